"""`maskdial.Model` in this process gives the floats of a server on a port, without one."""

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial import AsyncModel, Model
from maskdial.errors import BundleError, ConfigError, UnavailableError, ValidationError
from maskdial.local.window import CHUNK, WIDTH

PROMPTS = ["Once upon a time", "The old king lived in a", "She opened the door and"]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.fixture(scope="module")
def hybrid_model() -> Iterator[Model]:
    with Model("hybrid", generation_config="off", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def sentiment() -> Iterator[Model]:
    with Model("sentiment", threads=1) as model:
        yield model


@pytest.fixture
def post(openai_http: httpx.Client) -> Callable[..., Any]:
    def send(path: str, **body: Any) -> Any:
        reply = openai_http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    return send


def as_json(answers: Any) -> Any:
    return [
        as_json(each) if isinstance(each, list) else dataclasses.asdict(each) for each in answers
    ]


def test_classifies_as_the_server_does(sentiment: Model, post: Callable[..., Any]) -> None:
    texts = [f"A {word} film." * (1 + index) for index, word in enumerate(("dull", "fine", "odd"))]
    found = as_json(sentiment.classify(texts))
    assert found == post("/classify", inputs=texts)
    assert as_json(sentiment.classify(texts[:1], function_to_apply="none", top_k=1)) == post(
        "/classify", inputs=texts[:1], parameters={"function_to_apply": "none", "top_k": 1}
    )


def test_writes_by_unmasking_as_the_server_does(post: Callable[..., Any]) -> None:
    parameters = {"max_new_tokens": 8, "details": True}
    expected = post("/generate", model="hybrid:full", inputs=PROMPTS, parameters=parameters)
    with Model("hybrid", mask="full", threads=1) as model:
        found = model.generate(PROMPTS, max_new_tokens=8)
    for text, reply in zip(found, expected, strict=True):
        assert text.text == reply["generated_text"]
        tokens = reply["details"]["tokens"]
        assert list(text.token_ids) == [token["id"] for token in tokens]
        assert list(text.logprobs) == [token["logprob"] for token in tokens]


def test_fills_and_scores_as_the_server_does(hybrid_model: Model, post: Callable[..., Any]) -> None:
    texts = ["The [MASK] barked.", "A [MASK] and a <mask> in the sea."]
    found = as_json(hybrid_model.fill_mask(texts, top_k=3))
    expected = post("/fill-mask", inputs=texts, parameters={"top_k": 3})
    assert [found[0][0], found[1]] == expected
    scores = hybrid_model.score(PROMPTS)
    for score, reply in zip(
        scores, post("/score", model="hybrid", inputs=PROMPTS, mask="causal"), strict=True
    ):
        assert score.log_likelihood == reply["log_likelihood"]
        assert [each.logprob for each in score.tokens] == [
            each["logprob"] for each in reply["tokens"]
        ]


@pytest.mark.parametrize(
    "parameters",
    [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.1, "stop": ["."]}],
    ids=["greedy", "sampled"],
)
def test_generates_as_the_server_does(
    hybrid_model: Model, post: Callable[..., Any], parameters: dict[str, Any]
) -> None:
    found = hybrid_model.generate(PROMPTS, max_new_tokens=12, **parameters)
    sent = {"max_new_tokens": 12, "details": True, **parameters}
    for text, reply in zip(
        found, post("/generate", model="hybrid", inputs=PROMPTS, parameters=sent), strict=True
    ):
        assert text.text == reply["generated_text"]
        assert text.finish_reason == reply["details"]["finish_reason"]
        tokens = reply["details"]["tokens"]
        assert text.token_ids == tuple(token["id"] for token in tokens)
        assert text.logprobs == tuple(token["logprob"] for token in tokens)
        assert text.seed == reply["details"]["seed"]


def test_chats_and_keeps_to_schemas_as_the_server_does(
    chat_bundle: Path, post: Callable[..., Any]
) -> None:
    messages = [{"role": "user", "content": "Who lives here?"}]
    with Model(chat_bundle, generation_config="off", threads=1) as model:
        reply = model.chat(messages, max_new_tokens=9, seed=3, temperature=0.7)
        (text,) = model.generate(PROMPTS[:1], schema=SCHEMA, max_new_tokens=40)
    chosen = post(
        "/v1/chat/completions",
        model="chat",
        messages=messages,
        max_tokens=9,
        seed=3,
        temperature=0.7,
    )["choices"][0]
    assert reply.content == chosen["message"]["content"]
    assert reply.finish_reason == chosen["finish_reason"]
    grammar = {"type": "json", "value": SCHEMA}
    assert (
        text.text
        == post(
            "/generate",
            model="chat",
            inputs=PROMPTS[0],
            parameters={"grammar": grammar, "max_new_tokens": 40},
        )["generated_text"]
    )


def test_a_stream_is_answered_in_order_and_read_ahead_by_a_bounded_window(
    sentiment: Model,
) -> None:
    num_read = 0

    def texts() -> Iterator[str]:
        nonlocal num_read
        for number in count():
            num_read += 1
            yield f"Number {number} is fine." * (1 + number % 3)

    classify = partial(sentiment.classify, top_k=1)
    answers = sentiment.map(classify, texts())
    found = list(islice(answers, 2 * CHUNK))
    assert num_read <= (WIDTH + 3) * CHUNK
    answers.close()
    sample = list(islice(texts(), 2 * CHUNK))
    assert found == [sentiment.classify([text], top_k=1)[0] for text in sample]
    assert sentiment.classify(sample, top_k=1) == found  # more than a piece
    assert list(sentiment.map(classify, [])) == []


def test_in_an_event_loop() -> None:
    async def words() -> AsyncIterator[str]:
        for index in range(CHUNK + 1):
            yield f"word {index}"

    async def use() -> None:
        async with await AsyncModel.load("sentiment", threads=1) as model:
            found = [each async for each in model.map(model.classify, words())]
            assert found == await model.classify([f"word {index}" for index in range(CHUNK + 1)])
        with pytest.raises(UnavailableError):
            await model.classify(["late"])

    asyncio.run(use())


def test_refusals_name_the_item_and_the_parameter(sentiment: Model, hybrid_model: Model) -> None:
    long = "word " * 2000
    with pytest.raises(ValidationError, match=rf"^texts\[{CHUNK + 6}\]: the text has "):
        sentiment.classify(["fine"] * (CHUNK + 6) + [long])
    with pytest.raises(ValidationError, match=r"^temperature: must be between 0 and 100, not -1$"):
        hybrid_model.generate(["a"], temperature=-1)
    with pytest.raises(ValidationError, match="a text can match one of schema and regex only"):
        hybrid_model.generate(["a"], schema=SCHEMA, regex="a")
    with pytest.raises(TypeError, match="no parameter 'heat'"):
        hybrid_model.generate(["a"], heat=1)
    with pytest.raises(TypeError, match="a list of texts"):
        sentiment.classify("one text")
    with pytest.raises(ValidationError, match="cannot do embed; it does classify"):
        sentiment.embed(["a"])
    with pytest.raises(BundleError, match="there is no bundle 'absent'"):
        Model("absent")
    with pytest.raises(ConfigError, match="thread"):
        Model("sentiment", threds=1)


def test_needs_no_web_framework_and_ends_without_being_closed() -> None:
    program = (
        "import sys, maskdial; assert not {'numpy', 'onnxruntime'} & sys.modules.keys()\n"
        "model = maskdial.Model('sentiment')\n"
        "assert len(model.classify(['fine'])) == 1\n"
        "assert not {'fastapi', 'starlette', 'uvicorn'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
