"""Client and AsyncClient against a fake server: every test with ``driver`` runs on both."""

import asyncio
import inspect
import socket
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from maskdial_client import (
    ApiError,
    AsyncClient,
    Client,
    ConnectionFailedError,
    DeadlineError,
    ForbiddenError,
    GenerationError,
    Health,
    InferenceError,
    LabelScore,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    ResponseTimeoutError,
    RetryPolicy,
    StreamEndedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    ValidationError,
)


def test_fill_mask_returns_the_candidates_for_the_only_mask(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    result = driver.wait(client.fill_mask("Paris is the [MASK] of France.", top_k=2, model="m"))
    assert [(fill.token_str, fill.score) for fill in result.fills] == [
        ("capital", 0.5),
        ("heart", 0.25),
    ]
    assert result.fills[1].sequence == "Paris is the heart of France."
    assert fake.bodies == [
        {"inputs": "Paris is the [MASK] of France.", "parameters": {"top_k": 2}, "model": "m"}
    ]


def test_fill_mask_batch_may_mix_one_mask_and_several(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    one, two = driver.wait(client.fill_mask(["A [MASK].", "A [MASK], a [MASK]."], targets=None))
    assert (len(one.masks), len(two.masks)) == (1, 2)
    with pytest.raises(ValueError, match="2 masks"):
        _ = two.fills
    assert fake.bodies == [{"inputs": ["A [MASK].", "A [MASK], a [MASK]."]}]


def test_classify_takes_texts_pairs_and_batches(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    single = driver.wait(client.classify("Good.", function_to_apply="sigmoid"))
    assert single.labels == (LabelScore("positive", 0.75), LabelScore("negative", 0.25))
    assert (single.label, single.score) == ("positive", 0.75)
    assert driver.wait(client.classify(("A man eats.", "Someone eats."))) == single
    assert driver.wait(client.classify(["Good.", ("a", "b")])) == [single, single]
    assert [body["inputs"] for body in fake.bodies] == [
        "Good.",
        {"text": "A man eats.", "text_pair": "Someone eats."},
        ["Good.", {"text": "a", "text_pair": "b"}],
    ]


def test_generate_returns_details_only_on_request(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    plain = driver.wait(client.generate("Once", max_new_tokens=1, stop=["\n"]))
    assert (plain.generated_text, plain.details) == (" there was", None)
    detailed = driver.wait(client.generate("Once", details=True))
    assert detailed.details.finish_reason == "length"
    assert detailed.details.prefill[0].logprob is None
    assert detailed.details.tokens[0].text == " there was"
    assert driver.wait(client.generate(["Once", "Twice"])) == [plain, plain]
    assert fake.bodies[0]["parameters"] == {"max_new_tokens": 1, "stop": ["\n"]}


def test_generate_answers_a_conversation(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    messages = [{"role": "user", "content": "Hi"}]
    result = driver.wait(client.generate(messages=messages, seed=1))
    assert result.generated_text == " there was"
    assert len(driver.read(client.stream(messages=messages))) == 3
    assert fake.bodies == [
        {"messages": messages, "parameters": {"seed": 1}},
        {"messages": messages, "stream": True},
    ]


def test_either_a_prompt_or_messages_is_required(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    for given in ({}, {"prompt": "Once", "messages": [{"role": "user", "content": "Hi"}]}):
        with pytest.raises(ValueError, match="pass either a prompt or messages"):
            driver.wait(client.generate(**given))
        with pytest.raises(ValueError, match="pass either a prompt or messages"):
            client.stream(**given)
    assert fake.bodies == []


def test_generate_returns_all_n_texts(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    result = driver.wait(client.generate("Once", n=3, details=True))
    assert result.texts == (" there was", " text 2", " text 3")
    assert [other.details.tokens[0].text for other in result.others] == [" text 2", " text 3"]
    batch = driver.wait(client.generate(["Once", "Twice"], n=2))
    assert [entry.texts for entry in batch] == [(" there was", " text 2")] * 2
    assert driver.wait(client.generate("Once")).texts == (" there was",)


def test_generate_returns_all_details(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    call = client.generate(
        "Once", details=True, best_of=2, top_n_tokens=2, decoder_input_details=True
    )
    details = driver.wait(call).details
    assert details.input_length == 1
    assert [[token.text for token in tokens] for tokens in details.top_tokens] == [
        [" there was", " is"]
    ]
    (other,) = details.best_of_sequences
    assert (other.generated_text, other.details.prefill) == (" is", details.prefill)
    assert other.details.best_of_sequences == ()


def test_request_options_are_fields_of_the_body(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    driver.wait(
        client.generate(
            "Once",
            deadline=2.5,
            priority=-1,
            cache_salt="me",
            logit_bias={7: 1.5},
            grammar={"type": "regex", "value": "a+"},
        )
    )
    driver.wait(client.fill_mask("[MASK]", deadline=1))
    driver.wait(client.classify("Good.", deadline=1))
    assert fake.bodies == [
        {
            "inputs": "Once",
            "parameters": {
                "logit_bias": {"7": 1.5},
                "grammar": {"type": "regex", "value": "a+"},
            },
            "timeout": 2.5,
            "priority": -1,
            "cache_salt": "me",
        },
        {"inputs": "[MASK]", "timeout": 1},
        {"inputs": "Good.", "timeout": 1},
    ]


def test_stream_yields_tokens_and_then_the_details(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    events = driver.read(client.stream("Once", max_new_tokens=3, seed=3))
    assert [event.text for event in events] == [" caf\u00e9", " ole", ""]
    assert [event.details is None for event in events] == [True, True, False]
    assert events[-1].generated_text == " caf\u00e9 ole"
    assert [event.top_tokens for event in events] == [(event.token,) for event in events]
    assert (events[-1].details.finish_reason, events[-1].details.seed) == ("eos_token", 3)
    assert fake.bodies[0]["stream"] is True


def test_leaving_a_loop_over_a_stream_closes_its_connection(driver: Any, fake: Any) -> None:
    fake.stream = "endless"
    client = driver.client(fake.url)
    assert len(driver.read(client.stream("Once"), count=1)) == 1
    if driver.is_async:  # the event loop closes the stream at its next turn, so it needs one
        driver.wait(client.health())
    assert fake.closed.wait(30)


def test_an_exception_inside_a_with_block_closes_the_stream(fake: Any) -> None:
    fake.stream = "endless"
    with Client(fake.url) as client:
        stream = client.stream("Once")

        def leave() -> None:
            with stream:
                assert next(stream).text == " caf\u00e9"
                assert stream.request_id == "r-7"
                raise KeyError

        with pytest.raises(KeyError):
            leave()
        assert fake.closed.wait(30)
        assert list(stream) == []


def test_an_exception_inside_an_async_with_block_closes_the_stream(fake: Any) -> None:
    fake.stream = "endless"

    async def leave(client: AsyncClient) -> None:
        async with client.stream("Once") as stream:
            await anext(stream)
            assert stream.request_id == "r-7"
            raise KeyError

    async def check() -> None:
        async with AsyncClient(fake.url) as client:
            with pytest.raises(KeyError):
                await leave(client)
            assert await asyncio.to_thread(fake.closed.wait, 30)

    asyncio.run(check())


def test_canceling_a_task_that_reads_a_stream_closes_it(fake: Any) -> None:
    fake.stream = "endless"

    async def cancel() -> None:
        async with AsyncClient(fake.url) as client:
            came = asyncio.Event()

            async def read() -> None:
                async for _ in client.stream("Once"):
                    came.set()

            task = asyncio.create_task(read())
            await came.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(fake.closed.wait, 30)

    asyncio.run(cancel())


def test_an_error_event_raises_after_the_tokens_before_it(driver: Any, fake: Any) -> None:
    fake.stream = "error"
    client = driver.client(fake.url)
    with pytest.raises(GenerationError, match="the step failed") as caught:
        driver.read(client.stream("Once"))
    assert (caught.value.status, caught.value.request_id) == (500, "r-7")
    assert len(driver.read(client.stream("Once"), count=1)) == 1
    assert len(fake.bodies) == 2


def test_a_stream_without_a_last_event_is_an_error(driver: Any, fake: Any) -> None:
    fake.stream = "cut"
    with pytest.raises(StreamEndedError):
        driver.read(driver.client(fake.url).stream("Once"))
    assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("status", "error_type", "expected"),
    [
        (422, "validation", ValidationError),
        (404, "not_found", NotFoundError),
        (401, "unauthorized", UnauthorizedError),
        (403, "forbidden", ForbiddenError),
        (413, "too_large", TooLargeError),
        (429, "overloaded", OverloadedError),
        (504, "timeout", DeadlineError),
        (503, "unavailable", UnavailableError),
        (500, "inference", InferenceError),
        (500, "generation", GenerationError),
        (418, "teapot", ApiError),
    ],
)
def test_every_error_type_has_its_class(
    driver: Any, fake: Any, status: int, error_type: str, expected: type[ApiError]
) -> None:
    fake.refuse(status, error_type, x_request_id="r-1", retry_after="2")
    client = driver.client(fake.url, retry=RetryPolicy(max_retries=0))
    with pytest.raises(ApiError, match=f"this is {error_type}") as caught:
        driver.wait(client.fill_mask("[MASK]"))
    error = caught.value
    assert type(error) is expected
    assert (error.status, error.error_type) == (status, error_type)
    assert (error.request_id, error.retry_after) == ("r-1", 2.0)


def test_the_status_decides_the_class_of_an_error_from_a_proxy(driver: Any, fake: Any) -> None:
    fake.queued.append(PlainTextResponse("upstream is away", 504))
    with pytest.raises(DeadlineError, match="HTTP 504: upstream is away"):
        driver.wait(driver.client(fake.url).classify("Good."))


def test_a_refused_request_is_retried_after_the_delay_the_server_gave(
    driver: Any, fake: Any
) -> None:
    fake.refuse(429, "overloaded", retry_after="2")
    fake.refuse(503, "unavailable")
    client = driver.client(fake.url, retry=RetryPolicy(first_delay=0.5, uniform=lambda: 1.0))
    assert driver.wait(client.generate("Once")).generated_text == " there was"
    assert driver.waits == [2.5, 1.0]
    assert len(fake.bodies) == 3


def test_retries_are_bounded_in_number_and_delay(driver: Any, fake: Any) -> None:
    for _ in range(3):
        fake.refuse(429, "overloaded", retry_after="1")
    client = driver.client(fake.url, retry=RetryPolicy(max_retries=2, uniform=lambda: 0.0))
    with pytest.raises(OverloadedError):
        driver.wait(client.generate("Once"))
    assert driver.waits == [1.0, 1.0]
    fake.refuse(503, "unavailable", retry_after="3600")
    with pytest.raises(UnavailableError):
        driver.wait(client.generate("Once"))
    assert len(driver.waits) == 2


def test_a_stream_is_retried_before_its_first_byte(driver: Any, fake: Any) -> None:
    fake.refuse(429, "overloaded", retry_after="1")
    events = driver.read(driver.client(fake.url).stream("Once"))
    assert (len(events), driver.waits, len(fake.bodies)) == (3, [1.0], 2)


def test_other_errors_are_not_retried(driver: Any, fake: Any) -> None:
    fake.refuse(500, "inference", retry_after="1")
    with pytest.raises(InferenceError):
        driver.wait(driver.client(fake.url).fill_mask("[MASK]"))
    assert (driver.waits, len(fake.bodies)) == ([], 1)


def test_models_info_and_health(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    (model,) = driver.wait(client.models())
    assert (model.name, model.tasks, model.max_length) == ("story", ("generate",), 512)
    assert (model.state, model.reason) == ("ready", "")
    info = driver.wait(client.info())
    assert (info.version, info.limits, info.models) == ("0.1.0", {"slots": 8}, (model,))
    assert driver.wait(client.health()) == Health(True, "ready", ())
    fake.ready = False
    assert driver.wait(client.health()) == Health(False, "engine down", ("story",))
    assert driver.waits == []


def test_the_api_key_is_sent_as_a_bearer_token(driver: Any, fake: Any) -> None:
    driver.wait(driver.client(fake.url, api_key="sesame").generate("Once"))
    driver.wait(driver.client(fake.url).generate("Once"))
    assert fake.headers[0]["authorization"] == "Bearer sesame"
    assert "authorization" not in fake.headers[1]


def test_connecting_without_a_server_fails(driver: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        client = driver.client(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConnectionFailedError, match="could not connect to http://127"):
            driver.wait(client.generate("Once"))
        with pytest.raises(ConnectionFailedError):
            driver.read(client.stream("Once"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://localhost", "http://localhost:http", ""])
def test_an_invalid_url_is_reported(driver: Any, url: str) -> None:
    def ask() -> Any:
        return driver.wait(driver.client(url).health())

    with pytest.raises(ConnectionFailedError, match="not an http:// or https:// URL"):
        ask()


def test_no_data_within_the_timeout_is_an_error(driver: Any, fake: Any) -> None:
    fake.stream = "endless"
    client = driver.client(fake.url)
    with pytest.raises(ResponseTimeoutError):
        driver.read(client.stream("Once", timeout=0.5))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = driver.client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.5)
        with pytest.raises(ResponseTimeoutError):
            driver.wait(client.generate("Once"))


@pytest.mark.parametrize(
    ("content", "call"),
    [
        ({"generated_text": None, "details": 3}, lambda client: client.generate("Once")),
        ([], lambda client: client.generate("Once")),
        ([], lambda client: client.fill_mask("[MASK]")),
        ([[]], lambda client: client.fill_mask(["[MASK]", "[MASK]"])),
        ([{"label": "x"}], lambda client: client.classify("Good.")),
        ([], lambda client: client.classify("Good.")),
    ],
)
def test_an_unexpected_reply_is_a_protocol_error(
    driver: Any, fake: Any, content: Any, call: Callable[[Any], Any]
) -> None:
    fake.queued.append(JSONResponse(content))
    with pytest.raises(ProtocolError, match="is this a maskdial server"):
        driver.wait(call(driver.client(fake.url)))


def test_nan_is_rejected_before_anything_is_sent(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    with pytest.raises(ValueError, match="JSON"):
        driver.wait(client.generate("Once", temperature=float("nan")))
    assert fake.bodies == []


def test_both_clients_have_the_same_methods() -> None:
    def surface(client: type) -> dict[str, list[str]]:
        return {
            name.replace("aclose", "close"): list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_")
        }

    assert surface(Client) == surface(AsyncClient)
    assert {"generate", "embed", "close"} <= surface(Client).keys()
