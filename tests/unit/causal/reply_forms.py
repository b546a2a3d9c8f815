"""How some sixty families of chat models write a reply: facts of their published templates.

Each form has a small template of the same build, and what its models write of one reasoning, one
answer, one call and two calls. The texts are written out here, so that nothing in them comes from
the code that derives formats.
"""

from dataclasses import dataclass, field

CALL = "get_weather", {"city": "Rome", "days": 3}
SECOND = "paint", {"color": "red", "wet": True}
REASONING = "The user wants\nthe weather."
ANSWER = "It is <b>warm</b> & {fine}."

_JSON_1 = '{"city": "Rome", "days": 3}'
_JSON_2 = '{"color": "red", "wet": true}'


@dataclass(frozen=True)
class Form:
    """One way of writing replies.

    Attributes:
        families: the models that write so.
        template: a chat template of the build that theirs have.
        tags: the tokens that are marks, but for the ends of turns.
        ends: the end-of-sequence tokens.
        thinking: the marks around reasoning; None if the models do not reason.
        answer: the marks around an answer.
        one: one call.
        two: two calls; None if a turn has one at most.
        lead: text may come before a call.
        opened: the prompt opens the reasoning.
    """

    families: tuple[str, ...]
    template: str
    tags: tuple[str, ...]
    ends: tuple[str, ...]
    one: str = ""
    two: str | None = None
    thinking: tuple[str, str] | None = None
    answer: tuple[str, str] = ("", "")
    lead: bool = True
    opened: bool = False
    between: str = ""
    """What stands between the reasoning and what follows."""
    extra: tuple[str, ...] = field(default=())


def template(
    header: str,
    end: str,
    calls: str,
    *,
    thinking: tuple[str, str] = ("", ""),
    key: str = "reasoning_content",
    answer: tuple[str, str] = ("", ""),
    generation: str = "",
    name: str = "assistant",
    tools: str = "TOOLS: {{ tools | tojson }}",
    empty: str = "",
    answered: bool = False,
) -> str:
    """A chat template.

    Args:
        header: of a turn, with ROLE.
        end: of a turn.
        calls: writes ``m.tool_calls``.
        thinking: the marks around past reasoning.
        key: the field of a message with its reasoning.
        answer: the marks around a past answer.
        generation: what the generation prompt adds to the header.
        name: the assistant's role.
        tools: how the tools are described.
        empty: what stands in the place of reasoning where there is none.
        answered: a turn with calls has the marks of an answer, too.
    """
    begin = header.replace("ROLE", name)
    always = "true or " if answered else ""
    written = (
        "{% if tools %}" + header.replace("ROLE", "system") + tools + end + "{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}" + begin + "{% if m." + key + " %}"
        f"{thinking[0]}{{{{ m.{key} }}}}{thinking[1]}{{% else %}}{empty}{{% endif %}}"
        "{% if " + always + "m.content or not m.tool_calls %}"
        f"{answer[0]}{{{{ m.content }}}}{answer[1]}{{% endif %}}"
        "{% if m.tool_calls %}"
        + calls
        + "{% endif %}"
        + end
        + "{% else %}"
        + header.replace("ROLE", "{{ m.role }}")
        + "{{ m.content }}"
        + end
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + begin
        + generation
        + "{% endif %}"
    )
    # Jinja drops a line break behind a block.
    return written.replace("%}\n", "%}{{ '\\n' }}")


CHATML = "<|im_start|>ROLE\n", "<|im_end|>\n"
IM = ("<|im_end|>", "<|endoftext|>")
THINK = "<think>\n", "\n</think>\n\n"
THINK_MARKS = "<think>", "</think>"
F = "{% for c in m.tool_calls %}"
N, A = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
EACH = "{% for k, v in c.function.arguments.items() %}"
E = "{% endfor %}"
RAW = "{{ v if v is string else v | tojson }}"
TEXT = "{% if not loop.first %}SEP{% endif %}"

