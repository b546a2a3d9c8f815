"""Guard: the policies of a server, and one request under those that bind it."""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from maskdial.ask.catalogue import (
    INFILL,
    SUMMARIZE,
    TOKENIZE,
    TRANSLATE,
    UNMASK,
    WRITE,
    task_of,
)
from maskdial.bundle.manifest import Manifest
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.chat.documents import document_of
from maskdial.causal.chat.message import ChatMessage
from maskdial.causal.chat.request import ChatRequest
from maskdial.causal.events import Verdict
from maskdial.causal.model import WritingModel
from maskdial.causal.request import GenerationRequest, Infilling
from maskdial.config import Config
from maskdial.engine.timing import Deadline
from maskdial.errors import (
    ConfigError,
    ForbiddenError,
    MaskdialError,
    OverloadedError,
    RefusedError,
    UnavailableError,
    ValidationError,
)
from maskdial.masked.tasks.fill_mask import FillMaskRequest
from maskdial.metrics import Metrics
from maskdial.policy.file import check_routes, read_policies
from maskdial.policy.judge import Found, Judge, together
from maskdial.policy.placeholders import Placeholders
from maskdial.policy.redaction import Span, Strings, changed, changes
from maskdial.policy.rules import INPUT_PARTS, UNCHECKED, Part, Policy, Rule, strongest
from maskdial.registry.registry import Models
from maskdial.registry.served import Task

_SEEN = (WRITE, UNMASK, SUMMARIZE, TRANSLATE, TOKENIZE, INFILL)
"""Tasks whose texts the rules read, and one that runs no model."""
_WILD = re.compile(r"[*?\[]")
_BY_ROLE: Mapping[str, Part] = {part: part for part in INPUT_PARTS}
_FILLING = (task_of(FillMaskRequest), INFILL)
"""Tasks by which a masked model writes."""

_log = logging.getLogger("maskdial.policy")


class Rerouted(Exception):  # noqa: N818 (nothing is wrong)
    """A rule has another model answer."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class Policies:
    """The policies of a server.

    Args:
        path: their file.
        models: all that are served.
        config: limits of requests.
        metrics: count verdicts.
        key_names: the names of the keys that there are.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        models: Models,
        config: Config,
        metrics: Metrics,
        key_names: Callable[[], Collection[str]],
    ) -> None:
        self._path = path
        self._metrics = metrics
        self._models = models
        self._key_names = key_names
        self.judge = Judge(models, config)
        self._policies = _read(path)

    @property
    def policies(self) -> Sequence[Policy]:
        """All of them, in the order of the file."""
        return self._policies

    def check(self) -> None:
        """Whether there are the models and keys that policies bind, and the models of all rules can
        do what the rules say.

        Raises:
            ConfigError: one is not, or cannot; with the line.
        """
        self._check(self._policies)

    def reload(self) -> None:
        """Reads the file again.

        Raises:
            ConfigError: it cannot be used; the policies remain as they were.
        """
        policies = _read(self._path)
        self._check(policies)
        self._policies = policies

    def _check(self, policies: Iterable[Policy]) -> None:
        served = {entry.name for entry in self._models.entries}
        keys = set(self._key_names())
        for policy in policies:
            where = f"{self._path}, line {policy.line}: policy {policy.name!r} binds"
            for name in policy.models:
                if name not in served and not _WILD.search(name):  # it would bind nothing
                    raise ConfigError(
                        f"{where} model {name!r}, which is not served: {', '.join(sorted(served))}"
                    )
            for name in policy.keys:
                if name not in keys and not _WILD.search(name):
                    known = ", ".join(sorted(keys)) or "none, as no keys are needed"
                    raise ConfigError(
                        f"{where} requests with key {name!r}, and there is no key of that name: "
                        f"{known}"
                    )
            for rule in policy.rules:
                try:
                    self.judge.check(rule)
                except ConfigError as error:
                    raise ConfigError(
                        f"{self._path}, line {rule.line}: rule {rule.name!r}: {error.message}"
                    ) from error

    def check_task(self, manifest: Manifest, model: str, key: str | None, task: Task) -> None:
        """Whether a request with a key may ask a model for a task. Under a policy, a model that
        writes does only what the policy sees, and a masked one writes only so.

        Args:
            manifest: of the graph that does the task.
            model: its name.
            key: the name of the key; None for any.
            task: is asked for.

        Raises:
            ForbiddenError: it may not.
        """
        if task in _SEEN and not (task == INFILL and manifest.task != "generate"):
            return
        names = self._names(model)
        entries = (each for each in self._models.entries if each.name in names)
        writes = any(WRITE.serves(each) for entry in entries for each in entry.manifests)
        if not writes and task not in _FILLING:
            return
        for policy in self._policies:
            if policy.binds(names, key):
                raise ForbiddenError(
                    f"policy {policy.name!r} binds model {model!r} and reads only what it writes, "
                    f"so that {task.name} is refused"
                )

    def _names(self, model: str) -> set[str]:
        """The names by which a policy binds a model: its own, without a mask, and its base's."""
        names = {model, model.partition(":")[0]}
        for entry in self._models.entries:
            if entry.name in names and entry.base is not None:
                return names | {entry.base.name}
        return names

    def over(
        self, model: str, key: str, asked: str, deadline: Deadline, request_id: str
    ) -> "GuardedRequest | None":
        """One request under its policies; None if there are none.

        Args:
            model: is to write.
            key: the name of the request's key.
            asked: names of further policies that the request asks for, with commas.
            deadline: of the request.
            request_id: for the log.

        Raises:
            ValidationError: no policy has the name that is asked for.
        """
        known = {each.name: each for each in self._policies}
        names = self._names(model)
        bound = {each.name: each for each in self._policies if each.binds(names, key)}
        for name in filter(None, map(str.strip, asked.split(","))):
            if name not in known:
                raise ValidationError(
                    f"no policy {name!r} here; there are: {', '.join(known)}", field="x-policy"
                )
            bound[name] = known[name]
        if not bound:
            return None
        watch = Watch(self.judge, self._metrics, deadline, request_id)
        return GuardedRequest(tuple(bound.values()), model, watch)


