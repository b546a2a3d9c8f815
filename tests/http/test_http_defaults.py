"""A model's own defaults on every route: they apply where a request leaves a field out."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.chat_bundles import make_chat_bundle, set_defaults
from tests.http.conftest import CHAT_TEMPLATE

PROMPT = "Once upon a time there was a"
MESSAGES = [{"role": "user", "content": "Where does the king live?"}]
# Of the likeliest token alone: texts can be compared on routes without a seed, too.
DEFAULTS = {"top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 7}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The causal starter with a chat template and defaults that show."""
    folder = make_chat_bundle(tmp_path_factory.mktemp("bundles") / "chat", CHAT_TEMPLATE)
    set_defaults(folder, **DEFAULTS)
    return folder


@pytest.fixture(scope="module", params=["auto", "off"])
def served(
    request: pytest.FixtureRequest, start_server: Callable[..., Any], bundle: Path
) -> Iterator[httpx.Client]:
    server = start_server(models={"chat": bundle}, generation_config=request.param)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.headers["x-defaults"] = request.param
        yield client
    server.stop()


def post(served: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    reply = served.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_of(reply: Any) -> str:
    """The text in a reply of any dialect."""
    match reply:
        case {"generated_text": text}:
            return str(text)
        case [{"generated_text": text}]:
            return str(text)
        case {"choices": [{"text": text}]}:
            return str(text)
        case {"choices": [{"message": {"content": text}}]}:
            return str(text)
        case {"output": [{"content": [{"text": text}]}]}:
            return str(text)
        case {"content": [{"text": text}]}:
            return str(text)
    raise AssertionError(reply)


BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": PROMPT},
    "/models/chat": {"inputs": PROMPT},
    "/v1/completions": {"model": "chat", "prompt": PROMPT},
    "/v1/chat/completions": {"model": "chat", "messages": MESSAGES},
    "/v1/responses": {"model": "chat", "input": MESSAGES},
    "/v1/messages": {"model": "chat", "messages": MESSAGES, "max_tokens": 7},
}
# How each says what the defaults say.
SAID = {"top_k": 1, "repetition_penalty": 1.3}
SPELLED: dict[str, dict[str, Any]] = {
    "/generate": {"parameters": SAID | {"max_new_tokens": 7}},
    "/models/chat": {"parameters": SAID | {"max_new_tokens": 7}},
    "/v1/completions": SAID | {"max_tokens": 7},
    "/v1/chat/completions": SAID | {"max_tokens": 7},
    "/v1/responses": SAID | {"max_output_tokens": 7},
}


@pytest.mark.parametrize("path", SPELLED)
def test_a_request_that_says_nothing_gets_the_models_defaults(
    served: httpx.Client, path: str
) -> None:
    said = text_of(post(served, path, BODIES[path] | SPELLED[path]))
    unsaid = text_of(post(served, path, BODIES[path]))
    assert (unsaid == said) == (served.headers["x-defaults"] == "auto")


def test_anthropic_clients_cannot_say_it_but_get_it(served: httpx.Client) -> None:
    replies = [post(served, "/v1/messages", BODIES["/v1/messages"]) for _ in range(3)]
    chat = "/v1/chat/completions"
    said = text_of(post(served, chat, BODIES[chat] | SPELLED[chat]))
    same = [[each["text"] for each in reply["content"]] == [said] for reply in replies]
    assert all(same) == (served.headers["x-defaults"] == "auto")


def test_what_a_request_says_wins(served: httpx.Client) -> None:
    body = {"inputs": PROMPT, "parameters": {"details": True, "max_new_tokens": 9}}
    details = post(served, "/generate", body)["details"]
    assert details["generated_tokens"] == 9
    plain = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 30}
    greedy = post(served, "/generate", {"inputs": PROMPT, "parameters": plain})
    cold = {"temperature": 0, "repetition_penalty": 1.0, "max_tokens": 30}
    assert text_of(post(served, "/v1/completions", {"prompt": PROMPT} | cold)) == text_of(greedy)
    # Sampling that is turned off stays off; penalties do not sample, so they stay on.
    parameters = {"do_sample": False, "details": True}
    off = post(served, "/generate", {"inputs": PROMPT, "parameters": parameters})
    assert off["details"]["seed"] is None


def test_the_defaults_are_shown(served: httpx.Client) -> None:
    (model,) = served.get("/info").json()["models"]
    shown = model["generation_defaults"]
    neutral = {
        "do_sample": False,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": None,
    }
    own = {"do_sample": True} | DEFAULTS if served.headers["x-defaults"] == "auto" else {}
    assert shown == neutral | own
    assert model["chat"] is True
    response = post(served, "/v1/responses", BODIES["/v1/responses"] | {"max_output_tokens": 1})
    assert (response["temperature"], response["top_p"]) == (1.0, 1.0)


@pytest.mark.slow
def test_the_starters_tell_stories_that_do_not_go_round_in_circles(
    start_server: Callable[..., Any],
) -> None:
    prompts = json.loads((Path(__file__).parents[1] / "data" / "stories.json").read_text())
    server = start_server(models={"hybrid": STARTER_FOLDER / "hybrid"}, generation_config="auto")
    with httpx.Client(base_url=server.url, timeout=120) as client:
        parameters = {"max_new_tokens": 150, "seed": 0, "details": True}
        stories = post(client, "/generate", {"inputs": prompts, "parameters": parameters})
    server.stop()
    assert len(stories) == 40
    for story in stories:
        words = story["generated_text"].lower().split()
        grams = Counter(tuple(words[i : i + 4]) for i in range(len(words) - 3))
        assert max(grams.values()) <= 3, story["generated_text"]
        assert "[MASK]" not in story["generated_text"]
        assert all(token["id"] != 1 for token in story["details"]["tokens"])
