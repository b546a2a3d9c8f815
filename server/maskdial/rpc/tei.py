"""EmbeddingsService: text-embeddings-inference's remote procedure calls, as requests to its routes.

Its messages name no model: metadata ``x-model`` does, where several could answer.
"""

import base64
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from maskdial.engine.offload import offload
from maskdial.errors import shortened
from maskdial.http.in_process import Reply
from maskdial.rpc.asker import Asker, timeout
from maskdial.rpc.call import Call
from maskdial.rpc.calls import CallError
from maskdial.rpc.in_order import answer_in_order, in_order
from maskdial.rpc.tei_messages import LEFT, MODEL_TYPES, PACKAGE, message, read

_MODEL = "x-model"
_DOES = {"embed", "embed-sparse", "embed-all", *MODEL_TYPES}  # one of them, or it is not TEI's
_MAX_COUNT = 2**32 - 1  # of characters and tokens; larger ones have no place in a message
_SECONDS_PER_BYTE = 2e-8  # of a reply's JSON, to read it and make a message of it

Unary = Callable[[bytes, Call], Awaitable[Any]]


class EmbeddingsService:
    """The services of ``tei.v1``.

    Args:
        asker: asks the application.
        max_bytes: of the messages of a stream that are held at once.
    """

    def __init__(self, asker: Asker, max_bytes: int) -> None:
        self._asker = asker
        self._max_bytes = max_bytes

    @property
    def methods(self) -> Mapping[str, Callable[[Call], Awaitable[None]]]:
        """What answers a call, by its path."""
        unary: dict[str, Unary] = {
            "Embed/Embed": self._embed,
            "Embed/EmbedSparse": self._embed_sparse,
            "Embed/EmbedAll": self._embed_all,
            "Predict/Predict": self._predict,
            "Predict/PredictPair": self._predict_pair,
            "Tokenize/Tokenize": self._tokenize,
            "Tokenize/Decode": self._decode,
        }
        found: dict[str, Callable[[Call], Awaitable[None]]] = {
            "Info/Info": partial(_answer, self._info),
            "Rerank/Rerank": partial(_answer, self._rerank),
            "Rerank/RerankStream": self._rerank_stream,
        }
        for name, answer in unary.items():
            found[name] = partial(_answer, answer)
            found[f"{name}Stream"] = partial(self._answer_stream, answer)
        return {f"/{PACKAGE}.{name}": answer for name, answer in found.items()}

    async def _answer_stream(self, answer: Unary, call: Call) -> None:
        await answer_in_order(call, lambda content: answer(content, call), self._max_bytes)

    async def _info(self, _: bytes, call: Call) -> Any:
        told = await self._asker.get_json("/info", call)
        limits, model = told["limits"], _chosen(told["models"], call)
        kinds = [number for task, number in MODEL_TYPES.items() if task in model["tasks"]]
        return message("InfoResponse")(
            version=told["version"],
            model_id=model["name"],
            model_sha=model["bundle"],
            model_dtype=model["precision"],
            model_type=kinds[0] if kinds else 0,
            max_concurrent_requests=limits["max_queue"],
            max_input_length=model["max_length"],
            max_batch_tokens=limits["max_batch_tokens"],
            max_client_batch_size=limits["max_batch_inputs"],
            tokenization_workers=1,
        )

    async def _embed(self, content: bytes, call: Call) -> Any:
        asked = read(content, "EmbedRequest")
        body = _prompted(asked) | {
            "normalize": asked.normalize if asked.HasField("normalize") else True,
            "encoding_format": "base64",
        }
        if asked.HasField("dimensions"):
            body["dimensions"] = asked.dimensions
        return await self._ask("/embed", body, call, _embedding, len(asked.inputs))

    async def _embed_sparse(self, content: bytes, call: Call) -> Any:
        asked = read(content, "EmbedSparseRequest")
        return await self._ask(
            "/embed-sparse", _prompted(asked), call, _sparse_embedding, len(asked.inputs)
        )

    async def _embed_all(self, content: bytes, call: Call) -> Any:
        asked = read(content, "EmbedAllRequest")
        return await self._ask(
            "/embed-all", _prompted(asked), call, _token_embeddings, len(asked.inputs)
        )

    async def _predict(self, content: bytes, call: Call) -> Any:
        asked = read(content, "PredictRequest")
        return await self._ask_to_predict(asked, asked.inputs, len(asked.inputs), call)

    async def _predict_pair(self, content: bytes, call: Call) -> Any:
        asked = read(content, "PredictPairRequest")
        return await self._ask_to_predict(
            asked, list(asked.inputs), sum(map(len, asked.inputs)), call
        )

    async def _ask_to_predict(
        self, asked: Any, inputs: str | list[str], num_characters: int, call: Call
    ) -> Any:
        body = _truncated(asked) | {"inputs": inputs, "raw_scores": asked.raw_scores}
        return await self._ask("/predict", body, call, _predictions, num_characters)

    async def _rerank(self, content: bytes, call: Call) -> Any:
        asked = read(content, "RerankRequest")
        texts = list(asked.texts)
        num_characters = len(asked.query) * len(texts) + sum(map(len, texts))
        return await self._ask_to_rerank(asked, texts, asked, call, num_characters)

    async def _ask_to_rerank(
        self, asked: Any, texts: list[str], first: Any, call: Call, num_characters: int
    ) -> Any:
        body = _truncated(asked) | {
            "query": asked.query,
            "texts": texts,
            "raw_scores": first.raw_scores,
            "return_text": first.return_text,
        }
        return await self._ask("/rerank", body, call, _ranks, num_characters)

    async def _rerank_stream(self, call: Call) -> None:
        """Ranks the texts of all messages, each by its own query; the first says what to return."""
        first: Any = None
        num_bytes = 0

        async def rank(content: bytes) -> Any:
            nonlocal first
            asked = read(content, "RerankStreamRequest")
            first = asked if first is None else first
            num_characters = len(asked.query) + len(asked.text)
            return await self._ask_to_rerank(asked, [asked.text], first, call, num_characters)

        response = message("RerankResponse")()
        begun = time.perf_counter_ns()
        async for one in in_order(call, rank, self._max_bytes):
            num_bytes += one.ByteSize()
            if num_bytes > self._max_bytes:
                raise CallError(413, "the stream has more texts than one reply holds; send fewer")
            one.ranks[0].index = len(response.ranks)
            response.ranks.extend(one.ranks)
            _add(response.metadata, one.metadata)
        if first is None:
            raise CallError(400, "the call has no message")
        response.ranks.sort(key=lambda rank: -rank.score)
        for name in ("queue_time_ns", "inference_time_ns"):
            mean = getattr(response.metadata, name) // len(response.ranks)
            setattr(response.metadata, name, mean)
        response.metadata.total_time_ns = time.perf_counter_ns() - begun
        await call.write(response.SerializeToString())

    async def _tokenize(self, content: bytes, call: Call) -> Any:
        asked = read(content, "EncodeRequest")
        if asked.HasField("prompt_name"):
            raise CallError(400, "prompt_name: put the prompt before the text to tokenize it")
        body = {"inputs": asked.inputs, "add_special_tokens": asked.add_special_tokens}
        return await self._ask("/tokenize", body, call, _tokens)

    async def _decode(self, content: bytes, call: Call) -> Any:
        asked = read(content, "DecodeRequest")
        body = {"ids": list(asked.ids), "skip_special_tokens": asked.skip_special_tokens}
        return await self._ask("/decode", body, call, _decoded)

    async def _ask(
        self,
        path: str,
        body: dict[str, Any],
        call: Call,
        response_of: Callable[[Any], Any],
        num_characters: int | None = None,
    ) -> Any:
        """Asks a route; with a number of characters, the response has metadata."""
        body["timeout"] = timeout(call)
        name = _model(call)
        if name is not None:
            body["model"] = name
        begun = time.perf_counter_ns()
        reply = await self._asker.post(path, json.dumps(body).encode(), call)
        response = await offload(
            lambda: response_of(json.loads(reply.body)), len(reply.body) * _SECONDS_PER_BYTE
        )
        if num_characters is not None:
            took = time.perf_counter_ns() - begun
            response.metadata.CopyFrom(_metadata(reply, num_characters, took))
        return response


