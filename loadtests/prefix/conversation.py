"""Conversation: what an agent sends in its turns, and the template that renders it."""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers

from maskdial.bundle.bundle import hash_files, read_manifests, write_manifest
from maskdial.bundle.manifest import CHAT_TEMPLATE

Thinking = Literal["kept", "dropped"]
Message = Mapping[str, Any]

_TEMPLATE = """
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- set asked = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and (KEEPS or loop.index0 > asked.last) -%}
{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""ChatML with tools and thinking, which is left out before the user's last message or is not, as
Qwen3's templates do either."""

_PARAMETERS = 4  # of a tool
_ASKED, _THOUGHT, _SAID, _FOUND = 20, 50, 10, 60  # words of a turn
_LEFT = 256  # tokens of the context for the reply


def with_template(bundle: Path, folder: Path, thinking: Thinking) -> Path:
    """A bundle with the template for conversations, made of links to another one's files."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bundle, folder, copy_function=os.link)
    template = folder / CHAT_TEMPLATE
    template.unlink(missing_ok=True)
    text = _TEMPLATE.replace("KEEPS", "true" if thinking == "kept" else "false")
    template.write_text(text, encoding="utf-8")
    (folder / "maskdial.json").unlink()
    shutil.copy(bundle / "maskdial.json", folder / "maskdial.json")
    (manifest,) = read_manifests(folder.name, folder)
    files = hash_files(folder, sorted({*manifest.files, CHAT_TEMPLATE}))
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    return folder


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tools, and the messages of some turns: a question, a call, its result, an answer.

    Attributes:
        tools: in OpenAI's form.
        turns: the messages of each turn; the assistant's have what it thought.
    """

    tools: Sequence[Message]
    turns: Sequence[Sequence[Message]]

    @classmethod
    def draw(cls, bundle: Path, num_tokens: int, num_turns: int, seed: int) -> "Conversation":
        """One with about so many tokens of tools, in words of the bundle's tokenizer."""
        rng = random.Random(seed)
        tokenizer = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
        words = _words(tokenizer)
        tools: list[Message] = []
        left = num_tokens
        while left > 0:
            tools.append(_tool(rng, words, len(tools)))
            left -= len(tokenizer.encode(json.dumps(tools[-1]), add_special_tokens=False))
        turns = [_turn(rng, words, number) for number in range(num_turns)]
        return cls(tools, turns)

    def bodies(self) -> Iterator[dict[str, Any]]:
        """What the agent sends: in each turn one request for the call, and one for the answer."""
        said: list[Message] = []
        for asked, call, found, answer in self.turns:
            said.append(asked)
            yield self._body(said)
            said += (call, found)
            yield self._body(said)
            said.append(answer)

    def last(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What it sends at the beginning of the last turn, and before that."""
        *_, before, body, _ = self.bodies()
        return body, before

    def _body(self, said: Sequence[Message]) -> dict[str, Any]:
        return {"messages": [*said], "tools": [*self.tools]}


def _words(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Plain words, most of which are a token each."""
    vocabulary = tokenizer.get_vocab()
    found = (word.lstrip("Ġ▁") for word in vocabulary)
    words = sorted({word for word in found if 3 <= len(word) <= 8 and word.isascii()})
    return [word for word in words if word.isalpha() and word.islower()]


def _text(rng: random.Random, words: Sequence[str], count: int) -> str:
    return " ".join(rng.choices(words, k=count))


def _tool(rng: random.Random, words: Sequence[str], number: int) -> Message:
    properties = {
        f"{rng.choice(words)}_{index}": {"type": "string", "description": _text(rng, words, 12)}
        for index in range(_PARAMETERS)
    }
    schema = {"type": "object", "properties": properties}
    name = f"{rng.choice(words)}_{number}"
    function = {"name": name, "description": _text(rng, words, 60), "parameters": schema}
    return {"type": "function", "function": function}


def _turn(rng: random.Random, words: Sequence[str], number: int) -> Sequence[Message]:
    function = {"name": "read", "arguments": json.dumps({"path": _text(rng, words, 3)})}
    call_id = f"call{number:05d}"
    return (
        {"role": "user", "content": _text(rng, words, _ASKED)},
        {
            "role": "assistant",
            "content": _text(rng, words, _SAID),
            "reasoning_content": _text(rng, words, _THOUGHT),
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": _text(rng, words, _FOUND)},
        {
            "role": "assistant",
            "content": _text(rng, words, _SAID),
            "reasoning_content": _text(rng, words, _THOUGHT),
        },
    )
