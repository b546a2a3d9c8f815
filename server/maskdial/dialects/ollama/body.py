"""What the bodies of Ollama's API have in common."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from maskdial.bounds import Range
from maskdial.causal.model import WritingModel
from maskdial.causal.request import GenerationRequest
from maskdial.dialects.body import TaskBody
from maskdial.dialects.call import Call
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.ollama.options import Options
from maskdial.dialects.unsupported import Unsupported
from maskdial.errors import ValidationError
from maskdial.grammar.source import GrammarRequest

NO_IMAGES = "no model here reads images; send text"

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ns|us|µs|ms|s|m|h)"
_DURATION = rf"^(?:-?(?:{_PART}){{1,6}}|-?[0-9]{{1,12}})$"


def _read_seconds(value: object) -> float:
    """Seconds as a number or as Go's durations, such as 1h30m; negative ones have no end."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = min(float(value), 1e12) if abs(value) < 1e300 else math.copysign(1e12, value)
    elif isinstance(value, str) and re.fullmatch(_DURATION, value):
        sign, digits = (-1, value[1:]) if value[0] == "-" else (1, value)
        parts = re.findall(r"([0-9.]+)([a-zµ]+)", digits)
        seconds = sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
        if not parts:
            seconds = sign * float(digits)
    if math.isnan(seconds):
        raise ValueError('must be a number of seconds or a duration such as "5m"')
    return math.inf if seconds < 0 else seconds


def _read_format(value: object) -> object:
    if value in ("", "json") or isinstance(value, dict):
        return value
    raise ValueError('must be "json" or a JSON schema')


def _read_think(value: object) -> object:
    if isinstance(value, bool) or value in ("low", "medium", "high", "max"):
        return value
    raise ValueError('must be true, false, "low", "medium", "high" or "max"')


KeepAlive = Annotated[
    float,
    PlainValidator(
        _read_seconds, json_schema_input_type=float | Annotated[str, Field(pattern=_DURATION)]
    ),
]
Format = Annotated[
    str | dict[str, Any],
    PlainValidator(_read_format, json_schema_input_type=Literal["", "json"] | dict[str, Any]),
]
Level = Literal["low", "medium", "high", "max"]
Think = Annotated[bool | Level, PlainValidator(_read_think, json_schema_input_type=bool | Level)]


class OllamaBody(Lenient, TaskBody):
    """A body of Ollama's dialect. ``timeout`` and ``mask`` are extensions."""

    keep_alive: KeepAlive | None = Field(
        None,
        description="For how long to keep the model, in seconds or as in 5m; -1 is for ever. It "
        "counts in a request without input that comes with the admin's key.",
    )


class TextBody(OllamaBody, ABC):
    """The fields of both routes that generate text."""

    habits = frozenset({"debug_render_only", "shift", "truncate"})
    neutral = {"images": ([],)}  # noqa: RUF012

    options: Options | None = None
    format: Format | None = Field(None, description="json, or a JSON schema that the text matches.")
    think: Think | None = Field(
        None,
        description="Whether the model thinks, or how much: enable_thinking and reasoning_effort "
        "of the chat template. Default: the template's own.",
    )
    stream: bool | None = Field(None, description="Reply line by line. Default: true.")
    logprobs: bool | None = Field(None, description="Describe each token. Default: false.")
    top_logprobs: Annotated[int, Range(0, 20)] | None = Field(
        None, description="Describe each token with this many of the most likely ones. Default: 0."
    )

    @property
    def streams(self) -> bool:
        """Whether the reply comes line by line."""
        return self.stream is not False

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing is to be generated: the request has the model loaded, or unloaded."""

    def generation(self, model: WritingModel) -> GenerationRequest:
        """How to generate, as a dialect-neutral request without its prompt."""
        options = self.options or Options()
        return GenerationRequest(
            params=options.sampling(
                model.defaults,
                do_sample=True,
                include_stop=False,
                top_n_tokens=self.top_logprobs or 0,
            ),
            max_new_tokens=options.new_tokens(
                model, 1 + (self.top_logprobs or 0) if self.logprobs else 0
            ),
            is_limited=options.is_limited,
            grammar=self._grammar(),
            describe_tokens=bool(self.logprobs),
            **options.given("seed"),
        )

    def note_context(self, call: Call[Any], model: WritingModel) -> None:
        """Notes a context that is longer than the model's."""
        longer = self.options is not None and (self.options.num_ctx or 0) > model.max_length
        if longer and call.ignored is not None:
            call.ignored.add_field("num_ctx", "options")

    def thinking(self, model: WritingModel) -> dict[str, Any]:
        """What a chat request says of thinking.

        Raises:
            ValidationError: the model does not think.
        """
        budget = {} if self.options is None else self.options.given("thinking_budget")
        if self.think is None:
            return budget
        if self.think is not False and model.reply_format.thinking is None:
            raise ValidationError(
                f"model {model.name!r} does not think; send false, or leave it out", field="think"
            )
        variables = {"enable_thinking": self.think is not False}
        if isinstance(self.think, str):
            budget["reasoning_effort"] = self.think
        return {"template_variables": variables, **budget}

    def names(self) -> Mapping[str, str]:
        """What the body calls the fields of a neutral request, where the names differ."""
        return {
            **Options.names(),
            "grammar": "format",
            "describe_tokens": "logprobs",
        }

    def _grammar(self) -> GrammarRequest | None:
        if self.format is None or self.format == "":
            return None
        return GrammarRequest("json", None if isinstance(self.format, str) else self.format)


Images = Annotated[Any, Unsupported(NO_IMAGES)]
