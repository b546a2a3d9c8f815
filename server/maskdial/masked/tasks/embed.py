"""Embeddings, dense and sparse: prompts before a text, and what becomes of its vector."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from maskdial.bundle.manifest import Embedding, Manifest, TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.errors import ValidationError, about, shortened
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.hybrid_rows import all_rows, dense_vector, first_row, token_weights
from maskdial.masked.tasks.logits import finite
from maskdial.masked.tasks.quantized import INTEGERS, OutputDtype
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    T_co,
    TaskModel,
    TaskRequest,
    Truncation,
    masked_input,
    read_inputs,
    read_text,
    read_texts,
)
from maskdial.runtime.adapter import Adapter

QUERY = "query"
"""The prompt of queries, as sentence-transformers calls it."""
_SECONDS_PER_WEIGHT = 2e-9  # to tell whether one is 0
_SECONDS_PER_TOKEN = 1e-6
# The prompts of E5-Mistral (arXiv:2401.00368), Qwen3-Embedding and others trained as they are
_INSTRUCT = re.compile(r"Instruct: ?(.+)\nQuery:").match
_TINY = 1e-12  # a zero vector stays zero, as in torch.nn.functional.normalize


@dataclass(frozen=True, slots=True)
class PromptedRequest(TaskRequest[T_co]):
    """Texts, or token ids, each of which becomes a vector.

    ``prompt_name``: which of the model's prompts to put before every text; None: the model's
    default, if it has one. ``instruction``: what to say in that prompt in place of its own. Token
    ids are left alone.
    """

    texts: Sequence[TextOrIds]
    truncation: Truncation = REFUSE
    prompt_name: str | None = None
    instruction: str | None = None

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([text for text in self.texts if isinstance(text, str)])

    def check(self, model: TaskModel) -> None:
        self.prompt(model)

    def prompt(self, model: TaskModel) -> str:
        """The text that is put before every text."""
        return _prompt(model, self.prompt_name, self.instruction)

    def read_prompted(self, model: TaskModel) -> tuple[Sequence[MaskedInput], int]:
        """The inputs, and how many tokens were cut off."""
        prompt = self.prompt(model)
        texts = [prompt + text if isinstance(text, str) else text for text in self.texts]
        return read_inputs(model, texts, self.truncation)


@dataclass(frozen=True, slots=True)
class EmbedRequest(PromptedRequest[NDArray[np.float32]]):
    """Texts to turn into vectors.

    ``normalize``: scale to length 1; None: as the model was trained, and always with
    ``dimensions``, which keeps that many leading dimensions, or for a type of integers.
    ``dtypes``: what the vectors are for; the answer is float32, from which
    `maskdial.masked.tasks.quantized` makes the others. ``trained_for``: one of the model's tasks,
    whose adapter reads the texts, behind its prompt where no other is named.
    """

    task: ClassVar[str] = "embed"
    head: ClassVar[TaskName] = "embed"

    normalize: bool | None = None
    dimensions: int | None = None
    dtypes: Sequence[OutputDtype] = ("float",)
    trained_for: str | None = None

    def prompt(self, model: TaskModel) -> str:
        name = _prompt_name(model, self.prompt_name, self.trained_for)
        return _prompt(model, name, self.instruction)

    def adapter(self, model: TaskModel) -> Adapter | None:
        return _adapter(model, self.trained_for)

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return manifest.task in ("embed", "embed-hybrid")

    def check(self, model: TaskModel) -> None:
        _check_task(model, self.trained_for)
        PromptedRequest.check(self, model)
        embedding = _embedding(model)
        if self.dimensions is not None and not 1 <= self.dimensions <= embedding.dimension:
            raise ValidationError(
                f"must be between 1 and {embedding.dimension} (the model's), not {self.dimensions}",
                field="dimensions",
            )
        if self.normalize is False and embedding.normalized:
            raise ValidationError(
                "this model normalizes its vectors itself and has no others; leave it out",
                field="normalize",
            )
        if self.normalize is False and not INTEGERS.isdisjoint(self.dtypes):
            raise ValidationError(
                "integers are of vectors of length 1; leave it out, or take another output_dtype",
                field="normalize",
            )

    def read(self, model: TaskModel) -> Reading[NDArray[np.float32]]:
        inputs, num_truncated = self.read_prompted(model)
        embedding = _embedding(model)
        inputs = first_row(inputs, embedding)
        normalize = self.normalize if INTEGERS.isdisjoint(self.dtypes) else True

        def answer(results: Sequence[MaskedResult]) -> NDArray[np.float32]:
            return embed(
                _vectors(results, embedding),
                embedding,
                normalize=normalize,
                dimensions=self.dimensions,
            )

        return Reading(inputs, answer, num_truncated)


@dataclass(frozen=True, slots=True)
class SimilarityRequest(TaskRequest[NDArray[np.float64]]):
    """A sentence, and those to compare it with; ``trained_for`` as of `EmbedRequest`."""

    task: ClassVar[str] = "similarity"
    head: ClassVar[TaskName] = "embed"

    source: str
    sentences: Sequence[str]
    truncation: Truncation = REFUSE
    prompt_name: str | None = None
    instruction: str | None = None
    trained_for: str | None = None

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return EmbedRequest.serves(manifest)

    def adapter(self, model: TaskModel) -> Adapter | None:
        return _adapter(model, self.trained_for)

    def prompt(self, model: TaskModel) -> str:
        """The text that is put before every sentence."""
        name = _prompt_name(model, self.prompt_name, self.trained_for)
        return _prompt(model, name, self.instruction)

    @property
    def num_texts(self) -> int:
        return 1 + len(self.sentences)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([self.source, *self.sentences])

    def check(self, model: TaskModel) -> None:
        _check_task(model, self.trained_for)
        self.prompt(model)

    def read(self, model: TaskModel) -> Reading[NDArray[np.float64]]:
        prompt = self.prompt(model)
        with about("source"):
            source, num_source = read_text(model, (prompt + self.source, None), self.truncation)
        pairs = [(prompt + sentence, None) for sentence in self.sentences]
        others, num_others = read_texts(model, pairs, self.truncation, field="sentences")

        def answer(results: Sequence[MaskedResult]) -> NDArray[np.float64]:
            first, rest = np.split(_vectors(results, embedding), [1])
            return cosine_similarities(first[0], rest)

        embedding = _embedding(model)
        inputs = first_row([masked_input(each) for each in (source, *others)], embedding)
        return Reading(inputs, answer, num_source + num_others)


@dataclass(frozen=True, slots=True)
class SparseEmbedRequest(PromptedRequest[list["SparseVector"]]):
    """Texts to turn into weights of the vocabulary."""

    task: ClassVar[str] = "embed-sparse"
    head: ClassVar[TaskName] = "embed-sparse"

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return manifest.task in ("embed-sparse", "embed-hybrid")

    def least_inputs(self, model: TaskModel) -> int:
        return 0 if self._looks_up(model) else self.num_inputs

    def _looks_up(self, model: TaskModel) -> bool:
        """Whether the texts are queries of a model whose graph reads documents alone."""
        name = self.prompt_name or _embedding(model).default_prompt
        return model.query_weights is not None and name == QUERY

    def read(self, model: TaskModel) -> Reading[list["SparseVector"]]:
        if self._looks_up(model):
            return self._looked_up(model)
        inputs, num_truncated = self.read_prompted(model)
        embedding = _embedding(model)
        if embedding.hybrid is not None:
            return _read_weights(all_rows(inputs), num_truncated, embedding)

        def answer(results: Sequence[MaskedResult]) -> list[SparseVector]:
            return [sparse(result.logits) for result in results]

        seconds = len(inputs) * model.manifest.vocab_size * _SECONDS_PER_WEIGHT
        return Reading(inputs, answer, num_truncated, seconds)

    def _looked_up(self, model: TaskModel) -> Reading[list["SparseVector"]]:
        """The weights of the tokens that queries have, without those that a document has around
        it: no pass is needed, as in sentence-transformers' `SparseStaticEmbedding`."""
        table, prompt = model.query_weights, self.prompt(model)
        assert table is not None, "the caller knows"
        found, num_truncated = list[SparseVector](), 0
        for index, text in enumerate(self.texts):
            with about("texts", index):
                assert isinstance(text, str), "no body takes ids for sparse vectors"
                encoding, num_cut = read_text(model, (prompt + text, None), self.truncation)
            marks = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
            ids = {each for each, is_added in marks if not is_added}
            weights = {each: float(table[each]) for each in sorted(ids)}
            found.append(sparse_vector({each: value for each, value in weights.items() if value}))
            num_truncated += num_cut
        return Reading([], lambda _: found, num_truncated)


