"""How likely a model finds a text, token by token, for both families.

A causal model prefills the text once and gives its log-likelihood; a masked one reads it once per
token, with that token masked, and gives its pseudo-log-likelihood.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tokenizers import Encoding

from maskdial.bundle.manifest import Manifest
from maskdial.bundle.texts import check_characters, check_media, tokenizing_seconds
from maskdial.bundle.tokenizer import Tokenizer, TokenSpeller
from maskdial.causal.events import Finish
from maskdial.causal.model import CausalModel
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence as CausalSequence
from maskdial.config import Config
from maskdial.elementary import exp
from maskdial.engine.fairness import current_usage
from maskdial.engine.limits import check_num_texts
from maskdial.engine.offload import offload
from maskdial.engine.timing import Deadline, Timed, Timings
from maskdial.errors import ValidationError, about
from maskdial.masked.model import MaskedModel
from maskdial.masked.request import MaskedResult
from maskdial.masked.run import num_cached
from maskdial.masked.tasks.pseudo_likelihood import (
    Masking,
    log_probability,
    maskings,
    scored_positions,
    waves,
)
from maskdial.masked.tasks.task import REFUSE, Truncation, masked_input, read_texts
from maskdial.registry.served import ServedModel

ScoreMethod = Literal["causal", "pseudo"]

# Inputs of one request that are in the queue at a time: each gives a row of logits, as wide as the
# vocabulary.
_MAX_WAVE = 32


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token and its natural log-probability; None where it is not scored."""

    id: int
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Score:
    """A text's score: the sum of its tokens' log-probabilities.

    ``perplexity`` is the exponential of minus their mean, None where no token is scored.
    """

    tokens: tuple[TokenScore, ...]
    log_likelihood: float
    perplexity: float | None
    method: ScoreMethod


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Texts whose likelihood under the model is asked for."""

    texts: Sequence[str]
    truncation: Truncation = REFUSE

    @staticmethod
    def serves(manifest: Manifest) -> bool:
        """Whether a model can score texts."""
        return manifest.task in ("fill-mask", "generate") and manifest.text_to_text is None


async def score(
    request: ScoreRequest, model: ServedModel, config: Config, deadline: Deadline
) -> Timed[list[Score]]:
    """Scores texts with a model of either family.

    Raises:
        ValidationError: a text is too long or has no tokens, or there are too many.
        OverloadedError: the queue has no room for them.
        DeadlineError: the time is up.
    """
    check_num_texts(len(request.texts), config)
    model.engine.check_room(len(request.texts))

    def read() -> tuple[list[Encoding], int]:
        if isinstance(model, MaskedModel):
            pairs = [(text, None) for text in request.texts]
            return read_texts(model, pairs, request.truncation)
        return _read_causal(model, request)

    with model.metrics.tokenization_duration.time():
        seconds = tokenizing_seconds(request.texts)
        encodings, num_truncated = await offload(read, seconds, deadline)
    current_usage().note(model, [encoding.ids for encoding in encodings])
    with deadline.explained():
        if isinstance(model, MaskedModel):
            work = _score_masked(model, encodings, num_truncated, config, deadline)
        else:
            work = _score_causal(model, encodings, num_truncated, deadline)
        return await work


def summarize(tokens: Sequence[TokenScore], method: ScoreMethod) -> Score:
    """A text's score from those of its tokens."""
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    log_likelihood = float(np.sum(logprobs)) if logprobs else 0.0
    perplexity = None
    if logprobs:
        perplexity = float(exp(-log_likelihood / len(logprobs)))  # infinite for an impossible text
    return Score(tuple(tokens), log_likelihood, perplexity, method)


async def _score_masked(
    model: MaskedModel,
    encodings: Sequence[Encoding],
    num_truncated: int,
    config: Config,
    deadline: Deadline,
) -> Timed[list[Score]]:
    """The texts, each token masked in turn, are queued in waves of about one pass, so that no other
    request waits for more than that.
    """
    logprobs: list[dict[int, float]] = [{} for _ in encodings]
    queue_seconds = inference_seconds = 0.0
    num_tokens = cached_tokens = 0
    for wave in waves(
        _all_maskings(model.tokenizer, encodings),
        max_tokens=model.engine.max_batch_tokens,
        max_entries=min(_MAX_WAVE, model.max_queue),
    ):
        inputs = [each.input for each in wave]
        results = await model.engine.submit_many(inputs, deadline.remaining(), model.adapter)
        values = await asyncio.to_thread(_log_probabilities, wave, results)
        for each, value in zip(wave, values, strict=True):
            logprobs[each.text][each.position] = value
        queue_seconds += max(result.queue_seconds for result in results)
        inference_seconds += max(result.inference_seconds for result in results)
        num_tokens += sum(each.length for each in inputs)
        cached_tokens += num_cached(inputs, results)
    scores = [
        summarize(_token_scores(model.tokenizer, encoding, found), "pseudo")
        for encoding, found in zip(encodings, logprobs, strict=True)
    ]
    timings = Timings(queue_seconds, inference_seconds, num_tokens, num_truncated, cached_tokens)
    return Timed(scores, timings)


