"""ChatTemplate: a conversation as a prompt in the model's format."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from maskdial.bundle.bundle import Bundle
from maskdial.bundle.manifest import CHAT_TEMPLATE, DECISION_TEMPLATE, TOOL_TEMPLATE
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.roles import RoleRules
from maskdial.engine.child import ChildDiedError, ChildLimits, ChildProcess
from maskdial.engine.fairness import current_usage
from maskdial.errors import (
    BundleError,
    OverloadedError,
    UnavailableError,
    ValidationError,
    io_reason,
)

T = TypeVar("T")

LIMITS = ChildLimits(cpu_seconds=2.0, wall_seconds=10.0, memory_bytes=512 * 2**20)
_MAX_WAITING = 256


_DEFAULT = "default"
_TOOL_USE = "tool_use"
_DECISION = "decision"
_TEXT = "text"  # what a part of a content has, so that every template that reads parts says it
# A word that a template writes out if it reads the content that has it.
_PROBE = "Zcontentz"
# As in transformers: with a space, to see whether the template trims the message.
_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "


# What no message begins with: where two prompts part that differ in one, its content begins.
_OTHER = "\ue000"
_MAX_BREAKPOINTS = 4
_MOST_SECONDS = 0.25  # of a rendering that is repeated
BREAKPOINT = "ends a prefix"
"""A key of messages, which no template is given: a client expects another prompt to begin with
those up to this one."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and where the next one of its conversation may part from it: in characters."""

    text: str
    borders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template writes, as one text, and the variables that it reads."""

    writes: str = ""
    reads: frozenset[str] = frozenset()


class ChatTemplate:
    """The chat template of a model, if it has one. Thread-safe.

    It is rendered in a child process (see `maskdial.causal.chat.renderer`), one conversation at a
    time, each within `LIMITS`.

    Templates of models that also read images may take a message's content as a list of parts only,
    and would drop a text: each is tried, and gets one part of text where it needs one. Likewise,
    which orders of roles it takes is learned by trying (`RoleRules`).

    Attributes:
        source: the template; None if the model has none.
        tool_source: the one for conversations with tools, which may be another.
        decision_source: the one for questions of decision models; None if the model has none.
        facts: of the template for decisions, or of the one for conversations if there is none.
    """

    def __init__(
        self,
        source: str | None,
        *,
        name: str,
        tool_source: str | None = None,
        decision_source: str | None = None,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``name`` is the model's, for errors; ``tokens`` are the special tokens that it has, by
        the names that templates know them by, such as ``bos_token``.

        Raises:
            BundleError: a template is not valid Jinja.
        """
        self.source = source
        self.tool_source = tool_source or source
        self.decision_source = decision_source
        self._name = name
        # A missing token is undefined, as in transformers: templates test for that.
        self._tokens = dict(tokens or {})
        self._num_waiting = 0
        self._lock = threading.Lock()
        # A thread of its own: where templates are slow, others find the shared threads free.
        self._rendering = ThreadPoolExecutor(1, "maskdial-chat-template")
        # Once the thread runs, no other one asks the child process: two would read each other's
        # answers. So what is to be known of the templates is asked for here.
        self._child: ChildProcess | None = None
        self.facts = self._with_tools = TemplateFacts()
        sources = {} if source is None else {_DEFAULT: source, _TOOL_USE: tool_source or source}
        chats = sources.copy()
        if decision_source is not None:
            sources[_DECISION] = decision_source
        if sources:
            self._child = ChildProcess(
                "maskdial.causal.chat.renderer", {"sources": sources}, LIMITS
            )
            if source is not None:
                self.facts = self._check(_DEFAULT, CHAT_TEMPLATE)
                self._with_tools = self.facts
            if tool_source is not None:
                self._with_tools = self._check(_TOOL_USE, TOOL_TEMPLATE)
            if decision_source is not None:
                self.facts = self._check(_DECISION, DECISION_TEMPLATE)
            self._reads_parts = {
                name for name, text in chats.items() if _TEXT in text and self._needs_parts(name)
            }
            self._roles = {name: self._learn_roles(name) for name in chats}

    @classmethod
    def from_bundle(cls, bundle: Bundle, tokens: Mapping[str, str]) -> "ChatTemplate":
        """Reads ``chat_template.jinja``, which a bundle need not have, and the one for tools.

        Raises:
            BundleError: a template is not readable text or not valid Jinja.
        """
        return cls(
            _read(bundle, CHAT_TEMPLATE),
            name=bundle.name,
            tool_source=_read(bundle, TOOL_TEMPLATE),
            decision_source=_read(bundle, DECISION_TEMPLATE),
            tokens=tokens,
        )

    @property
    def exists(self) -> bool:
        """Whether the model has a template for conversations."""
        return self.source is not None

    def takes_documents(self, *, with_tools: bool) -> bool:
        """Whether a conversation has a place for documents, the variable ``documents``."""
        return "documents" in (self._with_tools if with_tools else self.facts).reads

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for the assistant's next message in a conversation, or for the rest of the
        final one.

        It contains the template's special tokens, so tokenize it without adding others.

        Args:
            messages: mappings of ``role``, ``content`` and other fields of the template, such as
                ``tool_calls``; values of JSON.
            tools: the tools the model may call, in OpenAI's form; None or empty for none. With any,
                ``tool_source`` is the template.
            variables: further variables of the template, such as ``enable_thinking`` or
                ``reasoning_effort``; values of JSON.
            add_generation_prompt: whether to open the assistant's next turn.
            continue_final_message: whether the prompt ends with the final message's content, as
                transformers does it; no turn is opened then.

        Raises:
            ValidationError: the model has no template, its template fails on these messages or
                exceeds the limits, or changes a message that is to be continued, or ``variables``
                redefines one of the template's own.
            OverloadedError: too many conversations wait to be rendered.
            UnavailableError: no child process can be started, or it was slow for another reason.
        """
        return self.submit(
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        ).result()

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Future[str]:
        """As `render`, to be awaited with ``asyncio.wrap_future``."""
        question, continued, _ = self._question(
            messages, tools, variables, add_generation_prompt, continue_final_message
        )
        return self._queue(partial(self._render, question, continued))

    def submit_with_borders(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Future[Rendered]:
        """As `submit`, with the prompt's borders, which take some renderings more: where the first
        message after the instructions begins, where the user's last one does, where that ends which
        a `BREAKPOINT` is at, where the reply begins, and where the prompt parts from that of the
        next turn, which may have nothing of what the assistant thought in this one. A template that
        is slow has none.
        """
        question, continued, parting = self._question(
            messages, tools, variables, add_generation_prompt, continue_final_message
        )

        def work() -> Rendered:
            started = time.monotonic()
            text = self._render(question, continued)
            if time.monotonic() - started > _MOST_SECONDS:  # others wait for the next ones
                return Rendered(text)
            return Rendered(text, self._borders(question, text, parting))

        return self._queue(work)

    def _question(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> tuple[Mapping[str, Any], str | None, Sequence[int]]:
        """What to ask the child process, the message that is continued, and the messages before
        which another prompt may part from this one.
        """
        if not self.exists:
            raise ValidationError(
                f"model {self._name!r} has no chat template; write the whole prompt yourself and "
                "send it as a text"
            )
        template = _TOOL_USE if tools else _DEFAULT
        messages = self._roles[template].applied(messages)
        parting = _parting(messages)
        messages = [{k: v for k, v in each.items() if k != BREAKPOINT} for each in messages]
        sent = _tagged(messages) if continue_final_message else messages
        own = {
            "messages": _in_parts(sent) if template in self._reads_parts else sent,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **self._tokens,
        }
        if reserved := sorted(own.keys() & (variables or {}).keys()):
            raise ValidationError(
                f"the server sets the chat template's variable {reserved[0]!r} itself",
                field="chat_template_kwargs",
            )
        continued = messages[-1]["content"] if continue_final_message else None
        written = {"documents": None, **(variables or {}), **own}
        return {"template": template, "variables": written}, continued, parting

    def submit_decision(self, variables: Mapping[str, Any]) -> Future[str]:
        """A decision model's prompt, from the variables of its own template.

        Raises:
            As `render`.
        """
        own = {
            "messages": [{"role": "user", "content": ""}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        asked = {"template": _DECISION, "variables": {**self._tokens, **variables, **own}}
        return self._queue(partial(self._render, asked, None))

    def _queue(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._num_waiting >= _MAX_WAITING and not current_usage().unlimited:
                raise OverloadedError(
                    f"{self._num_waiting} conversations wait for the chat template of model "
                    f"{self._name!r} already; try again in a moment"
                )
            self._num_waiting += 1
        rendering = self._rendering.submit(work)
        rendering.add_done_callback(self._count_down)
        return rendering

    def close(self) -> None:
        """Ends the thread and the child process; nothing can be rendered afterwards."""
        self._rendering.shutdown(cancel_futures=True)
        if self._child is not None:
            self._child.close()

    def _count_down(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _borders(
        self, question: Mapping[str, Any], text: str, parting: Sequence[int]
    ) -> tuple[int, ...]:
        """Where a prompt parts from the next turn's, from those that differ in one message, and
        from itself without the beginning of a reply. A template that fails on one of these has no
        border there.
        """
        variables = question["variables"]
        messages = variables["messages"]
        turn = [_like(messages[-1], role) for role in ("assistant", "user")]
        closed = {"add_generation_prompt": False}
        others: list[Mapping[str, Any]] = [closed, {"messages": [*messages, *turn], **closed}]
        for index in parting:
            other = _like(messages[index], messages[index]["role"])
            others.append({"messages": [*messages[:index], other, *messages[index + 1 :]]})
        found = set()
        for changes in others:
            answer = self._ask({**question, "variables": {**variables, **changes}})
            if "text" in answer:
                found.add(_num_common(text, answer["text"]))
        return tuple(sorted(found))

    def _render(self, question: Mapping[str, Any], continued: str | None) -> str:
        answer = self._ask(question)
        if "error" in answer:
            kind = "decision" if question["template"] == _DECISION else "chat"
            raise ValidationError(
                f"the {kind} template of model {self._name!r} fails on them: {answer['error']}"
            )
        text = answer["text"]
        if continued is None:
            return text
        prompt, found, _ = text.rpartition(_END_OF_MESSAGE.strip())
        if not found or continued.strip() not in prompt:
            raise ValidationError(
                f"the chat template of model {self._name!r} does not show the end of the final "
                "message, so it cannot be continued",
            )
        kept = text[len(prompt) :].startswith(_END_OF_MESSAGE)
        return prompt if kept else prompt.rstrip()

    def _check(self, template: str, file_name: str) -> TemplateFacts:
        """The facts of a template, which has to be valid."""
        answer = self._ask({"template": template, "variables": None})
        if "error" in answer:
            self.close()
            raise BundleError(
                f"model {self._name!r}: {file_name} is not a valid template: {answer['error']}"
            )
        return TemplateFacts(answer["writes"], frozenset(answer["reads"].split()))

    def _learn_roles(self, template: str) -> RoleRules:
        """Which orders of roles a template takes."""
        in_parts = template in self._reads_parts

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return self._probe(template, _in_parts(messages) if in_parts else messages)

        return RoleRules.learned(render)

    def _probe(self, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """What a template makes of a conversation; nothing where it fails."""
        own = {"tools": None, "documents": None, "add_generation_prompt": True, **self._tokens}
        variables = {"messages": messages, **own}
        return self._ask({"template": template, "variables": variables}).get("text", "")

    def _needs_parts(self, template: str) -> bool:
        """Whether a template writes out a message's text only if it is a part of the content."""
        messages = [{"role": "user", "content": _PROBE}]
        if _PROBE in self._probe(template, messages):
            return False
        return _PROBE in self._probe(template, _in_parts(messages))

    def _ask(self, question: Mapping[str, Any]) -> Mapping[str, str]:
        assert self._child is not None
        try:
            answer: Mapping[str, str] = self._child.ask(question)
        except ChildDiedError as error:
            if not error.too_complex:
                raise UnavailableError(
                    f"rendering the chat template of model {self._name!r} was interrupted; "
                    "try again"
                ) from error
            return {"error": f"it takes more than {LIMITS.cpu_seconds:g} s"}
        return answer


