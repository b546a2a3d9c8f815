"""The generation routes of text-generation-inference: `/generate` and `/generate_stream`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from maskdial.ask.catalogue import WRITE
from maskdial.ask.unmasking import UnmaskedBlock
from maskdial.ask.write import AnyGeneration
from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.bundle.tokenizer import Tokenizer, TokenSpeller
from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.generate import Completion, Text
from maskdial.causal.prompts import Prompt
from maskdial.dialects.call import Call, task_route
from maskdial.dialects.flow import Renderer, write
from maskdial.dialects.native.generate_bodies import GenerateBody, GenerateParameters
from maskdial.dialects.native.replies import GenerateReply
from maskdial.dialects.unmasking import describe_unmasked
from maskdial.errors import ValidationError
from maskdial.http.replies import encode_json
from maskdial.http.sse import data_frame
from maskdial.registry.served import ServedModel

_SECONDS_PER_TOKEN = 1e-6  # to render one


@dataclass(frozen=True, slots=True)
class GenerateRoute:
    """Text generation by the path of a model."""

    head: TaskName = "generate"
    body: type[GenerateBody] = GenerateBody

    def serves(self, manifest: Manifest) -> bool:
        return WRITE.serves(manifest)

    def claims(self, _: Mapping[str, Any], __: ServedModel) -> bool:
        """Generation is the main task of every model that does it."""
        return False

    async def answer(self, call: Call[GenerateBody]) -> Response:
        """Answers a body sent to `/models/NAME`: the reply is always a list, as at the root route
        of text-generation-inference.
        """
        return await _answer(call, stream=bool(call.body.stream), as_list=True)


GENERATE = GenerateRoute()


async def generate(call: Call[GenerateBody]) -> Response:
    """Continues a prompt or answers a conversation; with `"stream": true` as server-sent events,
    one per token. With `"mask": "full"` or `"block"` it writes by unmasking, block by block.
    """
    return await _answer(call, stream=bool(call.body.stream))


async def generate_stream(call: Call[GenerateBody]) -> Response:
    """Continues a prompt or answers a conversation as server-sent events, one per token."""
    return await _answer(call, stream=True)


ROUTES = tuple(
    task_route(
        f"/{answer.__name__}", answer, GenerateBody, GenerateReply, streams=True, tags=["causal"]
    )
    for answer in (generate, generate_stream)
)


async def _answer(call: Call[GenerateBody], *, stream: bool, as_list: bool = False) -> Response:
    body = call.body
    model = await call.writer()
    parameters = body.parameters or GenerateParameters()
    if stream:
        _check_streamable(body, parameters)
    generation = await call.generation(body.request(model.defaults), model)
    renderer = _TextRenderer(body, parameters, generation, model.tokenizer, as_list=as_list)
    return await write(call, generation, renderer, streams=stream)


class _TextRenderer(Renderer):
    """Writes what text-generation-inference replies with.

    Args:
        body: the request.
        parameters: its own.
        generation: the admitted request.
        tokenizer: the model's.
        as_list: whether a single text is in a list as well.
    """

    def __init__(
        self,
        body: GenerateBody,
        parameters: GenerateParameters,
        generation: AnyGeneration,
        tokenizer: Tokenizer,
        *,
        as_list: bool,
    ) -> None:
        self._batch = body.batch
        self._parameters = parameters
        self._tokenizer = tokenizer
        self._as_list = as_list
        prompt = generation.prompts[0]
        self._prefix = (prompt.text or "") if parameters.return_full_text else ""
        self._speller: TokenSpeller | None = None
        if parameters.top_n_tokens:
            self._speller = TokenSpeller(tokenizer, prompt.context_ids)

    def reply(self, completions: Sequence[Completion]) -> object:
        replies = [_reply(each, self._parameters, self._tokenizer) for each in completions]
        single = not self._batch and (isinstance(replies[0], list) or not self._as_list)
        return replies[0] if single else replies

    def seconds(self, completions: Sequence[Completion]) -> float:
        return _count_described(completions, self._parameters) * _SECONDS_PER_TOKEN

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        content = _stream_event(event, self._prefix)
        if self._speller is not None:
            content["top_tokens"] = _top_tokens(event, self._speller, self._tokenizer)
        return data_frame(encode_json(content))

    async def block(self, index: int, block: UnmaskedBlock) -> bytes:
        """The tokens one by one; before them, if that is wanted, what the pass has unmasked."""
        tokens = await super().block(index, block)
        if block.unmasked is None:
            return tokens
        unmasked = {"unmasked": list(map(describe_unmasked, block.unmasked))}
        return data_frame(encode_json(unmasked)) + tokens


def _check_streamable(body: GenerateBody, parameters: GenerateParameters) -> None:
    if body.batch:
        raise ValidationError("inputs: a stream has one prompt; send a string, not a list")
    if parameters.num_sequences > 1:
        raise ValidationError("parameters.n: a stream has one text; leave out n and best_of")
    if parameters.decoder_input_details:
        raise ValidationError("parameters.decoder_input_details: not available in a stream")


def _count_described(completions: Sequence[Completion], parameters: GenerateParameters) -> int:
    """About how many tokens a reply describes."""
    num_tokens = 0
    for each in completions:
        num_generated = sum(len(text.events) for text in each.texts)
        num_tokens += num_generated * (1 + (parameters.top_n_tokens or 0))
        if parameters.decoder_input_details:
            num_tokens += len(each.prompt.ids) * len(each.texts)
    return num_tokens


def _reply(completion: Completion, parameters: GenerateParameters, tokenizer: Tokenizer) -> object:
    """The reply for one prompt: a text, or the list of the ``n`` best."""
    n = parameters.n or 1
    replies = [
        _text_reply(completion.prompt, text, parameters, tokenizer) for text in completion.best(n)
    ]
    if n > 1:
        return replies[:n]
    best, others = replies[0], replies[1:]
    if others and "details" in best:
        best["details"]["best_of_sequences"] = [
            {"generated_text": other["generated_text"], **other["details"]} for other in others
        ]
    return best


def _text_reply(
    prompt: Prompt, text: Text, parameters: GenerateParameters, tokenizer: Tokenizer
) -> dict[str, Any]:
    finish = text.finish
    prefix = (prompt.text or "") if parameters.return_full_text else ""
    reply: dict[str, Any] = {"generated_text": prefix + finish.generated_text}
    if parameters.details or parameters.decoder_input_details:
        reply["details"] = _details(finish) | {
            "prefill": _prefill(prompt, finish, tokenizer)
            if parameters.decoder_input_details
            else [],
            "tokens": [_token(event) for event in text.events],
        }
        if parameters.top_n_tokens:
            speller = TokenSpeller(tokenizer, prompt.context_ids)
            tops = [_top_tokens(event, speller, tokenizer) for event in text.events]
            reply["details"]["top_tokens"] = tops
    return reply


def _stream_event(event: TokenEvent, prefix: str) -> dict[str, Any]:
    finish = event.finish
    return {
        "index": event.index,
        "token": _token(event),
        "generated_text": None if finish is None else prefix + finish.generated_text,
        "details": None if finish is None else _details(finish),
    }


def _token(event: TokenEvent) -> dict[str, Any]:
    """A token. Special tokens have no text: the texts of all tokens join to the generated text."""
    token = {
        "id": event.token_id,
        "text": event.text,
        "logprob": event.logprob,
        "special": event.special,
    }
    return token if event.step is None else {**token, "step": event.step}


def _top_tokens(
    event: TokenEvent, speller: TokenSpeller, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The most likely tokens, each with its text in this place; advances past the chosen one."""
    tokens = [
        {
            "id": token_id,
            "text": speller.text(token_id),
            "logprob": logprob,
            "special": token_id in tokenizer.special_ids,
        }
        for token_id, logprob in event.top
    ]
    speller.advance(event.token_id)
    return tokens


def _prefill(prompt: Prompt, finish: Finish, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompt's tokens. Nothing precedes the first, so it has no probability."""
    speller = TokenSpeller(tokenizer)
    tokens = []
    logprobs = (None, *(each.logprob for each in finish.prompt_logprobs))
    for token_id, logprob in zip(prompt.ids, logprobs, strict=True):
        tokens.append({"id": token_id, "text": speller.text(token_id), "logprob": logprob})
        speller.advance(token_id)
    return tokens


def _details(finish: Finish) -> dict[str, Any]:
    return {
        "finish_reason": finish.reason,
        "generated_tokens": finish.generated_tokens,
        "seed": finish.seed,
        "input_length": finish.input_length,
        **finish.policy,
    }
