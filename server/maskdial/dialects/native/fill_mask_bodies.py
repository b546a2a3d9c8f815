"""The bodies of `/fill-mask`, and of `/score`, which both families serve."""

import json
from typing import Annotated, Self, get_args

import pydantic
from pydantic import Field, model_validator

from maskdial.ask.score import ScoreRequest
from maskdial.bounds import Range, Size
from maskdial.causal.sampling.params import Temperature
from maskdial.dialects.body import FieldError, TextsBody, example
from maskdial.dialects.masked_body import MaskedBody, TruncationParameters
from maskdial.dialects.native.generate_bodies import GrammarParameter
from maskdial.dialects.sampling import Seed
from maskdial.grammar.source import GrammarRequest
from maskdial.masked.tasks.fill_jointly import (
    DEFAULT_BLANK,
    MAX_BEAMS,
    MAX_BLANK,
    JointFillRequest,
)
from maskdial.masked.tasks.fill_mask import FillMaskRequest
from maskdial.unmasking.unmasker import Order, Unmasking

_MAX_CHARACTERS = 256
_MAX_WORDS = 1024
_JOINT = (
    *("num_beams", "order", "steps", "threshold", "temperature", "seed"),
    *("grammar", "max_new_tokens"),
)


def _check_target(value: object) -> object:
    """A word, or the words for a mask; null for any."""
    words = value if isinstance(value, list) else [value or ""]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("must be a word, or with joint a list of words or null")
    if not 1 <= len(words) <= _MAX_WORDS:
        raise ValueError(f"must have between 1 and {_MAX_WORDS} words, not {len(words)}")
    if (longest := max(map(len, words))) > _MAX_CHARACTERS:
        raise ValueError(f"must have at most {_MAX_CHARACTERS} characters, not {longest}")
    return value


Target = Annotated[
    str | list[str] | None,
    pydantic.PlainValidator(
        _check_target,
        json_schema_input_type=Annotated[str, Field(max_length=_MAX_CHARACTERS)]
        | Annotated[
            list[Annotated[str, Field(max_length=_MAX_CHARACTERS)]],
            Field(min_length=1, max_length=_MAX_WORDS),
        ]
        | None,
    ),
]


def _check_order(value: object) -> object:
    if isinstance(value, list) or value in get_args(Order):
        return value
    raise ValueError(
        f"must be one of {', '.join(map(json.dumps, get_args(Order)))}, or the masks' indices in "
        "the order to fill them"
    )


def _list_grammars(value: object) -> object:
    """The grammar for each mask, or one for all, as a list."""
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return [value]
    raise ValueError(
        'must be a grammar, {"type": ..., "value": ...}, or a list of a grammar or null for each '
        "mask"
    )


