"""Fill-mask: candidates for the masked positions of a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, overload

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import TextOptions, task_body, task_call


class FillMaskParameters(TextOptions, total=False):
    """Parameters of ``fill_mask``. None means the server's default.

    ``top_k`` is the number of candidates per mask; ``targets`` limits them to the given words.
    """

    top_k: int | None
    targets: list[str] | None


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


class AsyncFillMask(AsyncCaller):
    """The method for /fill-mask."""

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
