"""`POST /v1/moderations`: whether a classifier finds anything in a text, as OpenAI has it.

The categories are the classifier's labels. A category is true if its label is independent of the
others and has a score of 0.5 or more, or if it is the most likely of labels that exclude each
other, unless it names what is harmless.
"""

import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
from fastapi import Response
from pydantic import Field

from maskdial.ask.catalogue import task_of
from maskdial.bundle.manifest import Manifest
from maskdial.dialects.body import IMAGES, AnyText, example
from maskdial.dialects.call import Call
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.masked_body import TruncationParameters
from maskdial.dialects.openai.base import OpenAIBody, check_items
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import ModerationReply, ModerationResult
from maskdial.errors import ValidationError
from maskdial.http.replies import json_reply, timing_headers
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.classify import ClassifyRequest, LabelScore

_THRESHOLD = 0.5
_HARMS = (
    "abuse|abusive|attack|bullying|flagged|harassment|harmful|hate|hateful|hatespeech|injection|"
    "insult|jailbreak|malicious|nsfw|obscene|offensive|phishing|profane|profanity|scam|spam|"
    "threat|toxic|unsafe|violation"
)
_HARMLESS = re.compile(
    "acceptable|appropriate|benign|clean|compliant|ham|harmless|legit|legitimate|neither|neutral|"
    "no|none|normal|ok|okay|safe|sfw|"
    f"(?:no|non|not)(?:{_HARMS})"
)


class ModeratedPart(Lenient):
    """A part of an input."""

    within = "input"

    type: Literal["text"]
    text: AnyText


def _check_input(value: object) -> object:
    """A text, texts, or parts, whose texts become one."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return "\n".join(_part_text(index, part) for index, part in enumerate(value))
    return check_items(value, 'must be a string, or all {"type": "text", "text": "..."}')


def _part_text(index: int, part: dict[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if isinstance(kind, str) and kind in IMAGES:
        raise ValueError(f"item {index} is an image, and classifiers read text only; send text")
    if kind != "text" or not isinstance(text, str) or not text.strip():
        raise ValueError(f'item {index} must be {{"type": "text", "text": "..."}}')
    return text


class ModerationsBody(TruncationParameters, OpenAIBody):
    """Texts to moderate. Truncation is an extension."""

    spellings = {"texts": "input"}  # noqa: RUF012
    model_config = example({"input": ["A warm film.", "I hate every minute of it."]})

    input: Annotated[
        str | list[str],
        pydantic.BeforeValidator(
            _check_input, json_schema_input_type=str | list[str] | list[ModeratedPart]
        ),
    ] = Field(description="A text, a list of texts, or the parts of one text.")


async def moderations(call: Call[ModerationsBody]) -> Response:
    """Says of texts what a classifier finds in them: its labels are the categories."""
    body = call.body
    model = await call.masked(task_of(ClassifyRequest))
    _check_labels(model)
    texts = body.input if isinstance(body.input, list) else [body.input]
    answer = await call.answer(
        ClassifyRequest([(text, None) for text in texts], body.truncation), model
    )
    content: ModerationReply = {
        "id": f"modr-{uuid.uuid4().hex}",
        "model": model.name,
        "results": [_result(scores, model.manifest) for scores in answer.content],
    }
    return json_reply(content, headers=timing_headers(answer.timings))


def _check_labels(model: MaskedModel) -> None:
    if model.manifest.problem_type == "regression":
        raise ValidationError(
            f"model {model.name!r} gives numbers, not the probabilities of categories",
            field="model",
        )


def _result(scores: Sequence[LabelScore], manifest: Manifest) -> ModerationResult:
    """What is said of a text with these scores, the best first."""
    independent = manifest.problem_type == "multi_label_classification" or len(manifest.labels) == 1
    found = {each.label for each in scores if each.score >= _THRESHOLD}
    if not independent:
        found = {scores[0].label}
    by_label = {each.label: each.score for each in scores}
    categories = {label: label in found and not is_harmless(label) for label in manifest.labels}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": {label: by_label[label] for label in manifest.labels},
        "category_applied_input_types": {label: ["text"] for label in manifest.labels},
    }


def is_harmless(label: str) -> bool:
    """Whether a label names what needs no moderation, such as OK, neutral or non-toxic."""
    return _HARMLESS.fullmatch(re.sub(r"[\W_]", "", label).lower()) is not None


ROUTES = (FORM.route("/v1/moderations", moderations, ModerationsBody, ModerationReply),)
