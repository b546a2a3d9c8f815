"""Renders a chat template in a child process, so that none can hold or fill the server.

A template comes with the checkpoint and runs for every request, so it runs in Jinja's sandbox. The
environment is that of transformers (``apply_chat_template``, transformers 5): trimmed blocks, loop
controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML, and
``{% generation %}``, which marks text for training and prints it.

Steps and output are counted here, so that an error can say what went wrong. What no count catches,
such as a list that is sorted or a text that is joined to itself again and again, ends with the
process: see `maskdial.causal.chat.template`.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maskdial.engine.child import serve

# The first is far above any conversation that fits a request body, the second takes about a second.
MAX_CHARACTERS = 10_000_000
MAX_STEPS = 1_000_000
_STEPS_PER_CALL = 10
_MAX_INTEGER_BITS = 4096
_MAX_MESSAGE = 300


def prepare(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, str]]:
    """What renders the templates of a model.

    Args:
        setup: ``sources``, the templates by name.

    Returns:
        Makes of ``variables`` and the name of a ``template`` the ``text``, or the ``error`` in one
        line; where the variables are None, an ``error`` if the template is not valid, otherwise
        what it ``writes`` and ``reads``: its literal texts, separated by null characters, and the
        names of its variables, by spaces. Compiles each with its first question, when the limits
        are in force.
    """
    compile_once = functools.cache(_compile)

    def answer(question: Mapping[str, Any]) -> Mapping[str, str]:
        variables = question["variables"]
        try:
            source = setup["sources"][question["template"]]
            template = compile_once(source)
            if variables is None:
                return _facts(source)
            text = "".join(_bounded(template.generate({**variables, _STEPS: _Steps()})))
            text.encode()  # a template can spell half of a surrogate pair, which is no text
            return {"text": text}
        except jinja2.TemplateSyntaxError as error:
            return {"error": f"line {error.lineno}: {_reason(error)}"}
        except Exception as error:  # a template may raise anything that Python can
            return {"error": _reason(error)}

    return answer


def _facts(source: str) -> Mapping[str, str]:
    """What a template writes and reads, as far as it can be told without rendering it."""
    tree = _Environment().parse(source)
    texts = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
    texts += [n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)]
    names = sorted(jinja2.meta.find_undeclared_variables(tree))
    return {"writes": "\0".join(texts), "reads": " ".join(names)}


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
    if isinstance(error, MemoryError):
        return "it takes too much memory"
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


def _compile(source: str) -> jinja2.Template:
    environment = _Environment()
    tree = environment.parse(source)
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(loop.iter, _COUNTED, [], [], None, None)
    tree.set_environment(environment)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of a chat template, with limits."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            optimized=False,  # which would compute constants without counting
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


if __name__ == "__main__":
    serve(prepare)
