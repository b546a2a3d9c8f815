"""Processors: changes to a model's logits before a token is chosen.

They are those of transformers (`GenerationMixin._get_logits_processor`), in the same order: bias,
repetition penalty, repeated n-grams, banned sequences, minimum length, grammar, forced tokens.
OpenAI's frequency and presence penalties follow the repetition penalty, as in vLLM; DRY follows
them, as in llama.cpp.
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
    most_likely: int | None = None,
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
        most_likely: the first token with the greatest logit, if only the best score is of interest.
            If it is the best one, other tokens that are ``never`` chosen may keep their scores.

    Raises:
        MaskdialError: the sequence's grammar failed.
    """
    params = sequence.params
    scores = logits
    if params.logit_bias:
        scores = _add_bias(scores, params.logit_bias)
    if params.repetition_penalty != 1.0:
        scores = _penalize_repetition(scores, penalized(sequence)[0], params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        scores = _penalize_frequency(scores, penalized(sequence)[1], params)
    if params.dry is not None:
        token_ids, penalties = params.dry.penalties(sequence.token_ids)
        scores = scores.copy()
        scores[token_ids] -= penalties
    if params.banned or params.no_repeat_ngram_size or params.no_source_ngram_size:
        scores = _ban(scores, _banned_tokens(sequence))
    if sequence.grammar is not None and not sequence.forces_next:
        scores = np.where(sequence.grammar.allowed(), scores, _NEVER)
    # After the grammar, which may leave nothing but these.
    never = not_drawn(never, params)
    may_end = sequence.num_generated >= params.min_new_tokens
    is_best = scores is logits and most_likely is not None and most_likely not in never
    if never and not (is_best and may_end):
        scores = _hold_back(scores, never)
    if not may_end:
        ends = eos_token_ids.union(t for t in params.stop_token_ids if t < len(scores))
        scores = _hold_back(scores, ends)
    forced = forced_tokens(sequence)
    return _only(forced, len(scores)) if forced else scores


def penalized(sequence: Sequence) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens that the repetition penalty is for, and those that the frequency and presence
    penalties count: int64, the latter the last ones of the former.
    """
    token_ids, last_n = sequence.token_ids, sequence.params.penalty_last_n
    if last_n is None:
        return token_ids, sequence.generated_ids
    window = token_ids if last_n == -1 else token_ids[max(len(token_ids) - last_n, 0) :]
    return window, window


def not_drawn(never: frozenset[int], params: SamplingParams) -> frozenset[int]:
    """Those of the tokens that are never drawn for which a sequence has no bias."""
    return never.difference(token_id for token_id, _ in params.logit_bias) if never else never


def forced_tokens(sequence: Sequence) -> tuple[int, ...]:
    """The tokens of which the next one must be; empty for any."""
    params = sequence.params
    if sequence.forces_next:
        assert params.forced_first is not None
        return (params.forced_first,)
    if sequence.closing_token is not None:
        return (sequence.closing_token,)
    is_last = sequence.num_generated == params.max_new_tokens - 1
    return params.forced_last if is_last and sequence.grammar is None else ()


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


def _ban(scores: NDArray[np.float32], token_ids: list[int]) -> NDArray[np.float32]:
    """The scores without those of some tokens."""
    if token_ids:
        scores = scores.copy()
        scores[token_ids] = _NEVER
    return scores


def _hold_back(scores: NDArray[np.float32], token_ids: frozenset[int]) -> NDArray[np.float32]:
    """The scores without those of some tokens, unless no others are left."""
    held = scores.copy()
    held[[*token_ids]] = _NEVER
    return scores if held.max() == _NEVER else held


def _banned_tokens(sequence: Sequence) -> list[int]:
    """The tokens that would repeat an n-gram, or complete a banned sequence."""
    params, token_ids = sequence.params, sequence.token_ids
    found = {
        word[-1]
        for word in params.banned
        if len(word) == 1 or token_ids[1 - len(word) :].tolist() == list(word[:-1])
    }
    found |= _completions(token_ids, token_ids, params.no_repeat_ngram_size)
    found |= _completions(sequence.source_ids, token_ids, params.no_source_ngram_size)
    return sorted(found)


def _completions(text: NDArray[np.int64], token_ids: NDArray[np.int64], size: int) -> set[int]:
    """The tokens that would end an n-gram of a text after the last tokens; none for a size of 0."""
    if not size or len(text) < size or len(token_ids) < size - 1:
        return set()
    grams = np.lib.stride_tricks.sliding_window_view(text, size)
    found = (grams[:, :-1] == token_ids[len(token_ids) + 1 - size :]).all(axis=1)
    return set(grams[found, -1].tolist())


def _only(token_ids: tuple[int, ...], vocab_size: int) -> NDArray[np.float32]:
    """Scores that leave only these tokens."""
    scores = np.full(vocab_size, _NEVER)
    scores[list(token_ids)] = 0.0
    return scores
