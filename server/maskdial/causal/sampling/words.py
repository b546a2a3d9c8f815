"""Parameters of sampling that are texts, as the tokens of a model."""

import dataclasses

from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.sampling.dry import read_breakers
from maskdial.causal.sampling.params import SamplingParams


def has_words(params: SamplingParams) -> bool:
    """Whether a model's tokenizer is needed."""
    return bool(params.text_bias or params.bad_words or params.penalizes_repetitions)


def read_words(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    """The parameters with the tokens of their texts.

    Args:
        params: as a request has them.
        tokenizer: the model's.
        vocab_size: of the model.

    Raises:
        ValidationError: the tokenizer gives up on a text.
    """
    biases = [
        (token_id, bias)
        for text, bias in params.text_bias
        for token_id in tokenizer.encode(text, add_special_tokens=False).ids
    ]
    banned = [each for word in params.bad_words for each in _spelled(word, tokenizer)]
    breakers = None
    if params.penalizes_repetitions:
        breakers = read_breakers(tokenizer, params.dry_sequence_breakers, vocab_size)
    return dataclasses.replace(
        params,
        logit_bias=(*params.logit_bias, *biases),
        banned=(*params.banned, *banned),
        dry_breakers=breakers,
    )


def _spelled(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """A word's tokens at the start of a text and after a space, as in vLLM, which leaves the latter
    out if they are more or fewer.
    """
    first, inner = (
        tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False).ids)
        for prefix in ("", " ")
    )
    return [each for each in dict.fromkeys((first, inner)) if each]
