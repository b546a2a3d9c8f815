"""LangChain's standard tests of its chat models and embeddings, on the server at ``SERVER_URL``.

Not a test of pytest's in this project: `tests.conformance` runs it in an environment of its own.
"""

import os
from typing import Any, ClassVar

from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

_URL = os.environ["SERVER_URL"]
_OPENAI = {"base_url": f"{_URL}/v1", "api_key": "none", "max_retries": 0}


class TestChatOpenAI(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params: ClassVar[dict[str, Any]] = {"model": "chat", "stream_usage": True, **_OPENAI}
    supports_json_mode = True
    supports_anthropic_inputs = False
    model_override_value = "other"


class TestChatOpenAIResponses(TestChatOpenAI):
    chat_model_params: ClassVar[dict[str, Any]] = {
        **TestChatOpenAI.chat_model_params,
        "use_responses_api": True,
    }


class TestChatAnthropic(ChatModelIntegrationTests):
    chat_model_class = ChatAnthropic
    chat_model_params: ClassVar[dict[str, Any]] = {
        "model": "chat",
        "base_url": _URL,
        "api_key": "none",
        "max_retries": 0,
    }
    supports_anthropic_inputs = False  # its messages have an image
    model_override_value = "other"


class TestChatOllama(ChatModelIntegrationTests):
    chat_model_class = ChatOllama
    chat_model_params: ClassVar[dict[str, Any]] = {"model": "chat", "base_url": _URL}
    has_tool_choice = False  # as Ollama
    supports_json_mode = True
    model_override_value = "other"


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        # With the check, token ids of OpenAI's own tokenizer would be sent.
        return {"model": "embed", "check_embedding_ctx_length": False, **_OPENAI}
