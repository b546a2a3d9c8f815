"""`POST /v1/prefill`: the beginning of conversations is read before the first of them comes."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Response
from pydantic import Field

from maskdial.bounds import Size
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion
from maskdial.causal.model import CausalModel
from maskdial.dialects.body import example
from maskdial.dialects.call import Call
from maskdial.dialects.flow import Renderer, write
from maskdial.dialects.openai.chat import ChatBody
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import PrefillReply
from maskdial.errors import ValidationError

# Nothing of a reply is asked for; the engine writes a token at least.
_LEAST = {"max_tokens": 1, "max_completion_tokens": None, "n": 1, "stream": False}


class PrefillBody(ChatBody):
    """A system prompt and tools, as `/v1/chat/completions` has them; what a reply is like means
    nothing.
    """

    model_config = example(
        {"messages": [{"role": "system", "content": "You live here."}], "key": "alice"}
    )

    key: Annotated[str, Size(1, 256, "characters")] | None = Field(
        None,
        description="The name of the key whose requests begin so. Required where there are keys, "
        "unless they share their prefixes (--prefix-cache-shared on).",
    )


async def prefill(call: Call[PrefillBody]) -> Response:
    """Reads a conversation into the prefix cache, of which the next one like it is copied.

    Whole blocks of tokens are kept, in memory and, with --prefix-cache-dir, on disk.
    """
    owner = call.server.prefix_owner(call.body.key)
    model = await call.writer()
    if not isinstance(model, CausalModel) or model.engine.prefix_cache is None:
        raise ValidationError(
            "there is no prefix cache: that takes a model that writes token by token, without "
            "another mask, and --prefix-cache-bytes",
            field="model",
        )
    call.act_for(owner)
    chat = call.body.model_copy(update=_LEAST).chat(model)
    generation = await call.generation(chat, model)
    return await write(call, generation, _Usage(model.bundle.name), streams=False)


class _Usage(Renderer):
    """Says what was read; the token that was written is nobody's."""

    def __init__(self, model: str) -> None:
        self._model = model

    def reply(self, completions: Sequence[Completion]) -> PrefillReply:
        (prompt,) = (completion.prompt for completion in completions)
        return {
            "object": "prefill",
            "model": self._model,
            "usage": {
                "prompt_tokens": len(prompt.ids),
                "prompt_tokens_details": {"cached_tokens": prompt.num_cached},
            },
        }

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        return b""


ROUTES = (FORM.route("/v1/prefill", prefill, PrefillBody, PrefillReply, admin=True),)
