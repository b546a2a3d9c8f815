"""Embeddings, and what is computed from texts two at a time: similarities and rankings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict, Unpack, overload

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import TextOptions, flat_body, task_body, task_call

Embedding = list[float]
"""The vector of a text."""

TokenEmbeddings = list[list[float]]
"""A vector for each token of a text."""

SparseEmbedding = dict[int, float]
"""The weights of the vocabulary's entries for a text, by index, without those that are 0."""


class PromptOptions(TextOptions, total=False):
    """Parameters of ``embed_sparse``. None means the server's default.

    ``prompt_name`` is one of the model's prompts, which is put before every text; ``instruction``
    stands in it in place of its own.
    """

    prompt_name: str | None
    instruction: str | None


class SimilarityParameters(PromptOptions, total=False):
    """Parameters of ``similarity``. None means the server's default.

    ``task`` is what the vectors are for, of a model that was trained for several tasks.
    """

    task: str | None


class EmbedAllParameters(TextOptions, total=False):
    """Parameters of ``embed_all``. None means the server's default.

    ``prompt_name`` says whether the texts are queries or documents. About ``pool_factor`` vectors
    of a document become one.
    """

    prompt_name: Literal["query", "document"] | None
    pool_factor: float | None


class EmbedParameters(PromptOptions, total=False):
    """Parameters of ``embed``. None means the server's default.

    ``normalize`` scales vectors to length 1. ``dimensions`` truncates them to that many components,
    and normalizes them again. ``output_dtype`` makes bytes or bits of them, as whole numbers.
    ``task`` is what they are for, of a model that was trained for several tasks.
    """

    normalize: bool | None
    dimensions: int | None
    task: str | None
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None


class HybridEmbedParameters(PromptOptions, total=False):
    """Parameters of ``embed_hybrid``. None means the server's default.

    ``outputs`` are the kinds of vectors that are wanted: all three by default.
    """

    outputs: list[Literal["dense", "sparse", "multi_vector"]] | None


class ChunkEmbedParameters(TextOptions, total=False):
    """Parameters of ``embed_chunks``. None means the server's default.

    ``normalize`` scales vectors to length 1.
    """

    normalize: bool | None


@dataclass(frozen=True, slots=True)
class HybridEmbedding:
    """The vectors of a text by their kind; None of a kind that was not wanted."""

    dense: Embedding | None
    sparse: SparseEmbedding | None
    multi_vector: TokenEmbeddings | None


class RerankParameters(TextOptions, total=False):
    """Parameters of ``rerank``. None means the server's default.

    With ``raw_scores`` the scores are logits; with ``return_text`` the results carry their texts.
    ``instruction`` is what to look for, in place of the instruction in the model's template.
    """

    raw_scores: bool | None
    return_text: bool | None
    instruction: str | None


class StoredVectors(TypedDict, total=False):
    """Documents as `embed_all` gave them: vectors, or their bytes as base64.

    ``dtype`` is what they consist of (float32 by default), ``scale`` what a step of int8 or uint8
    is worth, if they are not those of the server.
    """

    documents: Required[list[TokenEmbeddings] | list[str]]
    dtype: str | None
    scale: float | None


@dataclass(frozen=True, slots=True)
class RankedText:
    """A text's index in the given list, and how well it answers the query.

    ``text`` is None without ``return_text``.
    """

    index: int
    score: float
    text: str | None