def _read(path: Path) -> tuple[Policy, ...]:
    policies = read_policies(path)
    check_routes(path, policies)
    return policies


@dataclass(frozen=True, slots=True)
class Watch:
    """What asks for verdicts on behalf of one request, counts them, and writes them to the log.

    Attributes:
        judge: asks the models.
        metrics: count.
        deadline: of the request.
        request_id: for the log.
    """

    judge: Judge
    metrics: Metrics
    deadline: Deadline
    request_id: str

    async def verdicts(self, policy: Policy, rule: Rule, texts: Sequence[str]) -> list[list[Found]]:
        """What a rule finds in some texts.

        Raises:
            UnavailableError, OverloadedError: the rule's model could not be asked, and the rule
                does not let pass what it could not judge.
        """
        if not texts:
            return []
        began = time.perf_counter()
        try:
            found = await self.judge.judge(rule, texts, self.deadline)
        except MaskdialError as error:
            self.metrics.count_verdict(policy.name, rule.name, UNCHECKED)
            level = logging.WARNING if rule.lets_pass else logging.ERROR
            _log.log(
                level,
                "request %s: policy %s: rule %s could not be judged, %s: %s",
                self.request_id,
                policy.name,
                rule.name,
                "and the text passes" if rule.lets_pass else "so the request is refused",
                error.message,
            )
            if rule.lets_pass:
                return [[Found(UNCHECKED, 0.0, 0, len(text))] for text in texts]
            kind = OverloadedError if isinstance(error, OverloadedError) else UnavailableError
            raise kind(
                f"policy {policy.name!r}: rule {rule.name!r} could not be judged: {error.message}"
            ) from error
        self.metrics.observe_verdict(policy.name, rule.name, time.perf_counter() - began)
        return found

    def note(self, verdict: Verdict) -> None:
        """Counts a verdict, and writes it to the log, without the text."""
        self.metrics.count_verdict(verdict.policy, verdict.rule, verdict.action)
        _log.info(
            "request %s: policy %s: rule %s: %s (%.4f) in %s %d, characters %d to %d: %s",
            self.request_id,
            verdict.policy,
            verdict.rule,
            verdict.label,
            verdict.score,
            verdict.part,
            verdict.index,
            verdict.start,
            verdict.end,
            verdict.action,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """A text of a request: what it is, and where."""

    part: Part
    index: int
    text: str


class GuardedRequest:
    """One request under its policies.

    Args:
        policies: that bind it.
        model: is to answer.
        watch: asks for verdicts.

    Attributes:
        policies: as given.
        watch: as given.
        verdicts: on the request, once it has been read.
        placeholders: of what was redacted in it.
    """

    def __init__(self, policies: tuple[Policy, ...], model: str, watch: Watch) -> None:
        self.policies = policies
        self.watch = watch
        self.verdicts: list[Verdict] = []
        self.placeholders = Placeholders()
        self._model = model

    @property
    def names(self) -> str:
        """Those of its policies, with commas."""
        return ", ".join(each.name for each in self.policies)

    def rules(self, side: str) -> Iterator[tuple[Policy, Rule]]:
        """The rules for one side."""
        for policy in self.policies:
            for rule in policy.rules:
                if rule.side == side:
                    yield policy, rule

    async def read(
        self, asked: GenerationRequest | ChatRequest, model: WritingModel
    ) -> GenerationRequest | ChatRequest:
        """A conversation, or a request to continue prompts, as the rules leave it.

        Raises:
            RefusedError: a rule refuses it.
            Rerouted: a rule has another model answer.
            UnavailableError, OverloadedError: a rule could not be judged.
        """
        if isinstance(asked, ChatRequest):
            return await self._read_chat(asked)
        return await self._read_prompts(asked, model)

    async def _read_chat(self, chat: ChatRequest) -> ChatRequest:
        strings = [[Strings(call.arguments) for call in each.tool_calls] for each in chat.messages]
        places = []
        for i, (message, calls) in enumerate(zip(chat.messages, strings, strict=True)):
            texts = [message.content, message.reasoning, *(t for call in calls for t in call.texts)]
            places += [_Place(message.role, i, text) for text in texts]
        for i, document in enumerate(chat.documents):
            places.append(_Place("document", i, document["text"]))
        new = iter(await self._judged(places))

        def message_of(message: ChatMessage, calls: Sequence[Strings]) -> ChatMessage:
            content, reasoning = next(new), next(new)
            arguments = [call.replaced([next(new) for _ in call.texts]) for call in calls]
            return replace(
                message,
                content=content,
                reasoning=reasoning,
                tool_calls=[
                    replace(call, arguments=text)
                    for call, text in zip(message.tool_calls, arguments, strict=True)
                ],
            )

        messages = [message_of(*each) for each in zip(chat.messages, strings, strict=True)]
        documents = [document_of({**each, "text": next(new)}) for each in chat.documents]
        return replace(chat, messages=messages, documents=documents)

    async def _read_prompts(
        self, request: GenerationRequest, model: WritingModel
    ) -> GenerationRequest:
        """Prompts are the user's; a conversation may stand in their place."""

        def text_of(prompt: TextOrIds) -> str:
            if isinstance(prompt, str):
                return prompt
            return model.tokenizer.decode(list(prompt), skip_special_tokens=False)

        texts = list(map(text_of, request.prompts))
        places = [_Place("user", i, text) for i, text in enumerate(texts)]
        conversation = request.conversation
        if conversation is not None:
            for i, message in enumerate(conversation.messages):
                part = _BY_ROLE.get(message["role"], "user")
                places.append(_Place(part, i, message["content"]))
        infill = request.infill
        if infill is not None:
            others = [infill.suffix, infill.beginning, *(each.text for each in infill.snippets)]
            places += [_Place("user", 0, text) for text in others]
        new = iter(await self._judged(places))

        def prompt_of(prompt: TextOrIds, text: str) -> TextOrIds:
            changed_text = next(new)
            if changed_text == text:
                return prompt
            if isinstance(prompt, str):
                return changed_text
            return model.tokenizer.encode(changed_text, add_special_tokens=False).ids

        prompts = [prompt_of(*each) for each in zip(request.prompts, texts, strict=True)]
        if conversation is not None:
            messages = [{**each, "content": next(new)} for each in conversation.messages]
            conversation = replace(conversation, messages=messages)
        if infill is not None:
            infill = Infilling(
                next(new),
                next(new),
                [replace(each, text=next(new)) for each in infill.snippets],
                infill.cut,
            )
        return replace(request, prompts=prompts, conversation=conversation, infill=infill)

    async def _judged(self, places: Sequence[_Place]) -> list[str]:
        """The texts as the rules leave them."""
        self.placeholders = Placeholders(place.text for place in places)
        judged = await together(
            [partial(self._judge, policy, rule, places) for policy, rule in self.rules("input")]
        )
        spans: dict[int, list[Span]] = {}
        verdicts: list[tuple[Verdict, Rule]] = []
        for found in judged:
            for place, span, verdict, rule in found:
                if verdict.action == "route" and rule.to == self._model:
                    continue
                verdicts.append((verdict, rule))
                self.watch.note(verdict)
                if verdict.action == "redact":
                    spans.setdefault(place, []).append(span)
        self.verdicts = [verdict for verdict, _ in verdicts]
        self._decide(verdicts)
        return [
            changed(place.text, changes(place.text, spans.get(i, ()), self.placeholders))
            for i, place in enumerate(places)
        ]

    async def _judge(
        self, policy: Policy, rule: Rule, places: Sequence[_Place]
    ) -> list[tuple[int, Span, Verdict, Rule]]:
        read = [
            (i, each)
            for i, each in enumerate(places)
            if each.part in rule.parts and each.text.strip()
        ]
        texts = list(dict.fromkeys(place.text for _, place in read))
        found = dict(zip(texts, await self.watch.verdicts(policy, rule, texts), strict=True))
        return [
            (
                i,
                Span(each.start, each.end, each.label, each.score, rule.restore),
                verdict_of(policy, rule, each, place.part, place.index),
                rule,
            )
            for i, place in read
            for each in found[place.text]
        ]

    def _decide(self, verdicts: Sequence[tuple[Verdict, Rule]]) -> None:
        """Raises: what the strictest verdict says."""
        if not verdicts:
            return
        first = strongest(verdict for verdict, _ in verdicts)
        if first.action == "refuse":
            raise RefusedError(
                f"policy {first.policy!r} refuses the request: rule {first.rule!r} found "
                f"{first.label!r} in what the {first.part} wrote"
            )
        if first.action == "route":
            raise Rerouted(next(rule.to for each, rule in verdicts if each is first) or "")


def verdict_of(
    policy: Policy, rule: Rule, found: Found, part: Part, index: int, offset: int = 0
) -> Verdict:
    """What is told of something that was found; its place counts from ``offset``."""
    return Verdict(
        policy.name,
        rule.name,
        "flag" if found.label == UNCHECKED else rule.action,
        found.label,
        found.score,
        part,
        index,
        found.start + offset,
        found.end + offset,
    )
