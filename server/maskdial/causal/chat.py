"""ChatTemplate: a conversation as a prompt in the model's format.

A template comes with the checkpoint and runs for every request, so it runs in Jinja's sandbox. The
environment is that of transformers (``apply_chat_template``, transformers 5): trimmed blocks, loop
controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML, and
``{% generation %}``, which marks text for training and prints it.

Steps and output are limited. Memory is not: a template may still fill it on the way, for example by
joining a text to itself again and again. Serve only bundles that you trust that far.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maskdial.errors import BundleError, ValidationError
from maskdial.models.bundle import CHAT_TEMPLATE, Bundle

# The sandbox protects the process; these limit the cost. The first is far above any conversation
# that fits a request body, the second takes about a second.
MAX_CHARACTERS = 10_000_000
MAX_STEPS = 1_000_000
_STEPS_PER_CALL = 10
_MAX_INTEGER_BITS = 4096
_MAX_MESSAGE = 300


class ChatTemplate:
    """The chat template of a model, if it has one. Thread-safe."""

    def __init__(
        self, source: str | None, *, name: str, bos_token: str = "", eos_token: str = ""
    ) -> None:
        """``name`` is the model's, for errors; an empty token means that the model has none.

        Raises:
            BundleError: the template is not valid Jinja.
        """
        self.source = source
        self._name = name
        self._template = None if source is None else _compile(source, name)
        # A missing token is undefined, as in transformers: templates test for that.
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {key: token for key, token in tokens.items() if token}

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
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for the assistant's next message in a conversation.

        It contains the template's special tokens, so tokenize it without adding others. Takes about
        a second at worst.

        Args:
            messages: mappings of ``role``, ``content`` and whatever else the template reads, such
                as ``tool_calls``.
            tools: the tools the model may call, in OpenAI's form; None or empty for none.
            variables: further variables of the template, such as ``enable_thinking`` or
                ``reasoning_effort``.
            add_generation_prompt: whether to open the assistant's next turn.

        Raises:
            ValidationError: the model has no template, its template fails on these messages, or
                ``variables`` redefines one of the template's own.
        """
        if self._template is None:
            raise ValidationError(
                f"model {self._name!r} has no chat template; write the whole prompt yourself and "
                "send it as a text"
            )
        own = {
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
            _STEPS: _Steps(),
        }
        if reserved := sorted(own.keys() & (variables or {}).keys()):
            raise ValidationError(
                f"the server sets the chat template's variable {reserved[0]!r} itself",
                field="chat_template_kwargs",
            )
        try:
            return "".join(_bounded(self._template.generate({**(variables or {}), **own})))
        except Exception as error:  # a template may raise anything that Python can
            raise ValidationError(
                f"the chat template of model {self._name!r} fails on them: {_reason(error)}"
            ) from error


class _TooMuchError(Exception):
    """A template exceeded a limit."""


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        _check_length(num_characters)
        yield piece


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_CHARACTERS:
        raise _TooMuchError(f"it writes more than {MAX_CHARACTERS:,} characters")


def _reason(error: Exception) -> str:
    """One line about a failure; Python's own exceptions need their type to be understood."""
    text = " ".join(str(error).split())
    if not isinstance(error, jinja2.TemplateError | _TooMuchError) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."


# The context variable of a rendering's counter; no template can spell this name.
_STEPS = "steps of this rendering"


class _Steps:
    """Counts the loop iterations and calls of one rendering: nothing else in Jinja can run long."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def take(self, num_steps: int = 1) -> None:
        self._left -= num_steps
        if self._left < 0:
            raise _TooMuchError(f"it takes more than {MAX_STEPS:,} steps")


def _compile(source: str, name: str) -> jinja2.Template:
    environment = _Environment()
    try:
        tree = environment.parse(source)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _COUNTED, [], [], None, None)
        tree.set_environment(environment)
        code = environment.compile(tree)
    except Exception as error:  # Jinja's own, or Python's for code that nests too deeply
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise BundleError(
            f"model {name!r}: {CHAT_TEMPLATE} is not a valid template{line}: {_reason(error)}"
        ) from error
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of a chat template, with limits."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = _counted
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_Dict(),
            namespace=_Namespace,
        )
        del self.globals["lipsum"]  # writes any number of words in a single call

    def call(
        self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function for the template, and counts that."""
        context[_STEPS].take(_STEPS_PER_CALL)
        return super().call(context, called, *args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Refuses products and powers that would take all memory or time at once."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if operator == "**" else bits + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise _TooMuchError(f"it computes a number of over {_MAX_INTEGER_BITS:,} bits")
        for items, count in ((left, right), (right, left)):
            if isinstance(items, Sequence) and isinstance(count, int):
                _check_length(len(items) * count)
        return super().call_binop(context, operator, left, right)


_COUNTED = "maskdial_counted"


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each of which counts as a step."""
    steps: _Steps = context[_STEPS]
    for item in items:
        steps.take()
        yield item


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` prints its content, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Dict:
    """``dict`` without the class, whose methods could change objects that the sandbox protects."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` without private and dunder names, as in transformers."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: it begins with _")
