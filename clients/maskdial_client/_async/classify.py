"""Classification: the labels of a text, the model's own or given ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import TextOptions, task_body, task_call

ClassifyInput = str | tuple[str, str]
"""A text, or a pair of texts."""
ClassifyBatch = list[str] | list[tuple[str, str]] | list[ClassifyInput]


class ClassifyParameters(TextOptions, total=False):
    """Parameters of ``classify``. None means the server's default.

    ``top_k`` is the number of labels per text; ``function_to_apply`` turns logits into scores.
    """

    top_k: int | None
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None


class ZeroShotClassifyParameters(TextOptions, total=False):
    """Parameters of ``zero_shot_classify``. None means the server's default.

    With ``multi_label`` each label is scored independently of the others. In
    ``hypothesis_template``, ``{}`` stands for the label.
    """

    multi_label: bool | None
    hypothesis_template: str | None


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its score."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """The labels of a text, best first."""

    labels: tuple[LabelScore, ...]

    @property
    def label(self) -> str:
        """The best label."""
        return self.labels[0].label

    @property
    def score(self) -> float:
        """The score of the best label."""
        return self.labels[0].score


class AsyncClassify(AsyncCaller):
    """The methods for /classify and /zero-shot-classify."""

    @overload
    async def classify(
        self,
        inputs: ClassifyInput,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ClassifyParameters],
    ) -> Classification: ...
    @overload
    async def classify(
        self,
        inputs: ClassifyBatch,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ClassifyParameters],
    ) -> list[Classification]: ...
    async def classify(
        self,
        inputs: ClassifyInput | ClassifyBatch,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ClassifyParameters],
    ) -> Classification | list[Classification]:
        """The labels of a text or of a pair of texts; for a list, one result per entry."""
        wire = (
            [wire_pair(item) for item in inputs] if isinstance(inputs, list) else wire_pair(inputs)
        )
        body = task_body({"inputs": wire}, model, parameters)
        call = task_call("/classify", inputs, body, parse_classification, always_list=True)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def zero_shot_classify(
        self,
        inputs: str,
        candidate_labels: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ZeroShotClassifyParameters],
    ) -> Classification: ...
    @overload
    async def zero_shot_classify(
        self,
        inputs: list[str],
        candidate_labels: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ZeroShotClassifyParameters],
    ) -> list[Classification]: ...
    async def zero_shot_classify(
        self,
        inputs: str | list[str],
        candidate_labels: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ZeroShotClassifyParameters],
    ) -> Classification | list[Classification]:
        """How well each candidate label fits a text; for a list, one result per text."""
        labeled = {**parameters, "candidate_labels": candidate_labels}
        body = task_body({"inputs": inputs}, model, labeled)
        call = task_call("/zero-shot-classify", inputs, body, parse_classification)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]


def wire_pair(item: ClassifyInput) -> str | dict[str, str]:
    """A text or a pair of texts as the wire has it."""
    if isinstance(item, str):
        return item
    text, text_pair = item
    return {"text": text, "text_pair": text_pair}


def parse_classification(entry: Sequence[Mapping[str, Any]]) -> Classification:
    """The labels of one text."""
    return Classification(
        tuple(LabelScore(str(item["label"]), float(item["score"])) for item in entry)
    )
