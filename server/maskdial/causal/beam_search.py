"""BeamSearch: several texts for one source, of which the most likely go on, step by step.

It is transformers' search (`GenerationMixin._beam_search`, version 5), with its scores in float32
and its rules for when to stop.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.candidates import greatest_k
from maskdial.causal.sampling.processors import process
from maskdial.causal.sequence import BeamFork, Sequence

EarlyStopping = bool | Literal["never"]
_Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How a beam search goes; `maskdial.causal.seq2seq.Writing` describes the settings."""

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text: its tokens, with their log-probabilities under the model's own distribution,
    and its score.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: np.float32


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A text of a beam and one more token."""

    parent: int
    token_id: int
    score: np.float32
    ends: bool


class BeamSearch:
    """The beams of one search, each a sequence in a slot of its own, all of the same length.

    Args:
        readers: the sequences that receive the best texts, in this order, when the search ends.
        beams: the sequences that run, all from the same start; the first one runs alone at first.
        params: how to search.
    """

    def __init__(
        self, readers: SequenceOf[Sequence], beams: SequenceOf[Sequence], params: BeamParams
    ) -> None:
        self.readers = tuple(readers)
        self.beams = tuple(beams)
        self.running = self.beams[:1]
        """The beams that have a text, the most likely first."""
        self.ended = False
        self.hypotheses: list[Hypothesis] = []
        """The finished texts, the best first; as many as there are beams once the search ended."""
        self._params = params
        self._scores = np.zeros(1, np.float32)
        self._logprobs: dict[Sequence, tuple[float, ...]] = {self.beams[0]: ()}
        self._forks: list[BeamFork] = []
        for sequence in (*self.readers, *self.beams):
            sequence.join(self)

    def take_forks(self) -> list[BeamFork]:
        """What is to be copied in the KV cache before the next step; they count as done then."""
        forks, self._forks = self._forks, []
        return forks

    def advance(
        self,
        logits: _Floats,
        eos_token_ids: frozenset[int],
        max_length: int,
        never: frozenset[int] = frozenset(),
    ) -> None:
        """Gives every beam its next token, or ends the search.

        Args:
            logits: float32 (num_running, vocab_size), of the running beams.
            eos_token_ids: tokens that end a text.
            max_length: tokens that a slot holds.
            never: tokens to leave out; see `process`.

        Raises:
            MaskdialError: no token can be chosen.
        """
        own = _log_softmax(logits)
        pairs = zip(own, self.running, strict=True)
        scores = np.stack([process(row, beam, eos_token_ids, never) for row, beam in pairs])
        candidates = self._best_candidates(scores, eos_token_ids, max_length)
        num_beams = len(self.beams)
        length = self.running[0].num_generated + 1
        for each in candidates[:num_beams]:
            if each.ends:
                self._finish(each, own, length)
        going_on = [each for each in candidates if not each.ends][:num_beams]
        self.ended = not going_on or not self._goes_on(going_on[0].score, length, max_length)
        if not self.ended:
            self._continue(going_on, own)

    def _best_candidates(
        self, scores: _Floats, eos_token_ids: frozenset[int], max_length: int
    ) -> list[_Candidate]:
        """The likeliest texts with one more token: enough that as many as there are beams go on."""
        params, num_beams = self.running[0].params, len(self.beams)
        ends = eos_token_ids | params.stop_token_ids
        vocab_size = scores.shape[1]
        num_kept = min(max(2, 1 + len(ends)) * num_beams, vocab_size)
        total = scores + self._scores[:, None]
        likely = [row * vocab_size + greatest_k(each, num_kept) for row, each in enumerate(total)]
        best, total = np.concatenate(likely), total.reshape(-1)
        best = best[np.lexsort((best, -total[best]))[:num_kept]]
        beam = self.running[0]
        num_generated = beam.num_generated + 1
        full = (
            num_generated >= params.max_new_tokens or beam.num_prompt + num_generated >= max_length
        )
        return [
            _Candidate(
                index // vocab_size,
                index % vocab_size,
                total[index],
                full or index % vocab_size in ends,
            )
            for index in best.tolist()
        ]

    def _finish(self, candidate: _Candidate, own: _Floats, length: int) -> None:
        """Keeps a finished text if it is among the best."""
        if not np.isfinite(candidate.score):
            return  # what is forbidden is a candidate where little else is left
        beam = self.running[candidate.parent]
        text = Hypothesis(
            (*beam.generated_ids.tolist(), candidate.token_id),
            (*self._logprobs[beam], float(own[candidate.parent, candidate.token_id])),
            candidate.score / np.float32(length**self._params.length_penalty),
        )
        self.hypotheses.append(text)
        self.hypotheses.sort(key=lambda each: -each.score)
        del self.hypotheses[len(self.beams) :]

    def _goes_on(self, best: np.float32, length: int, max_length: int) -> bool:
        """Whether texts that go on could be better than the finished ones.

        Args:
            best: the score of the likeliest of them.
            length: their tokens.
            max_length: tokens that a slot holds.
        """
        if len(self.hypotheses) < len(self.beams):
            return True
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if early is True:
            return False
        if early == "never" and penalty > 0:
            beam = self.running[0]
            length = min(beam.params.max_new_tokens, max_length - beam.num_prompt)
        return bool(best / np.float32(length**penalty) > self.hypotheses[-1].score)

    def _continue(self, candidates: list[_Candidate], own: _Floats) -> None:
        """Distributes the texts that go on among the beams, each to its parent if that is free."""
        parents = [self.running[each.parent] for each in candidates]
        free = [beam for beam in self.beams if beam not in parents]
        texts = [
            np.append(parent.token_ids, each.token_id)
            for parent, each in zip(parents, candidates, strict=True)
        ]
        logprobs = [
            (*self._logprobs[parent], float(own[each.parent, each.token_id]))
            for parent, each in zip(parents, candidates, strict=True)
        ]
        running: list[Sequence] = []
        for parent in parents:
            beam = parent if parent not in running else free.pop()
            if beam is not parent:
                start = _num_common(parent.token_ids, beam.token_ids)
                self._forks.append(BeamFork(parent, beam, start if beam in self._logprobs else 0))
            running.append(beam)
        for beam, text in zip(running, texts, strict=True):
            beam.rewrite(text)
        self.running = tuple(running)
        self._logprobs = dict(zip(running, logprobs, strict=True))
        self._scores = np.array([each.score for each in candidates], np.float32)


def _num_common(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """How many first tokens two texts have in common."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _log_softmax(logits: _Floats) -> _Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: _Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
