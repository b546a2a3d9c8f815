"""ChatTemplate: a conversation as a prompt in the model's format."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from maskdial.child import ChildDiedError, ChildProcess, Limits
from maskdial.errors import BundleError, OverloadedError, UnavailableError, ValidationError
from maskdial.models.bundle import CHAT_TEMPLATE, Bundle

LIMITS = Limits(cpu_seconds=2.0, wall_seconds=10.0, memory_bytes=512 * 2**20)
_MAX_WAITING = 256


class ChatTemplate:
    """The chat template of a model, if it has one. Thread-safe.

    It is rendered in a child process (see `maskdial.causal.chat_renderer`), one conversation at a
    time, each within `LIMITS`.
    """

    def __init__(
        self, source: str | None, *, name: str, bos_token: str = "", eos_token: str = ""
    ) -> None:
        """``name`` is the model's, for errors; an empty token means that the model has none.

        Raises:
            BundleError: the template is not valid Jinja.
        """
        self.source = source
        self._name = name
        # A missing token is undefined, as in transformers: templates test for that.
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {key: token for key, token in tokens.items() if token}
        self._num_waiting = 0
        self._lock = threading.Lock()
        # A thread of its own: where templates are slow, others find the shared threads free.
        self._rendering = ThreadPoolExecutor(1, "maskdial-chat-template")
        self._child: ChildProcess | None = None
        if source is not None:
            self._child = ChildProcess("maskdial.causal.chat_renderer", {"source": source}, LIMITS)
            self._check()

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, bos_token: str = "", eos_token: str = ""
    ) -> "ChatTemplate":
        """Reads ``chat_template.jinja``, which a bundle need not have.

        Raises:
            BundleError: the template is not readable text or not valid Jinja.
        """
        source = None
        if CHAT_TEMPLATE in bundle.manifest.files:
            try:
                source = (bundle.path / CHAT_TEMPLATE).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BundleError(
                    f"model {bundle.name!r}: {CHAT_TEMPLATE} is not readable: {error}"
                ) from error
        return cls(source, name=bundle.name, bos_token=bos_token, eos_token=eos_token)

    @property
    def exists(self) -> bool:
        """Whether the model has a template."""
        return self._child is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for the assistant's next message in a conversation.

        It contains the template's special tokens, so tokenize it without adding others.

        Args:
            messages: mappings of ``role``, ``content`` and whatever else the template reads, such
                as ``tool_calls``; values of JSON.
            tools: the tools the model may call, in OpenAI's form; None or empty for none.
            variables: further variables of the template, such as ``enable_thinking`` or
                ``reasoning_effort``; values of JSON.
            add_generation_prompt: whether to open the assistant's next turn.

        Raises:
            ValidationError: the model has no template, its template fails on these messages or
                exceeds the limits, or ``variables`` redefines one of the template's own.
            OverloadedError: too many conversations wait to be rendered.
            UnavailableError: no child process can be started, or it was slow for another reason.
        """
        return self.submit(
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
        ).result()

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Future[str]:
        """As `render`, to be awaited with ``asyncio.wrap_future``."""
        if self._child is None:
            raise ValidationError(
                f"model {self._name!r} has no chat template; write the whole prompt yourself and "
                "send it as a text"
            )
        own = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        if reserved := sorted(own.keys() & (variables or {}).keys()):
            raise ValidationError(
                f"the server sets the chat template's variable {reserved[0]!r} itself",
                field="chat_template_kwargs",
            )
        with self._lock:
            if self._num_waiting >= _MAX_WAITING:
                raise OverloadedError(
                    f"{self._num_waiting} conversations wait for the chat template of model "
                    f"{self._name!r} already; try again in a moment"
                )
            self._num_waiting += 1
        rendering = self._rendering.submit(self._render, {**(variables or {}), **own})
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

    def _render(self, variables: Mapping[str, Any]) -> str:
        answer = self._ask(variables)
        if "error" in answer:
            raise ValidationError(
                f"the chat template of model {self._name!r} fails on them: {answer['error']}"
            )
        return answer["text"]

    def _check(self) -> None:
        answer = self._ask(None)
        if "error" in answer:
            self.close()
            raise BundleError(
                f"model {self._name!r}: {CHAT_TEMPLATE} is not a valid template: {answer['error']}"
            )

    def _ask(self, variables: Mapping[str, Any] | None) -> Mapping[str, str]:
        assert self._child is not None
        try:
            answer: Mapping[str, str] = self._child.ask(variables)
        except ChildDiedError as error:
            if not error.too_complex:
                raise UnavailableError(
                    f"rendering the chat template of model {self._name!r} was interrupted; "
                    "try again"
                ) from error
            return {"error": f"it takes more than {LIMITS.cpu_seconds:g} s"}
        return answer
