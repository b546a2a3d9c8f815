"""Model: a bundle in this process, without a server, by the engines and tasks of the server.

An answer equals that of the server for the same request, to the last bit, wherever the model is
batch-invariant (`docs/architecture.md`).
"""

import asyncio
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from maskdial.ask import catalogue
from maskdial.ask import score as scoring
from maskdial.ask.catalogue import SCORE, task_of
from maskdial.ask.write import Writer, task_under, writing
from maskdial.bundle.manifest import Mask
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.chat.message import ChatMessage
from maskdial.causal.chat.request import Reply
from maskdial.causal.model import CausalModel
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.causal.tools import Tool, ToolChoice
from maskdial.config import MAX_BATCH_INPUTS, Config, load_config
from maskdial.engine.thread import in_thread
from maskdial.engine.timing import Deadline
from maskdial.errors import BundleError, ValidationError
from maskdial.local import generation
from maskdial.local.generation import Generated, JsonSchema, Sampling
from maskdial.local.loop import LoopThread
from maskdial.local.window import CHUNK, in_order, in_order_async
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.classify import ClassifyRequest, LabelScore, ScoreFunction
from maskdial.masked.tasks.embed import EmbedRequest
from maskdial.masked.tasks.fill_mask import Filling, FillMaskRequest
from maskdial.masked.tasks.rerank import Rank, RerankRequest
from maskdial.masked.tasks.task import TaskRequest, TextOrPair, Truncation
from maskdial.masked.tasks.token_classify import (
    AggregationStrategy,
    Entity,
    TaggedToken,
    TokenClassifyRequest,
)
from maskdial.metrics import Metrics
from maskdial.registry.catalog import starters
from maskdial.registry.choice import Chooser, ModelChoice
from maskdial.registry.loading import start_models
from maskdial.registry.served import ServedModel, Task

P = ParamSpec("P")
X = TypeVar("X")
T = TypeVar("T")

# A caller in this process waits for its turn; nobody refuses it.
_MAX_QUEUE = 2**20
_DISK_PATIENCE = 10.0  # seconds, until it is known which prefixes the disk has
_DISK_GRACE = 10.0  # seconds, to write what waits of them


