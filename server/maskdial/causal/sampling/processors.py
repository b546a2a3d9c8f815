"""Processors: changes to a model's logits before a token is chosen.

They are those of transformers (`GenerationMixin._get_logits_processor`), in the same order: bias,
repetition penalty, minimum length, grammar. OpenAI's frequency and presence penalties follow the
repetition penalty, as in vLLM.
"""

import math

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence

_NEVER = np.float32(-math.inf)


def process(
    logits: NDArray[np.float32],
    sequence: Sequence,
    eos_token_ids: frozenset[int],
    never: frozenset[int] = frozenset(),
) -> NDArray[np.float32]:
    """The scores by which a sequence's next token is chosen, float32 (vocab_size,).

    Tokens that must not be chosen score -inf. If only ``eos_token_ids`` and the sequence's own
    ``stop_token_ids`` are left, they are allowed even before ``min_new_tokens``; likewise, tokens
    that are ``never`` chosen are where a grammar allows nothing else.

    Args:
        logits: float32 (vocab_size,); not changed, and returned as it is if nothing applies.
        sequence: whose parameters, tokens and grammar apply.
        eos_token_ids: the model's end-of-sequence tokens, all below vocab_size.
        never: tokens that are not chosen unless there is a bias for them, all below vocab_size.

    Raises:
        MaskdialError: the sequence's grammar failed.
    """
    params = sequence.params
    scores = logits
    if params.logit_bias:
        scores = _add_bias(scores, params.logit_bias)
    if params.repetition_penalty != 1.0:
        scores = _penalize_repetition(scores, sequence.token_ids, params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        scores = _penalize_frequency(scores, sequence.generated_ids, params)
    if sequence.grammar is not None:
        scores = np.where(sequence.grammar.allowed(), scores, _NEVER)
    # After the grammar, which may leave nothing but these.
    never = not_drawn(never, params)
    if never:
        scores = _hold_back(scores, never)
    if sequence.num_generated < params.min_new_tokens:
        ends = eos_token_ids.union(t for t in params.stop_token_ids if t < len(scores))
        scores = _hold_back(scores, ends)
    return scores


def not_drawn(never: frozenset[int], params: SamplingParams) -> frozenset[int]:
    """Those of the tokens that are never drawn for which a sequence has no bias."""
    return never.difference(token_id for token_id, _ in params.logit_bias) if never else never


def _add_bias(
    scores: NDArray[np.float32], logit_bias: tuple[tuple[int, float], ...]
) -> NDArray[np.float32]:
    token_ids, biases = zip(*logit_bias, strict=True)
    scores = scores.copy()
    np.add.at(scores, np.array(token_ids, np.int64), np.array(biases, np.float32))
    return scores


def _penalize_repetition(
    scores: NDArray[np.float32], token_ids: NDArray[np.int64], penalty: float
) -> NDArray[np.float32]:
    seen = scores[token_ids]
    factor = np.float32(penalty)
    scores = scores.copy()
    scores[token_ids] = np.where(seen < 0, seen * factor, seen / factor)
    return scores


def _penalize_frequency(
    scores: NDArray[np.float32], generated_ids: NDArray[np.int64], params: SamplingParams
) -> NDArray[np.float32]:
    token_ids, counts = np.unique(generated_ids, return_counts=True)
    penalties = counts * params.frequency_penalty + params.presence_penalty
    scores = scores.copy()
    scores[token_ids] -= penalties.astype(np.float32)
    return scores


def _hold_back(scores: NDArray[np.float32], token_ids: frozenset[int]) -> NDArray[np.float32]:
    """The scores without those of some tokens, unless no others are left."""
    held = scores.copy()
    held[[*token_ids]] = _NEVER
    return scores if held.max() == _NEVER else held
