"""Judge: what served models say of texts."""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from maskdial.ask.catalogue import DECIDE, task_of
from maskdial.ask.decide import decide
from maskdial.bundle.manifest import Manifest
from maskdial.config import Config
from maskdial.engine.fairness import current_usage
from maskdial.engine.provenance import noted
from maskdial.engine.questions import Question
from maskdial.engine.timing import Deadline, Timed
from maskdial.errors import ConfigError, DeadlineError, MaskdialError
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.classify import ClassifyRequest
from maskdial.masked.tasks.entities import EntitiesRequest
from maskdial.masked.tasks.redact import own_labels
from maskdial.masked.tasks.task import TaskRequest, Truncation
from maskdial.masked.tasks.token_classify import Entity, TokenClassifyRequest
from maskdial.masked.tasks.zero_shot import ZeroShotRequest
from maskdial.policy.rules import Rule
from maskdial.registry.choice import ModelChoice
from maskdial.registry.registry import Models
from maskdial.registry.served import ServedModel

_A_HALF = 0.5
_AT_ONCE = 32  # texts of a request: its turn comes between those of others
_MOST_KNOWN = 4096  # texts, of each model
_MARGIN = 8  # tokens by which a part of a text may become longer where it is cut off
_QUESTION = 256  # tokens of a prompt that asks about a text, beside both

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A label that a model found in a text, its score, and where."""

    label: str
    score: float
    start: int
    end: int


class Judge:
    """Asks the served models.

    Args:
        models: all that are served.
        config: limits of requests.
    """

    def __init__(self, models: Models, config: Config) -> None:
        self._models = models
        self._config = config
        # What was found in texts that come again, as those of a conversation do with each turn. An
        # answer depends on the text only, not on its company.
        self._known: WeakKeyDictionary[Any, OrderedDict[bytes, list[Found]]] = WeakKeyDictionary()

    def tags(self, rule: Rule) -> bool:
        """Whether a rule's model says where something is."""
        return any(map(_tags, self._manifests(rule.model)))

    def check(self, rule: Rule) -> None:
        """Whether a rule's model is served, does such work, and has its labels.

        Raises:
            ConfigError: one of these is not so.
        """
        names = {entry.name for entry in self._models.entries}
        for name in filter(None, (rule.model, rule.to)):
            if name not in names:
                raise ConfigError(f"no model {name!r} is served: {', '.join(sorted(names))}")
        manifest = self._reader(rule.model)
        if manifest is None:
            raise ConfigError(
                f"model {rule.model!r} neither classifies texts, nor finds entities in them, nor "
                "answers questions about them"
            )
        if _tags(manifest):
            known = None if EntitiesRequest.serves(manifest) else own_labels(manifest)
        else:
            known = list(manifest.labels) if _kind(manifest) is ClassifyRequest else None
        if rule.action == "redact" and not _tags(manifest):
            raise ConfigError(
                f"model {rule.model!r} says what a text is, not where something stands in it, so "
                "nothing can be redacted by it"
            )
        if known is None and not rule.thresholds:
            raise ConfigError(f"model {rule.model!r} has no labels of its own; name some in labels")
        if known is not None and not _tags(manifest) and not rule.thresholds:
            raise ConfigError(f"name the labels that matter: model {rule.model!r} has {known}")
        for label in rule.thresholds:
            if known is not None and label not in known:
                raise ConfigError(f"model {rule.model!r} has no label {label!r}, but {known}")

    def _manifests(self, name: str) -> Sequence[Manifest]:
        return self._models.entry(name).manifests

    def _reader(self, name: str) -> Manifest | None:
        """The graph of a model that a rule asks: the first that finds entities or classifies, or
        otherwise one that answers questions.
        """
        manifests = self._manifests(name)
        for reads in (_tags, _classifies, DECIDE.serves):
            for each in manifests:
                if reads(each):
                    return each
        return None

    async def judge(
        self, rule: Rule, texts: Sequence[str], deadline: Deadline
    ) -> list[list[Found]]:
        """What a rule's model finds in each of some texts, from the rule's thresholds on.

        Raises:
            MaskdialError: it could not be asked, or not in time.
        """
        left = deadline.remaining()
        seconds = rule.timeout if left is None else min(rule.timeout, left)
        try:
            async with asyncio.timeout(seconds):
                return await self._judge(rule, texts, deadline)
        except TimeoutError as error:
            raise DeadlineError(f"no verdict within {seconds:g} seconds") from error

    async def _judge(
        self, rule: Rule, texts: Sequence[str], deadline: Deadline
    ) -> list[list[Found]]:
        manifest = self._reader(rule.model)
        assert manifest is not None, "checked when the policies were read"
        kind = _kind(manifest)
        choice, task = ModelChoice(rule.model), DECIDE if kind is None else task_of(kind)
        lease = self._models.try_lease(choice, task) or await self._models.lease(choice, task)
        try:
            model = self._models.pick(lease, choice, task)
            current_usage().note(model, rule.thresholds, rule.threshold)
            known = self._known.setdefault(model.engine, OrderedDict())
            keys = [_key(rule, text) for text in texts]
            found = {key: known[key] for key in keys if key in known}
            new = {k: text for k, text in zip(keys, texts, strict=True) if k not in found}
            unread = list(new)
            for first in range(0, len(unread), _AT_ONCE):
                some = unread[first : first + _AT_ONCE]
                with noted():
                    answers = await self._ask(rule, [new[key] for key in some], model, deadline)
                found |= zip(some, answers, strict=True)
            for key in keys:
                known[key] = found[key]
                known.move_to_end(key)
            while len(known) > _MOST_KNOWN:
                known.popitem(last=False)
            return [found[key] for key in keys]
        finally:
            lease.release()

    async def _ask(
        self, rule: Rule, texts: Sequence[str], model: ServedModel, deadline: Deadline
    ) -> list[list[Found]]:
        kind = _kind(model.manifest)
        if kind is None:
            return await together(
                [partial(self._decisions, rule, text, model, deadline) for text in texts]
            )
        assert isinstance(model, MaskedModel)
        if kind is TokenClassifyRequest:
            return await self._entities(rule, texts, model, deadline)
        return await self._classes(rule, texts, model, deadline)

    async def _decisions(
        self, rule: Rule, text: str, model: ServedModel, deadline: Deadline
    ) -> list[Found]:
        """Whether each of the rule's statements is true of some part of a text."""
        questions = [Question("predicate", label) for label in rule.thresholds]
        best: dict[str, Found] = {}
        for start, end in _pieces(text, model, rule, _QUESTION):
            part = text[start:end]
            answer = await decide(part, questions, model, self._config, deadline)
            for question, (score, *_) in zip(questions, answer.probabilities, strict=True):
                label = question.instructions
                if score < _least(rule, label, model.manifest):
                    continue
                if label not in best or best[label].score < score:
                    best[label] = Found(label, score, start, end)
        return list(best.values())

    async def _entities(
        self, rule: Rule, texts: Sequence[str], model: MaskedModel, deadline: Deadline
    ) -> list[list[Found]]:
        request: TaskRequest[Any]
        if EntitiesRequest.serves(model.manifest):
            lowest = min(_least(rule, label, model.manifest) for label in rule.thresholds)
            request = EntitiesRequest(texts, list(rule.thresholds), lowest)
        else:
            request = TokenClassifyRequest(texts)
        found: Timed[Any] = await run.answer(request, model, self._config, deadline)
        return [
            [
                Found(each.entity_group, each.score, each.start, each.end)
                for each in entities
                if isinstance(each, Entity)
                and each.score >= _least(rule, each.entity_group, model.manifest)
            ]
            for entities in found.content
        ]

    async def _classes(
        self, rule: Rule, texts: Sequence[str], model: MaskedModel, deadline: Deadline
    ) -> list[list[Found]]:
        cut = Truncation(True, None)
        if not _entails(model.manifest):
            texts_alone = [(text, None) for text in texts]
            request: TaskRequest[Any] = ClassifyRequest(texts_alone, in_windows=True)
            scores: Timed[Any] = await run.answer(request, model, self._config, deadline)
            return [
                [
                    Found(each.label, each.score, each.start, each.end)
                    for each in labels
                    if each.score >= _least(rule, each.label, model.manifest)
                ]
                for labels in scores.content
            ]
        pieces = [
            (i, *span)
            for i, text in enumerate(texts)
            for span in _pieces(text, model, rule, _MARGIN)
        ]
        parts = [texts[i][start:end] for i, start, end in pieces]
        request = ZeroShotRequest(parts, list(rule.thresholds), cut, multi_label=True)
        scores = await run.answer(request, model, self._config, deadline)
        found: list[dict[str, Found]] = [{} for _ in texts]
        for (i, start, end), labels in zip(pieces, scores.content, strict=True):
            for each in labels:
                known = found[i].get(each.label)
                if each.score < _least(rule, each.label, model.manifest):
                    continue
                if known is None or known.score < each.score:
                    found[i][each.label] = Found(each.label, each.score, start, end)
        return [list(each.values()) for each in found]


