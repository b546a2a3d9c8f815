"""Tool calls and reasoning: how a model writes them, a grammar that holds it to that, and a parser.

Nothing here knows HTTP or the engine. The life of a request with tools::

    formats = ReplyFormat.of_bundle(bundle, tokenizer, template)   # once, when a model is loaded

    tools = [Tool("get_weather", {"type": "object", "properties": {...}}, "The weather in a city")]
    prompt = template.render(
        messages, tools=[tool.as_openai() for tool in tools], variables={"reasoning_effort": "low"}
    )
    opened = formats.thinking is not None and formats.thinking.opened_by(prompt)
    grammar = write_grammar(
        formats.calls, tools, ToolChoice("auto"), thinking=formats.thinking, thinking_opened=opened
    )
    # compiled and sampled under as GrammarRequest("structural", grammar)

    parser = ReplyParser(formats.calls, tools, thinking=formats.thinking, thinking_opened=opened)
    for event in stream:
        token = tokenizer.token_text(event.token_id)
        deltas = parser.push(token if token in parser.special_tags else event.text)
    deltas = parser.finish(cut=finish_reason == "length")

* `ReplyFormat.of_bundle` finds a `ToolFormat` (`derive_format`) and `ThinkingMarks` in the chat
  template, or takes them from the manifest. ``calls`` is None for a model whose template knows no
  tools: ``required`` then asks for JSON of a call, and ``auto`` is refused.
* `write_grammar` gives a grammar of the kind ``structural``. ``tool_choice: none`` needs none: pass
  no tools to the parser.
* `ReplyParser.push` and `finish` return `ContentDelta`, `ReasoningDelta` and `ToolCallDelta`, which
  has ``index``, ``call_id`` and ``name`` (in the first delta of a call), and a part of the
  ``arguments`` as JSON text. ``parser.incomplete`` says that a call was cut off.
* Special tokens are not in the text of the engine's events, but tags may be special tokens:
  ``parser.special_tags`` are those to be pushed by their spelling.
* `ToolFormat.new_call_id` makes an id that the template takes back, such as Mistral's 9 letters.
  Where ``text_arguments`` is set, a past call's arguments go to the template as JSON text, and else
  as an object.
"""

from maskdial.causal.tools.derive import derive_format
from maskdial.causal.tools.events import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta
from maskdial.causal.tools.format import ToolFormat
from maskdial.causal.tools.grammar import write_content_grammar, write_grammar
from maskdial.causal.tools.parser import ReplyParser
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.causal.tools.thinking import ThinkingMarks
from maskdial.causal.tools.tool import Tool, ToolChoice, check_tools

__all__ = [
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
    "write_content_grammar",
    "write_grammar",
]
