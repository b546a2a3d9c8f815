"""`POST /infill`, as llama.cpp has it: the text between two texts.

A causal model writes it if its tokenizer has fill-in-the-middle tokens; a masked one fills masks.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NotRequired

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from maskdial.ask.catalogue import INFILL
from maskdial.ask.write import AnyGeneration
from maskdial.bounds import Range, Size
from maskdial.causal.events import Finish, TokenEvent, Verdict
from maskdial.causal.generate import Completion
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest, Infilling, Snippet
from maskdial.dialects.body import TaskBody, example
from maskdial.dialects.call import Call, task_route
from maskdial.dialects.flow import Renderer, error_frame, write
from maskdial.dialects.guided import GuidedFields
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.sampling import AnyStops, SamplingFields
from maskdial.dialects.unsupported import Lora
from maskdial.errors import ValidationError
from maskdial.http.replies import encode_json, json_reply, timing_headers
from maskdial.http.sse import Frames, data_frame
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.fill_jointly import DEFAULT_BLANK, MAX_BEAMS, MAX_BLANK, JointToken
from maskdial.masked.tasks.infill import InfillRequest, gap_text
from maskdial.unmasking.unmasker import Unmasking

# Those that mean nothing where the likeliest tokens are chosen, and others
_DRAWN = ("top_k", "top_p", "min_p", "typical_p")
_CAUSAL = (
    *("stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


class InputExtra(Lenient):
    """A part of another file."""

    text: str = ""
    filename: Annotated[str, Size(0, 1024, "characters")] = "tmp"


class InfillBody(SamplingFields, GuidedFields, Lenient, TaskBody):
    """The texts around a gap."""

    model_config = example(
        {"input_prefix": "The old king lived in a ", "input_suffix": " by the sea."}
    )

    # What llama.cpp's clients send of its caches, slots and limits on time
    habits = frozenset(
        {
            *("cache_prompt", "id_slot", "n_indent", "n_keep", "n_probs", "response_fields"),
            *("samplers", "t_max_predict_ms", "t_max_prompt_ms", "return_tokens"),
        }
    )
    spellings = {  # noqa: RUF012
        "prompts": "input_prefix",
        "targets": "guided_choice",
        "prefix": "input_prefix",
        "suffix": "input_suffix",
        "max_tokens": "n_predict",
        "max_new_tokens": "n_predict",
    }

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after it.")
    input_extra: Annotated[list[InputExtra], Size(0, 1024, "texts")] | None = Field(
        None, description="Parts of other files, before the prefix."
    )
    prompt: str | None = Field(
        None, description="What the gap begins with. Default: nothing is given."
    )
    n_predict: Annotated[int, Range(-1)] | None = Field(
        None,
        description="Maximum number of tokens in the gap; a masked model tries all lengths up to "
        f"it. Default, and with -1: the causal model's limit or 100, {DEFAULT_BLANK} for a masked "
        "one.",
    )
    stop: AnyStops | None = Field(
        None, description="Texts that end the gap, and are not part of it."
    )
    stream: bool | None = Field(
        None, description="Reply with server-sent events, one per token. Default: false."
    )
    n: Annotated[int, Range(1, MAX_BEAMS)] | None = Field(
        None, description="For masked models, number of fillings to return. Default: 1."
    )
    num_beams: Annotated[int, Range(1, MAX_BEAMS)] | None = Field(
        None, description="For masked models, fillings of each length to follow. Default: 1."
    )
    lora: Lora = None

    def names(self) -> Mapping[str, str]:
        """What the body calls the fields of a neutral request, where the names differ."""
        return {"grammar": next(iter(self.grammars()), "guided_grammar"), **super().names()}

    @property
    def num_tokens(self) -> int | None:
        """The longest gap; None: the default."""
        return None if self.n_predict in (None, -1) else self.n_predict

    def causal(self, model: CausalModel) -> GenerationRequest:
        """The body as a request to a causal model.

        Raises:
            ValidationError: it asks for what only masked models do.
        """
        for name in self.given("n", "num_beams"):
            raise ValidationError(
                f"is for masked models; model {model.name!r} writes one text", field=name
            )
        if self.num_tokens == 0:
            raise ValidationError(
                "must be at least 1, or -1 for the model's own limit, not 0", field="n_predict"
            )
        snippets = [Snippet(each.text, each.filename) for each in self.input_extra or ()]
        return GenerationRequest(
            [self.input_prefix],
            params=self.sampling(model.defaults, do_sample=True, include_stop=False),
            max_new_tokens=self.num_tokens,
            grammar=self.constraint,
            infill=Infilling(self.input_suffix, self.prompt or "", snippets, cut=True),
            **self.given("seed"),
        )

    def masked(self, model: MaskedModel) -> InfillRequest:
        """The body as a request to a masked model.

        Raises:
            ValidationError: it asks for what only causal models do.
        """
        samples = (self.temperature or 0) > 0
        for name in self.given(*_CAUSAL, *(_DRAWN if samples else ())):
            raise ValidationError(
                f"is for causal models; model {model.name!r} fills masks", field=name
            )
        default = DEFAULT_BLANK if self.guided_choice is None else MAX_BLANK
        extra = "".join(f"{each.text}\n" for each in self.input_extra or ())
        return InfillRequest(
            extra + self.input_prefix + (self.prompt or ""),
            self.input_suffix,
            default if self.num_tokens is None else self.num_tokens,
            self.n or 1,
            Unmasking(temperature=self.temperature or 0.0, num_beams=self.num_beams or 1),
            choices=self.guided_choice,
            grammar=self.constraint if self.guided_choice is None else None,
            **self.given("seed"),
        )


class GapFilling(TypedDict):
    """One of a masked model's fillings of the gap; see `JointFilling`."""

    content: str
    score: float
    log_likelihood: float
    tokens: list[JointToken]