def _read_weights(
    inputs: Sequence[MaskedInput], num_truncated: int, embedding: Embedding
) -> Reading[list["SparseVector"]]:
    """The weights of the tokens that texts have, of a hybrid model."""

    def answer(results: Sequence[MaskedResult]) -> list[SparseVector]:
        return [
            sparse_vector(token_weights(result.logits, given.input_ids, embedding))
            for given, result in zip(inputs, results, strict=True)
        ]

    seconds = sum(each.length for each in inputs) * _SECONDS_PER_TOKEN
    return Reading(inputs, answer, num_truncated, seconds)


class SparseValue(TypedDict):
    """The weight of one entry of the vocabulary."""

    index: int
    value: float


SparseVector = list[SparseValue]
"""The weights that are not 0, by index."""


def sparse(weights: NDArray[np.float32]) -> SparseVector:
    """The entries of a vector, float32 (dimension,), that are not 0.

    Raises:
        InferenceError: a value is not a finite number.
    """
    (indices,) = np.nonzero(finite(weights, "embeddings"))
    return sparse_vector(dict(zip(indices.tolist(), weights[indices].tolist(), strict=True)))


def sparse_vector(weights: Mapping[int, float]) -> SparseVector:
    """Weights by index, as they are sent."""
    return [SparseValue(index=index, value=value) for index, value in weights.items()]


