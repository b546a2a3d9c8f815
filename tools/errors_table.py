"""Writes ``docs/errors.md``: every error of the server, from `maskdial.errors`.

    make format

A test fails when the page is out of date.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maskdial import errors
from maskdial.dialects.anthropic.errors import error_content as anthropic_content
from maskdial.dialects.openai.errors import error_content as openai_content
from maskdial.rpc.calls import CallError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
# https://grpc.io/docs/guides/status-codes/
_GRPC = {
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    16: "UNAUTHENTICATED",
}


@dataclass(frozen=True, slots=True)
class _Advice:
    """What a reader does about an error, and whether the same request may be sent again."""

    do: str
    retry: str


_AT_ONCE = "no"
_LATER = "yes, after `Retry-After` seconds"
_MAYBE = "yes, unless it must not run twice"
_REQUESTS: dict[type[errors.MaskdialError], _Advice] = {
    errors.ValidationError: _Advice("change the field that the sentence names", _AT_ONCE),
    errors.PromptTooLongError: _Advice(
        "shorten the prompt, or raise `--max-context` up to the model's own limit", _AT_ONCE
    ),
    errors.RefusedError: _Advice(
        "change the text, or the rule in the [policy](policies.md)", _AT_ONCE
    ),
    errors.UnauthorizedError: _Advice(
        "send `Authorization: Bearer KEY` or `x-api-key: KEY` ([keys](network.md#keys))", _AT_ONCE
    ),
    errors.ForbiddenError: _Advice(
        "have the operator set what the sentence names, such as `--admin-key`", _AT_ONCE
    ),
    errors.NotFoundError: _Advice(
        "compare the name with `GET /models`, the path with [routes](routes.md)", _AT_ONCE
    ),
    errors.SlowBodyError: _Advice(
        "send the body faster, or raise `--body-timeout`", "yes, on a faster connection"
    ),
    errors.TooLargeError: _Advice(
        "send fewer or shorter texts a request, or raise `--max-body-bytes` "
        "(431: shorter headers, or `--max-header-bytes`)",
        _AT_ONCE,
    ),
    errors.OverloadedError: _Advice(
        "send less at once; the sentence names the limit: `--max-queue`, "
        "`--max-requests-per-client`, `--max-tokens-per-minute`",
        _LATER,
    ),
    errors.UnavailableError: _Advice(
        "wait, or send it to another replica; if it stays, `GET /models` and the log say why",
        _LATER,
    ),
    errors.DeadlineError: _Advice(
        "ask for less, or raise `timeout` in the request or `--request-timeout`", _MAYBE
    ),
    errors.InferenceError: _Advice("search the log for the reply's `x-request-id`", _MAYBE),
    errors.GenerationError: _Advice("search the log for the reply's `x-request-id`", _MAYBE),
    errors.DeviceLostError: _Advice(
        "restart the server; with `--on-engine-failure exit` it ends, for an orchestrator to do so",
        _MAYBE,
    ),
    errors.InternalError: _Advice(
        "report the traceback in the log, found by the reply's `x-request-id`", _MAYBE
    ),
}
_AT_THE_START: dict[type[errors.MaskdialError], str] = {
    errors.ConfigError: "correct the flag, variable or key that the sentence names; "
    "see [settings](settings.md)",
    errors.BundleError: "[export the model again](upgrading.md), or correct the path",
    errors.CheckError: "try `--kernels off`; export again on this machine; `--golden-check warn` "
    "serves it nevertheless",
}
_INTRODUCTION = """# Errors and what to do

Generated from `server/maskdial/errors.py` by `make format`.

The server's own routes answer `{"error": "a sentence", "error_type": "..."}`. Routes of other \
projects answer in the form that those projects' clients expect. Every reply has the header \
`x-request-id`, by which the log can be searched.

Our [Python client](../clients/README.md) raises one class for each `error_type`, and retries 429 \
and 503 by itself.

## Replies

| HTTP | `error_type` | gRPC | what it means | what to do | send it again? |
|---|---|---|---|---|---|
"""
_DIALECTS = """
A validation error is a 400 on the routes of OpenAI, Anthropic, Ollama, Cohere and KServe, as \
their own servers answer it.

A stream that has begun has the status 200. Its last event is then the error.

A client that leaves is no error: metrics and log count its request as `cancelled`.

## By dialect

Ollama's errors are `{"error": "a sentence"}`, Cohere's `{"id": ..., "message": ...}`.

| `error_type` | OpenAI: `type` | OpenAI: `code` | Anthropic: `type` |
|---|---|---|---|
"""
_START = """
## At the start

These end `maskdial serve` with status 1 and one sentence, or leave a model in the state `failed`.

| | what it means | what to do |
|---|---|---|
"""


def page() -> str:
    """The whole page, as Markdown."""
    return "".join(
        [
            _INTRODUCTION,
            *(_reply(kind, advice) for kind, advice in _REQUESTS.items()),
            _DIALECTS,
            *(_dialects(kind) for kind in _REQUESTS),
            _START,
            *(f"| `{k.__name__}` | {_meaning(k)} | {do} |\n" for k, do in _AT_THE_START.items()),
        ]
    )


def known() -> set[type[errors.MaskdialError]]:
    """The errors that the page describes."""
    return {*_REQUESTS, *_AT_THE_START}


def all_errors() -> Iterator[type[errors.MaskdialError]]:
    """Every class of the tree, but for its root."""
    for _, each in inspect.getmembers(errors, inspect.isclass):
        if issubclass(each, errors.MaskdialError) and each is not errors.MaskdialError:
            yield each


def _meaning(kind: type[errors.MaskdialError]) -> str:
    """The first sentence of its docstring."""
    first = inspect.cleandoc(kind.__doc__ or "").replace("\n", " ").partition(". ")[0]
    first = first.partition("; ``")[0].rstrip(".")
    return first if first.startswith("GPU") else first[0].lower() + first[1:]


def _reply(kind: type[errors.MaskdialError], advice: _Advice) -> str:
    code = _GRPC[CallError(kind.status, "").code]
    return (
        f"| {kind.status} | `{kind.error_type}` | `{code}` | {_meaning(kind)} | {advice.do} "
        f"| {advice.retry} |\n"
    )


def _dialects(kind: type[errors.MaskdialError]) -> str:
    error = kind("")
    content = openai_content(error)["error"]
    code = f"`{content['code']}`" if content["code"] else ""
    anthropic = anthropic_content(error)["error"]["type"]
    return f"| `{kind.error_type}` | `{content['type']}` | {code} | `{anthropic}` |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