async def _answer(answer: Unary, call: Call) -> None:
    response = await answer(await call.read_only(), call)
    await call.write(response.SerializeToString())


def _model(call: Call) -> str | None:
    return next((value for name, value in call.headers if name == _MODEL), None)


def _chosen(models: list[dict[str, Any]], call: Call) -> dict[str, Any]:
    """The model that is meant, of all that there are."""
    name = _model(call)
    able = [each for each in models if _DOES.intersection(each["tasks"])]
    found = [each for each in able if name in (None, each["name"])]
    if len(found) == 1:
        return found[0]
    names = ", ".join(each["name"] for each in able) or "none"
    if found:
        raise CallError(400, f"name one of the models in the metadata {_MODEL}: {names}")
    asked = "" if name is None else f" {shortened(name)!r}"
    raise CallError(
        404, f"no model{asked} here embeds, classifies or ranks; those that do: {names}"
    )


def _truncated(asked: Any) -> dict[str, Any]:
    """Truncation as a request wants it; what it does not ask for, the server's settings say."""
    if asked.truncation_direction not in (0, LEFT):
        raise CallError(400, "truncation_direction must be 0 (right) or 1 (left)")
    return {
        "truncate": asked.truncate or None,
        "truncation_direction": "left" if asked.truncation_direction == LEFT else "right",
    }


