"""Chat templates of common styles render as in transformers."""

import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from maskdial.causal.chat.template import ChatTemplate
from maskdial.errors import ValidationError

SYSTEM = {"role": "system", "content": "  Be brief. "}
USER = {"role": "user", "content": "Is 1 < 2 & 'so'?\n"}
ANSWER = {"role": "assistant", "content": "<think>easy</think>Yes é 🙂"}
MORE = {"role": "user", "content": "Sure? {{ 1 }}"}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, MORE],
    [SYSTEM, USER, ANSWER, MORE],
    [{"role": "user", "content": ""}],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# The system message goes into the first turn of the user.
LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set turns = messages[1:] %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set turns = messages %}
    {% set system = '' %}
{% endif %}
{% for message in turns %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set content = system + message['content'] if loop.first else message['content'] %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' ' + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}"""
# Macros, a namespace, a date, tools that nobody gives.
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- endif %}
{%- macro header(role) %}
    {{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' }}
{%- endmacro %}
{%- set ns = namespace(system='', turns=0) %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = ns.system ~ message.content | trim %}
{%- endfor %}
{{- header('system') ~ 'Today Date: ' ~ date_string ~ '\\n\\n' ~ ns.system ~ '<|eot_id|>' }}
{%- if tools is not none and tools is defined %}{{ tools | tojson(indent=4) }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- header(message.role) ~ message['content'] | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}
{# The count is a comment's neighbor. #}
{{ ns.turns }}
"""
# Reasoning is cut from earlier answers, as Qwen3 and DeepSeek do; text for training is marked.
REASONING = """\
{%- for message in messages[::-1] %}{% if loop.last %}{{ message | tojson }}{% endif %}{% endfor %}
{% for message in messages %}
{%- if message.role == "assistant" %}
{% generation %}
{{ message.content.split('</think>')[-1].lstrip('\\n') }}{{ eos_token }}
{% endgeneration %}
{%- else %}
<|{{ message.role | upper }}|>{{ message.content.rstrip() }}
    {% if loop.nextitem is defined %}{{ loop.nextitem.role[:4] }}{% endif %}
{% endif %}
{%- endfor %}
{{ messages | map(attribute='role') | join(', ') }} {{ messages | length }}
{{ {'b': [1, none, true], 'a': '</script>'} | tojson(sort_keys=true, separators=(',', ':')) }}
{{- '<|assistant|>' if add_generation_prompt }}
"""


def theirs(source: str, messages: list[dict[str, str]]) -> str:
    (rendered,), _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, **TOKENS
    )
    return str(rendered)


def ours(source: str, messages: list[dict[str, str]]) -> str:
    return ChatTemplate(source, name="m", tokens=TOKENS).render(messages)


# The template shows no answer, or only a part of one.
HIDING = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
CUTTING = "{% for message in messages %}{{ message.content[:8] }}{% endfor %}"
REPEATING = (
    "{% for message in messages %}{{ message.content }}|{% endfor %}{{ messages[-1].content }}"
)


@pytest.mark.parametrize(
    "end", ["Yes é", "Yes \n", " ", "", "<think>easy</think>\n\nYes", "{{ 1 }}"]
)
@pytest.mark.parametrize(
    "source",
    [CHATML, LLAMA_2, LLAMA_3, REASONING, HIDING, CUTTING, REPEATING],
    ids=["chatml", "llama-2", "llama-3", "cot", "hiding", "cutting", "repeating"],
)
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_the_final_message_is_continued_as_by_transformers(
    source: str, end: str, role: str
) -> None:
    before = [USER, ANSWER, MORE] if role == "assistant" else [USER, ANSWER]
    messages = [*before, {"role": role, "content": end}]
    template = ChatTemplate(source, name="m", tokens=TOKENS)
    try:
        (expected,), _ = render_jinja_template(
            conversations=[messages], chat_template=source, continue_final_message=True, **TOKENS
        )
    except ValueError:
        with pytest.raises(ValidationError, match="does not show the end of the final message"):
            template.render(messages, continue_final_message=True)
    else:
        assert template.render(messages, continue_final_message=True) == expected
    finally:
        template.close()


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=len)
@pytest.mark.parametrize("source", [CHATML, LLAMA_2, REASONING], ids=["chatml", "llama-2", "cot"])
def test_a_conversation_is_rendered_as_by_transformers(
    source: str, messages: list[dict[str, str]]
) -> None:
    assert ours(source, messages) == theirs(source, messages)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=len)
def test_a_template_with_todays_date(messages: list[dict[str, str]]) -> None:
    before = theirs(LLAMA_3, messages)
    rendered = ours(LLAMA_3, messages)
    assert rendered in (before, theirs(LLAMA_3, messages))  # midnight may lie between them
    assert re.search(r"Today Date: \d\d \w+ \d{4}\n", rendered)


def test_what_a_template_refuses_is_refused_in_its_words() -> None:
    first = {"role": "assistant", "content": "Hello"}
    with pytest.raises(Exception, match="Roles must alternate"):
        theirs(LLAMA_2, [first, USER])
    with pytest.raises(ValidationError, match="Roles must alternate user/assistant/user"):
        ours(LLAMA_2, [first, USER])


def test_messages_of_one_role_are_one_where_a_template_refuses_two() -> None:
    both = {"role": "user", "content": f"{USER['content']}\n\n{MORE['content']}"}
    with pytest.raises(Exception, match="Roles must alternate"):
        theirs(LLAMA_2, [USER, MORE])
    assert ours(LLAMA_2, [USER, MORE]) == theirs(LLAMA_2, [both])