class InfillReply(TypedDict):
    """llama.cpp's, with the fillings of a masked model beside it, best first."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    truncated: bool
    stop_type: str
    stopping_word: str
    fillings: NotRequired[list[GapFilling]]
    policy: NotRequired[list[Verdict]]


async def infill(call: Call[InfillBody]) -> Response:
    """Writes the text between a prefix and a suffix; with `"stream": true` as server-sent events.

    A masked model tries all lengths up to `n_predict`, and answers with the likeliest text per
    token.
    """
    model = await call.model(INFILL)
    if isinstance(model, CausalModel):
        return await _write(call, model)
    assert isinstance(model, MaskedModel), "no other model does the task"
    return await _fill(call, model)


async def _write(call: Call[InfillBody], model: CausalModel) -> Response:
    generation = await call.generation(call.body.causal(model), model)
    renderer = CompletionRenderer(model.name, generation)
    return await write(call, generation, renderer, streams=bool(call.body.stream))


class CompletionRenderer(Renderer):
    """Writes one text as llama.cpp replies with it.

    Args:
        model_name: of the model that writes it.
        generation: the admitted request, of one prompt.
    """

    def __init__(self, model_name: str, generation: AnyGeneration) -> None:
        (prompt,) = generation.prompts
        self._common = {"model": model_name, "truncated": prompt.num_truncated > 0}

    def reply(self, completions: Sequence[Completion]) -> dict[str, Any]:
        ((text,),) = (completion.texts for completion in completions)
        return (
            _ending(text.finish)
            | self._common
            | {
                "content": text.finish.generated_text,
                "tokens": [event.token_id for event in text.events],
            }
        )

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        part = {"index": 0, "content": event.text, "tokens": [event.token_id], "stop": False}
        frames = data_frame(encode_json(part))
        if event.finish is not None:
            last = _ending(event.finish) | self._common | {"content": "", "tokens": []}
            frames += data_frame(encode_json(last))
        return frames


def _ending(finish: Finish) -> dict[str, Any]:
    stop_type = "limit" if finish.reason == "length" else "eos"
    return {
        "index": 0,
        "stop": True,
        **finish.policy,
        "tokens_predicted": finish.generated_tokens,
        "tokens_evaluated": finish.input_length,
        "stop_type": "word" if finish.stop else stop_type,
        "stopping_word": finish.stop or "",
    }


async def _fill(call: Call[InfillBody], model: MaskedModel) -> Response:
    answer = await call.answer(call.body.masked(model), model)
    fillings = [
        {
            "content": gap_text(filling, model.tokenizer),
            "score": filling.score,
            "log_likelihood": filling.log_likelihood,
            "tokens": filling.tokens,
        }
        for filling in answer.content
    ]
    best = answer.content[0]
    reply = {
        "index": 0,
        "content": fillings[0]["content"],
        "tokens": [token.token for token in best.tokens],
        "stop": True,
        "model": model.name,
        "tokens_predicted": len(best.tokens),
        "tokens_evaluated": answer.timings.compute_tokens,
        "truncated": answer.timings.truncated_tokens > 0,
        "stop_type": "none",
        "stopping_word": "",
        "fillings": fillings,
    }
    headers = timing_headers(answer.timings)
    if not call.body.stream:
        return json_reply(reply, headers=headers)

    async def frames() -> Frames:
        yield data_frame(encode_json(reply))

    return await call.stream(frames(), error_frame, headers)


ROUTES = (
    task_route("/infill", infill, InfillBody, InfillReply, streams=True, tags=["causal", "masked"]),
)
