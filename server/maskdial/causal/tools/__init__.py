"""Tool calls and reasoning: how a model writes them, a grammar that enforces it, and a parser.

This package knows neither HTTP nor the engine. A request with tools::

    formats = ReplyFormat.of_bundle(bundle, tokenizer, template)   # once, when a model is loaded

    tools = [Tool("get_weather", {"type": "object", "properties": {...}}, "The weather in a city")]
    prompt = template.render(
        messages, tools=[tool.as_openai() for tool in tools], variables={"reasoning_effort": "low"}
    )
    opened = formats.thinking is not None and formats.thinking.opened_by(prompt)
    grammar = formats.grammar(tools, ToolChoice("auto"), opened=opened)
    # compiled and sampled under as GrammarRequest("structural", grammar.text)

    parser = formats.parser(tools, opened=opened)
    for event in stream:
        token = tokenizer.token_text(event.token_id)
        deltas = parser.push(token if token in parser.special_tags else event.text)
    deltas = parser.finish(cut=finish_reason == "length")

* `ReplyFormat.of_bundle` derives a `ToolFormat` (`derive_format`), `ThinkingMarks` and
  `AnswerMarks` from the chat template, or takes them from the manifest. ``calls`` is None if the
  template does not support tools: the grammar then asks for a call in JSON under ``required``, and
  refuses ``auto``.
  gpt-oss's messages on channels have a grammar and a parser of their own (``harmony.py``).
* With many large schemas, writing a grammar takes up to 0.7 s. ``tool_choice: none`` needs no
  grammar and no tools in the parser.
* ``push`` and ``finish`` return `ContentDelta`, `ReasoningDelta` and `ToolCallDelta`. The first
  delta of a call has its ``call_id`` and ``name``; ``arguments`` are pieces of JSON text.
  ``parser.incomplete`` says that the last call was cut off.
* Tags may be special tokens, which the texts of the engine's events leave out. Push the spelling of
  those in ``parser.special_tags``.
* `maskdial.causal.chat.history` renders past calls with ids and arguments as the template takes
  them.
"""

from maskdial.causal.tools.derive import derive_format
from maskdial.causal.tools.events import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta
from maskdial.causal.tools.format import ToolFormat
from maskdial.causal.tools.grammar import write_content_grammar, write_grammar
from maskdial.causal.tools.marks import AnswerMarks, ThinkingMarks
from maskdial.causal.tools.parser import ReplyParser
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.causal.tools.tool import INPUT, Tool, ToolChoice, check_tools, text_of

__all__ = [
    "INPUT",
    "AnswerMarks",
    "ContentDelta",
    "ReasoningDelta",
    "ReplyDelta",
    "ReplyFormat",
    "ReplyParser",
    "ThinkingMarks",
    "Tool",
    "ToolCallDelta",
    "ToolChoice",
    "ToolFormat",
    "check_tools",
    "derive_format",
    "text_of",
    "write_content_grammar",
    "write_grammar",
]
