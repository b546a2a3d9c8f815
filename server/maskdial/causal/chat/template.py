"""ChatTemplate: a conversation as a prompt in the model's format."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

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
        if not self.exists:
            raise ValidationError(
                f"model {self._name!r} has no chat template; write the whole prompt yourself and "
                "send it as a text"
            )
        template = _TOOL_USE if tools else _DEFAULT
        messages = self._roles[template].applied(messages)
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
        return self._queue(template, {"documents": None, **(variables or {}), **own}, continued)

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
        return self._queue(_DECISION, {**self._tokens, **variables, **own}, None)

    def _queue(
        self, template: str, variables: Mapping[str, Any], continued: str | None
    ) -> Future[str]:
        with self._lock:
            if self._num_waiting >= _MAX_WAITING and not current_usage().unlimited:
                raise OverloadedError(
                    f"{self._num_waiting} conversations wait for the chat template of model "
                    f"{self._name!r} already; try again in a moment"
                )
            self._num_waiting += 1
        question = {"template": template, "variables": variables}
        rendering = self._rendering.submit(self._render, question, continued)
        rendering.add_done_callback(self._count_down)
        return rendering

    def close(self) -> None:
        """Ends the thread and the child process; nothing can be rendered afterwards."""
        self._rendering.shutdown(cancel_futures=True)
        if self._child is not None:
            self._child.close()

    def _count_down(self, _: Future[str]) -> None:
        with self._lock:
            self._num_waiting -= 1

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