HERMES = (
    F + TEXT.replace("SEP", "\n") + '<tool_call>\n{"name": "' + N + '", "arguments": ' + A + "}"
    "\n</tool_call>" + E
)
HERMES_1 = f'<tool_call>\n{{"name": "get_weather", "arguments": {_JSON_1}}}\n</tool_call>'
HERMES_2 = f'<tool_call>\n{{"name": "paint", "arguments": {_JSON_2}}}\n</tool_call>'
HERMES_TAGS = ("<tool_call>", "</tool_call>")
CODER = (
    F
    + TEXT.replace("SEP", "\n")
    + "<tool_call>\n<function="
    + N
    + ">\n"
    + EACH
    + "<parameter={{ k }}>\n"
    + RAW
    + "\n</parameter>\n"
    + E
    + "</function>\n</tool_call>"
    + E
)
CODER_1 = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
CODER_2 = (
    "<tool_call>\n<function=paint>\n<parameter=color>\nred\n</parameter>\n"
    "<parameter=wet>\ntrue\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    F
    + TEXT.replace("SEP", "\n")
    + "<tool_call>"
    + N
    + "\n"
    + EACH
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + RAW
    + "</arg_value>\n"
    + E
    + "</tool_call>"
    + E
)
GLM_1 = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
GLM_2 = (
    "<tool_call>paint\n<arg_key>color</arg_key>\n<arg_value>red</arg_value>\n"
    "<arg_key>wet</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
)
PLAIN = '{"name": "' + N + '", "arguments": ' + A + "}"
PLAIN_1 = f'{{"name": "get_weather", "arguments": {_JSON_1}}}'
PLAIN_2 = f'{{"name": "paint", "arguments": {_JSON_2}}}'
LISTED = F + TEXT.replace("SEP", ", ") + PLAIN + E
MISTRAL = "[INST]ROLE: ", "</s>"
DSML = (
    "<｜DSML｜NAME>"
    + F
    + '\n<｜DSML｜invoke name="'
    + N
    + '">\n'
    + EACH
    + """<｜DSML｜parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">"""
    + RAW
    + "</｜DSML｜parameter>\n"
    + E
    + "</｜DSML｜invoke>"
    + E
    + "\n</｜DSML｜NAME>"
)
DSML_1 = (
    '\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>"
)
DSML_2 = (
    '\n<｜DSML｜invoke name="paint">\n<｜DSML｜parameter name="color" string="true">red'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="wet" string="false">true</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>"
)
DEEPSEEK = "<｜ROLE｜>", "<｜end▁of▁sentence｜>"
KIMI = "<|im_ROLE|>ROLE<|im_middle|>", "<|im_end|>"
KIMI_TAGS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
KIMI_1 = (
    "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{_JSON_1}<|tool_call_end|>"
)
KIMI_2 = (
    f"<|tool_call_begin|>functions.paint:1<|tool_call_argument_begin|>{_JSON_2}<|tool_call_end|>"
)
KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
COHERE = "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
COHERE_CALLS = (
    "<|START_ACTION|>["
    + F
    + '\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "'
    + N
    + '", "parameters": '
    + A
    + "}{{ ',' if not loop.last }}"
    + E
    + "\n]<|END_ACTION|>"
)
COHERE_1 = f'\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_JSON_1}}}'
COHERE_2 = f'\n    {{"tool_call_id": "1", "tool_name": "paint", "parameters": {_JSON_2}}}'
COHERE_TAGS = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>")
GEMMA = "<|turn>ROLE\n", "<turn|>\n"
GEMMA_CALL = (
    F + "<|tool_call>call:" + N + "{{ '{' }}" + EACH + "{{ ',' if not loop.first }}{{ k }}:"
    """{{ '<|"|>' ~ v ~ '<|"|>' if v is string else v | tojson }}"""
    + E
    + "{{ '}' }}<tool_call|>"
    + E
)
GEMMA_1 = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>'
GEMMA_2 = '<|tool_call>call:paint{color:<|"|>red<|"|>,wet:true}<tool_call|>'
PYTHONIC = (
    "<|tool_call_start|>["
    + F
    + TEXT.replace("SEP", ", ")
    + N
    + "("
    + EACH
    + "{{ ', ' if not loop.first }}{{ k }}="
    """{{ '"' ~ v ~ '"' if v is string else v }}""" + E + ")" + E + "]<|tool_call_end|>"
)
PYTHONIC_1 = 'get_weather(city="Rome", days=3)'
PYTHONIC_2 = 'paint(color="red", wet=True)'
PYTHONIC_TAGS = ("<|tool_call_start|>", "<|tool_call_end|>")
K3 = '<|open|>message role="ROLE"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"
K3_CALLS = (
    "<|open|>tools<|sep|>"
    + F
    + '<|open|>call tool="'
    + N
    + '" index="{{ loop.index }}"<|sep|>'
    + EACH
    + """<|open|>argument key="{{ k }}" type="{{ 'boolean' if v is boolean else 'null' if """
    """v is none else 'number' if v is number else 'string' if v is string else 'object' if v is """
    """mapping else 'array' }}"<|sep|>"""
    + RAW
    + "<|close|>argument<|sep|>"
    + E
    + "<|close|>call<|sep|>"
    + E
    + "<|close|>tools<|sep|>"
)
K3_1 = (
    '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"'
    '<|sep|>Rome<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
K3_2 = (
    '<|open|>call tool="paint" index="2"<|sep|><|open|>argument key="color" type="string"'
    '<|sep|>red<|close|>argument<|sep|><|open|>argument key="wet" type="boolean"<|sep|>true'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>"
    "commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SOLAR = "<|begin|>ROLE", "<|end|>"


def mistral(call: str, *, thinks: bool = False) -> str:
    """A template of Mistral's: the assistant's turns have no header."""
    thinking = (
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
        if thinks
        else ""
    )
    return (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}"
        + thinking
        + "{{ m.content }}{% if m.tool_calls %}"
        + call
        + "{% endif %}</s>{% endif %}{% endfor %}"
    )


FORMS = {
    "hermes": Form(
        ("Qwen2.5", "Qwen2.5-VL", "Qwen3-Instruct-2507", "Granite 4.0", "Granite 4.1", "MiMo-VL"),
        template(*CHATML, HERMES),
        HERMES_TAGS,
        IM,
        HERMES_1,
        f"{HERMES_1}\n{HERMES_2}",
    ),
    "hermes, reasoning": Form(
        ("Qwen3", "Qwen3-VL", "Bielik 3", "Reka Edge", "Hermes 4", "EXAONE 4"),
        template(*CHATML, HERMES, thinking=THINK, empty="<think>\n\n</think>\n\n"),
        (*HERMES_TAGS, *THINK_MARKS),
        IM,
        HERMES_1,
        f"{HERMES_1}\n{HERMES_2}",
        THINK,
    ),
    "hermes, opened": Form(
        ("QwQ", "Qwen3-Thinking-2507"),
        template(*CHATML, HERMES, generation="<think>\n"),
        (*HERMES_TAGS, *THINK_MARKS),
        IM,
        HERMES_1,
        f"{HERMES_1}\n{HERMES_2}",
        THINK,
        opened=True,
    ),
    "hermes, past calls untold": Form(
        ("SmolLM3", "Hermes 2 Pro", "Hermes 3"),
        template(
            *CHATML,
            "",
            tools="within <tool_call></tool_call>, with name and arguments: {{ tools | tojson }}",
        ),
        HERMES_TAGS,
        IM,
        HERMES_1,
        f"{HERMES_1}\n{HERMES_2}",
    ),
    "coder": Form(
        ("Qwen3-Coder", "Step 3.5 Flash"),
        template(*CHATML, CODER),
        HERMES_TAGS,
        IM,
        CODER_1,
        f"{CODER_1}\n{CODER_2}",
    ),
    "coder, reasoning": Form(
        ("Qwen3.5", "Qwen3.6", "Nemotron 3 Nano", "Nemotron 3 Super"),
        template(*CHATML, CODER, thinking=THINK, generation="<think>\n"),
        (*HERMES_TAGS, *THINK_MARKS),
        IM,
        CODER_1,
        f"{CODER_1}\n{CODER_2}",
        THINK,
        opened=True,
    ),
    "seed": Form(
        ("Seed-OSS",),
        template(
            "<seed:bos>ROLE\n",
            "<seed:eos>",
            CODER.replace("tool_call>", "seed:tool_call>")
            .replace("}}>\n" + RAW, "}}>" + RAW)
            .replace(RAW + "\n", RAW),
            thinking=("<seed:think>", "</seed:think>"),
        ),
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        ("<seed:eos>",),
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        None,
        ("<seed:think>", "</seed:think>"),
    ),
    "glm": Form(
        ("GLM 4.5", "GLM 4.6", "Laguna XS", "Ling 3"),
        template("<|ROLE|>\n", "", GLM, thinking=("<think>", "</think>")),
        (*HERMES_TAGS, *THINK_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        GLM_1,
        f"{GLM_1}\n{GLM_2}",
        ("<think>", "</think>"),
    ),
    "glm, no breaks": Form(
        ("GLM 4.7", "GLM 5", "Spark 2.5", "Laguna S"),
        template("<|ROLE|>", "", GLM.replace("\n", ""), thinking=("<think>", "</think>")),
        (*HERMES_TAGS, *THINK_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        GLM_1.replace("\n", ""),
        (GLM_1 + GLM_2).replace("\n", ""),
        ("<think>", "</think>"),
    ),
    "llama": Form(
        ("Llama 3.1", "Llama 3.2", "Llama 3.3"),
        template(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n",
            "<|eot_id|>",
            '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
            "{{ m.tool_calls[0].function.arguments | tojson }}}",
        ),
        (),
        ("<|eot_id|>", "<|eom_id|>"),
        f'{{"name": "get_weather", "parameters": {_JSON_1}}}',
        lead=False,
    ),
    "mistral": Form(
        ("Mistral 7B v0.3", "Mistral Nemo", "Mistral Large", "Mistral Small 3.1"),
        mistral(
            "[TOOL_CALLS] ["
            + F
            + TEXT.replace("SEP", ", ")
            + '{"name": "'
            + N
            + '", "arguments": '
            + A
            + ', "id": "{{ c.id }}"}'
            + E
            + "]"
        ),
        ("[TOOL_CALLS]",),
        ("</s>",),
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_JSON_1}, "id": "abcdefgh1"}}]',
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_JSON_1}, "id": "abcdefgh1"}}, '
        f'{{"name": "paint", "arguments": {_JSON_2}, "id": "abcdefgh2"}}]',
    ),
    "mistral, new": Form(
        ("Devstral", "Ministral 3", "Mistral Medium 3.1"),
        mistral(F + "[TOOL_CALLS]" + N + "[ARGS]" + A + E),
        ("[TOOL_CALLS]", "[ARGS]"),
        ("</s>",),
        f"[TOOL_CALLS]get_weather[ARGS]{_JSON_1}",
        f"[TOOL_CALLS]get_weather[ARGS]{_JSON_1}[TOOL_CALLS]paint[ARGS]{_JSON_2}",
    ),
    "magistral": Form(
        ("Magistral", "Mistral Small 3.2", "Ministral 3 Reasoning"),
        mistral(F + "[TOOL_CALLS]" + N + "[CALL_ID]{{ c.id }}[ARGS]" + A + E, thinks=True),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
        ("</s>",),
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{_JSON_1}",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{_JSON_1}"
        f"[TOOL_CALLS]paint[CALL_ID]abcdefgh2[ARGS]{_JSON_2}",
        ("[THINK]", "[/THINK]"),
    ),
    "gemma 4": Form(
        ("Gemma 4",),
        template(
            *GEMMA,
            GEMMA_CALL,
            name="model",
            generation="{% if not enable_thinking | default(true) %}"
            "<|channel>thought\n<channel|>{% endif %}",
        ),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        ("<turn|>",),
        GEMMA_1,
        GEMMA_1 + GEMMA_2,
        ("<|channel>thought\n", "<channel|>"),
    ),
    "function gemma": Form(
        ("FunctionGemma",),
        template(
            "<start_of_turn>ROLE\n",
            "<end_of_turn>\n",
            GEMMA_CALL.replace("<|tool_call>", "<start_function_call>")
            .replace("<tool_call|>", "<end_function_call>")
            .replace('<|"|>', "<escape>"),
        ),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        ("<end_of_turn>",),
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:3}"
        "<end_function_call>",
    ),
    "gpt-oss": Form(
        ("gpt-oss-20b", "gpt-oss-120b"),
        HARMONY,
        HARMONY_TAGS,
        ("<|return|>", "<|call|>", "<|endoftext|>"),
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + _JSON_1,
        None,
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<|channel|>final<|message|>", ""),
        between="<|start|>assistant",
        lead=False,
    ),
    "gpt-oss, recipient first": Form(
        ("gpt-oss-20b", "gpt-oss-120b"),
        HARMONY,
        HARMONY_TAGS,
        ("<|return|>", "<|call|>", "<|endoftext|>"),
        " to=functions.get_weather<|channel|>commentary json<|message|>" + _JSON_1,
        None,
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<|channel|>final<|message|>", ""),
        between="<|start|>assistant",
        lead=False,
    ),
    "deepseek": Form(
        ("DeepSeek V3", "DeepSeek R1"),
        template(
            *DEEPSEEK,
            "<｜tool▁calls▁begin｜>"
            + F
            + "<｜tool▁call▁begin｜>"
            + N
            + "<｜tool▁sep｜>"
            + A
            + "<｜tool▁call▁end｜>"
            + E
            + "<｜tool▁calls▁end｜>",
            generation="<think>",
        ),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            *THINK_MARKS,
        ),
        ("<｜end▁of▁sentence｜>",),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{_JSON_1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{_JSON_1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>paint<｜tool▁sep｜>{_JSON_2}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("<think>", "</think>"),
        opened=True,
    ),
    "deepseek v3.2": Form(
        ("DeepSeek V3.2",),
        template(
            *DEEPSEEK,
            "\n\n" + DSML.replace("NAME", "function_calls"),
            thinking=("<think>", "</think>"),
        ),
        ("｜DSML｜", *THINK_MARKS),
        ("<｜end▁of▁sentence｜>",),
        f"<｜DSML｜function_calls>{DSML_1}\n</｜DSML｜function_calls>",
        f"<｜DSML｜function_calls>{DSML_1}{DSML_2}\n</｜DSML｜function_calls>",
        ("<think>", "</think>"),
    ),
    "deepseek v4": Form(
        ("DeepSeek V4",),
        template(
            *DEEPSEEK, "\n\n" + DSML.replace("NAME", "tool_calls"), thinking=("<think>", "</think>")
        ),
        ("｜DSML｜", *THINK_MARKS),
        ("<｜end▁of▁sentence｜>",),
        f"<｜DSML｜tool_calls>{DSML_1}\n</｜DSML｜tool_calls>",
        f"<｜DSML｜tool_calls>{DSML_1}{DSML_2}\n</｜DSML｜tool_calls>",
        ("<think>", "</think>"),
    ),
    "kimi": Form(
        ("Kimi K2",),
        template(
            *KIMI,
            KIMI_SECTION[0] + F + "<|tool_call_begin|>functions." + N + ":{{ loop.index0 }}"
            "<|tool_call_argument_begin|>" + A + "<|tool_call_end|>" + E + KIMI_SECTION[1],
        ),
        KIMI_TAGS,
        ("<|im_end|>",),
        KIMI_SECTION[0] + KIMI_1 + KIMI_SECTION[1],
        KIMI_SECTION[0] + KIMI_1 + KIMI_2 + KIMI_SECTION[1],
    ),
    "kimi, by id": Form(
        ("Kimi K2 Thinking", "Kimi K2.5"),
        template(
            *KIMI,
            KIMI_SECTION[0]
            + F
            + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
            + A
            + "<|tool_call_end|>"
            + E
            + KIMI_SECTION[1],
            thinking=("<think>", "</think>"),
            empty="<think></think>",
        ),
        (*KIMI_TAGS, *THINK_MARKS),
        ("<|im_end|>",),
        KIMI_SECTION[0] + KIMI_1 + KIMI_SECTION[1],
        KIMI_SECTION[0] + KIMI_1 + KIMI_2 + KIMI_SECTION[1],
        ("<think>", "</think>"),
    ),
    "kimi, untold": Form(
        ("Kimi K2 (first template)",),
        template(*KIMI, "", tools="<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}"),
        KIMI_TAGS,
        ("<|im_end|>",),
        KIMI_SECTION[0] + KIMI_1 + KIMI_SECTION[1],
        KIMI_SECTION[0] + KIMI_1 + KIMI_2 + KIMI_SECTION[1],
    ),
    "kimi k3": Form(
        ("Kimi K3",),
        template(
            *K3,
            K3_CALLS,
            thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
            answered=True,
        ),
        ("<|open|>", "<|close|>", "<|sep|>"),
        ("<|end_of_msg|>",),
        f"<|open|>tools<|sep|>{K3_1}<|close|>tools<|sep|>",
        f"<|open|>tools<|sep|>{K3_1}{K3_2}<|close|>tools<|sep|>",
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "minimax m1": Form(
        ("MiniMax M1",),
        template(
            "<beginning_of_sentence>ROLE\n",
            "<end_of_sentence>\n",
            "<tool_calls>" + F + "\n" + PLAIN + E + "\n</tool_calls>",
        ),
        ("<tool_calls>", "</tool_calls>"),
        ("<end_of_sentence>",),
        f"<tool_calls>\n{PLAIN_1}\n</tool_calls>",
        f"<tool_calls>\n{PLAIN_1}\n{PLAIN_2}\n</tool_calls>",
    ),
    "minimax m2": Form(
        ("MiniMax M2", "MiniMax M2.5"),
        template(
            "]~b]ROLE\n",
            "[e~[\n",
            "<minimax:tool_call>"
            + F
            + '\n<invoke name="'
            + N
            + '">\n'
            + EACH
            + '<parameter name="{{ k }}">'
            + RAW
            + "</parameter>\n"
            + E
            + "</invoke>"
            + E
            + "\n</minimax:tool_call>",
            thinking=THINK,
            generation="<think>\n",
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>", *THINK_MARKS),
        ("[e~[",),
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>'
        '\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        None,
        THINK,
        opened=True,
    ),
    "command": Form(
        ("Command R7B", "Command A"),
        template(
            *COHERE, COHERE_CALLS, name="CHATBOT", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
        )
        + "{# <|START_THINKING|> and <|END_THINKING|> #}",
        (*COHERE_TAGS, "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ("<|END_OF_TURN_TOKEN|>",),
        f"<|START_ACTION|>[{COHERE_1}\n]<|END_ACTION|>",
        f"<|START_ACTION|>[{COHERE_1},{COHERE_2}\n]<|END_ACTION|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        lead=False,
    ),
    "command, text": Form(
        ("Command A Reasoning", "Cohere 2 MoE"),
        template(
            *COHERE,
            COHERE_CALLS,
            name="CHATBOT",
            thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
            answer=("<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        (*COHERE_TAGS, "<|START_TEXT|>", "<|END_TEXT|>"),
        ("<|END_OF_TURN_TOKEN|>",),
        f"<|START_ACTION|>[{COHERE_1}\n]<|END_ACTION|>",
        f"<|START_ACTION|>[{COHERE_1},{COHERE_2}\n]<|END_ACTION|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_TEXT|>", "<|END_TEXT|>"),
        lead=False,
    ),
    "granite 3": Form(
        ("Granite 3.2", "Granite 3.3"),
        template(
            "<|start_of_role|>ROLE<|end_of_role|>",
            "<|end_of_text|>\n",
            "",
            tools="respond only with <|tool_call|> followed by a JSON list of tools used: "
            "{{ tools | tojson }}",
        )
        + "{# thoughts between <think></think>, response between <response></response> #}",
        ("<|tool_call|>",),
        ("<|end_of_text|>",),
        f"<|tool_call|>[{PLAIN_1}]",
        f"<|tool_call|>[{PLAIN_1}, {PLAIN_2}]",
        ("<think>", "</think>"),
        ("<response>", "</response>"),
        lead=False,
    ),
    "lfm2": Form(
        ("LFM2",),
        template(
            *CHATML,
            "",
            tools="List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>",
        ),
        PYTHONIC_TAGS,
        ("<|im_end|>",),
        f"<|tool_call_start|>[{PYTHONIC_1}]<|tool_call_end|>",
        f"<|tool_call_start|>[{PYTHONIC_1}, {PYTHONIC_2}]<|tool_call_end|>",
    ),
    "lfm2.5": Form(
        ("LFM2.5", "LFM2.5 Thinking"),
        template(*CHATML, PYTHONIC) + "{# m.content.split('</think>') #}",
        (*PYTHONIC_TAGS, *THINK_MARKS),
        ("<|im_end|>",),
        f"<|tool_call_start|>[{PYTHONIC_1}]<|tool_call_end|>",
        f"<|tool_call_start|>[{PYTHONIC_1}, {PYTHONIC_2}]<|tool_call_end|>",
        ("<think>", "</think>"),
    ),
    "phi 4": Form(
        ("Phi-4-mini", "Phi-4-multimodal"),
        template("<|ROLE|>", "<|end|>", "<|tool_call|>[" + LISTED + "]<|/tool_call|>"),
        ("<|tool_call|>", "<|/tool_call|>"),
        ("<|end|>",),
        f"<|tool_call|>[{PLAIN_1}]<|/tool_call|>",
        f"<|tool_call|>[{PLAIN_1}, {PLAIN_2}]<|/tool_call|>",
    ),
    "nemotron": Form(
        ("Nemotron Nano v2", "Llama Nemotron Super"),
        template(
            "<SPECIAL_11>ROLE\n",
            "<SPECIAL_12>",
            "<TOOLCALL>[" + LISTED + "]</TOOLCALL>",
            thinking=THINK,
        ),
        ("<TOOLCALL>", "</TOOLCALL>", *THINK_MARKS),
        ("<SPECIAL_12>",),
        f"<TOOLCALL>[{PLAIN_1}]</TOOLCALL>",
        f"<TOOLCALL>[{PLAIN_1}, {PLAIN_2}]</TOOLCALL>",
        THINK,
    ),
    "apertus": Form(
        ("Apertus",),
        template(
            "<|ROLE_start|>",
            "<|assistant_end|>",
            "<|tools_prefix|>["
            + F
            + TEXT.replace("SEP", ", ")
            + '{"'
            + N
            + '": '
            + A
            + "}"
            + E
            + "]<|tools_suffix|>",
            thinking=("<|inner_prefix|>", "<|inner_suffix|>"),
            key="thinking",
        ),
        ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        ("<|assistant_end|>",),
        f'<|tools_prefix|>[{{"get_weather": {_JSON_1}}}]<|tools_suffix|>',
        f'<|tools_prefix|>[{{"get_weather": {_JSON_1}}}, {{"paint": {_JSON_2}}}]<|tools_suffix|>',
        ("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "hunyuan": Form(
        ("Hunyuan 3",),
        template(
            "<｜hy_ROLE｜>",
            "<｜hy_eos｜>",
            "<tool_calls>"
            + F
            + "\n<tool_call>"
            + N
            + "<tool_sep>\n"
            + EACH
            + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
            + RAW
            + "</arg_value>\n"
            + E
            + "</tool_call>"
            + E
            + "\n</tool_calls>",
            thinking=("<think>", "</think>"),
        ),
        (
            "<tool_calls>",
            "</tool_calls>",
            "<tool_call>",
            "</tool_call>",
            "<tool_sep>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            *THINK_MARKS,
        ),
        ("<｜hy_eos｜>",),
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "</tool_calls>",
        None,
        ("<think>", "</think>"),
    ),
    "gigachat": Form(
        ("GigaChat 3.1",),
        template(
            "ROLE<|role_sep|>\n",
            "<|message_sep|>\n\n",
            '<|function_call|>{"name": "{{ m.tool_calls[0].function.name }}", "arguments": '
            "{{ m.tool_calls[0].function.arguments | tojson }}}",
        ),
        ("<|function_call|>",),
        ("<|message_sep|>",),
        f"<|function_call|>{PLAIN_1}",
    ),
    "minicpm": Form(
        ("MiniCPM 5",),
        template(
            *CHATML,
            F
            + TEXT.replace("SEP", "\n")
            + '<function name="'
            + N
            + '">'
            + EACH
            + '<param name="{{ k }}">'
            + RAW
            + "</param>"
            + E
            + "</function>"
            + E,
            thinking=THINK,
        ),
        THINK_MARKS,
        IM,
        '<function name="get_weather"><param name="city">Rome</param><param name="days">3</param>'
        "</function>",
        None,
        THINK,
    ),
    "functionary": Form(
        ("Functionary 3.1",),
        template(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n",
            "<|eot_id|>",
            F + "<function=" + N + ">" + A + "</function>" + E,
        ),
        (),
        ("<|eot_id|>", "<|eom_id|>"),
        f"<function=get_weather>{_JSON_1}</function>",
        f"<function=get_weather>{_JSON_1}</function><function=paint>{_JSON_2}</function>",
    ),
    "apriel": Form(
        ("Apriel 1.6",),
        template(
            "<|begin_ROLE|>\n",
            "\n<|end|>\n",
            "\n<tool_calls>[" + LISTED + "]</tool_calls>",
            generation="Here are my reasoning steps:\n",
        )
        + "{# [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE] #}",
        ("<tool_calls>", "</tool_calls>", "[BEGIN FINAL RESPONSE]"),
        ("<|end|>",),
        f"<tool_calls>[{PLAIN_1}]</tool_calls>",
        f"<tool_calls>[{PLAIN_1}, {PLAIN_2}]</tool_calls>",
        ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
        ("", "\n[END FINAL RESPONSE]"),
        opened=True,
    ),
    "solar": Form(
        ("Solar Open",),
        template(
            *SOLAR,
            "<|tool_calls|>"
            + F
            + "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>"
            + N
            + "<|tool_call:args|>"
            + A
            + "<|tool_call:end|>"
            + E
            + "<|calls|>",
            thinking=("<|think|>", "<|end|><|begin|>assistant"),
            answer=("<|content|>", ""),
        ),
        (
            "<|think|>",
            "<|end|>",
            "<|begin|>",
            "<|content|>",
            "<|tool_calls|>",
            "<|tool_call:begin|>",
            "<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
            "<|calls|>",
        ),
        ("<|endoftext|>",),
        "<|tool_calls|><|tool_call:begin|>abcdefgh1<|tool_call:name|>get_weather"
        f"<|tool_call:args|>{_JSON_1}<|tool_call:end|><|calls|>",
        None,
        ("<|think|>", "<|end|>"),
        ("<|content|>", "<|end|>"),
        between="<|begin|>assistant",
        lead=False,
    ),
}
