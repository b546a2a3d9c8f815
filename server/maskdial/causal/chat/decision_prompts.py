"""DecisionPrompts: questions as the prompts of a decision model, as transformers 5 writes them.

A model with a ``decision_template.jinja`` says itself where its prompts are read: before each mark.
Others are asked by a user's message, and read after it, where the reply would begin.
"""

import asyncio
import json
import string
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tokenizers

from maskdial.bundle.bundle import Bundle
from maskdial.bundle.manifest import Decision, DecisionKind
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.control_tokens import ControlTokens
from maskdial.causal.chat.template import ChatTemplate
from maskdial.engine.offload import offload
from maskdial.engine.questions import (
    Content,
    DecisionPrompt,
    Option,
    Question,
    Readout,
    as_text,
    check_input,
)
from maskdial.errors import ValidationError, about

_MARK, _SPLIT = "<|mark|>", "<|split|>"
_KINDS: Mapping[str, DecisionKind] = {"predicate": "noul", "choice": "choice", "score": "score"}
_YES_OR_NO = ("Yes", "No")
_VARIABLES = {"enable_thinking": False}


class DecisionPrompts:
    """Writes the prompts of a model; see `maskdial.engine.questions.PromptWriter`. Thread-safe.

    Args:
        bundle: the model's. If its manifest does not say how it answers, that is by the letters of
            the options.
        template: writes the prompts.
        tokenizer: the model's.
        max_length: tokens of a prompt.
    """

    def __init__(
        self, bundle: Bundle, template: ChatTemplate, tokenizer: Tokenizer, max_length: int
    ) -> None:
        self._settings = bundle.manifest.decision or Decision()
        self._has_head = bundle.manifest.task == "decide"
        self._template = template
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._path = bundle.tokenizer
        self._name = bundle.name
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the template's process."""
        self._template.close()

    async def fits(self, questions: Sequence[Question]) -> bool:
        """Whether the model has labels for the options, each of them a single token."""
        await self._prepare()
        try:
            for question in questions:
                self._ask(question)
        except ValidationError:
            return False
        return True

    async def write(self, state: Content, questions: Sequence[Question]) -> list[DecisionPrompt]:
        """The prompts: one for all questions if the template takes them so, or one for each.

        Raises:
            ValidationError: a question has more options than the model has labels, the template
                fails, it does not say where to read an answer, or a prompt is far too long.
            OverloadedError: too many prompts wait for the template.
        """
        await self._prepare()
        seconds = tokenizing_seconds([as_text(state)])
        asked = []
        for index, question in enumerate(questions):
            with about("questions", index):
                asked.append(self._ask(question))
        groups = [range(len(asked))] if self._asks_together else [[i] for i in range(len(asked))]
        prompts = []
        for group in groups:
            members = [asked[index] for index in group]
            with about("questions", group[0]):
                rendering = await offload(partial(self._submit, state, members), seconds)
                text = await asyncio.wrap_future(rendering)
                prompts.append(await offload(partial(self._read, text, group, members), seconds))
        return prompts

    async def _prepare(self) -> None:
        """Reads the tokenizer at the first request, which takes a second if it is large."""

        def read() -> None:
            with self._lock:
                _ = self._control_tokens

        if "_control_tokens" not in self.__dict__:
            await asyncio.to_thread(read)

    @property
    def _asks_together(self) -> bool:
        return (
            self._template.decision_source is not None and "questions" in self._template.facts.reads
        )

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """A tokenizer of its own, which knows the marks; requests cannot write them."""
        backend = tokenizers.Tokenizer.from_file(str(self._path))
        backend.no_padding()
        backend.no_truncation()
        if backend.token_to_id(_MARK) is None:
            backend.add_special_tokens(
                [tokenizers.AddedToken(each, normalized=False) for each in (_MARK, _SPLIT)]
            )
        return backend

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(
            self._backend, self._template.facts.writes, self._settings.control_tokens
        )

    def _ask(self, question: Question) -> "_Asked":
        kind = _KINDS[question.kind]
        noul = self._settings.noul_options
        criteria: list[tuple[str, Content]]
        order: Sequence[int]
        if kind == "noul":
            criteria = [(option, question.meanings.get(option)) for option in noul]
            order = (noul.index("true"),)
        elif kind == "choice":
            criteria = [(o.text, o.content or o.description or None) for o in question.options]
            order = range(len(criteria))
        else:
            levels = [_level(option) for option in question.options]
            criteria = [(str(index), level) for index, level in enumerate(levels)]
            order = range(len(criteria))
        default = _YES_OR_NO if kind == "noul" else tuple(string.ascii_uppercase)
        labels = self._settings.labels.get(kind) or default
        if self._settings.num_scores is not None:
            labels = labels[: self._settings.num_scores - self._settings.offsets[kind]]
        if len(labels) < len(criteria):
            raise ValidationError(
                f"has {len(criteria)} options; model {self._name!r} reads at most {len(labels)} of "
                f"a {question.kind}"
            )
        variables = {
            "name": question.name,
            "type": kind,
            "instructions": question.content or question.instructions or None,
            "options": [option for option, _ in criteria],
            "labels": list(labels[: len(criteria)]),
            "descriptions": [description for _, description in criteria],
        }
        columns = self._columns(kind, labels[: len(criteria)])
        return _Asked(kind, variables, columns, tuple(order))

    def _columns(self, kind: DecisionKind, labels: Sequence[str]) -> tuple[int, ...]:
        """Where the scores of the options stand."""
        if self._has_head:
            first = self._settings.offsets[kind]
            return tuple(range(first, first + len(labels)))
        spelled = [self._backend.encode(each, add_special_tokens=False).ids for each in labels]
        unknown = getattr(self._backend.model, "unk_token", None)
        unknown_id = None if unknown is None else self._backend.token_to_id(unknown)
        ids = [each[0] for each in spelled if len(each) == 1 and each[0] != unknown_id]
        if len(set(ids)) < len(labels):
            listed = ", ".join(labels)
            raise ValidationError(
                f"model {self._name!r} cannot answer by labels: {listed} are not one different "
                "token each"
            )
        return tuple(ids)

    def _submit(self, state: Content, asked: Sequence["_Asked"]) -> Future[str]:
        questions = [each.variables for each in asked]
        variables: dict[str, Any] = {"state": state, "question": questions[0]}
        variables["questions"] = questions
        if self._template.decision_source is None:
            content = self._control_tokens.marked(_prompt(state, questions[0]))
            messages = [{"role": "user", "content": content}]
            return self._template.submit(messages, variables=_VARIABLES)
        variables = {
            name: variables[name] for name in variables if name in self._template.facts.reads
        }
        if self._settings.keeps_control_tokens:
            variables = _without_marks(variables)
        else:
            variables = self._control_tokens.marked(variables)
        return self._template.submit_decision(
            {**self._settings.special_tokens, **_VARIABLES, **variables}
        )

    def _read(self, text: str, group: Sequence[int], asked: Sequence["_Asked"]) -> DecisionPrompt:
        bare = self._control_tokens.unmarked(text).replace(_MARK, "").replace(_SPLIT, "")
        check_input(bare, self._max_length, self._tokenizer, self._name)
        if self._settings.keeps_control_tokens:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        else:
            ids = self._control_tokens.encode(text)
        mark, split = map(self._backend.token_to_id, (_MARK, _SPLIT))
        kept: list[int] = []
        marks = []
        for token_id in ids:
            if token_id == mark:
                marks.append(len(kept))
            elif token_id != split:
                kept.append(token_id)
        marks = marks or [len(kept)]
        if not kept or len(marks) < len(asked) or not marks[0]:
            raise ValidationError(
                f"the decision template of model {self._name!r} marks {len(marks)} places for the "
                f"answers to {len(asked)} questions"
            )
        temperature, softcap = self._settings.temperature, self._settings.softcap
        readouts = (
            Readout(
                question,
                end - 1,
                each.columns,
                temperature.get(each.kind, 1.0),
                each.order,
                softcap,
            )
            for question, end, each in zip(group, marks, asked, strict=False)
        )
        return DecisionPrompt(tuple(kept), tuple(readouts))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question as templates read it, and where its options are scored."""

    kind: DecisionKind
    variables: Mapping[str, Any]
    columns: tuple[int, ...]
    order: tuple[int, ...]


def _level(option: Option) -> Content:
    if option.content is not None:
        return option.content
    return f"{option.text}: {option.description}" if option.description else option.text


def _without_marks(value: Any) -> Any:
    """A value of JSON without the marks that only a template may write."""
    text = json.dumps(value, ensure_ascii=False).replace(_MARK, "").replace(_SPLIT, "")
    return json.loads(text)


def _prompt(state: Content, question: Mapping[str, Any]) -> str:
    """What a model without a template of its own is asked, in the words of transformers."""
    kind, labels = question["type"], question["labels"]
    lines = [_written(question["instructions"])]
    for label, option, description in zip(
        labels, question["options"], question["descriptions"], strict=True
    ):
        answer = _written(description)
        if kind == "noul":
            answer = answer or (option if labels != list(_YES_OR_NO) else "")
            lines += [f"{label}: {answer}"] if answer else []
            continue
        if kind == "choice":
            answer = f"{option}: {answer}" if answer else option
        lines.append(f"{label}. {answer}")
    if kind == "noul":
        end = f"Answer {labels[0]} or {labels[1]} only."
    else:
        letters = "letter" if "".join(labels) == string.ascii_uppercase[: len(labels)] else "label"
        what = "option" if kind == "choice" else "level"
        end = (
            f"Answer with the {letters} of the {what} that fits best ({labels[0]} to {labels[-1]}) "
            "only."
        )
    listed = "\n".join(filter(None, lines))
    return f"{_written(state)}\n\n{listed}\n{end}"


def _written(content: Content) -> str:
    """A content as Jinja writes it: JSON as ``tojson`` does."""
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)
