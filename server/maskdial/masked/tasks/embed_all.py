"""A vector for each token of a text, by models trained for late interaction (ColBERT).

Khattab and Zaharia, SIGIR 2020, "ColBERT": a query is extended to a fixed length by mask tokens,
each of which has a vector; a document's punctuation has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import (
    Embedding,
    Manifest,
    MultiVector,
    TaskName,
    TokenPooling,
)
from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.embed import PromptedRequest
from maskdial.masked.tasks.hybrid_rows import all_rows, token_vectors
from maskdial.masked.tasks.logits import finite
from maskdial.masked.tasks.muvera import Muvera
from maskdial.masked.tasks.task import Reading, TaskModel, Truncation, masked_input, read_text
from maskdial.masked.tasks.token_pooling import check_sizes, pool_tokens, pooling_of

_SECONDS_PER_TOKEN = 1e-6


@dataclass(frozen=True, slots=True)
class EmbedAllRequest(PromptedRequest[list[NDArray[np.float32]]]):
    """Texts to turn into a vector for each token, float32 (num_tokens, dimension).

    They are queries if ``prompt_name`` is ``query``, otherwise documents. ``pool_factor``: about
    how many vectors of a document become one; None: as the model's modules say. ``muvera``: makes
    one vector of a text's, float32 (size,), which is the answer then.
    """

    task: ClassVar[str] = "embed-all"
    head: ClassVar[TaskName] = "embed-all"

    pool_factor: float | None = None
    muvera: Muvera | None = None

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return manifest.task in ("embed-all", "embed-hybrid")

    def check(self, model: TaskModel) -> None:
        PromptedRequest.check(self, model)
        if self.pool_factor is not None and self._pooling(model) is None:
            raise ValidationError(
                f"model {model.name!r} pools the tokens of documents, not of queries; leave it out",
                field="pool_factor",
            )
        if self.muvera is not None:
            self.muvera.check(len(self.texts), _embedding(model).dimension)

    def _pooling(self, model: TaskModel) -> TokenPooling | None:
        is_query = self.prompt_name == "query"
        return pooling_of(_embedding(model), is_query=is_query, factor=self.pool_factor)

    def read(self, model: TaskModel) -> Reading[list[NDArray[np.float32]]]:
        reading, pooling = self._read(model), self._pooling(model)
        sizes = [len(each.rows) for each in reading.inputs]
        seconds = check_sizes(sizes, pooling)
        muvera = self.muvera
        if muvera is not None:
            seconds += muvera.seconds(sizes, _embedding(model).dimension)

        def reduce(texts: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
            texts = [pool_tokens(each, pooling) for each in texts]
            if muvera is None:
                return texts
            is_query = self.prompt_name == "query"
            return [muvera.encode(each, is_query=is_query) for each in texts]

        return replace(reading.map(reduce), seconds=reading.seconds + seconds)

    def _read(self, model: TaskModel) -> Reading[list[NDArray[np.float32]]]:
        embedding = model.manifest.embedding
        if embedding is not None and embedding.hybrid is not None:
            return self._read_hybrid(model, embedding)
        inputs, num_truncated = [], 0
        for index, text in enumerate(self.texts):
            assert isinstance(text, str), "no dialect sends token ids"
            with about("texts", index):
                read, num_cut = read_for_interaction(
                    model,
                    self.prompt(model) + text,
                    self.truncation,
                    is_query=self.prompt_name == "query",
                )
            inputs.append(read)
            num_truncated += num_cut

        def answer(results: Sequence[MaskedResult]) -> list[NDArray[np.float32]]:
            for result in results:
                finite(result.logits, "embeddings")
            return [result.logits for result in results]

        seconds = sum(each.length for each in inputs) * _SECONDS_PER_TOKEN
        return Reading(inputs, answer, num_truncated, seconds)

    def _read_hybrid(
        self, model: TaskModel, embedding: Embedding
    ) -> Reading[list[NDArray[np.float32]]]:
        """Queries and documents are read alike; the first token has no vector of its own."""
        read, num_truncated = self.read_prompted(model)
        inputs = all_rows(read)

        def answer(results: Sequence[MaskedResult]) -> list[NDArray[np.float32]]:
            return [token_vectors(result.logits, embedding) for result in results]

        seconds = sum(each.length for each in inputs) * _SECONDS_PER_TOKEN
        return Reading(inputs, answer, num_truncated, seconds)


def _embedding(model: TaskModel) -> Embedding:
    embedding = model.manifest.embedding
    assert embedding is not None, "every bundle for this task has one"
    return embedding


def read_for_interaction(
    model: TaskModel, text: str, truncation: Truncation, *, is_query: bool
) -> tuple[MaskedInput, int]:
    """Tokenizes a query or a document, its prompt included, as a multi-vector model reads it.

    Returns:
        The input, whose rows are the tokens that have a vector, and how many tokens were cut off.

    Raises:
        ValidationError: the text is too long.
    """
    settings = _embedding(model).multi_vector
    assert settings is not None, "and says how to read texts"
    limit = settings.query_length if is_query else settings.document_length
    encoding, num_cut = read_text(model, (text, None), truncation, limit)
    skipped = settings.skipped if settings.skips_in_queries or not is_query else ()
    rows = tuple(at for at, token in enumerate(encoding.ids) if token not in skipped)
    read = masked_input(encoding, rows)
    return (extended(read, settings) if is_query else read), num_cut


def extended(query: MaskedInput, settings: MultiVector) -> MaskedInput:
    """A query with as many further tokens, and rows for them, as the model expects."""
    num_added = (settings.expansion_length or 0) - query.length
    token = settings.expansion_token
    if num_added <= 0 or token is None:
        return query
    return MaskedInput(
        query.input_ids + (token,) * num_added,
        query.rows + tuple(range(query.length, query.length + num_added)),
        (*(query.token_type_ids or (0,) * query.length), *(0,) * num_added),
        0 if settings.attends_to_expansion else num_added,
    )
