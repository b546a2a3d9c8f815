"""The ``options`` of Ollama's requests: sampling, the length of the text, and the runtime's."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from maskdial.bounds import Range
from maskdial.causal.model import WritingModel
from maskdial.causal.sampling.params import LastN, RepetitionPenalty
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.sampling import (
    PENALTY_LAST_N,
    AnySeed,
    AnyStops,
    SamplingFields,
    parameter,
    rest_of_context,
)

RUNTIME = frozenset(
    {
        "draft_num_predict",
        "embedding_only",
        "f16_kv",
        "logits_all",
        "low_vram",
        "main_gpu",
        "num_batch",
        "num_gpu",
        "num_gqa",
        "num_keep",
        "num_thread",
        "numa",
        "penalize_newline",
        "rope_frequency_base",
        "rope_frequency_scale",
        "tfs_z",
        "use_mlock",
        "use_mmap",
        "vocab_only",
    }
)
"""Options of Ollama's runtime, which cannot change an answer here; they are ignored."""

_RENAMED = {"repetition_penalty": "repeat_penalty", "penalty_last_n": "repeat_last_n"}


class Options(SamplingFields, Lenient):
    """How to sample, and until when. Options of Ollama's runtime are ignored.

    Those that Ollama does not have are extensions.
    """

    habits = RUNTIME
    within = "options"

    top_k: Annotated[int, Range(-1), AfterValidator(lambda k: max(k, 0))] | None = Field(
        None, description="Sample from the k most likely tokens; 0 and -1 disable it. Default: 0."
    )
    repetition_penalty: RepetitionPenalty | None = parameter("repetition_penalty", "repeat_penalty")
    penalty_last_n: LastN | None = PENALTY_LAST_N
    seed: AnySeed | None = Field(None, description="Random seed. Default, and with -1: a new one.")
    stop: AnyStops | None = Field(
        None, description="Texts that end the generation, and are not part of it."
    )
    num_predict: Annotated[int, Range(-2)] | None = Field(
        None,
        description="Maximum number of tokens to generate. Default, and below 1: what the context "
        "leaves.",
    )

    num_ctx: Annotated[int, Range(-1)] | None = Field(
        None,
        description="The context is the server's own, which /api/show and /api/ps tell; a longer "
        "one is named in the header x-ignored-fields.",
    )
    thinking_budget: Annotated[int, Range(0)] | None = Field(
        None, description="Tokens of thinking after which it is closed. Default: no limit."
    )

    @property
    def is_limited(self) -> bool:
        """Whether the length of a text has a limit."""
        return self.num_predict is not None and self.num_predict > 0

    def new_tokens(self, model: WritingModel, described: int) -> int:
        """The limit on a text, of which each token is described with so many."""
        if self.num_predict is not None and self.num_predict > 0:
            return self.num_predict
        return rest_of_context(model, described)

    @classmethod
    def names(cls) -> Mapping[str, str]:
        """Where a body has the parameters of a neutral request."""
        fields = SamplingFields.model_fields
        return {
            **{name: f"options.{_RENAMED.get(name, name)}" for name in (*fields, *_RENAMED)},
            "max_new_tokens": "options.num_predict",
        }