class AsyncEmbed(AsyncCaller):
    """The methods for /embed, /embed-sparse, /embed-all, /embed-hybrid, /embed-chunks, /similarity
    and /rerank.
    """

    @overload
    async def embed(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[EmbedParameters],
    ) -> Embedding: ...
    @overload
    async def embed(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[EmbedParameters],
    ) -> list[Embedding]: ...
    async def embed(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[EmbedParameters],
    ) -> Embedding | list[Embedding]:
        """The vector of a text; for a list, one vector per text."""
        body = task_body({"inputs": inputs}, model, parameters)
        call = task_call("/embed", inputs, body, parse_embedding, always_list=True)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def embed_sparse(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[PromptOptions],
    ) -> SparseEmbedding: ...
    @overload
    async def embed_sparse(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[PromptOptions],
    ) -> list[SparseEmbedding]: ...
    async def embed_sparse(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[PromptOptions],
    ) -> SparseEmbedding | list[SparseEmbedding]:
        """The weights of the vocabulary for a text; for a list, for each text."""
        body = task_body({"inputs": inputs}, model, parameters)
        call = task_call("/embed-sparse", inputs, body, parse_sparse_embedding, always_list=True)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def embed_all(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[EmbedAllParameters],
    ) -> TokenEmbeddings: ...
    @overload
    async def embed_all(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[EmbedAllParameters],
    ) -> list[TokenEmbeddings]: ...
    async def embed_all(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[EmbedAllParameters],
    ) -> TokenEmbeddings | list[TokenEmbeddings]:
        """A vector for each token of a text; for a list, of each text."""
        body = task_body({"inputs": inputs}, model, parameters)
        call = task_call("/embed-all", inputs, body, parse_token_embeddings, always_list=True)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def embed_hybrid(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[HybridEmbedParameters],
    ) -> HybridEmbedding: ...
    @overload
    async def embed_hybrid(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[HybridEmbedParameters],
    ) -> list[HybridEmbedding]: ...
    async def embed_hybrid(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[HybridEmbedParameters],
    ) -> HybridEmbedding | list[HybridEmbedding]:
        """Vectors of several kinds of a text, from one pass; for a list, of each text."""
        body = task_body({"inputs": inputs}, model, parameters)
        call = task_call("/embed-hybrid", inputs, body, parse_hybrid_embedding)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    async def embed_chunks(
        self,
        text: str,
        chunks: list[tuple[int, int]],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ChunkEmbedParameters],
    ) -> list[Embedding]:
        """The vectors of a text's chunks, (start, end) in characters, after one pass over all."""
        body = flat_body({"inputs": text, "chunks": chunks}, model, parameters)
        return await self._send(task_call("/embed-chunks", chunks, body, parse_embedding), timeout)

    async def similarity(
        self,
        source_sentence: str,
        sentences: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[SimilarityParameters],
    ) -> list[float]:
        """The similarity of each sentence to the source sentence, in the order given."""
        inputs = {"source_sentence": source_sentence, "sentences": sentences}
        body = task_body({"inputs": inputs}, model, parameters)
        return await self._send(task_call("/similarity", sentences, body, float), timeout)

    async def rerank(
        self,
        query: str,
        texts: list[str] | None = None,
        *,
        vectors: StoredVectors | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[RerankParameters],
    ) -> list[RankedText]:
        """The texts ranked by how well they answer the query, best first; or documents that were
        stored as the ``vectors`` of their tokens, for late-interaction models.
        """
        given = {"texts": texts, "vectors": vectors}
        documents = {name: value for name, value in given.items() if value is not None}
        ranked = texts if vectors is None else vectors["documents"]
        body = flat_body({"query": query, **documents}, model, parameters)
        call = task_call("/rerank", ranked or [], body, parse_ranked_text)
        return await self._send(call, timeout)


def parse_embedding(entry: Sequence[Any]) -> Embedding:
    """The vector of one text."""
    return [float(number) for number in entry]


def parse_sparse_embedding(entry: Sequence[Mapping[str, Any]]) -> SparseEmbedding:
    """The weights for one text."""
    return {int(each["index"]): float(each["value"]) for each in entry}


def parse_token_embeddings(entry: Sequence[Sequence[float]]) -> TokenEmbeddings:
    """The vectors of one text."""
    return [[float(value) for value in vector] for vector in entry]


def parse_hybrid_embedding(entry: Mapping[str, Any]) -> HybridEmbedding:
    """The vectors of one text, by kind."""
    dense, sparse, tokens = (entry.get(name) for name in ("dense", "sparse", "multi_vector"))
    return HybridEmbedding(
        None if dense is None else parse_embedding(dense),
        None if sparse is None else parse_sparse_embedding(sparse),
        None if tokens is None else parse_token_embeddings(tokens),
    )


def parse_ranked_text(item: Mapping[str, Any]) -> RankedText:
    """One entry of a ranking."""
    return RankedText(int(item["index"]), float(item["score"]), item.get("text"))