def read_chat_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a bundle, which may lack one, with its tokenizer's special tokens."""
    special = bundle.manifest.special_tokens
    ids = {
        "bos_token": special.bos,
        "eos_token": next(iter(special.eos), None),
        "pad_token": special.pad,
        "unk_token": tokenizer.unknown_id if tokenizer.unknown_id >= 0 else None,
        "mask_token": special.mask,
    }
    tokens = {
        name: tokenizer.id_to_token(token_id)
        for name, token_id in ids.items()
        if token_id is not None
    }
    return ChatTemplate.from_bundle(bundle, {name: each for name, each in tokens.items() if each})


def _read(bundle: Bundle, file_name: str) -> str | None:
    """A template of a bundle; None if it has none of this name."""
    if file_name not in bundle.manifest.files:
        return None
    try:
        return (bundle.path / file_name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = io_reason(error)
        raise BundleError(
            f"model {bundle.name!r}: {file_name} is not readable: {reason}"
        ) from error


def _in_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, each with its text as the only part of its content."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def _tagged(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with a tag at the end of the final one's content."""
    *others, final = messages
    return [*others, {**final, "content": final["content"] + _END_OF_MESSAGE}]


def _parting(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The messages before which another prompt may part from this one's.

    Another conversation has other messages after the instructions, and a client may send the user's
    last message once more, with other remarks of its own in it.
    """
    roles = [message.get("role") for message in messages]
    found = [next((i for i, role in enumerate(roles) if role != "system"), 0)]
    if "user" in roles:
        found.append(len(roles) - 1 - roles[::-1].index("user"))
    marked = [i + 1 for i, message in enumerate(messages) if message.get(BREAKPOINT)]
    return sorted({each for each in found + marked[-_MAX_BREAKPOINTS:] if each < len(roles)})


def _like(message: Mapping[str, Any], role: object) -> Mapping[str, Any]:
    """A message of a role that begins otherwise than all, in the form of one, with text only."""
    content: Any = _OTHER
    if not isinstance(message["content"], str):
        content = [{"type": "text", "text": _OTHER}]
    kept = {name: message[name] for name in ("name", "tool_call_id") if name in message}
    return {**(kept if role == "tool" else {}), "role": role, "content": content}


def _num_common(one: str, other: str) -> int:
    """With how many of the same characters two texts begin."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
