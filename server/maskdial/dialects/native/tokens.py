"""`/tokenize` and `/detokenize`, as text-embeddings-inference has them."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import pydantic
from fastapi import Response
from pydantic import Field
from tokenizers import Encoding

from maskdial.ask.catalogue import TOKENIZE
from maskdial.bundle.texts import check_ids, tokenizing_seconds
from maskdial.bundle.tokenizer import spans
from maskdial.dialects.body import TaskBody, TextsBody, example
from maskdial.dialects.call import Call, task_route
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.native.replies import DetokenizeReply, TextToken, TokenizeReply
from maskdial.engine.limits import check_num_characters, check_num_texts
from maskdial.engine.offload import offload
from maskdial.errors import about
from maskdial.http.replies import encode_json, json_reply

_SECONDS_PER_TOKEN = 1e-6
_TOKENS_PER_PART = 5000


class TokenizeBody(Lenient, TextsBody):
    """A text, or a list of them."""

    model_config = example({"model": "hybrid", "inputs": "The old king"})

    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens of the model's inputs. Default: true."
    )


def _check_ids(value: object) -> object:
    """A list of token ids, or of such lists; the model knows how large an id may be."""
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids, or a list of such lists")
    if set(map(type, value)) == {int} and min(value) >= 0:
        return value
    nested = any(isinstance(item, list) for item in value)
    for index, item in enumerate(value):
        ids = item if isinstance(item, list) else None if nested else [item]
        good = ids is not None and all(type(each) is int and each >= 0 for each in ids)
        if not good:
            kind = "a list of token ids" if nested else "a token id"
            raise ValueError(f"ids[{index}] must be {kind}, which are integers of at least 0")
    return value


_AnyId = Annotated[int, Field(json_schema_extra={"minimum": 0})]


class DetokenizeBody(Lenient, TaskBody):
    """The token ids of a text, or of several."""

    spellings = {"texts": "ids"}  # noqa: RUF012

    model_config = example({"model": "hybrid", "ids": [347, 607, 1588]})

    ids: Annotated[list[_AnyId] | list[list[_AnyId]], pydantic.BeforeValidator(_check_ids)] = Field(
        description="A list of token ids, or a list of such lists."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text. Default: true."
    )

    @property
    def texts(self) -> list[list[int]]:
        """The ids of each text."""
        ids: Any = self.ids  # the validator has seen to it that they are all of one kind
        return ids if ids and isinstance(ids[0], list) else [ids]


async def tokenize(call: Call[TokenizeBody]) -> Response:
    """Splits a text, or several, into a model's tokens. Texts may be longer than the model."""
    model = await call.model(TOKENIZE)
    texts = call.body.texts
    check_num_texts(len(texts), call.server.config)
    check_num_characters(texts)
    add = call.body.add_special_tokens is not False
    with model.metrics.tokenization_duration.time():
        encodings = await offload(
            lambda: [model.tokenizer.encode(text, add_special_tokens=add) for text in texts],
            tokenizing_seconds(texts),
            call.deadline,
        )
    return await offload(
        lambda: Response(_write_texts(encodings, texts), media_type="application/json"),
        sum(map(len, encodings)) * _SECONDS_PER_TOKEN,
    )


async def detokenize(call: Call[DetokenizeBody]) -> Response:
    """Turns a model's token ids into text: a list of one text, or of one for each list of ids."""
    model = await call.model(TOKENIZE)
    texts = call.body.texts
    check_num_texts(len(texts), call.server.config)
    with about("texts"):
        for ids in texts:
            check_ids(ids, model)
    skip = call.body.skip_special_tokens is not False
    return await offload(
        lambda: json_reply(
            [model.tokenizer.decode(ids, skip_special_tokens=skip) for ids in texts]
        ),
        sum(map(len, texts)) * _SECONDS_PER_TOKEN,
    )


def _write_texts(encodings: Sequence[Encoding], texts: Sequence[str]) -> bytes:
    """A list of the texts' lists of tokens, as JSON."""
    written = (_write_tokens(*each) for each in zip(encodings, texts, strict=True))
    return b"[" + b",".join(written) + b"]"


def _write_tokens(encoding: Encoding, text: str) -> bytes:
    # The event loop cannot run while a value is written, and 500,000 tokens take 0.3 s.
    parts = (encode_json(part)[1:-1] for part in _batched(_tokens(encoding, text)))
    return b"[" + b",".join(parts) + b"]"


def _batched(tokens: Iterator[TextToken]) -> Iterator[list[TextToken]]:
    while part := list(islice(tokens, _TOKENS_PER_PART)):
        yield part


def _tokens(encoding: Encoding, text: str) -> Iterator[TextToken]:
    """A text's tokens: special tokens by their names, the others as they stand in the text, with
    their offsets in characters.
    """
    return (
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
            spans(encoding),
            strict=True,
        )
    )


ROUTES = (
    task_route("/tokenize", tokenize, TokenizeBody, TokenizeReply, tags=["tokens"]),
    task_route("/detokenize", detokenize, DetokenizeBody, DetokenizeReply, tags=["tokens"]),
)
