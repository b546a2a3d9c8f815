"""A model that does what it is asked: the server's own engine, with a sensible reply forced on it.

The suites check what a capable model would make of a request, and none is at hand. What is forced
has to be what the request's grammar accepts, so that a capable model could have written it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from maskdial.causal import prompts
from maskdial.causal.sequence import Sequence as Generated
from tests.agents.script import RESULT, Call, Forced, spelled

_JOKE = {"setup": "Why did the cat sit on the laptop?", "punchline": "To watch the mouse."}
_TOOLS = re.compile(r"<tools>\n(.*)\n</tools>", re.DOTALL)
_USERS = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


def replies(prompt: str) -> list[str]:
    """What a sensible model might write, best first."""
    asked = _USERS.findall(prompt)[-1]
    found = []
    if (tools := _TOOLS.search(prompt)) and RESULT not in asked:
        for line in tools.group(1).splitlines():
            function = json.loads(line)["function"]
            found.append(spelled(Call(function["name"], _example(function["parameters"], asked))))
    text = "Hello! All of 1, 2, 3, 4 and 5 are well."
    if "reasoning" in asked and not prompt.endswith("</think>\n\n"):
        text = "<think>\n15 * 37 is 555.\n</think>\n\nIt is 555."
    return [*found, spelled(text), spelled(json.dumps(_JOKE))]


def _example(schema: dict[str, Any], asked: str) -> Any:
    """A value for a schema: what the user names in quotes, or 3."""
    if "properties" in schema:
        return {name: _example(each, asked) for name, each in schema["properties"].items()}
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], asked)
    if schema.get("type") in ("integer", "number"):
        return 3
    if schema.get("type") == "string":
        named = re.search(r"'(.+?)'", asked)
        return named.group(1) if named else "San Francisco"
    return {}


@contextmanager
def sensible() -> Iterator[None]:
    """Has every model in this process reply sensibly."""
    make = prompts._make_sequences

    def scripted(
        request: Any, start: Any, params: Any, grammar: Any, *others: Any
    ) -> tuple[Generated, ...]:
        model = others[-1]
        prompt = model.tokenizer.decode(start[0], skip_special_tokens=False)
        for text in replies(prompt):
            ids = model.tokenizer.encode(text, add_special_tokens=False).ids
            if grammar is None or accepts(grammar, ids):
                forced: Any = Forced(ids, model.manifest.vocab_size)
                return make(request, start, params, forced, *others)
        raise AssertionError(f"the grammar accepts no sensible reply to {prompt}")

    with patch.object(prompts, "_make_sequences", scripted):
        yield


def accepts(grammar: Any, ids: Sequence[int]) -> bool:
    """Whether a grammar accepts all tokens but the last, which ends the text, and lets it end."""
    matcher = grammar.matcher(first=True)
    for token_id in ids:
        if matcher.finished:
            return token_id == ids[-1]
        matcher.prepare()
        if not matcher.allowed()[token_id]:
            return matcher.finished and token_id == ids[-1]
        if token_id != ids[-1]:
            matcher.accept(token_id)
    return True
