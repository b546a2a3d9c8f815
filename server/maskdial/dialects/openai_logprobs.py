"""Log-probabilities and usage, as the OpenAI dialect reports them."""

from collections.abc import Iterable, Sequence
from typing import Any

from maskdial.causal.events import TokenEvent
from maskdial.models.tokenizer import Tokenizer
from maskdial.requests.generation import Completion, Prompt

Alternatives = Iterable[tuple[int, float]]
"""Token ids and their natural log-probabilities, best first."""


class TokenSpeller:
    """Spells a sequence's tokens one by one, each as it reads after the one before it.

    Args:
        tokenizer: the model's.
        prompt_ids: what the sequence begins with; empty to spell those tokens, too.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._previous_id = next((i for i in reversed(prompt_ids) if tokenizer.is_text(i)), None)

    def spell(self, token_id: int) -> bytes:
        """A token in this place, as UTF-8: possibly only a part of a character."""
        return self._tokenizer.token_bytes(token_id, self._previous_id)

    def advance(self, token_id: int) -> None:
        """Goes on to the place after a token."""
        if self._tokenizer.is_text(token_id):
            self._previous_id = token_id


class CompletionLogprobs:
    """The log-probabilities of one text, token by token, as `/v1/completions` lays them out.

    Args:
        speller: at the place of the first token.
        offset: where that token begins in the text, in characters.
    """

    def __init__(self, speller: TokenSpeller, offset: int = 0) -> None:
        self._speller = speller
        self._offset = offset

    def describe(
        self, tokens: Iterable[tuple[int, float | None, Alternatives]]
    ) -> dict[str, list[Any]]:
        """The next tokens: id, log-probability (None for a prompt's first), and alternatives."""
        content: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, logprob, alternatives in tokens:
            token = self._text(token_id)
            content["text_offset"].append(self._offset)
            content["token_logprobs"].append(logprob)
            content["tokens"].append(token)
            content["top_logprobs"].append(self._top(token, logprob, alternatives))
            self._offset += len(token)
            self._speller.advance(token_id)
        return content

    def _text(self, token_id: int) -> str:
        return self._speller.spell(token_id).decode(errors="replace")

    def _top(
        self, token: str, logprob: float | None, alternatives: Alternatives
    ) -> dict[str, float] | None:
        if logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, value in alternatives:
            # Parts of characters look the same; the first is the likeliest.
            top.setdefault(self._text(token_id), value)
        top.setdefault(token, logprob)
        return top


def chat_logprobs(events: Iterable[TokenEvent], speller: TokenSpeller) -> dict[str, Any]:
    """The log-probabilities of some tokens, as `/v1/chat/completions` lays them out."""
    content = []
    for event in events:
        alternatives = [_chat_token(speller, *each) for each in event.top]
        token = _chat_token(speller, event.token_id, event.logprob)
        content.append(token | {"top_logprobs": alternatives})
        speller.advance(event.token_id)
    return {"content": content, "refusal": None}


def _chat_token(speller: TokenSpeller, token_id: int, logprob: float) -> dict[str, Any]:
    spelling = speller.spell(token_id)
    return {
        "token": spelling.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(spelling),
    }


def usage(
    prompts: Sequence[Prompt], num_generated: int, num_reasoning: int | None = None
) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many texts it has.

    ``num_reasoning`` of the generated tokens are reasoning; None: that is not reported.
    """
    num_prompt = sum(len(prompt.ids) for prompt in prompts)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(prompt.num_cached for prompt in prompts)},
    }
    if num_reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


def count_generated(completions: Sequence[Completion]) -> int:
    """Tokens of all texts, also of those that were not the best."""
    return sum(len(text.events) for each in completions for text in each.texts)
