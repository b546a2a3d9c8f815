"""Text by unmasking, as every dialect that writes under the full or the block mask asks for it and
reads it; and text in canvases, which models write that have no other way.
"""

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from maskdial.bounds import Range
from maskdial.bundle.manifest import Manifest
from maskdial.bundle.tokenizer import IncrementalDecoder
from maskdial.causal.block_diffusion import BlockRequest, BlockTask
from maskdial.causal.model import CausalModel
from maskdial.causal.request import Conversation
from maskdial.dialects.body import Wire
from maskdial.dialects.call import Call
from maskdial.engine.timing import Timed
from maskdial.errors import ValidationError
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.denoise import DenoiseRequest
from maskdial.masked.tasks.masked_diffusion import UnmaskRequest
from maskdial.unmasking.canvas import FilledToken
from maskdial.unmasking.text import BLOCK_LENGTH, TextPlan, TextPrompt, TextSoFar
from maskdial.unmasking.unmasker import Order


class UnmaskingFields(Wire):
    """How a text is unmasked. Null means not given."""

    block_length: Annotated[int, Range(1)] | None = Field(
        None,
        description="Under full and block masks, tokens that are unmasked before the next ones. "
        f"Default: {BLOCK_LENGTH}.",
    )
    steps: Annotated[int, Range(1)] | None = Field(
        None,
        description="Under full and block masks, number of passes for the text. Default: one for "
        "each token. Of a model that writes canvases, passes for each at most. Default: the "
        "model's.",
    )
    order: Order | None = Field(
        None,
        description="Under full and block masks, which tokens of a block are unmasked first. "
        "Default: confidence.",
    )
    threshold: Annotated[float, Range(0, 1, above_low=True)] | None = Field(
        None,
        description="Under full and block masks, in place of steps: each pass unmasks all tokens "
        "that are at least so probable, and at least one.",
    )
    stream_unmasking: bool | None = Field(
        None,
        description="Under full and block masks, a stream also shows the tokens that each pass "
        "unmasks. Default: false.",
    )

    def check_causal(self) -> None:
        """Refuses them where a text is written token by token.

        Raises:
            ValidationError: one of them is given.
        """
        for name in self.given(*UnmaskingFields.model_fields):
            raise ValidationError(
                "is for the full and the block mask; set mask to one of them", field=name
            )

    def check_shown(self, *, stream: bool) -> None:
        """Refuses changes to be shown in a reply that is not streamed.

        Raises:
            ValidationError: they are asked for.
        """
        if self.stream_unmasking and not stream:
            raise ValidationError(
                "only a stream shows what a pass unmasks; set stream", field="stream_unmasking"
            )


UnmaskingModel = MaskedModel | CausalModel


@dataclass(frozen=True, slots=True)
class UnmaskTask:
    """Text under the full mask as something that models can be asked for."""

    name: str = UnmaskRequest.task

    def serves(self, manifest: Manifest) -> bool:
        return UnmaskRequest.serves(manifest) or DenoiseRequest.serves(manifest)


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Text under the mask that a model was trained to write under."""

    name: str = "generate"

    def serves(self, manifest: Manifest) -> bool:
        return manifest.task == "generate" or DenoiseRequest.serves(manifest)


async def find_model(call: Call[Any]) -> UnmaskingModel | None:
    """The model that is meant, if it does not write token by token: of the masked family under the
    full mask, causal under the block mask. Without a mask, one that writes canvases.
    """
    mask = call.choice().mask
    if mask == "block":
        return await call.causal(BlockTask())
    if mask == "full":
        return await call.masked(UnmaskTask())
    model = await call.model(WriteTask())
    return model if isinstance(model, MaskedModel) else None


async def render(
    model: UnmaskingModel, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """A conversation as a prompt, with its special tokens.

    Raises:
        ValidationError: the model has no template, or its template fails on them.
    """
    if isinstance(model, MaskedModel):
        return await model.render(messages, variables)
    return await Conversation(messages, variables=variables).render(model)


async def parts(
    call: Call[Any], model: UnmaskingModel, prompt: TextPrompt, plan: TextPlan
) -> AsyncIterator[Timed[TextSoFar]]:
    """The text after each of its blocks or canvases, or of its passes."""
    if isinstance(model, CausalModel):
        async for written in BlockRequest(prompt, plan).write(model, call.deadline):
            yield written
        return
    kind = UnmaskRequest if model.manifest.denoising is None else DenoiseRequest
    part = await call.answer(kind(prompt, plan), model)
    yield Timed(part.content.text, part.timings)
    while part.content.rest is not None:
        part = await run.proceed(part.content.rest, model, call.deadline)
        yield Timed(part.content.text, part.timings)


class Written:
    """What is written of a text, block by block.

    Attributes:
        text: of the tokens so far.
        num_tokens: how many there are.
    """

    def __init__(self, model: UnmaskingModel) -> None:
        self.text = ""
        self.num_tokens = 0
        self._tokenizer = model.tokenizer
        self._decoder: IncrementalDecoder | None = None

    def push(self, part: TextSoFar) -> Iterator[tuple[FilledToken, str]]:
        """The tokens that are new in the text, and what each adds to it.

        What the last one leaves of a character is added when the text is finished.
        """
        if self._decoder is None:
            self._decoder = self._tokenizer.decoder(part.prompt_ids)
        for token in part.tokens[self.num_tokens :]:
            self.num_tokens += 1
            new = self._decoder.push(token.token)
            self.text += new
            yield token, new

    def finish(self) -> str:
        """The rest of an incomplete character at the end."""
        rest = "" if self._decoder is None else self._decoder.flush()
        self.text += rest
        return rest

    def changes(self, part: TextSoFar) -> list[dict[str, Any]]:
        """What the last pass unmasked; ``index`` is a token's place in the text, from 1."""
        return [
            {"index": each.position - len(part.prompt_ids) + 1, **self.describe(each)}
            for each in sorted(part.unmasked, key=lambda each: each.position)
        ]

    def describe(self, token: FilledToken) -> dict[str, Any]:
        """A token by itself."""
        return {
            "id": token.token,
            "text": self._tokenizer.decode([token.token], skip_special_tokens=False),
            "logprob": token.logprob,
            "special": token.token in self._tokenizer.special_ids,
            "step": token.step,
        }


_NOT_OF_CANVASES = (
    *("do_sample", "temperature"),
    *("block_length", "order", "threshold", "stream_unmasking"),
)


def refuse_others(
    body: Wire, taken: Collection[str], model: UnmaskingModel, idle: Collection[str] = ()
) -> None:
    """Refuses fields that mean nothing where a text is unmasked, or written in canvases.

    Args:
        body: has the fields.
        taken: those that unmasking takes.
        model: writes the text.
        idle: those that ask for nothing.

    Raises:
        ValidationError: one of them is given.
    """
    why = f"is for the causal mask; model {model.name!r} writes by unmasking"
    if model.manifest.denoising is not None:
        taken = set(taken).difference(_NOT_OF_CANVASES)
        why = f"means nothing to model {model.name!r}, which writes whole canvases; leave it out"
    for name in body.given(*type(body).model_fields):
        if name not in taken and name not in idle:
            raise ValidationError(why, field=type(body).model_fields[name].alias or name)
