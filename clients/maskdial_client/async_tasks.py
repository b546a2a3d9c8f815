"""AsyncTasks: the methods of AsyncClient that read texts."""

# The timeout is the time between two bytes, which asyncio.timeout cannot express.
# ruff: noqa: ASYNC109

from abc import ABC, abstractmethod
from typing import TypeVar, Unpack, overload

from maskdial_client import calls
from maskdial_client.core import Call
from maskdial_client.parameters import (
    ClassifyBatch,
    ClassifyInput,
    ClassifyParameters,
    DetokenizeParameters,
    EmbedParameters,
    FillMaskParameters,
    Question,
    QuestionAnsweringParameters,
    RerankParameters,
    TextOptions,
    TokenClassifyParameters,
    TokenizeParameters,
    ZeroShotClassifyParameters,
)
from maskdial_client.results import (
    Answers,
    Classification,
    Embedding,
    Entity,
    FillMaskResult,
    RankedText,
    TextScore,
    TextToken,
)

T = TypeVar("T")


class AsyncTasks(ABC):
    """What a client can ask about a text: everything but to go on from it."""

    @abstractmethod
    async def _send(self, call: Call[T], timeout: float | None = None) -> T:
        """The result of a call."""

    @overload
    async def fill_mask(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[FillMaskParameters],
    ) -> FillMaskResult: ...
    @overload
    async def fill_mask(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[FillMaskParameters],
    ) -> list[FillMaskResult]: ...
    async def fill_mask(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[FillMaskParameters],
    ) -> FillMaskResult | list[FillMaskResult]:
        """The likeliest tokens for every mask of a text; for a list, one result per text."""
        results = await self._send(calls.fill_mask_call(inputs, model, parameters), timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def classify(
        self,
        inputs: ClassifyInput,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ClassifyParameters],
    ) -> Classification: ...
    @overload
    async def classify(
        self,
        inputs: ClassifyBatch,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ClassifyParameters],
    ) -> list[Classification]: ...
    async def classify(
        self,
        inputs: ClassifyInput | ClassifyBatch,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ClassifyParameters],
    ) -> Classification | list[Classification]:
        """The labels of a text, or of a tuple of two texts; for a list, one result per entry."""
        results = await self._send(calls.classify_call(inputs, model, parameters), timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def token_classify(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenClassifyParameters],
    ) -> tuple[Entity, ...]: ...
    @overload
    async def token_classify(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenClassifyParameters],
    ) -> list[tuple[Entity, ...]]: ...
    async def token_classify(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenClassifyParameters],
    ) -> tuple[Entity, ...] | list[tuple[Entity, ...]]:
        """The entities of a text, in its order; for a list, one result per text."""
        results = await self._send(calls.token_classify_call(inputs, model, parameters), timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def question_answering(
        self,
        inputs: Question,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[QuestionAnsweringParameters],
    ) -> Answers: ...
    @overload
    async def question_answering(
        self,
        inputs: list[Question],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[QuestionAnsweringParameters],
    ) -> list[Answers]: ...
    async def question_answering(
        self,
        inputs: Question | list[Question],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[QuestionAnsweringParameters],
    ) -> Answers | list[Answers]:
        """The answer in a tuple of a question and its context, or ``top_k`` of them.

        For a list, one result per tuple.
        """
        results = await self._send(
            calls.question_answering_call(inputs, model, parameters), timeout
        )
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def zero_shot_classify(
        self,
        inputs: str,
        candidate_labels: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ZeroShotClassifyParameters],
    ) -> Classification: ...
    @overload
    async def zero_shot_classify(
        self,
        inputs: list[str],
        candidate_labels: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ZeroShotClassifyParameters],
    ) -> list[Classification]: ...
    async def zero_shot_classify(
        self,
        inputs: str | list[str],
        candidate_labels: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ZeroShotClassifyParameters],
    ) -> Classification | list[Classification]:
        """The labels given, as they fit a text; for a list, one result per text."""
        results = await self._send(
            calls.zero_shot_classify_call(inputs, candidate_labels, model, parameters), timeout
        )
        return results if isinstance(inputs, list) else results[0]

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
        """The vector of a text; for a list, one per text."""
        results = await self._send(calls.embed_call(inputs, model, parameters), timeout)
        return results if isinstance(inputs, list) else results[0]

    async def similarity(
        self,
        source_sentence: str,
        sentences: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TextOptions],
    ) -> list[float]:
        """How alike each of the sentences is to the source sentence, in their order."""
        return await self._send(
            calls.similarity_call(source_sentence, sentences, model, parameters), timeout
        )

    async def rerank(
        self,
        query: str,
        texts: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[RerankParameters],
    ) -> list[RankedText]:
        """The texts by how well they answer the query, best first."""
        return await self._send(calls.rerank_call(query, texts, model, parameters), timeout)

    @overload
    async def score(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TextOptions],
    ) -> TextScore: ...
    @overload
    async def score(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TextOptions],
    ) -> list[TextScore]: ...
    async def score(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TextOptions],
    ) -> TextScore | list[TextScore]:
        """How likely the model finds a text; for a list, one result per text."""
        results = await self._send(calls.score_call(inputs, model, parameters), timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def tokenize(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenizeParameters],
    ) -> tuple[TextToken, ...]: ...
    @overload
    async def tokenize(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenizeParameters],
    ) -> list[tuple[TextToken, ...]]: ...
    async def tokenize(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenizeParameters],
    ) -> tuple[TextToken, ...] | list[tuple[TextToken, ...]]:
        """The tokens of a text; for a list, one result per text."""
        results = await self._send(calls.tokenize_call(inputs, model, parameters), timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def detokenize(
        self,
        ids: list[int],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[DetokenizeParameters],
    ) -> str: ...
    @overload
    async def detokenize(
        self,
        ids: list[list[int]],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[DetokenizeParameters],
    ) -> list[str]: ...
    async def detokenize(
        self,
        ids: list[int] | list[list[int]],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[DetokenizeParameters],
    ) -> str | list[str]:
        """The text of token ids; for a list of lists, one text each."""
        results = await self._send(calls.detokenize_call(ids, model, parameters), timeout)
        return results if calls.is_id_batch(ids) else results[0]
