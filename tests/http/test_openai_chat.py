"""`/v1/chat/completions`: the SDK and InferenceClient, unmodified, answered as by `/generate`."""

import asyncio
import json
from typing import Any, Literal

import httpx
import huggingface_hub
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me of a king."},
]
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


def native(http: httpx.Client, **parameters: Any) -> Any:
    """What `/generate` answers."""
    body = {"model": "chat", "messages": MESSAGES, "parameters": {"details": True} | parameters}
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> Any:
    reply = http.post(path, json={"model": "chat", "messages": MESSAGES} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events_of(http: httpx.Client, **body: Any) -> list[Any]:
    body = {"model": "chat", "messages": MESSAGES, "stream": True} | body
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        lines = [line for line in reply.iter_lines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_an_answer_is_what_generate_writes(
    openai_client: openai.OpenAI, openai_http: httpx.Client
) -> None:
    expected = native(openai_http, max_new_tokens=12, **SAMPLING)
    reply = openai_client.chat.completions.create(
        model="chat", messages=MESSAGES, max_completion_tokens=12, **SAMPLING
    )
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected["generated_text"]
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == expected["details"]["input_length"]
    assert reply.usage.completion_tokens == 12
    older = chat(openai_http, max_tokens=12, **SAMPLING)
    assert older["choices"][0]["message"]["content"] == choice.message.content


def test_messages_take_every_form_of_text(openai_http: httpx.Client) -> None:
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
    expected = chat(openai_http, **body)["usage"]["prompt_tokens"]
    parts = [{"type": "text", "text": "Tell me of a king."}]
    for messages in (
        [{"role": "developer", "content": "You tell stories."}, MESSAGES[1]],
        [MESSAGES[0], {"role": "user", "content": parts, "name": "Ann"}],
        [
            {
                **MESSAGES[0],
                "tool_calls": [],
                "refusal": None,
                "annotations": [],
                "provider_specific_fields": {"a": 1},
            },
            MESSAGES[1],
        ],
    ):
        assert chat(openai_http, messages=messages, **body)["usage"]["prompt_tokens"] == expected


def test_without_a_limit_an_answer_may_fill_the_context(openai_http: httpx.Client) -> None:
    reply = chat(openai_http, ignore_eos=True, temperature=0)
    assert reply["usage"]["total_tokens"] == 512
    assert reply["choices"][0]["finish_reason"] == "length"


def test_the_stream_helper_of_the_sdk(
    openai_client: openai.OpenAI, openai_http: httpx.Client
) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, **SAMPLING}
    expected = chat(openai_http, **body)
    with openai_client.chat.completions.stream(
        model="chat", messages=MESSAGES, stream_options={"include_usage": True}, **body
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    (choice,) = final.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected["choices"][0]["message"]["content"]
    assert choice.finish_reason == expected["choices"][0]["finish_reason"]
    assert choice.logprobs is not None
    assert choice.logprobs.model_dump() == expected["choices"][0]["logprobs"]
    assert final.usage is not None
    assert final.usage.completion_tokens == expected["usage"]["completion_tokens"]


def test_chunks_carry_the_role_with_the_first_text(openai_http: httpx.Client) -> None:
    events = events_of(openai_http, max_tokens=5, temperature=0)
    assert len(events) == 5, "one for each token"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    expected = chat(openai_http, max_tokens=5, temperature=0)["choices"][0]["message"]["content"]
    assert "".join(delta["content"] for delta in deltas) == expected


def test_usage_on_every_chunk(openai_http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = events_of(openai_http, max_tokens=3, temperature=0, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert (last["choices"], last["usage"]) == ([], events[-1]["usage"])


@pytest.mark.parametrize("n", [2, 12])
def test_several_answers_whole_and_streamed(
    openai_client: openai.OpenAI, openai_http: httpx.Client, n: int
) -> None:
    """Also more of them than run at once."""
    body: dict[str, Any] = {"max_tokens": 8, "n": n, **SAMPLING}
    expected = [
        each["generated_text"] for each in native(openai_http, max_new_tokens=8, n=n, **SAMPLING)
    ]
    reply = chat(openai_http, **body)
    assert [each["message"]["content"] for each in reply["choices"]] == expected
    with openai_client.chat.completions.stream(model="chat", messages=MESSAGES, **body) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot
    assert [choice.index for choice in final.choices] == list(range(n))
    assert [choice.message.content for choice in final.choices] == expected
    assert {choice.message.role for choice in final.choices} == {"assistant"}
    reasons = [each["finish_reason"] for each in reply["choices"]]
    assert [choice.finish_reason for choice in final.choices] == reasons


def test_log_probabilities(openai_http: httpx.Client) -> None:
    details = native(openai_http, max_new_tokens=6, top_n_tokens=3)["details"]
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    content = chat(openai_http, **body)["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == [each["logprob"] for each in details["tokens"]]
    for token in content:
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
        top = token["top_logprobs"]
        assert len(top) == 3
        assert top[0] == {key: token[key] for key in ("token", "logprob", "bytes")}
    plain = chat(openai_http, max_tokens=6, temperature=0, logprobs=True)
    assert all(t["top_logprobs"] == [] for t in plain["choices"][0]["logprobs"]["content"])


class Weather(BaseModel):
    """What the model has to write."""

    city: Literal["Paris", "Rome"]
    warm: bool


def test_parse_with_a_pydantic_model(openai_client: openai.OpenAI) -> None:
    for seed in range(3):
        reply = openai_client.chat.completions.parse(
            model="chat", messages=MESSAGES, response_format=Weather, seed=seed
        )
        assert isinstance(reply.choices[0].message.parsed, Weather)
        assert reply.choices[0].finish_reason == "stop"
    with openai_client.chat.completions.stream(
        model="chat", messages=MESSAGES, response_format=Weather, seed=1
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with pytest.raises(openai.LengthFinishReasonError):
        openai_client.chat.completions.parse(
            model="chat", messages=MESSAGES, response_format=Weather, max_tokens=2
        )


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
    ],
)
def test_schemas(openai_http: httpx.Client, response_format: dict[str, Any]) -> None:
    reply = chat(openai_http, response_format=response_format)
    assert json.loads(reply["choices"][0]["message"]["content"])["a"] in (1, 2)


@pytest.mark.slow
def test_any_json_object(openai_http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "logit_bias": {},
    }
    for seed in range(4):
        content = chat(openai_http, **body, seed=seed)["choices"][0]
        if content["finish_reason"] == "stop":
            assert isinstance(json.loads(content["message"]["content"]), dict)
        assert content["message"]["content"].startswith("{")
    text = chat(openai_http, response_format={"type": "text"}, temperature=0, max_tokens=5)
    assert text["choices"][0] == chat(openai_http, temperature=0, max_tokens=5)["choices"][0]


@pytest.mark.slow
def test_64_at_once(openai_server: Any, openai_http: httpx.Client) -> None:
    expected = [
        native(openai_http, max_new_tokens=8, temperature=0.8, seed=seed)["generated_text"]
        for seed in range(64)
    ]

    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(
            base_url=f"{openai_server.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:

            async def ask(seed: int) -> str | None:
                options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8, "seed": seed}
                if seed % 2:
                    reply = await client.chat.completions.create(
                        model="chat", messages=MESSAGES, **options
                    )
                    return str(reply.choices[0].message.content)
                async with client.chat.completions.stream(
                    model="chat", messages=MESSAGES, **options
                ) as stream:
                    await stream.until_done()
                content = stream.current_completion_snapshot.choices[0].message.content
                return None if content is None else str(content)

            return await asyncio.gather(*map(ask, range(64)))

    assert asyncio.run(ask_all()) == expected


def test_inference_client(openai_server: Any, openai_http: httpx.Client) -> None:
    body: dict[str, Any] = {"max_tokens": 10, **SAMPLING}
    expected = chat(openai_http, **body)["choices"][0]["message"]["content"]
    # It appends the route to the URL, and names the model "dummy".
    client = huggingface_hub.InferenceClient(model=f"{openai_server.url}/models/chat")
    messages: list[Any] = [*MESSAGES]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    reply = client.chat_completion(messages, **body)
    assert reply.choices[0].message.content == expected
    assert reply.usage.completion_tokens == 10
    chunks = list(client.chat_completion(messages, stream=True, **body))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    formatted = client.chat_completion(messages, response_format=schema)
    assert json.loads(formatted.choices[0].message.content or "")["a"] in (1, 2)
    detailed = client.chat_completion(messages, logprobs=True, top_logprobs=2, **body)
    assert detailed.choices[0].logprobs is not None


def test_the_path_names_the_model(openai_http: httpx.Client) -> None:
    path = "/models/chat/v1/chat/completions"
    body: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    expected = chat(openai_http, **body)["choices"]
    assert chat(openai_http, path, model="dummy", **body)["choices"] == expected
    assert chat(openai_http, path, model=None, **body)["choices"] == expected


def test_predicted_outputs(openai_client: openai.OpenAI, openai_http: httpx.Client) -> None:
    """The answer is the same; the counts say how much of the prediction is in it."""
    (expected,) = chat(openai_http, max_tokens=30, **SAMPLING)["choices"]
    text = expected["message"]["content"]
    words = text.split(" ")
    changed = " ".join([*words[:6], "something else", *words[6:]])
    counts: dict[str, Any] = {}
    for name, prediction in (("same", text), ("changed", changed), ("other", "1 2 3 4 5 6 7 8")):
        reply = openai_client.chat.completions.create(
            model="chat",
            messages=MESSAGES,
            max_completion_tokens=30,
            prediction={"type": "content", "content": prediction},
            **SAMPLING,
        )
        assert reply.choices[0].message.content == text
        assert reply.usage is not None
        details = reply.usage.completion_tokens_details
        assert details is not None
        counts[name] = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    # What was drawn may be other tokens than those that the tokenizer makes of its text.
    same, edited, other = counts["same"], counts["changed"], counts["other"]
    assert same[0] >= 15
    assert same[1] <= 15
    assert 8 <= edited[0] <= same[0]
    assert edited[1] > same[1]
    assert other[0] == 0
    assert other[1] > 0
    parts = [{"type": "text", "text": changed}]
    *_, last = events_of(
        openai_http,
        max_tokens=30,
        prediction={"type": "content", "content": parts},
        stream_options={"include_usage": True},
        **SAMPLING,
    )
    streamed = last["usage"]["completion_tokens_details"]
    assert streamed == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": counts["changed"][0],
        "rejected_prediction_tokens": counts["changed"][1],
    }
