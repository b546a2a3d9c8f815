"""Formats of models whose chat templates tell them of tools, but do not write past calls.

Such calls are written into the content of past turns, as these models write them.
"""

from maskdial.causal.tools.format import ArgumentList, ToolFormat

# By what the templates contain; from the models' own descriptions of their formats.
_KNOWN: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (
        # Granite 3.x
        ("<|tool_call|>", "JSON list"),
        ToolFormat(
            call='{"name": "$NAME", "arguments": $ARGUMENTS}',
            section_begin="<|tool_call|>[",
            separator=", ",
            section_end="]",
            untold=True,
        ),
    ),
    (
        # The first template of Kimi K2
        ("<|im_system|>", "tool_declare"),
        ToolFormat(
            call="<|tool_call_begin|>functions.$NAME:$INDEX<|tool_call_argument_begin|>$ARGUMENTS"
            "<|tool_call_end|>",
            section_begin="<|tool_calls_section_begin|>",
            separator="",
            section_end="<|tool_calls_section_end|>",
            id_form="functions.$NAME:$INDEX",
            untold=True,
        ),
    ),
    (
        # LFM2 and LFM2.5
        ("List of tools: ",),
        ToolFormat(
            call="$NAME($ARGUMENTS)",
            arguments=ArgumentList("$KEY=$VALUE", ", ", '"', python=True),
            section_begin="<|tool_call_start|>[",
            separator=", ",
            section_end="]<|tool_call_end|>",
            untold=True,
        ),
    ),
    (
        # Hermes 2, SmolLM3, and what else was trained on their format
        ("<tool_call></tool_call>", "arguments"),
        ToolFormat(
            call='<tool_call>\n{"name": "$NAME", "arguments": $ARGUMENTS}\n</tool_call>',
            separator="\n",
            untold=True,
        ),
    ),
)


def known_format(source: str) -> ToolFormat | None:
    """The format of a chat template that does not write calls; None if it is none of these."""
    return next((form for marks, form in _KNOWN if all(each in source for each in marks)), None)