class AsyncModel:
    """A model in this process, for use in an event loop.

    The constructor loads it and blocks meanwhile; `load` does so in a thread. Every method takes a
    list and returns a list, with an answer for each item. Lists of any length are answered in
    pieces, `map` answers streams. Without `close` (or ``async with``), its memory is held until
    the process ends.

    Args:
        bundle: its folder, or the name of a starter model.
        mask: the attention mask, for bundles with both.
        settings: those of ``maskdial serve`` that matter to a model, such as ``threads=2``, by
            their names in its configuration file. ``MASKDIAL_*`` variables apply, too.

    Raises:
        BundleError: there is no such bundle, or it cannot be run.
        ConfigError: a setting is wrong, or the model does not fit.
    """

    def __init__(self, bundle: str | Path, *, mask: Mask | None = None, **settings: Any) -> None:
        limits = {"max_queue": _MAX_QUEUE, "max_batch_inputs": MAX_BATCH_INPUTS}
        self._config: Config = load_config(limits | settings)
        folder = _find(bundle)
        self.name = folder.name
        self._choice = ModelChoice(mask=mask)
        self._chooser = Chooser(catalogue.LISTED)
        metrics = Metrics()
        self._disk = None
        if self._config.prefix_cache_dir is not None:
            self._disk = DiskStore(
                self._config.prefix_cache_dir, self._config.prefix_cache_disk_bytes, metrics.disk
            )
        self._models = start_models(self.name, folder, self._config, metrics, disk=self._disk)
        if self._disk is not None:
            self._disk.start()
            self._disk.wait_until_open(_DISK_PATIENCE)

    @classmethod
    async def load(
        cls, bundle: str | Path, *, mask: Mask | None = None, **settings: Any
    ) -> "AsyncModel":
        """A model, loaded in a thread while the event loop goes on."""
        return await in_thread(partial(cls, bundle, mask=mask, **settings))

    async def close(self) -> None:
        """Stops the engines; requests that run fail with UnavailableError."""
        await asyncio.gather(*(in_thread(model.stop) for model in self._models))
        if self._disk is not None:
            await in_thread(partial(self._disk.close, _DISK_GRACE))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def embed(
        self,
        texts: Sequence[str],
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """The texts' vectors, float32 (num_texts, dimension); see `EmbedRequest`.

        Raises:
            ValidationError: the model has no embeddings, or a text is too long for it.
        """

        def request(texts: Sequence[str]) -> EmbedRequest:
            return EmbedRequest(
                texts, Truncation(truncate), prompt_name, instruction, normalize, dimensions
            )

        vectors = await self._answers(request, texts)
        if not vectors:
            embedding = self.pick(task_of(EmbedRequest)).manifest.embedding
            assert embedding is not None, "every bundle for this task has one"
            return np.empty((0, dimensions or embedding.dimension), np.float32)
        return np.stack(vectors)

    async def classify(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        top_k: int | None = None,
        function_to_apply: ScoreFunction | None = None,
        truncate: bool = False,
    ) -> list[list[LabelScore]]:
        """The labels of each text or pair of texts, best first.

        Raises:
            ValidationError: the model does not classify, or a text is too long for it.
        """

        def request(texts: Sequence[str | tuple[str, str]]) -> ClassifyRequest:
            pairs: list[TextOrPair] = [
                (each, None) if isinstance(each, str) else each for each in texts
            ]
            return ClassifyRequest(pairs, Truncation(truncate), function_to_apply, top_k)

        return await self._answers(request, texts)

    async def fill_mask(
        self,
        texts: Sequence[str],
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        truncate: bool = False,
    ) -> list[list[list[Filling]]]:
        """For each text, for each of its masks, the best fillings.

        Raises:
            ValidationError: the model fills no masks, or a text has none or is too long.
        """

        def request(texts: Sequence[str]) -> FillMaskRequest:
            return FillMaskRequest(texts, Truncation(truncate), top_k, targets)

        return await self._answers(request, texts)

    async def token_classify(
        self,
        texts: Sequence[str],
        *,
        aggregation_strategy: AggregationStrategy = "simple",
        ignore_labels: Sequence[str] = ("O",),
        stride: int | None = None,
    ) -> list[list[TaggedToken] | list[Entity]]:
        """The entities of each text; of any length, which is read in windows.

        Raises:
            ValidationError: the model tags no tokens.
        """

        def request(texts: Sequence[str]) -> TokenClassifyRequest:
            return TokenClassifyRequest(texts, aggregation_strategy, ignore_labels, stride)

        return await self._answers(request, texts)

    async def rerank(
        self,
        query: str,
        texts: Sequence[str],
        *,
        raw_scores: bool = False,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[Rank]:
        """The texts by how well they answer the query, best first; at most 16,384.

        Raises:
            ValidationError: the model does not rerank, or a text is too long for it.
        """
        request = RerankRequest(query, texts, Truncation(truncate), raw_scores, instruction)
        return list(await self.answer(request)) if texts else []

    async def answer(self, request: TaskRequest[T]) -> T:
        """Answers any request of `maskdial.masked.tasks`, as one piece.

        Raises:
            ValidationError: the request does not fit the model.
        """
        model = self.pick(task_of(type(request)))
        assert isinstance(model, MaskedModel)
        timed = await run.answer(request, model, self._config, Deadline(None, self._config))
        return timed.content

    async def score(self, texts: Sequence[str], *, truncate: bool = False) -> list[scoring.Score]:
        """How likely the model finds each text, token by token.

        Raises:
            ValidationError: the model scores no texts, or one is too long for it.
        """
        model = self.pick(SCORE)

        async def answer(texts: Sequence[str]) -> list[scoring.Score]:
            request = scoring.ScoreRequest(texts, Truncation(truncate))
            deadline = Deadline(None, self._config)
            return (await scoring.score(request, model, self._config, deadline)).content

        return await _pieces(answer, texts)

    async def score_ids(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The natural log-probability of each token but the first, for texts as token ids.

        Raises:
            ValidationError: no causal model scores texts here, or one is too long for it.
        """
        model = self.pick(SCORE)
        if not isinstance(model, CausalModel):
            raise ValidationError("only causal models score token ids")

        async def answer(texts: Sequence[Sequence[int]]) -> list[list[float]]:
            deadline = Deadline(None, self._config)
            return await scoring.log_probabilities(texts, model, deadline)

        return await _pieces(answer, texts)

    async def generate(
        self,
        prompts: Sequence[TextOrIds],
        *,
        max_new_tokens: int | None = None,
        schema: JsonSchema | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        seed: int | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Generated]:
        """Continues each prompt, as ``/generate`` does: greedily, unless a parameter of sampling is
        given or the model's own files say otherwise.

        Args:
            prompts: the texts, or lists of token ids, which are used as they are.
            max_new_tokens: limit per text. None: the model's default, or 100.
            schema: a JSON schema that each text has to match.
            regex: a regular expression, likewise.
            grammar: a Lark grammar, likewise.
            seed: of the random numbers of each text. None draws one.
            sampling: see `SamplingParams`.

        Raises:
            ValidationError: the model generates no text, or a parameter is wrong.
        """
        model = self._writer()
        params = generation.params(model.defaults, sampling, model.defaults.do_sample)
        wanted = generation.grammar_of(schema, regex, grammar)

        async def answer(prompts: Sequence[TextOrIds]) -> list[Generated]:
            return await generation.complete(
                prompts, model, self._config, params, wanted, max_new_tokens, seed
            )

        return await _pieces(answer, prompts)

    async def chat(
        self,
        messages: Sequence[ChatMessage | Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        max_new_tokens: int | None = None,
        schema: JsonSchema | None = None,
        reasoning_effort: str | None = None,
        thinking_budget: int | None = None,
        seed: int | None = None,
        **sampling: Unpack[Sampling],
    ) -> Reply:
        """Answers one conversation, as ``/v1/chat/completions`` does: by sampling, unless the
        temperature is 0.

        Args:
            messages: each a `ChatMessage`, or a mapping of its fields.
            tools: what the model may call.
            tool_choice: whether it must. None: as it chooses.
            max_new_tokens: limit. None: what the context leaves.
            schema: a JSON schema that the content has to match.
            reasoning_effort: a variable of the chat template.
            thinking_budget: tokens of reasoning after which the answer begins.
            seed: of the random numbers. None draws one.
            sampling: see `SamplingParams`.

        Raises:
            ValidationError: the model has no chat template, or a parameter is wrong.
        """
        return await generation.reply(
            messages,
            self._writer(),
            self._config,
            generation.grammar_of(schema, None, None),
            sampling,
            max_new_tokens=max_new_tokens,
            seed=seed,
            tools=tools,
            tool_choice=tool_choice or ToolChoice(),
            reasoning_effort=reasoning_effort,
            thinking_budget=thinking_budget,
        )

    def map(
        self,
        method: Callable[[Sequence[X]], Awaitable[Iterable[T]]],
        items: Iterable[X] | AsyncIterable[X],
    ) -> AsyncIterator[T]:
        """The answers of a method for a stream of any length, in order: ``async for vector in
        model.map(model.embed, texts)``. Parameters are bound with `functools.partial`.

        A bounded number of items is read ahead. An iterable that blocks belongs into `Model.map`.

        Raises:
            ValidationError: an item is refused; ``index`` says which. Those before it were yielded.
        """
        return in_order_async(method, items)

    async def _answers(
        self, request: Callable[[Sequence[X]], TaskRequest[Iterable[T]]], items: Sequence[X]
    ) -> list[T]:
        async def answer(items: Sequence[X]) -> Iterable[T]:
            return await self.answer(request(items))

        return await _pieces(answer, items)

    @property
    def writer(self) -> Writer:
        """What writes texts.

        Raises:
            ValidationError: the model generates no text.
        """
        return self._writer()

    def _writer(self) -> Writer:
        mask = self._choice.mask
        return writing(self.pick(task_under(mask)), mask)

    def pick(self, task: Task) -> ServedModel:
        """The model of the bundle that does a task.

        Raises:
            ValidationError: it does not.
        """
        return self._chooser.pick(self.name, self._models, self._choice, task)


def _sync(
    method: Callable[Concatenate[AsyncModel, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[Model, P], T]":
    """A method of `Model` that runs the one of `AsyncModel` in the background loop."""

    @wraps(method)
    def run_in_loop(self: "Model", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.loop.run(method(self.model, *args, **kwargs))

    return run_in_loop


class Model:
    """A model in this process, for any number of threads: see `AsyncModel` for its arguments.

    Attributes:
        model: what answers.
        loop: the event loop, in a thread of its own, in which it does so.
    """

    def __init__(self, bundle: str | Path, *, mask: Mask | None = None, **settings: Any) -> None:
        self.model = AsyncModel(bundle, mask=mask, **settings)
        self.loop = LoopThread()

    embed = _sync(AsyncModel.embed)
    classify = _sync(AsyncModel.classify)
    fill_mask = _sync(AsyncModel.fill_mask)
    token_classify = _sync(AsyncModel.token_classify)
    rerank = _sync(AsyncModel.rerank)
    score = _sync(AsyncModel.score)
    score_ids = _sync(AsyncModel.score_ids)
    generate = _sync(AsyncModel.generate)
    chat = _sync(AsyncModel.chat)

    def answer(self, request: TaskRequest[T]) -> T:
        """Answers any request of `maskdial.masked.tasks`; see `AsyncModel.answer`."""
        return self.loop.run(self.model.answer(request))

    def map(self, method: Callable[[Sequence[X]], Iterable[T]], items: Iterable[X]) -> Iterator[T]:
        """The answers of a method for a stream of any length, in order: ``for vector in
        model.map(model.embed, texts)``. Parameters are bound with `functools.partial`.

        A bounded number of items is read ahead.

        Raises:
            ValidationError: an item is refused; ``index`` says which. Those before it were yielded.
        """
        return in_order(method, items)

    def close(self) -> None:
        """Stops the engines and the loop; a second call does nothing."""
        if not self.loop.closed:
            self.loop.run(self.model.close())
            self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _pieces(
    answer: Callable[[Sequence[X]], Awaitable[Iterable[T]]], items: Sequence[X]
) -> list[T]:
    """The answers for a list of any length."""
    if isinstance(items, str):
        raise TypeError("give a list of texts, even for a single one")
    if len(items) <= CHUNK:  # as one request
        return list(await answer(items)) if len(items) else []
    return [each async for each in in_order_async(answer, items)]


def _find(bundle: str | Path) -> Path:
    folder = Path(bundle)
    if folder.is_dir():
        return folder.resolve()
    found = starters()
    if str(bundle) not in found:
        raise BundleError(
            f"there is no bundle {str(bundle)!r}: give its folder, or the name of a starter model "
            f"({', '.join(found)})"
        )
    return found[str(bundle)]
