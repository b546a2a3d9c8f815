"""Config: every setting of the server, from flags, MASKDIAL_* variables and a TOML file.

Flags win over variables, variables over the file, the file over the defaults. It is validated once,
when it is made, and cannot change afterwards.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from maskdial.errors import ConfigError


class Config(BaseSettings):
    """The server's settings; each field's description is the flag's help."""

    model_config = SettingsConfigDict(env_prefix="MASKDIAL_", frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    models: Annotated[dict[str, Path], NoDecode] = Field(
        {}, description="models to serve, by name; none: the starter models"
    )
    provider: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="execution provider; auto takes a GPU where there is one that can run the "
        "model, and else the CPU",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="threads of one pass; 0: one per physical core"
    )
    spinning: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether threads spin while a pass has nothing for them to do: faster for one "
        "model alone, slower where models share cores; auto spins where one model is served",
    )
    max_batch_tokens: int = Field(
        4096,
        ge=16,
        description="padded tokens in one pass of a masked model: more gives throughput, fewer "
        "give shorter waits",
    )
    max_batch_inputs: int = Field(
        256, ge=1, description="texts that one request may carry; more is refused"
    )
    max_queue: int = Field(
        1024, ge=1, description="texts that may wait for each model; beyond it requests get 429"
    )
    max_body_bytes: int = Field(
        2_000_000, ge=1024, description="size of a request's body; beyond it requests get 413"
    )
    slots: int = Field(
        0,
        ge=0,
        le=1024,
        description="sequences that a causal model generates at once; each costs KV memory, on the "
        "CPU as it grows; 0: 8 on the CPU, and on a GPU as many as its memory holds, 64 at most",
    )
    kv_cache_bytes: int = Field(
        0,
        ge=0,
        description="most memory for the KV cache of each causal model; 0: no limit on the CPU, "
        "and on a GPU --kv-cache-fraction of what is free",
    )
    kv_cache_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of a GPU's free memory, the weights being loaded, that the KV cache of "
        "a causal model may take; passes need some of the rest",
    )
    cuda_graphs: Literal["on", "off"] = Field(
        "on",
        description="whether decode steps on a GPU are captured as CUDA graphs: the host has one "
        "thing to launch in the place of hundreds, starting takes longer",
    )
    max_context: int = Field(
        4096, ge=8, description="tokens of prompt and text together, where the model allows more"
    )
    prefill_chunk_tokens: int = Field(
        0,
        ge=0,
        description="prompt tokens read between two steps of the running streams, rounded up to "
        "the attention kernel's block: more reads prompts faster, fewer keep streams smoother; 0: "
        "256 on the CPU, 2048 on a GPU",
    )
    prefix_cache_bytes: int = Field(
        512 * 2**20,
        ge=0,
        description="memory of each causal model for the beginnings of prompts, which are then "
        "copied instead of read again; 0 turns it off",
    )
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="most tokens to guess ahead, from the text itself, for a sequence that runs "
        "alone: copies and summaries get faster, and the last bits of log-probabilities depend on "
        "who else is there; 0 turns it off",
    )
    request_timeout: float = Field(
        0.0,
        ge=0,
        description="seconds that a request may take, unless its own timeout is shorter; beyond "
        "it: 504; 0: as long as it needs",
    )
    grace_period: float = Field(
        30.0, ge=0, description="seconds that running requests get to finish after SIGTERM"
    )
    golden_check: Literal["error", "warn"] = Field(
        "error",
        description="what to do when a model's logits on this machine differ from the exported "
        "ones",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe messages to log"
    )

    @field_validator("models", mode="before")
    @classmethod
    def _parse_models(cls, value: object) -> object:
        """Takes NAME=PATH pairs, comma-separated or a list, as flags and variables give them."""
        if isinstance(value, str):
            if value.lstrip().startswith("{"):
                return json.loads(value)
            value = [pair for pair in value.split(",") if pair.strip()]
        if not isinstance(value, list):
            return value
        models: dict[str, str] = {}
        for pair in value:
            name, equals, path = str(pair).strip().partition("=")
            if not (name and equals and path):
                raise ValueError(f"{pair!r} is not NAME=PATH")
            if name in models:
                raise ValueError(f"the name {name!r} is given twice")
            models[name] = path
        return models

    @field_validator("models")
    @classmethod
    def _check_names(cls, value: dict[str, Path]) -> dict[str, Path]:
        for name in value:
            if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                raise ValueError(f"model name {name!r}: use letters, digits, '-', '_' and '.'")
        return value

    def chunk_tokens(self, *, on_gpu: bool) -> int:
        """The prompt tokens of one pass, before they are rounded up."""
        return self.prefill_chunk_tokens or (2048 if on_gpu else 256)

    def spins(self, *, alone: bool) -> bool:
        """Whether the threads of a model spin, which may be ``alone`` on the server."""
        return self.spinning == "on" or (self.spinning == "auto" and alone)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = settings_cls.model_config.get("toml_file")
        sources = (init_settings, env_settings)
        return sources if file is None else (*sources, TomlConfigSettingsSource(settings_cls))


def load_config(flags: dict[str, Any], file: Path | None = None) -> Config:
    """Makes the Config of a run.

    Args:
        flags: the flags that were given, by field name.
        file: a TOML file with the same keys, if any.

    Raises:
        ConfigError: the file is unreadable, or a setting is unknown or out of range.
    """

    class FileConfig(Config):
        model_config = SettingsConfigDict(toml_file=file)

    if file is not None and not file.is_file():
        raise ConfigError(f"configuration file {file} does not exist")
    try:
        return FileConfig(**flags)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"setting {name!r}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"configuration file {file} is not valid TOML: {error}") from error
