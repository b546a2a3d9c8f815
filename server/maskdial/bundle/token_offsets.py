"""Where in a generated text its tokens begin, in characters; see also `Tokenizer.offsets`."""

from collections.abc import Sequence

from maskdial.bundle.tokenizer import Tokenizer, TokenSpeller


def spelled_offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Where token ids begin in the text that they spell, special tokens included."""
    counter, speller = OffsetCounter(tokenizer), TokenSpeller(tokenizer)
    offsets = []
    for token_id in token_ids:
        if tokenizer.is_text(token_id):
            offsets.append(counter.push(token_id))
        else:
            offsets.append(counter.skip(len(speller.text(token_id))))
        speller.advance(token_id)
    return offsets


class OffsetCounter:
    """Finds where the tokens of a text begin that is being generated.

    Args:
        tokenizer: the model's.
        prompt_ids: the tokens that the first one follows.
        start: where the text begins.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), start: int = 0
    ) -> None:
        self._decoder = tokenizer.decoder(prompt_ids)
        self._complete = start
        """The number of complete characters."""

    def push(self, token_id: int) -> int:
        """Takes the next token and returns where it begins.

        One that completes a character begins where the character does; one that does not leaves
        U+FFFD behind in place of it.
        """
        begin = self._complete + self._decoder.num_broken_by(token_id)
        self._complete += len(self._decoder.push(token_id))
        return begin

    def skip(self, num_characters: int) -> int:
        """Takes a text that is no part of the tokens' own, and returns where it begins."""
        begin = self._complete + len(self._decoder.flush())
        self._complete = begin + num_characters
        return begin