def _key(rule: Rule, text: str) -> bytes:
    """What a rule's verdict on a text depends on. Keys of clients know nothing of each other, not
    by how long a verdict takes either.
    """
    asked = repr((current_usage().key, sorted(map(repr, rule.thresholds.items())), rule.threshold))
    return hashlib.sha256(f"{asked}\n{text}".encode(errors="surrogatepass")).digest()


def _kind(manifest: Manifest) -> type[TaskRequest[Any]] | None:
    """What a model is asked for; None for questions."""
    if _tags(manifest):
        return TokenClassifyRequest
    if not _classifies(manifest):
        return None
    return ZeroShotRequest if _entails(manifest) else ClassifyRequest


def _entails(manifest: Manifest) -> bool:
    return manifest.task == "classify" and manifest.entailment is not None


def _tags(manifest: Manifest) -> bool:
    return TokenClassifyRequest.serves(manifest)


def _classifies(manifest: Manifest) -> bool:
    return ClassifyRequest.serves(manifest)


def _least(rule: Rule, label: str, manifest: Manifest) -> float:
    """The score from which on a label matters; infinite if it never does."""
    if rule.thresholds and label not in rule.thresholds:
        return math.inf
    own = rule.thresholds.get(label, rule.threshold)
    if own is not None:
        return own
    known = {} if manifest.calibration is None else manifest.calibration.thresholds
    return known.get(label, _A_HALF)


def _pieces(text: str, model: ServedModel, rule: Rule, beside: int) -> list[tuple[int, int]]:
    """The parts of a text, each as long as a model takes beside a label, that overlap by a quarter.

    Args:
        beside: tokens to leave for what else stands in the prompt.
    """
    longest = max(len(model.tokenizer.encode(label).ids) for label in rule.thresholds) + beside
    most = model.manifest.max_length - model.tokenizer.num_special_tokens(pair=True)
    room = max(most - longest, most // 4)
    encoding = model.tokenizer.encode(text, add_special_tokens=False)
    offsets = encoding.offsets
    if len(offsets) <= room:
        return [(0, len(text))]
    size = max(room - _MARGIN, 1)
    pieces = []
    for first in range(0, len(offsets), max(size * 3 // 4, 1)):
        last = min(first + size, len(offsets))
        start = 0 if not first else offsets[first][0]
        pieces.append((start, len(text) if last == len(offsets) else offsets[last - 1][1]))
        if last == len(offsets):
            break
    return pieces


async def together(work: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of several pieces of work at the same time; if one fails, the others end."""
    if len(work) < 2:
        return [await each() for each in work]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(each)) for each in work]
    except* MaskdialError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