def embed(
    vectors: NDArray[np.float32],
    embedding: Embedding,
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
) -> NDArray[np.float32]:
    """The vectors to return, float32 (num_texts, dimensions or the model's dimension).

    Args:
        vectors: float32 (num_texts, dimension), from the graph.
        embedding: what the graph has done to them.
        normalize: scale to length 1. None: as the graph does, and always after a cut.
        dimensions: keep that many leading dimensions, where a model trained with Matryoshka
            representation learning (arXiv:2205.13147) packs the most information.

    Raises:
        InferenceError: a vector has values that are not finite numbers.
    """
    finite(vectors, "embeddings")
    kept = vectors[:, :dimensions]
    if normalize is False or (normalize is None and dimensions is None):
        return kept
    if embedding.normalized and kept.shape == vectors.shape:
        return kept
    return (kept / lengths(kept)[:, None]).astype(np.float32)


def cosine_similarities(
    source: NDArray[np.float32], others: NDArray[np.float32]
) -> NDArray[np.float64]:
    """The cosine of the angle between one vector and each of others, float64 (num_others,).

    Args:
        source: float32 (dimension,).
        others: float32 (num_others, dimension).

    Raises:
        InferenceError: a vector has values that are not finite numbers.
    """
    finite(source, "embeddings")
    # Sums row by row, not a matrix product, which is not batch-invariant.
    products = (finite(others, "embeddings") * source).sum(axis=1)
    cosines: NDArray[np.float64] = products / (lengths(others) * lengths(source[None]))
    return cosines.clip(-1.0, 1.0)


def _embedding(model: TaskModel) -> Embedding:
    embedding = model.manifest.embedding
    assert embedding is not None, "every bundle for this task has one"
    return embedding


def _check_task(model: TaskModel, task: str | None) -> None:
    """Raises: ValidationError: the model does not embed texts for the task."""
    if task is None:
        return
    tasks = _embedding(model).tasks
    if not tasks:
        raise ValidationError(f"model {model.name!r} has no tasks; leave it out", field="task")
    if task not in tasks:
        known = ", ".join(map(repr, tasks))
        raise ValidationError(f"must be one of {known}, not {shortened(task)!r}", field="task")
    if model.adapter is not None:
        raise ValidationError(
            f"model {model.name!r} is an adapter, and tasks are those of its base; leave it out",
            field="task",
        )
    if model.why_no_adapters:
        raise ValidationError(f"model {model.name!r} {model.why_no_adapters}", field="task")


def _adapter(model: TaskModel, task: str | None) -> Adapter | None:
    if task is None:
        return model.adapter
    return model.task_adapters[_embedding(model).tasks[task].adapter]


def _prompt_name(model: TaskModel, name: str | None, task: str | None) -> str | None:
    """The prompt that is named, or that of a task; None for the default one."""
    return name if name is not None or task is None else _embedding(model).tasks[task].prompt


def _prompt(model: TaskModel, name: str | None, instruction: str | None) -> str:
    embedding = _embedding(model)
    if name is None:
        name = embedding.default_prompt
        if name is None and instruction is not None:  # the only prompt that takes one, or none
            fitting = [each for each, prompt in embedding.prompts.items() if _INSTRUCT(prompt)]
            name = fitting[0] if len(fitting) == 1 else None
    if name is None:
        if instruction is not None:
            raise _no_instruction(model, "no prompt by default that takes one")
        return ""
    if name not in embedding.prompts:
        known = ", ".join(map(repr, embedding.prompts)) or "none"
        raise ValidationError(
            f"model {model.name!r} has no prompt {shortened(name)!r}; it has {known}",
            field="prompt_name",
        )
    prompt = embedding.prompts[name]
    if instruction is None:
        return prompt
    place = _INSTRUCT(prompt)
    if place is None:
        raise _no_instruction(model, f"none in its prompt {name!r}")
    return prompt[: place.start(1)] + instruction + prompt[place.end(1) :]


def _no_instruction(model: TaskModel, why: str) -> ValidationError:
    return ValidationError(
        f"model {model.name!r} takes an instruction in prompts like 'Instruct: ...\\nQuery: ', and "
        f"has {why}",
        field="instruction",
    )


def _vectors(results: Sequence[MaskedResult], embedding: Embedding) -> NDArray[np.float32]:
    return np.stack([dense_vector(result.logits, embedding) for result in results])


def lengths(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """The Euclidean lengths of vectors, float64 (num_vectors,), 1e-12 at least."""
    squares = np.square(vectors.astype(np.float64)).sum(axis=1)
    found: NDArray[np.float64] = np.maximum(np.sqrt(squares), _TINY)
    return found
