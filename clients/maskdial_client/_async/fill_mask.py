"""Fill-mask: candidates for the masked positions of a text, texts filled whole, and gaps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import (
    Call,
    Grammar,
    Request,
    TaskOptions,
    TextOptions,
    flat_body,
    task_body,
    task_call,
)

Order = Literal["confidence", "topk_margin", "entropy", "random", "left_to_right"]
"""By what the masks of a pass are chosen."""


class FillMaskParameters(TextOptions, total=False):
    """Parameters of ``fill_mask``. None means the server's default.

    ``top_k`` is the number of candidates per mask; ``targets`` limits them to the given words.
    """

    top_k: int | None
    targets: list[str] | None


class JointParameters(TextOptions, total=False):
    """Parameters of ``fill_jointly``. None means the server's default.

    ``top_k`` filled texts are returned: the best that a search with ``num_beams`` finds, or as many
    drawn at ``temperature``. Each pass fills the masks that ``order`` puts first, which may also be
    the masks' indices in the order to fill them: one, as many as ``steps`` passes have to, or all
    whose token is as probable as ``threshold``. ``targets`` are words of any number of tokens, for
    all masks, or a list of words or None for each. ``grammar``, in their place, is what the text of
    a mask has to match, as in ``generate``, or a list of that or None for each mask; such a text
    has one to ``max_new_tokens`` tokens.
    """

    top_k: int | None
    num_beams: int | None
    order: Order | list[int] | None
    steps: int | None
    threshold: float | None
    temperature: float | None
    seed: int | None
    targets: list[str] | list[list[str] | None] | None
    grammar: Grammar | list[Grammar | None] | None
    max_new_tokens: int | None


class InfillParameters(TaskOptions, total=False):
    """Parameters of ``infill``. None means the server's default.

    ``n_predict`` is the greatest number of tokens in the gap, ``prompt`` what the gap begins with,
    and ``input_extra`` parts of other files, with ``text`` and ``filename``. One of
    ``guided_choice``, ``guided_regex``, ``guided_json`` (a schema) and ``guided_grammar`` (in
    Lark's notation) is what the text in the gap has to match. ``n`` and
    ``num_beams`` are for masked models, ``top_k`` to ``stop`` for causal ones.
    """

    n_predict: int | None
    prompt: str | None
    input_extra: list[dict[str, str]] | None
    guided_choice: list[str] | None
    guided_regex: str | None
    guided_json: dict[str, Any] | str | None
    guided_grammar: str | None
    temperature: float | None
    seed: int | None
    n: int | None
    num_beams: int | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    stop: list[str] | None


@dataclass(frozen=True, slots=True)
class Fill:
    """One candidate for a masked position.

    ``score`` is its probability over the whole vocabulary, ``token`` its id, and ``sequence`` the
    text with this mask filled in; other masks of the text stay.
    """

    score: float
    token: int
    token_str: str
    sequence: str


@dataclass(frozen=True, slots=True)
class FillMaskResult:
    """The candidates for each mask of a text: masks in text order, best candidate first."""

    masks: tuple[tuple[Fill, ...], ...]

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The candidates for the only mask. Raises ValueError if the text has several."""
        if len(self.masks) != 1:
            raise ValueError(
                f"the text has {len(self.masks)} masks: use .masks, which has an entry for each"
            )
        return self.masks[0]


@dataclass(frozen=True, slots=True)
class JointToken:
    """A token that was filled in: the index of its mask, its id and text, its probability in the
    pass that filled it, and that pass, counted from 0.
    """

    mask: int
    token: int
    token_str: str
    score: float
    step: int


@dataclass(frozen=True, slots=True)
class JointFill:
    """A text with all of its masks filled.

    ``log_likelihood`` is the natural pseudo-log-likelihood of its tokens, ``score`` the exponential
    of their mean.
    """

    sequence: str
    score: float
    log_likelihood: float
    tokens: tuple[JointToken, ...]


@dataclass(frozen=True, slots=True)
class GapFill:
    """One of a masked model's texts for a gap; see `JointFill`."""

    content: str
    score: float
    log_likelihood: float
    tokens: tuple[JointToken, ...]


@dataclass(frozen=True, slots=True)
class Infilled:
    """The text in a gap, and why it ends there: ``eos``, ``limit``, ``word`` (a text of ``stop``),
    or ``none`` for a masked model, whose ``fillings`` are ranked.
    """

    content: str
    stop_type: str
    truncated: bool
    fillings: tuple[GapFill, ...] = ()


class AsyncFillMask(AsyncCaller):
    """The methods for /fill-mask and /infill."""

    @overload
    async def fill_mask(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[FillMaskParameters],
    ) -> FillMaskResult: ...
    @overload
    async def fill_mask(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[FillMaskParameters],
    ) -> list[FillMaskResult]: ...
    async def fill_mask(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[FillMaskParameters],
    ) -> FillMaskResult | list[FillMaskResult]:
        """The most likely tokens for each mask of a text; for a list, one result per text."""
        body = task_body({"inputs": inputs}, model, parameters)
        call = task_call("/fill-mask", inputs, body, parse_fill_mask)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def fill_jointly(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[JointParameters],
    ) -> list[JointFill]: ...
    @overload
    async def fill_jointly(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[JointParameters],
    ) -> list[list[JointFill]]: ...
    async def fill_jointly(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[JointParameters],
    ) -> list[JointFill] | list[list[JointFill]]:
        """The text with all of its masks filled, each pass seeing what was filled, best text first;
        for a list, one result per text.
        """
        body = task_body({"inputs": inputs}, model, {**parameters, "joint": True})
        call = task_call("/fill-mask", inputs, body, _parse_jointly)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    async def infill(
        self,
        prefix: str,
        suffix: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[InfillParameters],
    ) -> Infilled:
        """The text between two texts."""
        fields = {"input_prefix": prefix, "input_suffix": suffix}
        body = flat_body(fields, model, parameters)
        return await self._send(Call(Request("POST", "/infill", body), _parse_infill), timeout)


def _parse_jointly(entry: Sequence[Any]) -> list[JointFill]:
    return [JointFill(str(item["sequence"]), *_joint(item)) for item in entry]


def _parse_infill(reply: Mapping[str, Any]) -> Infilled:
    return Infilled(
        content=str(reply["content"]),
        stop_type=str(reply["stop_type"]),
        truncated=bool(reply["truncated"]),
        fillings=tuple(
            GapFill(str(item["content"]), *_joint(item)) for item in reply.get("fillings", ())
        ),
    )


def _joint(item: Mapping[str, Any]) -> tuple[float, float, tuple[JointToken, ...]]:
    tokens = tuple(
        JointToken(
            mask=int(token["mask"]),
            token=int(token["token"]),
            token_str=str(token["token_str"]),
            score=float(token["score"]),
            step=int(token["step"]),
        )
        for token in item["tokens"]
    )
    return float(item["score"]), float(item["log_likelihood"]), tokens


def parse_fill_mask(entry: Sequence[Any]) -> FillMaskResult:
    """A list of candidates if the text has one mask, else a list of such lists."""
    masks = entry if isinstance(entry[0], list) else [entry]
    return FillMaskResult(tuple(tuple(_fill(item) for item in mask) for mask in masks))


def _fill(item: Mapping[str, Any]) -> Fill:
    return Fill(
        score=float(item["score"]),
        token=int(item["token"]),
        token_str=str(item["token_str"]),
        sequence=str(item["sequence"]),
    )