class FillMaskParameters(TruncationParameters):
    """Parameters of `/fill-mask`."""

    top_k: Annotated[int, Range(1)] | None = Field(
        None,
        description="Number of fillings per mask. Default: 5. With joint, number of filled texts, "
        "1 by default.",
    )
    targets: Annotated[list[Target], Size(1, _MAX_WORDS, "words")] | None = Field(
        None,
        description="Only score these words, each a single token. With joint, of one token or "
        "several; also a list of words, or null, for each mask.",
    )
    grammar: (
        Annotated[
            Annotated[list[GrammarParameter | None], Size(1, 1024, "masks")],
            pydantic.BeforeValidator(
                _list_grammars,
                json_schema_input_type=GrammarParameter | list[GrammarParameter | None],
            ),
        ]
        | None
    ) = Field(
        None,
        description="With joint, what the text of a mask has to match, of one token or several; "
        "also a list of grammars, or null, for each mask.",
    )
    max_new_tokens: Annotated[int, Range(1, MAX_BLANK)] | None = Field(
        None,
        description="With a grammar, most tokens of a mask's text; all numbers are tried. "
        f"Default: {DEFAULT_BLANK}.",
    )
    joint: bool | None = Field(
        None,
        description="Fill the masks of a text together, pass by pass, each seeing what was filled; "
        "the reply has whole texts. Default: false.",
    )
    num_beams: Annotated[int, Range(1, MAX_BEAMS)] | None = Field(
        None, description="With joint, fillings that a search follows. Default: top_k."
    )
    order: (
        Annotated[
            Order | Annotated[list[Annotated[int, Range(0)]], Size(1, 1024, "masks")],
            pydantic.BeforeValidator(_check_order),
        ]
        | None
    ) = Field(
        None,
        description="With joint, which masks are filled first, or their indices in the order to "
        "fill them. Default: confidence.",
    )
    steps: Annotated[int, Range(1)] | None = Field(
        None,
        description="With joint, number of passes, over which the masks are spread. Default: one "
        "for each mask.",
    )
    threshold: Annotated[float, Range(0, 1, above_low=True)] | None = Field(
        None,
        description="With joint, in place of steps: each pass fills all masks whose token is at "
        "least so probable, and at least one.",
    )
    temperature: Temperature | None = Field(
        None,
        description="With joint, draw tokens at this temperature, top_k texts. Default: 0, the "
        "likeliest tokens.",
    )
    seed: Seed | None = Field(
        None, description="With joint, seed of the drawn tokens; text i has the seed plus i."
    )

    @property
    def words(self) -> list[list[str] | None] | None:
        """The words for each mask, or one list for all; None: any."""
        if self.targets is None:
            return None
        words = [each for each in self.targets if isinstance(each, str)]
        return [words] if words else [each for each in self.targets if not isinstance(each, str)]

    @property
    def grammars(self) -> list[GrammarRequest | None] | None:
        """What the text of each mask has to match, or one grammar for all; None: anything."""
        if self.grammar is None:
            return None
        return [None if each is None else each.request for each in self.grammar]

    @property
    def unmasking(self) -> Unmasking:
        """How masks are filled together."""
        given = self.given("threshold", "temperature")
        samples = (self.temperature or 0.0) > 0
        num_beams = self.num_beams or (1 if samples else self.top_k or 1)
        order = tuple(self.order) if isinstance(self.order, list) else self.order
        return Unmasking(order or "confidence", num_beams=num_beams, **given)


class FillMaskBody(TextsBody, MaskedBody):
    """A text with one or more masks, or a list of them."""

    model_config = example({"inputs": "The old king lived in a [MASK] by the sea."})

    parameters: FillMaskParameters | None = None

    @model_validator(mode="after")
    def _check_joint(self) -> Self:
        parameters = self.parameters or FillMaskParameters()
        kinds = {type(each) for each in parameters.targets or ()}
        if parameters.joint:
            if str in kinds and len(kinds) > 1:
                raise FieldError(
                    "parameters.targets",
                    "send words for all masks, or a list of words or null for each",
                )
            if parameters.grammar is not None and parameters.targets is not None:
                raise FieldError("parameters.grammar", "a mask has targets or a grammar, not both")
            if parameters.grammar is None and parameters.max_new_tokens is not None:
                raise FieldError(
                    "parameters.max_new_tokens", "is for masks with a grammar; send one, too"
                )
            return self
        for name in parameters.given(*_JOINT):
            raise FieldError(
                f"parameters.{name}", "is for masks that are filled together; set joint to true"
            )
        if kinds - {str}:
            raise FieldError(
                "parameters.targets", "must be words; lists for each mask need joint: true"
            )
        return self

    @property
    def joint(self) -> bool:
        """Whether the masks of a text are filled together."""
        return self.parameters is not None and bool(self.parameters.joint)

    def request(self) -> FillMaskRequest | JointFillRequest:
        parameters = self.parameters or FillMaskParameters()
        if not parameters.joint:
            given = parameters.given("top_k", "targets")
            return FillMaskRequest(self.texts, parameters.truncation, **given)
        return JointFillRequest(
            self.texts,
            parameters.truncation,
            unmasking=parameters.unmasking,
            targets=parameters.words,
            grammars=parameters.grammars,
            max_tokens=parameters.max_new_tokens or DEFAULT_BLANK,
            **parameters.given("top_k", "steps", "seed"),
        )


class ScoreBody(TextsBody):
    """A text, or a list of them, to be scored by how likely the model finds it."""

    model_config = example(
        {"model": "hybrid", "inputs": "The captain of the ship looked at the sea."}
    )

    parameters: TruncationParameters | None = None

    def request(self) -> ScoreRequest:
        parameters = self.parameters or TruncationParameters()
        return ScoreRequest(self.texts, parameters.truncation)
