"""A server with the models that ship, and one that speaks OpenAI's dialect."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.chat_bundles import make_chat_bundle


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    running = start_server()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def url(server: Any) -> str:
    return str(server.url)


@pytest.fixture(scope="session")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message.role + ': ' + message.content | trim + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant:' }}
{%- endif %}
"""


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The causal starter with a chat template."""
    return make_chat_bundle(tmp_path_factory.mktemp("bundles") / "chat", CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def openai_server(start_server: Callable[..., Any], chat_bundle: Path) -> Iterator[Any]:
    """A server of three models: one chats, one only continues texts, one classifies."""
    models = {
        "chat": chat_bundle,
        "hybrid": STARTER_FOLDER / "hybrid",
        "sentiment": STARTER_FOLDER / "sentiment",
    }
    running = start_server(models=models)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def openai_http(openai_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=openai_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def openai_client(openai_server: Any) -> Iterator[openai.OpenAI]:
    """The unmodified SDK."""
    with openai.OpenAI(
        base_url=f"{openai_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client
