"""The routes `/tokenize` and `/detokenize`, as text-embeddings-inference has them."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from tokenizers import Encoding

from maskdial.api import work
from maskdial.api.bodies import DetokenizeBody, TokenizeBody
from maskdial.api.schema import parse_body
from maskdial.config import Config
from maskdial.errors import ValidationError
from maskdial.http.replies import body_schema, json_reply
from maskdial.models.registry import Models

router = APIRouter(tags=["tokens"])

# About 2 ms of work; more is done beside the event loop.
_INLINE_TOKENS = 2000


@router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Splits a text, or several, into a model's tokens. Any length is taken."""
    body = parse_body(TokenizeBody, await request.body())
    models: Models = request.app.state.models
    config: Config = request.app.state.config
    model = models.for_task("tokenize", body.model)
    request.state.model = model.bundle.name
    texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    work.check_num_inputs(len(texts), config)
    encodings = await work.tokenize(
        model.tokenizer,
        model.metrics,
        [(text, None) for text in texts],
        add_special_tokens=body.add_special_tokens is not False,
    )

    def answer() -> Response:
        pairs = zip(encodings, texts, strict=True)
        return json_reply([_tokens(encoding, text) for encoding, text in pairs])

    if sum(map(len, encodings)) <= _INLINE_TOKENS:
        return answer()
    return await asyncio.to_thread(answer)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Turns a model's token ids back into text: a list of one text, or of one for each list."""
    body = parse_body(DetokenizeBody, await request.body())
    models: Models = request.app.state.models
    config: Config = request.app.state.config
    model = models.for_task("tokenize", body.model)
    request.state.model = model.bundle.name
    work.check_num_inputs(len(body.texts), config)
    vocab_size = model.bundle.manifest.vocab_size
    largest = max((token_id for ids in body.texts for token_id in ids), default=0)
    if largest >= vocab_size:
        raise ValidationError(
            f"ids: model {model.bundle.name!r} has token ids from 0 to {vocab_size - 1}, not "
            f"{largest}"
        )

    def answer() -> Response:
        skip = body.skip_special_tokens is not False
        return json_reply(
            [model.tokenizer.decode(ids, skip_special_tokens=skip) for ids in body.texts]
        )

    if sum(map(len, body.texts)) <= _INLINE_TOKENS:
        return answer()
    return await asyncio.to_thread(answer)


def _tokens(encoding: Encoding, text: str) -> list[dict[str, Any]]:
    """A text's tokens: those that the tokenizer added by their names, the others as they are
    written in the text, with their offsets in characters.
    """
    return [
        {"id": token_id, "text": token, "special": True, "start": None, "stop": None}
        if is_added
        else {
            "id": token_id,
            "text": text[start:stop],
            "special": False,
            "start": start,
            "stop": stop,
        }
        for token_id, token, is_added, (start, stop) in zip(
            encoding.ids,
            encoding.tokens,
            encoding.special_tokens_mask,
            encoding.offsets,
            strict=True,
        )
    ]