def _prompted(asked: Any) -> dict[str, Any]:
    body = _truncated(asked) | {"inputs": asked.inputs}
    if asked.HasField("prompt_name"):
        body["prompt_name"] = asked.prompt_name
    return body


def _embedding(answer: Any) -> Any:
    (encoded,) = answer
    return message("EmbedResponse")(embeddings=np.frombuffer(base64.b64decode(encoded), "<f4"))


def _sparse_embedding(answer: Any) -> Any:
    (weights,) = answer
    return message("EmbedSparseResponse")(sparse_embeddings=weights)


def _token_embeddings(answer: Any) -> Any:
    (vectors,) = answer
    return message("EmbedAllResponse")(token_embeddings=[{"embeddings": each} for each in vectors])


def _predictions(answer: Any) -> Any:
    return message("PredictResponse")(predictions=answer)


def _ranks(answer: Any) -> Any:
    return message("RerankResponse")(ranks=answer)


def _tokens(answer: Any) -> Any:
    (tokens,) = answer
    return message("EncodeResponse")(tokens=tokens)


def _decoded(answer: Any) -> Any:
    (text,) = answer
    return message("DecodeResponse")(text=text)


def _metadata(reply: Reply, num_characters: int, total_ns: int) -> Any:
    """What an answer took. Tokenization is within the total."""
    queue, inference = (
        round(float(reply.headers.get(f"x-{name}-time", 0)) * 1e6)
        for name in ("queue", "inference")
    )
    return message("Metadata")(
        compute_chars=min(num_characters, _MAX_COUNT),
        compute_tokens=int(reply.headers.get("x-compute-tokens", 0)),
        total_time_ns=total_ns,
        queue_time_ns=queue,
        inference_time_ns=inference,
    )


def _add(total: Any, one: Any) -> None:
    for name in ("compute_chars", "compute_tokens", "queue_time_ns", "inference_time_ns"):
        count = getattr(total, name) + getattr(one, name)
        setattr(total, name, min(count, _MAX_COUNT) if name.startswith("compute") else count)
