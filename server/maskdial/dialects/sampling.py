"""The table of sampling fields, from which the bodies of every dialect take theirs.

A field has the name, the bounds and the default of its parameter (`SamplingParams`); a dialect that
spells it otherwise declares it once more, with an alias.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from maskdial.bounds import LARGEST_INT, Range, Size
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.model import WritingModel
from maskdial.causal.prompts import MAX_DESCRIBED
from maskdial.causal.sampling.params import (
    CONTROLS,
    DEFAULTS,
    Count,
    DryBase,
    DryLength,
    LastN,
    MirostatVersion,
    NotNegative,
    OrMinusOne,
    Penalty,
    PositiveShare,
    RepetitionPenalty,
    SamplingParams,
    Share,
    Temperature,
)
from maskdial.dialects.body import TokenId, Wire
from maskdial.errors import shortened

_NUMBER = re.compile(r"\s*[+-]?[\d.]+\s*")


def _check_keys(biases: dict[str, float]) -> dict[str, float]:
    for key in biases:
        if not _is_token_id(key) and (not key or _NUMBER.fullmatch(key)):
            raise ValueError(
                f'a key must be a token id, such as "42", or a text, not {shortened(key)!r}'
            )
        if len(key) > _MAX_WORD:
            raise ValueError(f"a text must have at most {_MAX_WORD} characters, not {len(key)}")
    return biases


Seed = Annotated[int, Range(0, 2**63 - 1)]


def _is_token_id(key: str) -> bool:
    canonical = key.isascii() and key.isdecimal() and str(int(key[:11])) == key
    return canonical and int(key) <= LARGEST_INT


def _pairs_to_map(biases: object) -> object:
    """llama.cpp's list of pairs, of a token id or a text and its bias, as a map."""
    if not isinstance(biases, list):
        return biases
    found: dict[str, object] = {}
    for index, pair in enumerate(biases):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"item {index} must be a pair of a token id or a text, and its bias")
        key, bias = pair
        if type(key) is not int and not isinstance(key, str):
            raise ValueError(f"item {index} must begin with a token id or a text")
        found[str(key)] = bias
    return found


