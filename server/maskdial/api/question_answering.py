"""The route `/question-answering`."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fastapi import APIRouter, Request, Response
from tokenizers import Encoding

from maskdial.api.bodies import Question, QuestionAnsweringBody, QuestionAnsweringParameters
from maskdial.api.masked import admit, masked_headers, masked_input, run_masked
from maskdial.api.schema import parse_body
from maskdial.api.work import name_input
from maskdial.errors import ValidationError
from maskdial.http.replies import body_schema, json_reply
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks import question_answering as task
from maskdial.masked.tasks.question_answering import Window
from maskdial.models.registry import MaskedModel, Models
from maskdial.models.tokenizer import cut_tokens

router = APIRouter(tags=["masked"])

# transformers' defaults
_MAX_SEQ_LEN = 384
_DOC_STRIDE = 128
_MAX_ANSWER_LEN = 15

_MAX_ANSWERS = 100_000


@dataclass(frozen=True, slots=True)
class _Windowed:
    """A question in the windows of its context, and how many of its own tokens were cut off."""

    context: str
    inputs: list[MaskedInput]
    windows: list[Window]
    num_truncated: int


@router.post("/question-answering", openapi_extra=body_schema(QuestionAnsweringBody))
async def question_answering(request: Request) -> Response:
    """Answers a question with parts of its context."""
    return await serve_question_answering(request, await request.body(), None)


async def serve_question_answering(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/question-answering` body with the named model, or the one that the body means."""
    body = parse_body(QuestionAnsweringBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("question-answering", name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters or QuestionAnsweringParameters()
    max_seq_len = _max_seq_len(model, parameters)

    batch = isinstance(body.inputs, list)
    questions = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    admit(request, model, len(questions))
    started = time.perf_counter()
    read = await asyncio.to_thread(_read, model, questions, parameters, max_seq_len, batch)
    model.metrics.tokenization_duration.observe(time.perf_counter() - started)
    inputs = [given for question in read for given in question.inputs]
    _check_num_answers(parameters.top_k or 1, len(inputs))

    results = await run_masked(request, model, inputs, body.timeout)
    answers = await asyncio.to_thread(_answer, read, results, parameters, batch)
    headers = masked_headers(inputs, results, sum(question.num_truncated for question in read))
    return json_reply(answers if batch else answers[0], headers=headers)


def _max_seq_len(model: MaskedModel, parameters: QuestionAnsweringParameters) -> int:
    longest = model.bundle.manifest.max_length
    asked = parameters.max_seq_len or min(longest, _MAX_SEQ_LEN)
    if asked > longest:
        raise ValidationError(
            f"parameters.max_seq_len: model {model.bundle.name!r} takes at most {longest} tokens, "
            f"not {asked}"
        )
    return asked


def _check_num_answers(top_k: int, num_windows: int) -> None:
    if top_k > 1 and top_k * num_windows > _MAX_ANSWERS:
        raise ValidationError(
            f"parameters.top_k: {top_k} answers from each of {num_windows} windows; one request "
            f"may ask for at most {_MAX_ANSWERS:,} together"
        )


def _read(
    model: MaskedModel,
    questions: Sequence[Question],
    parameters: QuestionAnsweringParameters,
    max_seq_len: int,
    batch: bool,
) -> list[_Windowed]:
    """Tokenizes questions and their contexts, no more than the model's queue can hold."""
    read: list[_Windowed] = []
    room = model.engine.max_queue
    for index, question in enumerate(questions):
        with name_input(index, batch):
            read.append(_read_one(model, question, parameters, max_seq_len, room))
        room -= len(read[-1].inputs)
    return read


def _read_one(
    model: MaskedModel,
    asked: Question,
    parameters: QuestionAnsweringParameters,
    max_seq_len: int,
    max_windows: int,
) -> _Windowed:
    tokenizer = model.tokenizer
    question = tokenizer.encode(asked.question, add_special_tokens=False)
    context = tokenizer.encode(asked.context, add_special_tokens=False)
    num_tokens = len(question)
    if parameters.max_question_len is not None:
        question = cut_tokens(question, parameters.max_question_len, "right")
    room = max_seq_len - tokenizer.num_special_tokens(pair=True) - len(question)
    if room < 1:
        raise ValidationError(
            f"the question's {len(question)} tokens leave no room for the context in windows of "
            f'{max_seq_len}; shorten it, or have it cut with "max_question_len"'
        )
    pieces = _split(context, room, parameters.doc_stride, max_seq_len, max_windows)
    pairs = [tokenizer.join(question, piece) for piece in pieces]
    windows = [Window.from_encodings(*both) for both in zip(pairs, pieces, strict=True)]
    inputs = [masked_input(*both) for both in zip(pairs, (w.rows for w in windows), strict=True)]
    return _Windowed(asked.context, inputs, windows, num_tokens - len(question))


def _split(
    context: Encoding, room: int, asked_stride: int | None, max_seq_len: int, max_windows: int
) -> list[Encoding]:
    """A context in windows of ``room`` tokens."""
    stride = min(max_seq_len // 2, _DOC_STRIDE) if asked_stride is None else asked_stride
    if asked_stride is None and stride >= room:
        stride = room // 2
    if len(context) <= room:
        num_windows = 1
    elif stride < room:
        num_windows = task.count_windows(len(context), room, stride)
    else:
        raise ValidationError(
            f"parameters.doc_stride: {stride} tokens are too many; the question leaves {room} to "
            f"the context in windows of {max_seq_len}, and two windows must share fewer"
        )
    if num_windows > max_windows:
        raise ValidationError(
            f"the context's {len(context):,} tokens fill {num_windows:,} windows; this request may "
            f'have {max_windows:,} more (--max-queue); shorten it, or set a smaller "doc_stride"'
        )
    context.truncate(room, stride if num_windows > 1 else 0)
    return [context, *context.overflowing]


def _answer(
    read: Sequence[_Windowed],
    results: Sequence[MaskedResult],
    parameters: QuestionAnsweringParameters,
    batch: bool,
) -> list[object]:
    """Each question's answer on the wire."""
    replies: list[object] = []
    logits = iter(result.logits for result in results)
    for index, question in enumerate(read):
        with name_input(index, batch):
            answers = task.find_answers(
                question.context,
                question.windows,
                [next(logits) for _ in question.windows],
                top_k=parameters.top_k or 1,
                max_answer_len=parameters.max_answer_len or _MAX_ANSWER_LEN,
                handle_impossible_answer=bool(parameters.handle_impossible_answer),
                align_to_words=parameters.align_to_words is not False,
            )
        listed = [asdict(answer) for answer in answers]
        replies.append(listed if (parameters.top_k or 1) > 1 else listed[0])
    return replies
