"""Judge: what served models say of texts."""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from maskdial.ask.catalogue import task_of
from maskdial.bundle.manifest import Manifest
from maskdial.config import Config
from maskdial.engine.fairness import current_usage
from maskdial.engine.timing import Deadline, Timed
from maskdial.errors import ConfigError, DeadlineError
from maskdial.masked import run
from maskdial.masked.engine import MaskedEngine
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

_A_HALF = 0.5
_AT_ONCE = 32  # texts of a request: its turn comes between those of others
_MOST_KNOWN = 4096  # texts, of each model
_MARGIN = 8  # tokens by which a part of a text may become longer where it is cut off


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
        self._known: WeakKeyDictionary[MaskedEngine, OrderedDict[bytes, list[Found]]] = (
            WeakKeyDictionary()
        )

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
        manifests = self._manifests(rule.model)
        fitting = [each for each in manifests if _tags(each) or _classifies(each)]
        if not fitting:
            raise ConfigError(
                f"model {rule.model!r} neither classifies texts nor finds entities in them"
            )
        (manifest, *_) = fitting
        if _tags(manifest):
            known = None if EntitiesRequest.serves(manifest) else own_labels(manifest)
        else:
            known = None if _entails(manifest) else list(manifest.labels)
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
        manifest = next(
            each for each in self._manifests(rule.model) if _tags(each) or _classifies(each)
        )
        kind = _kind(manifest)
        choice, task = ModelChoice(rule.model), task_of(kind)
        lease = self._models.try_lease(choice, task) or await self._models.lease(choice, task)
        try:
            model = self._models.pick(lease, choice, task)
            assert isinstance(model, MaskedModel)
            ask = self._entities if _tags(manifest) else self._classes
            known = self._known.setdefault(model.engine, OrderedDict())
            keys = [_key(rule, text) for text in texts]
            found = {key: known[key] for key in keys if key in known}
            new = {k: text for k, text in zip(keys, texts, strict=True) if k not in found}
            unread = list(new)
            for first in range(0, len(unread), _AT_ONCE):
                some = unread[first : first + _AT_ONCE]
                answers = await ask(rule, [new[key] for key in some], model, deadline)
                found |= zip(some, answers, strict=True)
            for key in keys:
                known[key] = found[key]
                known.move_to_end(key)
            while len(known) > _MOST_KNOWN:
                known.popitem(last=False)
            return [found[key] for key in keys]
        finally:
            lease.release()

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
        pieces = [(i, *span) for i, text in enumerate(texts) for span in _pieces(text, model, rule)]
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


def _kind(manifest: Manifest) -> type[TaskRequest[Any]]:
    if _tags(manifest):
        return TokenClassifyRequest
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


def _pieces(text: str, model: MaskedModel, rule: Rule) -> list[tuple[int, int]]:
    """The parts of a text, each as long as an NLI model takes beside a label, that overlap by a
    quarter.
    """
    longest = max(len(model.tokenizer.encode(label).ids) for label in rule.thresholds) + _MARGIN
    room = model.manifest.max_length - model.tokenizer.num_special_tokens(pair=True) - longest
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
