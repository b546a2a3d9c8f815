"""The table of sampling fields, from which the bodies of every dialect take theirs.

A field has the name, the bounds and the default of its parameter (`SamplingParams`); a dialect that
spells it otherwise declares it once more, with an alias.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pydantic
from pydantic import Field

from maskdial.bounds import LARGEST_INT, Range, Size
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.sampling.params import (
    CONTROLS,
    DEFAULTS,
    Count,
    Penalty,
    PositiveShare,
    RepetitionPenalty,
    SamplingParams,
    Share,
    Temperature,
)
from maskdial.dialects.body import TokenId, Wire
from maskdial.errors import shortened


def _check_token_keys(biases: dict[str, float]) -> dict[str, float]:
    for key in biases:
        canonical = key.isascii() and key.isdecimal() and str(int(key[:11])) == key
        if not canonical or int(key) > LARGEST_INT:
            raise ValueError(f'a key must be a token id, such as "42", not {shortened(key)!r}')
    return biases


Seed = Annotated[int, Range(0, 2**63 - 1)]
Stops = Annotated[list[Annotated[str, Size(0, 1024, "characters")]], Size(0, 64, "texts")]
LogitBias = Annotated[
    dict[str, Annotated[float, Range(-100, 100)]],
    Size(0, 1024, "token ids"),
    pydantic.AfterValidator(_check_token_keys),
    Field(json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]

_DESCRIPTIONS = {
    "temperature": "Sampling temperature; 0 is greedy.",
    "top_k": "Sample from the k most likely tokens; 0 disables it.",
    "top_p": "Sample from the smallest set of tokens with this total probability; 1 disables it.",
    "min_p": "Sample from tokens with at least this share of the most likely token's probability; "
    "0 disables it.",
    "typical_p": "Locally typical sampling; 1 disables it.",
    "repetition_penalty": "Penalty for tokens of the prompt and the generated text; 1 disables it.",
    "frequency_penalty": "Penalty per occurrence in the generated text.",
    "presence_penalty": "Penalty for tokens that occur in the generated text.",
    "min_new_tokens": "Ignore end-of-sequence and stop sequences before this many tokens.",
    "ignore_eos": "Continue after the end-of-sequence token.",
}


def parameter(name: str, alias: str | None = None) -> Any:
    """The field of a parameter, with its description and its default.

    Args:
        name: of the parameter.
        alias: what the dialect calls it, if that is another name.
    """
    default = f"{DEFAULTS[name]:g}" if DEFAULTS[name] is not False else "false"
    return Field(None, alias=alias, description=f"{_DESCRIPTIONS[name]} Default: {default}.")


class CommonSampling(Wire):
    """What every dialect can ask for. Null means not given."""

    temperature: Temperature | None = parameter("temperature")
    top_k: Count | None = parameter("top_k")
    top_p: Share | None = parameter("top_p")
    stop: Stops | None = Field(None, description="Texts that end the generation.")

    def sampling(self, defaults: GenerationDefaults, **others: Any) -> SamplingParams:
        """How to sample: as the body says, otherwise as the model's defaults do.

        Args:
            defaults: the model's.
            others: parameters that do not stand in the body under their names.
        """
        values = {
            name: _READ[name](value) if name in _READ else value
            for name, value in self.given(*self.model_fields_set & _PARAMETERS).items()
        }
        return defaults.sampling(values | others)


class SamplingFields(CommonSampling):
    """What text-generation-inference, vLLM and transformers can ask for beside it."""

    min_p: Share | None = parameter("min_p")
    typical_p: PositiveShare | None = parameter("typical_p")
    repetition_penalty: RepetitionPenalty | None = parameter("repetition_penalty")
    frequency_penalty: Penalty | None = parameter("frequency_penalty")
    presence_penalty: Penalty | None = parameter("presence_penalty")
    logit_bias: LogitBias | None = Field(
        None, description="Map from token ids to a bias that is added to their logits."
    )
    seed: Seed | None = Field(
        None, description="Random seed; text i has the seed plus i. Default: a new one."
    )
    stop_token_ids: Annotated[list[TokenId], Size(0, 256, "token ids")] | None = Field(
        None, description="Tokens that end the generation."
    )
    ignore_eos: bool | None = parameter("ignore_eos")

    @property
    def has_controls(self) -> bool:
        """Whether a parameter is given that means nothing unless tokens are drawn."""
        return bool(self.given(*self.model_fields_set & CONTROLS))


class Scheduling(Wire):
    """When a request starts, and with whom it shares."""

    priority: Annotated[int, Range(-100, 100)] | None = Field(
        None,
        description="Priority among the client's own requests; lower values start earlier. "
        "Default: 0.",
    )
    cache_salt: Annotated[str, Size(1, 256, "characters")] | None = Field(
        None,
        description="Share cached prompt prefixes only with requests of the same key and salt.",
    )


_PARAMETERS = frozenset(DEFAULTS)
_READ: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": lambda biases: tuple((int(key), bias) for key, bias in biases.items()),
    # An empty string would end every text at once.
    "stop": lambda texts: tuple(filter(None, texts)),
    "stop_token_ids": frozenset,
}
"""How the engine has what a body spells in another way."""
