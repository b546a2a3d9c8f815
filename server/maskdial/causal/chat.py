"""ChatTemplate: a conversation as the text that its model was trained on.

A template comes with the checkpoint and is run for every request, so it runs in Jinja's sandbox.
It finds there what transformers gives it (``apply_chat_template``, transformers 5): blocks without
the white space around them, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that
leaves HTML alone, and ``{% generation %}``, which marks text for training and prints it.

A rendering is bounded in steps and in what it writes, not in the memory that a template may fill
on its way there (a text joined to itself again and again): as for the rest of a bundle, whoever
serves it trusts it that far.
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

# The sandbox guards the process. These bound what a template may cost: the first is far above any
# conversation that fits a body, the second about a second of computing.
MAX_CHARACTERS = 10_000_000
MAX_STEPS = 1_000_000
_STEPS_PER_CALL = 10
_MAX_INTEGER_BITS = 4096
_MAX_MESSAGE = 300


class ChatTemplate:
    """The chat template of a model, if it has one. May be used from several threads at once."""

    def __init__(
        self, source: str | None, *, name: str, bos_token: str = "", eos_token: str = ""
    ) -> None:
        """``name`` is the model's, for errors; an empty token is one that the model does not have.

        Raises:
            BundleError: the template is not valid Jinja.
        """
        self.source = source
        self._name = name
        self._template = None if source is None else _compile(source, name)
        # An absent token is undefined, as in transformers: templates ask for that.
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {key: token for key, token in tokens.items() if token}

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, bos_token: str = "", eos_token: str = ""
    ) -> "ChatTemplate":
        """Reads ``chat_template.jinja``; the bundle may lack it.

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
        """The prompt for the next answer in a conversation.

        It holds the special tokens that the template writes, so it is tokenized without adding
        others. Takes about a second at worst.

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
                f"messages: model {self._name!r} has no chat template; write the whole prompt "
                "yourself and send it as inputs"
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
        except Exception as error:  # whatever Python raises for what a template may compute
            raise ValidationError(
                f"messages: the chat template of model {self._name!r} fails on them: "
                f"{_reason(error)}"
            ) from error


class _TooMuchError(Exception):
    """A template printed or computed more than one request is worth."""


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
    """One line about a failure. The template's own errors say what they mean, Python's do not."""
    text = " ".join(str(error).split())
    if not isinstance(error, jinja2.TemplateError | _TooMuchError) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."


# Where a rendering keeps its counter: no template can write a variable of this name.
_STEPS = "steps of this rendering"


class _Steps:
    """Counts the loop iterations and calls of one rendering: nothing else in Jinja can go on."""

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
    except Exception as error:  # beside Jinja's own, Python's, for code nested too deeply
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise BundleError(
            f"model {name!r}: {CHAT_TEMPLATE} is not a valid template{line}: {_reason(error)}"
        ) from error
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Environment(ImmutableSandboxedEnvironment):
    """What a chat template may see, bounded."""

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
        del self.globals["lipsum"]  # writes any number of words in one call

    def call(
        self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Counts a template's call."""
        context[_STEPS].take(_STEPS_PER_CALL)
        return super().call(context, called, *args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Refuses products and powers that alone would take all memory or time."""
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
    """What a loop runs over, each iteration a step."""
    steps: _Steps = context[_STEPS]
    for item in items:
        steps.take()
        yield item


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` prints what it holds, in a scope of its own."""

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
    """``dict`` without the class itself, whose methods would change what the sandbox freezes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` without names that Python gives a meaning to, as in transformers."""

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