Stops = Annotated[list[Annotated[str, Size(0, 1024, "characters")]], Size(0, 64, "texts")]
AnySeed = Annotated[
    int,
    Range(-(2**63), 2**63 - 1),
    pydantic.AfterValidator(lambda seed: None if seed == -1 else seed),
]
"""A seed, or -1 for a new one."""
AnyStops = Annotated[
    Stops,
    pydantic.BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=str | list[str],
    ),
]
"""A text, or several."""
_MAX_WORD = 1024  # characters
Words = Annotated[list[Annotated[str, Size(1, _MAX_WORD, "characters")]], Size(0, 256, "texts")]
Breakers = Annotated[list[Annotated[str, Size(1, 40, "characters")]], Size(0, 16, "texts")]
_BiasNumber = Annotated[float, Range(-100, 100)]
_Bias = Annotated[
    _BiasNumber,
    pydantic.WrapValidator(
        lambda value, check: value if value is False else check(value),
        json_schema_input_type=Literal[False] | _BiasNumber,
    ),
]
LogitBias = Annotated[
    dict[str, _Bias],
    Size(0, 1024, "token ids and texts"),
    pydantic.AfterValidator(_check_keys),
    pydantic.BeforeValidator(_pairs_to_map),
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
    "dry_multiplier": "Penalty for tokens that would go on with a repetition (DRY); 0 disables it.",
    "dry_base": "Factor by which it grows with each repeated token.",
    "dry_allowed_length": "Number of tokens that may be repeated without it.",
    "dry_penalty_last_n": "Number of tokens to look at for repetitions; 0 for none, -1 for all.",
    "top_n_sigma": "Sample from tokens whose logits are at most this many standard deviations "
    "below the greatest; 0 and -1 disable it.",
    "xtc_probability": "Chance, for each token, to exclude the top choices (XTC); 0 disables it.",
    "xtc_threshold": "Probability from which a token is a top choice; above 0.5 disables XTC.",
    "dynatemp_range": "How far the temperature moves with the entropy; 0 disables it.",
    "dynatemp_exponent": "Exponent of the normalized entropy there.",
    "mirostat": "Draw by Mirostat 2.0, with 2, in place of all that narrows tokens down; 0 "
    "disables it.",
    "mirostat_tau": "The surprise that Mirostat keeps to, in bits.",
    "mirostat_eta": "The learning rate of Mirostat.",
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


PENALTY_LAST_N: Any = Field(
    None,
    alias="repeat_last_n",
    description="The repetition, frequency and presence penalties look at so many of the last "
    "tokens, of the prompt as well; 0 for none, -1 for all. Default: the first looks at all, the "
    "others at the generated text.",
)
"""The field of llama.cpp's clients."""


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
        biases = values.pop("logit_bias", {})
        ids = {key: bias for key, bias in biases.items() if _is_token_id(key)}
        values["logit_bias"] = tuple((int(key), bias) for key, bias in ids.items())
        values["text_bias"] = tuple(each for each in biases.items() if each[0] not in ids)
        return defaults.sampling(values | others)


class SamplingFields(CommonSampling):
    """What text-generation-inference, vLLM and transformers can ask for beside it."""

    min_p: Share | None = parameter("min_p")
    typical_p: PositiveShare | None = parameter("typical_p")
    repetition_penalty: RepetitionPenalty | None = parameter("repetition_penalty")
    frequency_penalty: Penalty | None = parameter("frequency_penalty")
    presence_penalty: Penalty | None = parameter("presence_penalty")
    dry_multiplier: NotNegative | None = parameter("dry_multiplier")
    dry_base: DryBase | None = parameter("dry_base")
    dry_allowed_length: DryLength | None = parameter("dry_allowed_length")
    dry_penalty_last_n: LastN | None = parameter("dry_penalty_last_n")
    dry_sequence_breakers: Breakers | None = Field(
        None,
        description="Texts that repetitions do not reach beyond. Default: newline, colon, "
        "quotation mark and asterisk.",
    )
    top_n_sigma: OrMinusOne | None = parameter("top_n_sigma")
    xtc_probability: Share | None = parameter("xtc_probability")
    xtc_threshold: Share | None = parameter("xtc_threshold")
    dynatemp_range: NotNegative | None = parameter("dynatemp_range")
    dynatemp_exponent: NotNegative | None = parameter("dynatemp_exponent")
    mirostat: MirostatVersion | None = parameter("mirostat")
    mirostat_tau: NotNegative | None = parameter("mirostat_tau")
    mirostat_eta: Share | None = parameter("mirostat_eta")
    logit_bias: LogitBias | None = Field(
        None,
        description="Map from token ids, or texts for all of their tokens, to a bias that is added "
        "to their logits, or false, which bans them; or a list of such pairs.",
    )
    bad_words: Words | None = Field(None, description="Texts that are never written.")
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


def rest_of_context(model: WritingModel, described: int) -> int:
    """The limit on a text that has none, of which each token is described with so many."""
    most = model.defaults.new_tokens(model.max_length, model.max_length)
    return min(most, MAX_DESCRIBED // described) if described else most


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


_BAN = -math.inf
_PARAMETERS = frozenset(DEFAULTS)
_READ: Mapping[str, Callable[[Any], Any]] = {
    "bad_words": tuple,
    "dry_sequence_breakers": tuple,
    # llama.cpp's way to ban a token
    "logit_bias": lambda biases: {k: _BAN if v is False else v for k, v in biases.items()},
    # An empty string would end every text at once.
    "stop": lambda texts: tuple(filter(None, texts)),
    "stop_token_ids": frozenset,
}
"""How the engine has what a body spells in another way."""
