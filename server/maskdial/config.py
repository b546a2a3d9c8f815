"""Config: every setting of the server, with its limits, its default and its help.

A Config is validated when it is created and immutable afterwards. `load_config` makes one from
flags, MASKDIAL_* variables and a TOML file.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from maskdial import settings
from maskdial.bundle.starters import starters
from maskdial.errors import ConfigError, shortened
from maskdial.logs import LogFormat
from maskdial.model_cache import GGUF, HubSource
from maskdial.runtime import providers


@dataclass(frozen=True, slots=True)
class Unset:
    """Marks a setting whose value may be left open: ``word`` stands for None, on the command line,
    in variables and in the file.
    """

    word: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def _read(self, value: object) -> object:
        return None if value == self.word else value


@dataclass(frozen=True, slots=True)
class Repeated:
    """Marks a setting of several values. It is called as its flag, which gives one of them."""

    name: str
    metavar: str


_KEY = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
# What scripts and templates write where there is no key.
_NO_KEYS = frozenset({"false", "nil", "no", "none", "null", "off", "undefined"})


def key_fault(key: str) -> str | None:
    """Why this cannot be a key; None if it can."""
    if not _KEY.fullmatch(key):
        return "a key must be visible ASCII characters"
    if key.lower() in _NO_KEYS:
        return "a key that anybody would guess: the word for none"
    return None


def _check_key(key: SecretStr) -> SecretStr:
    if (fault := key_fault(key.get_secret_value())) is not None:
        raise ValueError(fault)
    return key


UNIX_CLIENT = "unix"
"""The address of the clients of a Unix socket, as `forwarded_allow_ips` has it."""

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")


def _check_root_path(value: str) -> str:
    if not _ROOT_PATH.fullmatch(value):
        raise ValueError(
            f"{value!r} is no prefix of a path; write it as in a URL, as /llm: it begins with a "
            "slash, ends without one, and what is not ASCII is written as %C3%BC"
        )
    return value


def _check_proxies(value: str) -> str:
    for item in value.split(",") if value not in ("", "*") else ():
        name = item.strip()
        try:
            if name != UNIX_CLIENT:
                ipaddress.ip_network(name)
        except ValueError as error:
            raise ValueError(
                f"{name!r} is not an address, a network, or {UNIX_CLIENT!r}: {error}"
            ) from error
    return value


_Auto = Unset("auto")
_Off = Unset("off")
_None = Unset("none")

_ORIGIN = re.compile(r"\*|https?://[^/\s]+")
_HOST = re.compile(r"\*|[A-Za-z0-9._-]{1,253}")


def _check_origin(value: str) -> str:
    if not _ORIGIN.fullmatch(value):
        raise ValueError(
            f"{shortened(value)!r} is no origin; write it as https://example.org, or *"
        )
    return value


def _check_host(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError(f"{shortened(value)!r} is no host; write it as example.org, or *")
    return value


_Origin = Annotated[str, AfterValidator(_check_origin)]
_Host = Annotated[str, AfterValidator(_check_host)]
_Key = Annotated[SecretStr, Field(min_length=1), AfterValidator(_check_key)]

# Event loops count milliseconds, NumPy and ONNX Runtime 64 bits: what is computed from the largest
# values fits in.
_MAX_SECONDS = 31_536_000  # a year
_MAX_COUNT = 2**30
_MAX_BYTES = 2**60

MAX_BATCH_INPUTS = 16_384
"""What `max_batch_inputs` is at most: longer lists are refused without looking at their items."""

_MODEL_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ROUTES = ("load", "unload")  # below /models/


def _model_fault(given: str) -> str:
    """What is wrong with a ``--model`` that is none."""
    shown = shortened(given)
    if os.path.isdir(given):  # unlike Path's, it takes any text
        return f"say what the bundle is called: NAME={given}"
    known = ", ".join(starters()) or "none are installed"
    return (
        f"{shown!r} is neither NAME=PATH, nor a name of the Hub, ORG/NAME, nor a GGUF file, nor a "
        f"starter model ({known})"
    )


def model_name_fault(name: str) -> str | None:
    """Why a model cannot have this name; None if it can."""
    if not _MODEL_NAME.fullmatch(name) or {".", ".."}.intersection(name.split("/")):
        return (
            f"model name {shortened(name)!r}: use letters, digits, '-', '_' and '.', with one '/' "
            "at most, as in ORG/NAME"
        )
    if name in _ROUTES:
        return f"model name {name!r}: /models/{name} is a route; use another name"
    return None


class Config(BaseModel):
    """The server's settings; each field's description is its flag's help."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: all interfaces")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free port")
    grpc_port: Annotated[int | None, Field(ge=0, le=65535), _Off] = Field(
        None,
        description="port for gRPC: KServe's protocol and text-embeddings-inference's, with the "
        "same keys and certificate; 0: any free port; needs the extra grpc",
    )
    uds: Annotated[Path | None, _None] = Field(
        None, description="Unix socket to listen on, instead of host and port"
    )
    root_path: Annotated[str, AfterValidator(_check_root_path)] = Field(
        "",
        description="prefix that a proxy in front of the server takes off the path, such as /llm",
    )
    forwarded_allow_ips: Annotated[str, AfterValidator(_check_proxies)] = Field(
        f"127.0.0.1,{UNIX_CLIENT}",
        description="addresses and networks of proxies, with commas, whose X-Forwarded-For and "
        f"X-Forwarded-Proto are believed; {UNIX_CLIENT}: those at the socket of --uds; *: anyone. "
        "A trusted proxy can impersonate any client",
    )
    ssl_certfile: Annotated[Path | None, _None] = Field(
        None,
        description="PEM file of the certificate, for HTTPS; it is read again when it changes",
    )
    ssl_keyfile: Annotated[Path | None, _None] = Field(
        None, description="PEM file of its private key; none: it is in --ssl-certfile"
    )
    cors_allow_origins: Annotated[tuple[_Origin, ...], Repeated("cors_allow_origin", "ORIGIN")] = (
        Field(
            (),
            description="origin whose web pages may use the API, such as https://example.org; *: "
            "any. Default: only pages that this server delivers",
        )
    )
    allowed_hosts: Annotated[tuple[_Host, ...], Repeated("allowed_host", "NAME")] = Field(
        (),
        description="name by which a server without keys may be called, beside addresses, names "
        "without a dot, and those below .localhost and .internal, which no web page has; *: any. "
        "Default: none for one that listens on this machine alone, else any",
    )
    models: Annotated[
        dict[str, Path], Repeated("model", "NAME=PATH|FILE.gguf|ORG/NAME[:QUANT]")
    ] = Field(
        {},
        description="models to serve, by name, loaded at the start. A name of the Hub (with "
        ":Q4_K_M, a GGUF file there of that quantization), or a GGUF file (also as "
        "NAME=FILE.gguf), is exported into the cache (MASKDIAL_CACHE) the first time; that of a "
        "starter model is enough, too. None, and no --model-dir: the starter models",
    )
    model_dir: Annotated[Path | None, _None] = Field(
        None,
        description="folder of bundles to serve as well, each by its folder's name (NAME or "
        "ORG/NAME); they are loaded when they are first asked for",
    )
    allow_pull: Annotated[tuple[str, ...], Repeated("allow_pull", "ORG/NAME")] = Field(
        (),
        description="repository of the Hub that Ollama's /api/pull takes into the cache, with the "
        "admin key; may have wildcards, 'unsloth/*'. The models of these that are in the cache are "
        "served, too, as ORG/NAME or ORG/NAME--Q4_K_M, and /api/delete removes them",
    )
    models_autoload: Literal["on", "off"] = Field(
        "on",
        description="whether a request loads the model that it needs; off: only /models/load does",
    )
    models_max: Annotated[int | None, Field(ge=1, le=_MAX_COUNT), _Off] = Field(
        None,
        description="maximum number of loaded models; beyond that, the one unused for longest is "
        "unloaded",
    )
    models_memory: Annotated[int | None, Field(ge=1, le=_MAX_BYTES), _Off] = Field(
        None,
        description="maximum size of the weights of all loaded models in bytes; beyond that, those "
        "unused for longest are unloaded",
    )
    models_keep_alive: Annotated[float | None, Field(ge=0, le=_MAX_SECONDS), _Off] = Field(
        None, description="seconds after which an unused model is unloaded"
    )
    adapters: Annotated[dict[str, tuple[Path, str]], Repeated("adapter", "NAME=PATH@MODEL")] = (
        Field(
            {},
            description="low-rank adapters to serve (maskdial export-adapter), by name, each with "
            "the model that it was made for",
        )
    )
    adapters_memory: Annotated[int | None, Field(ge=1, le=_MAX_BYTES), _Off] = Field(
        None,
        description="maximum size of all loaded adapters in bytes; beyond that, those unused for "
        "longest are dropped, and read again when they are asked for. With it, adapters can be "
        "loaded while the server runs, even if --adapter names none",
    )
    api_keys: Annotated[tuple[_Key, ...], Repeated("api_key", "KEY")] = Field(
        (),
        description="key that requests must send, as 'Authorization: Bearer KEY' or 'x-api-key'. "
        "With one, or with --api-key-file, only /, /docs, /page/, /health and /metrics are open. "
        "Other users of the machine see flags: prefer the file, or the variable with commas",
    )
    api_key_file: Annotated[Path | None, _None] = Field(
        None,
        description="file of keys that requests must send, or one of --api-key: one NAME:KEY a "
        "line, read again on SIGHUP; logs and metrics have the names. A name may have several "
        "keys, so that they can be exchanged",
    )
    admin_key: Annotated[_Key | None, _None] = Field(
        None,
        description="key for the routes that change the server, such as /models/load; without one "
        "they are refused. It opens all other routes, too. Prefer the variable here as well",
    )
    policy: Annotated[Path | None, _None] = Field(
        None,
        description="file of policies, in TOML: which served models read requests and replies, and "
        "what happens when they find something; read again on SIGHUP",
    )
    metrics_key: Annotated[_Key | None, _None] = Field(
        None, description="key for /metrics; none: it is open"
    )
    receipt_key: Annotated[Path | None, _None] = Field(
        None,
        description="PEM file with the Ed25519 key that signs receipts (x-maskdial-receipt); needs "
        "the extra receipts",
    )
    provider: str = Field(
        "auto",
        description=f"execution provider ({', '.join(providers.NAMES)}, or a plug-in: openvino is "
        "onnxruntime-ep-openvino); with commas, in the order to try them; auto: the first of "
        f"{', '.join(providers.NAMES)} that can run the model",
    )
    threads: Annotated[int | None, Field(ge=1, le=1024), _Auto] = Field(
        None,
        description="intra-op threads of a pass; auto: one per physical core that taskset, numactl "
        "or a container's quota leave",
    )
    spinning: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether idle intra-op threads spin during a pass: faster for one model, "
        "slower when models share cores; auto: on if a single model is served",
    )
    kernels: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compute quantized products and causal attention on the CPU with our own "
        "kernels; auto: if they were built (python -m maskdial.kernels build)",
    )
    max_batch_tokens: Annotated[int | None, Field(ge=16, le=_MAX_COUNT), _Auto] = Field(
        None,
        description="maximum tokens per batch of a masked model, padding included; lower values "
        "reduce latency: new requests wait for the running batch; auto: 512 on the CPU, 4096 on a "
        "GPU",
    )
    max_batch_inputs: int = Field(
        256,
        ge=1,
        le=MAX_BATCH_INPUTS,
        description="maximum number of texts in one request; /v1/embeddings takes 2,048 and queues "
        "so many at a time",
    )
    auto_truncate: str = Field(
        "off",
        min_length=1,
        description="whether texts that are too long are cut, not refused, where a request does "
        "not say (prompts to be continued are not); on: for all models; otherwise names of models, "
        "with commas. x-truncated-tokens says by how many tokens",
    )
    answer_cache_bytes: Annotated[int | None, Field(ge=1, le=_MAX_BYTES), _Off] = Field(
        None,
        description="maximum size of what each masked model keeps of its answers, so that an equal "
        "text is not computed again; exact, so only where an answer does not depend on what shares "
        "its batch. Each key has its own, unless --prefix-cache-shared is on",
    )
    max_queue: int = Field(
        1024,
        ge=1,
        le=_MAX_COUNT,
        description="texts that may queue for a model; beyond that, requests get 429",
    )
    max_requests_per_client: Annotated[int | None, Field(ge=1, le=_MAX_COUNT), _Off] = Field(
        None,
        description="maximum number of requests that a client (a key, or an address without keys) "
        "may have open at once; beyond that, 429",
    )
    max_tokens_per_minute: Annotated[int | None, Field(ge=1, le=_MAX_COUNT), _Off] = Field(
        None,
        description="tokens that a client may have computed in a minute, prompts included; beyond "
        "that, 429 with the time to wait",
    )
    max_body_bytes: int = Field(
        2_000_000,
        ge=1024,
        le=_MAX_COUNT,
        description="maximum request body size; larger bodies get 413",
    )
    front_ends: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that take connections, parse requests and write replies for the one "
        "with the models, which computes the passes; 1: that does it all. For short requests on "
        "machines with many cores",
    )
    max_connections: int = Field(
        2000,
        ge=1,
        le=_MAX_COUNT,
        description="maximum number of open connections; further ones get 503 at once. Each may "
        "hold a body: with --max-body-bytes, this bounds the memory of requests",
    )
    max_header_bytes: int = Field(
        65_536,
        ge=1024,
        le=_MAX_COUNT,
        description="maximum size of a request's line and headers, each header counted as 32 bytes "
        "more than it has; beyond that, 431",
    )
    header_timeout: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="seconds until a request's headers must have arrived; then the connection is "
        "closed",
    )
    body_timeout: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="seconds until a request's body must have arrived; then it gets 408. Slow "
        "networks need more for large bodies",
    )
    write_timeout: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="seconds in which a client must take some of a reply that waits for it, 1 KiB "
        "a second or more; otherwise its connection is closed and its request cancelled",
    )
    keep_alive_timeout: int = Field(
        5,
        ge=1,
        le=_MAX_SECONDS,
        description="seconds until an idle connection is closed; behind a load balancer, longer "
        "than its own, which otherwise may send a request into a closing connection",
    )
    max_unsent_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        le=_MAX_BYTES,
        description="maximum size of all replies that wait for their clients; beyond that, the "
        "connections that held most for longest are closed",
    )
    batch_dir: Annotated[Path | None, _None] = Field(
        None,
        description="folder for OpenAI's Batch API: uploaded files, batches and their results, "
        "which are computed while no other request is; none: /v1/files and /v1/batches are refused",
    )
    batch_max_file_bytes: int = Field(
        200 * 2**20,
        ge=1024,
        le=_MAX_BYTES,
        description="maximum size of an uploaded file; larger ones get 413",
    )
    batch_max_dir_bytes: int = Field(
        10 * 2**30,
        ge=2**20,
        le=_MAX_BYTES,
        description="maximum size of all files in --batch-dir; where there are several keys, each "
        "has at most half of what the others leave. Beyond that, uploads and batches get 429. "
        "Results of batches that run are not stopped by it",
    )
    slots: Annotated[int | None, Field(ge=1, le=1024), _Auto] = Field(
        None,
        description="maximum number of sequences a causal model generates at once; auto: as many "
        "as fit into memory, at most 8 on the CPU, 512 on CUDA and 16 on WebGPU",
    )
    kv_cache_bytes: Annotated[int | None, Field(ge=1, le=_MAX_BYTES), _Auto] = Field(
        None,
        description="maximum size of each causal model's KV cache; auto: --kv-cache-fraction of "
        "the free memory",
    )
    kv_cache_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of the memory that is free once the weights are loaded (of the GPU, or "
        "of the machine within the limits of its control groups) for a causal model's KV cache; "
        "passes need some of the rest",
    )
    kv_cache_dtype: Literal["auto", "float", "int16", "int8"] = Field(
        "auto",
        description="element type of the KV cache; float: the model's floats; int16: half of "
        "their memory, about as exact as float16; int8: a third, for a small loss; both need the "
        "kernels; auto: int16 for int8 and int4 models where the kernels can read it, else float",
    )
    cuda_graphs: Literal["on", "off"] = Field(
        "on",
        description="capture decode steps as CUDA graphs: fewer kernel launches, slower start",
    )
    max_context: Annotated[int | None, Field(ge=8, le=_MAX_COUNT), _Auto] = Field(
        None,
        description="maximum context (prompt and generated tokens), if the model's is longer; "
        "auto: the model's own, or what fits into its share of the memory for at least 4 slots, "
        "on CUDA 16, but no less than 4096 (which it is where the memory does not tell what is "
        "free)",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="what to do with fields that a request in another project's format has and "
        "this server does not know; ignore: name them in the header x-ignored-fields, and once for "
        "each client in the log. Routes of its own refuse them in any case. With refuse, "
        "nothing is left out of a prompt either, such as what Claude Code says of its session",
    )
    prefill_chunk_tokens: Annotated[int | None, Field(ge=1, le=_MAX_COUNT), _Auto] = Field(
        None,
        description="prompt tokens prefilled between two decode steps, rounded up to the attention "
        "kernel's block; higher: faster prefill, lower: smoother streams; auto: 256 on the CPU, "
        "2048 on a GPU",
    )
    prefix_cache_bytes: Annotated[int | None, Field(ge=0, le=_MAX_BYTES), _Auto] = Field(
        None,
        description="maximum size of each causal model's prefix cache, which reuses the KV cache "
        "of shared prompt prefixes; auto: 512 MiB, or what a prompt of the whole context takes, "
        "up to a quarter of the free memory, where that is more; 0 disables it",
    )
    prefix_cache_shared: Literal["on", "off"] = Field(
        "off",
        description="whether requests of different keys share cached prefixes and answers; on: a "
        "system prompt that all of them send is read once, but how fast a prompt is read tells "
        "each of them what others have sent",
    )
    prefix_cache_dir: Annotated[Path | None, _None] = Field(
        None,
        description="folder where the prefix caches of all models go on beyond memory, and across "
        "restarts: its files hold prompts, as numbers from which they can be computed. For one "
        "server alone; none: they are in memory only",
    )
    prefix_cache_disk_bytes: int = Field(
        10 * 2**30,
        ge=2**20,
        le=_MAX_BYTES,
        description="maximum size of all files in --prefix-cache-dir; beyond that, the prefixes go "
        "that were not used for longest",
    )
    speculative_tokens: Annotated[int | None, Field(ge=0, le=64), _Auto] = Field(
        None,
        description="maximum number of draft tokens of a sequence, which one pass verifies; fewer "
        "or none are verified where more would take longer; 0: no speculation; auto: 16 where the "
        "answers are the same to the last bit with it, which takes the kernels, else 0. Without "
        "them, only a sequence that runs alone has drafts, and last bits depend on it",
    )
    draft: str | None = Field(
        None,
        description="name of a served causal model, smaller and with the same vocabulary, whose "
        "likeliest tokens the others verify where speculation changes no bit of their answers; it "
        "takes a KV cache for each of them",
    )
    generation_config: Literal["auto", "off"] = Field(
        "auto",
        description="whether a causal model's generation_config.json says how it samples where a "
        "request does not",
    )
    request_timeout: Annotated[float | None, Field(gt=0, le=_MAX_SECONDS), _Off] = Field(
        None,
        description="seconds after which a request gets 504, unless its own timeout is shorter",
    )
    grace_period: float = Field(
        30.0,
        ge=0,
        le=_MAX_SECONDS,
        description="seconds that running requests may take after SIGTERM",
    )
    stall_timeout: Annotated[float | None, Field(gt=0, le=_MAX_SECONDS), _Off] = Field(
        120.0,
        description="seconds without progress of a pass or of the event loop, after which "
        "/health/live turns red and the log gets all threads' stacks; longer than any good pass",
    )
    on_engine_failure: Literal["degrade", "exit"] = Field(
        "degrade",
        description="what follows the death of a model's engine; degrade: the others go on, and "
        "readiness is red once none is left; exit: the server drains and ends with status 1",
    )
    golden_check: Literal["error", "warn"] = Field(
        "error",
        description="what to do if a model's logits on this machine differ from those at export",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
    log_format: LogFormat = Field(
        "text",
        description="json: the log as JSON, with a line for each request: client, "
        "model, status and duration; json-texts: its body and that of its reply as well, the first "
        "65,536 bytes of each",
    )
    responses_store: Annotated[Path | None, _None] = Field(
        None,
        description="file of SQLite's that keeps the responses of /v1/responses, so that they can "
        "be retrieved and continued, and run in the background; each key has its own",
    )
    responses_max_age: float = Field(
        2_592_000.0, gt=0, le=1e9, description="seconds after which a stored response is dropped"
    )
    responses_max_bytes: int = Field(
        2**30,
        ge=2**20,
        le=_MAX_BYTES,
        description="maximum size of all stored responses; beyond that, the oldest of the key that "
        "has most are dropped",
    )
    otlp_endpoint: Annotated[str | None, Field(pattern=r"^https?://"), _None] = Field(
        None,
        description="OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP, "
        "as http://localhost:4318; needs the extra otel",
    )

    @field_validator("provider")
    @classmethod
    def _check_provider(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",")]
        for name in names:
            if name != "auto" and not providers.check_name(name):
                known = ", ".join(("auto", *providers.NAMES, *providers.plugin_names()))
                raise PydanticCustomError(
                    "provider",
                    f"unknown provider {name!r}; use one of {known}, or install the package of a "
                    "plug-in, such as onnxruntime-ep-openvino",
                )
        return ",".join(names)

    @field_validator("api_keys", "cors_allow_origins", "allowed_hosts", "allow_pull", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Accepts a comma-separated string (variables)."""
        return [each.strip() for each in value.split(",")] if isinstance(value, str) else value

    @field_validator("allow_pull")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if pattern != "*" and not re.fullmatch(r"[\w.*?\[\]!-]+/[\w.*?\[\]!-]+", pattern):
                raise ValueError(
                    f"{shortened(pattern)!r} is neither ORG/NAME, perhaps with wildcards, nor *"
                )
        return value

    @model_validator(mode="after")
    def _check_pulls(self) -> Self:
        if self.allow_pull and self.admin_key is None:
            raise ValueError("allow_pull: give admin_key as well, with which requests pull")
        return self

    @field_validator("models", mode="before")
    @classmethod
    def _parse_models(cls, value: object) -> object:
        """Accepts NAME=PATH pairs, GGUF files, which are called as they are without their suffix,
        names of starter models, and names of the Hub, whose bundles are in the cache: a list
        (flags) or a comma-separated string (variables).
        """
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list):
            return value
        models: dict[str, str] = {}
        for pair in value:
            name, equals, path = str(pair).strip().partition("=")
            if not equals and name.endswith(GGUF):
                name, path = Path(name).stem, name
            elif not equals and name in starters():
                path = str(starters()[name])
            elif not equals and (source := HubSource.named(name)) is not None:
                name, path = source.repository, str(source.folder())
            elif not (name and equals and path):
                raise ValueError(_model_fault(str(pair)))
            if name in models:
                raise ValueError(f"the name {shortened(name)!r} is given twice")
            models[name] = path
        return models

    @field_validator("adapters", mode="before")
    @classmethod
    def _parse_adapters(cls, value: object) -> object:
        """Accepts what `_parse_models` does, of NAME=PATH@MODEL."""
        pairs = cls._parse_models(value)
        if not isinstance(pairs, dict):
            return pairs
        adapters: dict[str, object] = {}
        for name, place in pairs.items():
            path, at, model = place.rpartition("@") if isinstance(place, str) else ("", "", "")
            if isinstance(place, str) and not (path and at and model):
                raise ValueError(f"{shortened(f'{name}={place}')!r} is not NAME=PATH@MODEL")
            adapters[name] = (path, model) if isinstance(place, str) else place
        return adapters

    @field_validator("models", "adapters")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            fault = model_name_fault(name)
            if fault is not None:
                raise ValueError(fault)
        return value

    @model_validator(mode="after")
    def _check_key_file(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile: give ssl_certfile as well")
        return self

    @model_validator(mode="after")
    def _check_prefix_cache(self) -> Self:
        if self.prefix_cache_dir is not None and self.prefix_cache_bytes == 0:
            raise ValueError(
                "prefix_cache_dir: what is read from disk goes to the prefix cache in memory; give "
                "it some prefix_cache_bytes"
            )
        return self

    @field_validator("auto_truncate")
    @classmethod
    def _check_truncated(cls, value: str) -> str:
        for name in () if value in ("off", "on") else value.split(","):
            fault = model_name_fault(name.strip())
            if fault is not None:
                raise ValueError(fault)
        return value

    @property
    def takes_adapters(self) -> bool:
        """Whether models are loaded so that adapters can change them."""
        return bool(self.adapters) or self.adapters_memory is not None

    def truncates(self, name: str) -> bool:
        """Whether a model's texts are cut where a request does not say."""
        named = (each.strip() for each in self.auto_truncate.split(","))
        return self.auto_truncate == "on" or (self.auto_truncate != "off" and name in named)

    def spins(self, *, alone: bool) -> bool:
        """Whether a model's threads spin. ``alone``: it is the only model served."""
        return self.spinning == "on" or (self.spinning == "auto" and alone)


def _mark(field: str, kind: type[Any]) -> Any:
    """A field's marker of this class, None if it has none."""
    marks = Config.model_fields[field].metadata
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def repeated(field: str) -> Repeated | None:
    """How the flag of a setting with several values is called; None if it has one value."""
    mark: Repeated | None = _mark(field, Repeated)
    return mark


def _setting(field: str) -> str:
    mark = repeated(field)
    return field if mark is None else mark.name


SETTINGS: Mapping[str, str] = {_setting(field): field for field in Config.model_fields}
"""The field of `Config` by the name of the setting: ``api_key`` is the flag ``--api-key``, the
variable ``MASKDIAL_API_KEY``, and the key ``api_key`` of the file."""

HEADINGS = {
    "host": "network",
    "models": "models",
    "api_keys": "security",
    "provider": "engine",
    "max_batch_tokens": "requests",
    "front_ends": "connections",
    "batch_dir": "batches",
    "slots": "text generation",
    "request_timeout": "deadlines and faults",
    "log_level": "logs and traces",
}
"""The headings of the help, each by the first field of `Config` below it."""


BRIEF = (
    *("host", "port", "model", "model_dir", "api_key_file", "threads", "slots", "max_context"),
    *("request_timeout", "log_level"),
)
"""The settings that matter first, by name: those of the short help."""


def default_text(field: str) -> str:
    """A setting's default as it is written on the command line."""
    default = Config.model_fields[field].default
    return unset_word(field) or "" if default is None else str(default) or "none"


def unset_word(field: str) -> str | None:
    """The word that leaves a setting open, None where it has to have a value."""
    mark = _mark(field, Unset)
    return None if mark is None else str(mark.word)


def load_config(flags: Mapping[str, Any], file: Path | None = None) -> Config:
    """Reads the configuration.

    Flags override variables, variables override the file, the file overrides the defaults.

    Args:
        flags: command-line flags that were given, by the setting's name.
        file: TOML file with the same keys, if any; without it that of ``MASKDIAL_CONFIG``.

    Raises:
        ConfigError: the file is unreadable, or a setting is unknown, empty or out of range.
    """
    given = settings.read(SETTINGS, flags, file)
    try:
        return Config(**{SETTINGS[name]: value for name, value in given.items()})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field, *inner = first["loc"] or ("",)
        known = field in Config.model_fields
        name = ".".join(map(str, (_setting(str(field)) if known else field, *inner)))
        word = unset_word(str(field)) if known else None
        raise ConfigError(f"setting {name!r}: {settings.fault_of(first, word)}") from error
