"""A text asked for in every dialect that writes, whole and streamed, and read from its replies."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

Read = Callable[[Any], str]


@dataclass(frozen=True)
class Way:
    """One dialect's way to have a prompt continued, or a conversation answered.

    Attributes:
        route: with ``{model}`` for its name.
        body: of a prompt, and a number of tokens.
        whole: the text of a reply.
        part: what an event of a stream adds.
        streamed: what the body says to have it streamed; None: the route ends in ``_stream``.
        chats: whether the prompt is a user's message.
        seed: where the body has the seed; empty if it has none.
    """

    route: str
    body: Callable[[str, int], dict[str, Any]]
    whole: Read
    part: Read
    streamed: Mapping[str, Any] | None
    chats: bool = False
    seed: tuple[str, ...] = ("seed",)

    def ask(
        self,
        http: httpx.Client,
        model: str,
        prompt: str,
        num_tokens: int,
        seed: int | None = None,
    ) -> str:
        """The text of the whole reply."""
        reply = http.post(self._path(model), json=self._body(model, prompt, num_tokens, seed))
        assert reply.status_code == 200, (self.route, reply.text)
        return self.whole(reply.json())

    def stream(
        self,
        http: httpx.Client,
        model: str,
        prompt: str,
        num_tokens: int,
        seed: int | None = None,
    ) -> str:
        """The text of the events."""
        path, body = self._path(model), self._body(model, prompt, num_tokens, seed)
        if self.streamed is None:
            path += "_stream"
        else:
            body |= self.streamed
        reply = http.post(path, json=body)
        assert reply.status_code == 200, (self.route, reply.text)
        lines = (line.removeprefix("data:").strip() for line in reply.text.splitlines())
        events = [json.loads(line) for line in lines if line.startswith("{")]
        assert len(events) > 1, "the reply is streamed"
        return "".join(map(self.part, events))

    def _path(self, model: str) -> str:
        return self.route.format(model=model)

    def _body(self, model: str, prompt: str, num_tokens: int, seed: int | None) -> dict[str, Any]:
        body = self.body(prompt, num_tokens)
        if seed is not None and self.seed:
            *places, last = self.seed
            within = body
            for place in places:
                within = within[place]
            within[last] = seed
        return body if "{model}" in self.route else {"model": model, **body}


def user(prompt: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": prompt}]


def _choice(reply: Any) -> Any:
    return reply["choices"][0] if reply["choices"] else {"text": "", "delta": {}}


def _cohere_part(event: Any) -> str:
    if event["type"] != "content-delta":
        return ""
    return str(event["delta"]["message"]["content"]["text"])


WAYS = {
    "openai": Way(
        "/v1/completions",
        lambda prompt, n: {"prompt": prompt, "max_tokens": n},
        lambda reply: str(_choice(reply)["text"]),
        lambda event: str(_choice(event)["text"]),
        {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "llama.cpp": Way(
        "/completion",
        lambda prompt, n: {"prompt": prompt, "n_predict": n},
        lambda reply: str(reply["content"]),
        lambda event: str(event["content"]),
        {"stream": True},
    ),
    "ollama": Way(
        "/api/generate",
        lambda prompt, n: {
            "prompt": prompt,
            "raw": True,
            "options": {"num_predict": n},
            "stream": False,
        },
        lambda reply: str(reply["response"]),
        lambda event: str(event["response"]),
        {"stream": True},
        seed=("options", "seed"),
    ),
    "kserve": Way(
        "/v2/models/{model}/generate",
        lambda prompt, n: {"text_input": prompt, "parameters": {"max_new_tokens": n}},
        lambda reply: str(reply["text_output"]),
        lambda event: str(event["text_output"]),
        None,
        seed=("parameters", "seed"),
    ),
    "kserve tensors": Way(
        "/v2/models/{model}/infer",
        lambda prompt, n: {
            "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [prompt]}],
            "parameters": {"max_new_tokens": n},
        },
        lambda reply: str(reply["outputs"][0]["data"][0]),
        str,
        None,
        seed=("parameters", "seed"),
    ),
    "openai chat": Way(
        "/v1/chat/completions",
        lambda prompt, n: {"messages": user(prompt), "max_tokens": n},
        lambda reply: str(_choice(reply)["message"]["content"]),
        lambda event: str(_choice(event)["delta"].get("content") or ""),
        {"stream": True, "stream_options": {"include_usage": True}},
        chats=True,
    ),
    "responses": Way(
        "/v1/responses",
        lambda prompt, n: {"input": prompt, "max_output_tokens": n},
        lambda reply: str(reply["output"][0]["content"][0]["text"]),
        lambda event: str(event["delta"]) if event["type"] == "response.output_text.delta" else "",
        {"stream": True},
        chats=True,
        seed=(),
    ),
    "anthropic": Way(
        "/v1/messages",
        lambda prompt, n: {"messages": user(prompt), "max_tokens": n},
        lambda reply: str(reply["content"][0]["text"]),
        lambda event: str(event["delta"]["text"]) if event["type"] == "content_block_delta" else "",
        {"stream": True},
        chats=True,
        seed=(),
    ),
    "cohere": Way(
        "/v2/chat",
        lambda prompt, n: {"messages": user(prompt), "max_tokens": n},
        lambda reply: str(reply["message"]["content"][0]["text"]),
        _cohere_part,
        {"stream": True},
        chats=True,
    ),
    "ollama chat": Way(
        "/api/chat",
        lambda prompt, n: {
            "messages": user(prompt),
            "options": {"num_predict": n},
            "stream": False,
        },
        lambda reply: str(reply["message"]["content"]),
        lambda event: str(event["message"]["content"]),
        {"stream": True},
        chats=True,
        seed=("options", "seed"),
    ),
    "native chat": Way(
        "/generate",
        lambda prompt, n: {"messages": user(prompt), "parameters": {"max_new_tokens": n}},
        lambda reply: str(reply["generated_text"]),
        lambda event: str(event["token"]["text"]),
        None,
        chats=True,
        seed=("parameters", "seed"),
    ),
}