def _all_maskings(tokenizer: Tokenizer, encodings: Sequence[Encoding]) -> Iterator[Masking]:
    mask_token_id = tokenizer.mask_token_id
    assert mask_token_id is not None, "every bundle for fill-mask has one"
    for index, encoding in enumerate(encodings):
        positions = scored_positions(
            encoding.ids, encoding.special_tokens_mask, tokenizer.special_ids
        )
        yield from maskings(index, masked_input(encoding), positions, mask_token_id)


def _log_probabilities(wave: Sequence[Masking], results: Sequence[MaskedResult]) -> list[float]:
    return [
        log_probability(result.logits[0], each.target)
        for each, result in zip(wave, results, strict=True)
    ]


def _read_causal(model: CausalModel, request: ScoreRequest) -> tuple[list[Encoding], int]:
    longest = model.max_length - 1  # the engine needs room for one more token
    encodings = []
    num_truncated = 0
    for index, text in enumerate(request.texts):
        with about("texts", index):
            encoding, num_cut = _read_one(model, text, longest, request.truncation)
            check_media(encoding.ids, model)
            if not len(encoding):
                raise ValidationError("the text has no tokens; write at least one word")
        encodings.append(encoding)
        num_truncated += num_cut
    return encodings, num_truncated


def _read_one(
    model: CausalModel, text: str, longest: int, truncation: Truncation
) -> tuple[Encoding, int]:
    if truncation.cuts(model):
        return model.tokenizer.encode_cut(
            text, max_length=longest, direction=truncation.side(model)
        )
    check_characters(text, longest, model)
    encoding = model.tokenizer.encode(text)
    if len(encoding) > longest:
        raise ValidationError(
            f"the text has {len(encoding)} tokens; model {model.name!r} scores at most {longest}; "
            'shorten it, or set "truncate"'
        )
    return encoding, 0


async def log_probabilities(
    texts: Sequence[Sequence[int]], model: CausalModel, deadline: Deadline
) -> list[list[float]]:
    """The natural log-probability of each token but the first, for texts as token ids.

    Raises:
        ValidationError: a text has more tokens than the model has room for.
        OverloadedError: the queue has no room for them.
        DeadlineError: the time is up.
    """
    longest = model.max_length - 1  # the engine needs room for one more token
    for index, ids in enumerate(texts):
        if not 0 < len(ids) <= longest:
            raise ValidationError(f"text {index} has {len(ids)} tokens, not 1 to {longest}")
    finishes = await _prefill(texts, model, deadline)
    return [[each.logprob for each in finish.prompt_logprobs] for finish in finishes]


async def _prefill(
    texts: Sequence[Sequence[int]], model: CausalModel, deadline: Deadline
) -> list[Finish]:
    """Each text is prefilled once, as a prompt that one token is generated for."""
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    sequences = [CausalSequence(ids, params, adapter=model.adapter) for ids in texts]
    async with model.engine.streams(sequences, deadline.remaining()) as streams:
        finishes: list[Finish] = []
        for stream in streams:
            finishes += [event.finish async for event in stream if event.finish is not None]
    return finishes


async def _score_causal(
    model: CausalModel, encodings: Sequence[Encoding], num_truncated: int, deadline: Deadline
) -> Timed[list[Score]]:
    finishes = await _prefill([encoding.ids for encoding in encodings], model, deadline)
    scores = []
    for encoding, finish in zip(encodings, finishes, strict=True):
        # Nothing precedes the first token, so it has no probability.
        logprobs = (each.logprob for each in finish.prompt_logprobs)
        found = dict(enumerate(logprobs, start=1))
        scores.append(summarize(_token_scores(model.tokenizer, encoding, found), "causal"))
    timings = Timings(
        queue_seconds=max(finish.queue_seconds for finish in finishes),
        inference_seconds=max(finish.inference_seconds for finish in finishes),
        compute_tokens=sum(len(encoding.ids) for encoding in encodings),
        truncated_tokens=num_truncated,
    )
    return Timed(scores, timings)


def _token_scores(
    tokenizer: Tokenizer, encoding: Encoding, logprobs: dict[int, float]
) -> list[TokenScore]:
    """The text's own tokens, without special tokens that the tokenizer added."""
    speller = TokenSpeller(tokenizer)
    scores = []
    for position, (token_id, is_added) in enumerate(
        zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    ):
        if not is_added:
            # A vocabulary that marks subwords spells them with the mark, as its users know them.
            alone = tokenizer.marks_subwords
            text = tokenizer.token_text(token_id) if alone else speller.text(token_id)
            scores.append(TokenScore(token_id, text, logprobs.get(position)))
        speller.advance(token_id)
    return scores
