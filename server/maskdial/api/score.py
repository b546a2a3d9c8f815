"""The route `/score`, for both families."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from tokenizers import Encoding

from maskdial.api.bodies import ScoreBody, Truncation
from maskdial.api.masked import Texts, admit, masked_input, read_texts
from maskdial.api.schema import parse_body
from maskdial.api.work import check_num_inputs, name_input, time_limit, tokenize
from maskdial.causal.events import Finish
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence as CausalSequence
from maskdial.config import Config
from maskdial.errors import DeadlineError, ValidationError
from maskdial.http.replies import Timings, body_schema, json_reply, unless_gone
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks import score as task
from maskdial.models.registry import CausalModel, MaskedModel, Models
from maskdial.models.tokenizer import Tokenizer

router = APIRouter(tags=["masked", "causal"])

# Entries of one request in the queue at a time: each gives a row of logits, as wide as the
# vocabulary.
_MAX_WAVE = 32


@router.post("/score", openapi_extra=body_schema(ScoreBody))
async def score(request: Request) -> Response:
    """Says how likely a model finds a text, token by token. A causal model reads it once; a masked
    one reads it once for each token, with that token masked.
    """
    body = parse_body(ScoreBody, await request.body())
    models: Models = request.app.state.models
    config: Config = request.app.state.config
    model = models.for_task("score", body.model)
    request.state.model = model.bundle.name
    batch = isinstance(body.inputs, list)
    texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    seconds = time_limit(body.timeout, config)
    if isinstance(model, MaskedModel):
        admit(request, model, len(texts))
        pairs = [(text, None) for text in texts]
        read = await read_texts(model, pairs, body.parameters, batch=batch)
        work = _score_masked(model, read, config.max_batch_tokens, seconds)
    else:
        check_num_inputs(len(texts), config)
        model.engine.check_room(len(texts))
        read = await _read_causal(model, texts, body.parameters, batch=batch)
        work = _score_causal(model, read, seconds)
    scores, timings = await unless_gone(request, work)
    return json_reply([asdict(each) for each in scores], headers=timings.headers())


async def _score_masked(
    model: MaskedModel, read: Texts, max_tokens: int, seconds: float | None
) -> tuple[list[task.Score], Timings]:
    """Pseudo-log-likelihoods. The texts, each token masked in turn, go through the queue in waves
    of about one pass, so that no other request waits for more than that.

    Raises:
        DeadlineError: the time is over.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    logprobs: list[dict[int, float]] = [{} for _ in read.encodings]
    queue_seconds = inference_seconds = 0.0
    num_tokens = 0
    max_entries = min(_MAX_WAVE, model.engine.max_queue)
    for wave in task.waves(
        _maskings(model.tokenizer, read.encodings), max_tokens=max_tokens, max_entries=max_entries
    ):
        left = None if seconds is None else max(0.0, seconds - (loop.time() - started))
        with _name_limit(seconds):
            results = await model.engine.submit_many([each.input for each in wave], left)
        values = await asyncio.to_thread(_log_probabilities, wave, results)
        for each, value in zip(wave, values, strict=True):
            logprobs[each.text][each.position] = value
        queue_seconds += max(result.queue_seconds for result in results)
        inference_seconds += max(result.inference_seconds for result in results)
        num_tokens += sum(len(each.input.input_ids) for each in wave)
    scores = [
        task.summarize(_token_scores(model.tokenizer, encoding, found), "pseudo")
        for encoding, found in zip(read.encodings, logprobs, strict=True)
    ]
    return scores, Timings(queue_seconds, inference_seconds, num_tokens, read.num_truncated)


def _maskings(tokenizer: Tokenizer, encodings: Sequence[Encoding]) -> Iterator[task.Masking]:
    mask_token_id = tokenizer.mask_token_id
    assert mask_token_id is not None, "every bundle that fills masks has one"
    for index, encoding in enumerate(encodings):
        positions = task.scored_positions(
            encoding.ids, encoding.special_tokens_mask, tokenizer.special_ids
        )
        yield from task.maskings(index, masked_input(encoding), positions, mask_token_id)


@contextlib.contextmanager
def _name_limit(seconds: float | None) -> Iterator[None]:
    """Says the time that the whole request had, and not what was left of it."""
    try:
        yield
    except DeadlineError as error:
        raise DeadlineError(f"the request was not finished within {seconds:g} seconds") from error


def _log_probabilities(
    wave: Sequence[task.Masking], results: Sequence[MaskedResult]
) -> list[float]:
    return [
        task.log_probability(result.logits[0], each.target)
        for each, result in zip(wave, results, strict=True)
    ]


async def _read_causal(
    model: CausalModel, texts: Sequence[str], truncation: Truncation | None, *, batch: bool
) -> Texts:
    """Tokenizes texts; one that is too long is cut where the request allows it.

    Raises:
        ValidationError: a text is too long or has no tokens.
    """
    pairs = [(text, None) for text in texts]
    encodings = await tokenize(model.tokenizer, model.metrics, pairs)
    longest = model.max_length - 1  # the engine keeps room for one token to follow
    num_truncated = 0
    for index, encoding in enumerate(encodings):
        length = len(encoding)
        with name_input(index, batch):
            if not length:
                raise ValidationError("the text has no tokens; write at least one word")
            if length > longest and (truncation is None or not truncation.truncate):
                raise ValidationError(
                    f"the text has {length} tokens; model {model.bundle.name!r} scores at most "
                    f'{longest}; shorten it, or set "truncate"'
                )
        if length > longest:
            assert truncation is not None, "it was looked at"
            encodings[index] = await asyncio.to_thread(
                model.tokenizer.encode_cut,
                texts[index],
                max_length=longest,
                direction=truncation.truncation_direction or "right",
            )
            num_truncated += length - len(encodings[index])
    return Texts(encodings, num_truncated)


async def _score_causal(
    model: CausalModel, read: Texts, seconds: float | None
) -> tuple[list[task.Score], Timings]:
    """Log-likelihoods, each text read once, as the prompt of one more token.

    Raises:
        DeadlineError: the time is over.
    """
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_name_limit(seconds))
        streams = [
            await stack.enter_async_context(
                model.engine.stream(CausalSequence(encoding.ids, params), seconds)
            )
            for encoding in read.encodings
        ]
        finishes: list[Finish] = []
        for stream in streams:
            finishes += [event.finish async for event in stream if event.finish is not None]
    scores = []
    for encoding, finish in zip(read.encodings, finishes, strict=True):
        # The first token has nothing before it that it could be likely after.
        found = dict(enumerate(finish.prompt_logprobs, start=1))
        scores.append(task.summarize(_token_scores(model.tokenizer, encoding, found), "causal"))
    timings = Timings(
        queue_seconds=max(finish.queue_seconds for finish in finishes),
        inference_seconds=max(finish.inference_seconds for finish in finishes),
        compute_tokens=sum(len(encoding.ids) for encoding in read.encodings),
        truncated_tokens=read.num_truncated,
    )
    return scores, timings


def _token_scores(
    tokenizer: Tokenizer, encoding: Encoding, logprobs: dict[int, float]
) -> list[task.TokenScore]:
    """The text's own tokens, without those that the tokenizer put around it."""
    return [
        task.TokenScore(token_id, tokenizer.token_text(token_id), logprobs.get(position))
        for position, (token_id, is_added) in enumerate(
            zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        )
        if not is_added
    ]
