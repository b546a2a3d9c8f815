"""PromptReader: how a kind of model reads the prompts of a request.

`DecoderOnly` reads prompts that the texts continue, `Seq2Seq` source texts.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.beam_search import BeamParams
from maskdial.causal.infill import infill_tokens
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest, Writing
from maskdial.causal.sampling.params import SamplingParams
from maskdial.errors import ValidationError


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized prompt: its ids, how many were cut off, where in the text they begin, if that is
    wanted, and how many of them stand before each border.
    """

    ids: list[int]
    num_truncated: int = 0
    offsets: list[int] | None = None
    borders: tuple[int, ...] = ()


class PromptReader(ABC):
    """Reads the prompts of one request.

    Raises:
        ValidationError: the request asks for what this kind of model does not do.
    """

    max_new_tokens: int | None = None
    """The checkpoint's own limit; None if it has none."""

    def __init__(self, request: GenerationRequest, model: CausalModel) -> None:
        if request.infill is not None:
            infill_tokens(model)
        self._request = request
        self._model = model

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """What the checkpoint and the request's `Writing` add to its `SamplingParams`."""

    def writing(self, params: SamplingParams, *, has_grammar: bool) -> Writing:
        """How the request's texts are searched for."""
        return self._request.writing

    @abstractmethod
    def read(self, prompt: TextOrIds, index: int, borders: Sequence[int] = ()) -> Tokens:
        """The tokens of a prompt. Token ids are used unchanged.

        Args:
            prompt: the text, or ids.
            index: its place among the request's.
            borders: places in a rendered conversation, in characters.

        Raises:
            ValidationError: it is empty or too long.
        """

    @abstractmethod
    def start(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """What a sequence begins with, and its source text, of a prompt's tokens."""


def resolve_beams(writing: Writing, params: SamplingParams, *, has_grammar: bool) -> BeamParams:
    """How to search.

    Raises:
        ValidationError: a search was asked for that cannot be.
    """
    num_beams = writing.num_beams or 1
    if num_beams > 1 and excludes_search(params, has_grammar=has_grammar):
        raise ValidationError(
            "a beam search cannot be combined with sampling, stop strings, ignore_eos, a grammar, "
            "top tokens or the prompt's log-probabilities; leave them out, or set num_beams to 1",
            field="num_beams",
        )
    penalty = 1.0 if writing.length_penalty is None else writing.length_penalty
    return BeamParams(num_beams, penalty, writing.early_stopping or False)


def excludes_search(params: SamplingParams, *, has_grammar: bool) -> bool:
    """Whether there is something that no beam search can be combined with."""
    return (
        not params.greedy
        or has_grammar
        or bool(params.stop)
        or params.top_n_tokens > 0
        or params.ignore_eos
        or params.prompt_logprobs
    )
