"""`/summarize` and `/translate`: the Hugging Face tasks of encoder-decoder models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from maskdial.ask.catalogue import SUMMARIZE, TRANSLATE
from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.causal.model import CausalModel
from maskdial.dialects.call import Call, task_route
from maskdial.dialects.native.replies import SummarizeReply, TranslateReply
from maskdial.dialects.native.seq2seq_bodies import SummarizeBody, TranslateBody
from maskdial.http.replies import json_reply, timing_headers, warnings_header
from maskdial.http.route import TaskRoute
from maskdial.registry.served import ServedModel, Task

# What transformers' tokenizers clean up
_SPACES = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)


@dataclass(frozen=True, slots=True)
class TextToTextRoute:
    """A task of encoder-decoder models on the wire.

    Attributes:
        task: what models are asked for.
        body: the type of its request body.
        reply: the type of its reply.
        key: of the text in the reply.
        description: of the route, for the documentation.
        parameters: by which a body is known that was sent to `/models/NAME`.
    """

    task: Task
    body: type[SummarizeBody] | type[TranslateBody]
    reply: Any
    key: str
    description: str
    parameters: frozenset[str] = frozenset()
    head: TaskName = "generate"

    def serves(self, manifest: Manifest) -> bool:
        """Whether a model can do the task."""
        return self.task.serves(manifest)

    def claims(self, content: Mapping[str, Any], model: ServedModel) -> bool:
        """Whether a body that was sent to `/models/NAME` is for this task."""
        given = content.get("parameters")
        has_encoder = model.manifest.text_to_text is not None
        return has_encoder and isinstance(given, dict) and not self.parameters.isdisjoint(given)

    def route(self) -> TaskRoute:
        """`POST /NAME`."""

        return task_route(
            f"/{self.task.name}",
            self.answer,
            self.body,
            self.reply,
            tags=["causal"],
            name=self.task.name,
            description=self.description,
        )

    async def answer(self, call: Call[SummarizeBody | TranslateBody]) -> Response:
        """Answers a body of the task: always with a list, as transformers does."""
        model = await call.model(self.task)
        assert isinstance(model, CausalModel)
        generation = await call.generation(call.body.request(model.defaults), model)
        completions = await generation.complete()
        texts = [completion.texts[0].finish.generated_text for completion in completions]
        if call.body.options.clean_up_tokenization_spaces:
            texts = list(map(_clean_up, texts))
        headers = timing_headers(generation.timings(completions))
        headers |= warnings_header(generation.warnings)
        return json_reply([{self.key: text} for text in texts], headers=headers)


def _clean_up(text: str) -> str:
    for spaced, plain in _SPACES:
        text = text.replace(spaced, plain)
    return text


TASKS = (
    TextToTextRoute(
        SUMMARIZE,
        SummarizeBody,
        SummarizeReply,
        "summary_text",
        "Summarizes a text, or several, with an encoder-decoder model.",
    ),
    TextToTextRoute(
        TRANSLATE,
        TranslateBody,
        TranslateReply,
        "translation_text",
        "Translates a text, or several, with an encoder-decoder model.",
        frozenset({"src_lang", "tgt_lang"}),
    ),
)

ROUTES = tuple(task.route() for task in TASKS)
