"""OutputProcessor: from the logits of a step to what its sequences' readers receive."""

import math
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from maskdial.causal.beam_search import BeamSearch, Hypothesis
from maskdial.causal.events import Reply, TokenEvent
from maskdial.causal.executor import Output
from maskdial.causal.sampling.sampler import Sample, TokenSampler
from maskdial.causal.sequence import Detokenizer, Sequence
from maskdial.engine.life import failure_of
from maskdial.errors import GenerationError, MaskdialError
from maskdial.metrics import ModelMetrics

# How long a step waits for a grammar's mask while nothing else can run. After it, the engine takes
# in what has arrived meanwhile.
_PATIENCE_SECONDS = 0.05
# How long it waits for the mask of a draft token, whose logits would be computed again.
_DRAFT_PATIENCE_SECONDS = 0.002


class OutputProcessor:
    """Samples tokens and appends them to their sequences.

    A failure ends its own sequence only, or those of one pass if it concerns no single one.

    Args:
        sampler: chooses the tokens.
        detokenizer: turns tokens into text.
        eos_token_ids: tokens that end a text.
        never: tokens that no beam goes on with.
        max_length: tokens of prompt and text together.
        metrics: the model's instruments.
        name: the model's, for messages.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        detokenizer: Detokenizer,
        *,
        eos_token_ids: frozenset[int],
        never: frozenset[int] = frozenset(),
        max_length: int,
        metrics: ModelMetrics,
        name: str,
    ) -> None:
        self._sampler = sampler
        self._detokenizer = detokenizer
        self._eos_token_ids = eos_token_ids
        self._never = never
        self._max_length = max_length
        self._metrics = metrics
        self._name = name

    def process(self, outputs: Iterable[Output], *, may_wait: bool) -> list[tuple[Sequence, Reply]]:
        """The replies to the sequences of a step.

        Args:
            outputs: of the step's passes.
            may_wait: whether to wait a moment for a grammar mask if none is ready. Sequences
                without one hold their logits for a later step.
        """
        patience = _PATIENCE_SECONDS if may_wait else 0.0
        replies: list[tuple[Sequence, Reply]] = []
        for output in outputs:
            error = output.error
            if error is None:
                try:
                    replies += self._process(output, patience)
                    continue
                except Exception as raised:
                    error = self._failure(raised, "reading the result of a pass")
            involved = (*output.sequences, *(prefill.sequence for prefill in output.prefills))
            replies += [(each, error) for each in _readers(involved)]
        return replies

    def _process(self, output: Output, patience: float) -> list[tuple[Sequence, Reply]]:
        """As `process`, of a pass that has not failed."""
        _note_prompts(output)
        if output.unmasks:
            return [(output.sequences[0], self._unmask(output))]
        replies: list[tuple[Sequence, Reply]] = []
        searches = dict.fromkeys(s.search for s in output.sequences)
        for search in searches:
            if isinstance(search, BeamSearch):
                replies += self._search(search, output)
        # Those that are written block by block have read their prompts.
        plain = [
            i for i, s in enumerate(output.sequences) if s.search is None and s.block_text is None
        ]
        if len(plain) < len(output.sequences):
            output = output.only(plain)
        if output.drafts:
            replies += self._accept_drafts(output)
        elif output.sequences:
            ready = _defer_unready_masks(output, patience)
            replies += self.accept(ready.sequences, self.sample(ready))
        return replies

    def sample(self, output: Output) -> list[Sample | MaskdialError]:
        """Chooses a token for each sequence of an output, without appending it."""
        try:
            return self._sampler.sample(output.logits, output.sequences)
        except Exception as error:  # of all rows together
            failure = self._failure(error, "reading the logits")
            return [failure] * len(output.sequences)

    def accept(
        self, sequences: Iterable[Sequence], samples: Iterable[Sample | MaskdialError]
    ) -> list[tuple[Sequence, Reply]]:
        """Appends a sampled token to each sequence."""
        return [
            (sequence, self._accept(sequence, sample))
            for sequence, sample in zip(sequences, samples, strict=True)
        ]

    def _search(self, search: BeamSearch, output: Output) -> list[tuple[Sequence, Reply]]:
        """Goes on with a beam search; its readers get their texts as a whole when it ends."""
        rows = [output.sequences.index(beam) for beam in search.running]
        try:
            logits = np.array(output.logits[rows], np.float32)
            if not np.isfinite(logits.max(axis=1)).all():
                raise self._no_numbers()
            search.advance(logits, self._eos_token_ids, self._max_length, self._never)
        except Exception as raised:
            error = self._failure(raised, "a beam search")
            return [(reader, error) for reader in search.readers]
        if not search.ended:
            return []
        return [
            (reader, reply)
            for reader, text in zip(search.readers, search.hypotheses, strict=False)
            for reply in self._read_out(reader, text, search.beams[0].started_at)
        ]

    def _read_out(self, reader: Sequence, text: Hypothesis, started_at: float) -> Iterator[Reply]:
        """The events of a text that is already finished."""
        reader.begin(started_at)
        for token_id, logprob in zip(text.token_ids, text.logprobs, strict=True):
            reply = self._accept(reader, Sample(token_id, logprob))
            yield reply
            if isinstance(reply, MaskdialError) or reply.finish:
                return

    def _failure(self, error: Exception, what: str) -> MaskdialError:
        return failure_of(error, GenerationError, f"{what} of model {self._name!r}")

    def _no_numbers(self) -> GenerationError:
        return GenerationError(f"model {self._name!r} returned logits that are not numbers")

    def _accept_drafts(self, output: Output) -> list[tuple[Sequence, Reply]]:
        """The tokens that single steps would have sampled, as long as the draft tokens agree."""
        (sequence,) = output.sequences
        replies: list[tuple[Sequence, Reply]] = []
        for i, draft in enumerate((*output.drafts, None)):
            if not sequence.can_sample:
                sequence.wait_for_grammar(_DRAFT_PATIENCE_SECONDS)
            if not sequence.can_sample:
                sequence.hold(np.array(output.logits[i : i + 1])[0])
                break
            (sample,) = self._sampler.sample(output.logits[i : i + 1], (sequence,))
            reply = self._accept(sequence, sample)
            replies.append((sequence, reply))
            if not isinstance(reply, TokenEvent) or reply.finish or reply.token_id != draft:
                break
        return replies

    def _unmask(self, output: Output) -> Reply:
        """What a pass over the block at work gives."""
        (sequence,) = output.sequences
        previous_at = sequence.last_token_at
        event = sequence.unmask(np.array(output.logits[: len(output.logits)]))
        if event.num_new and not previous_at:
            self._metrics.time_to_first_token.observe(sequence.last_token_at - sequence.arrived_at)
        elif event.num_new:
            self._metrics.inter_token_latency.observe(sequence.last_token_at - previous_at)
        return event

    def _accept(self, sequence: Sequence, sample: Sample | MaskdialError) -> Reply:
        if isinstance(sample, MaskdialError):
            return sample
        if not math.isfinite(sample.logprob):
            return self._no_numbers()
        previous_at = sequence.last_token_at
        try:
            event = sequence.accept(
                sample.token_id,
                sample.logprob,
                sample.top,
                detokenizer=self._detokenizer,
                eos_token_ids=self._eos_token_ids,
                max_length=self._max_length,
            )
        except Exception as error:
            return self._failure(error, "decoding a token")
        if event.index == 1:
            self._metrics.time_to_first_token.observe(sequence.last_token_at - sequence.arrived_at)
        elif sequence.search is None:
            self._metrics.inter_token_latency.observe(sequence.last_token_at - previous_at)
        return event


def _readers(sequences: Iterable[Sequence]) -> list[Sequence]:
    """The receivers of sequences' results: of a beam search, its readers."""
    found = (
        (sequence,) if sequence.search is None else sequence.search.readers
        for sequence in sequences
    )
    return list(dict.fromkeys(chain.from_iterable(found)))


def _note_prompts(output: Output) -> None:
    """Hands the sequences what prefill computed of their prompts."""
    for row, prefill in enumerate(output.prefills):
        sequence = prefill.sequence
        sequence.add_prompt_logprobs(output.prompt_logprobs)
        if prefill.is_last and sequence.shared_prompt is not None:
            logits = np.array(output.logits[row : row + 1])[0]
            sequence.shared_prompt.fill(logits, sequence.prompt_logprobs)


def _defer_unready_masks(output: Output, patience: float) -> Output:
    """Leaves out the sequences whose grammar mask is not ready; they hold their logits.

    Waits for the first of them, ``patience`` seconds at most, if no sequence is ready.
    """
    if patience and not any(sequence.can_sample for sequence in output.sequences):
        output.sequences[0].wait_for_grammar(patience)
    late = [i for i, sequence in enumerate(output.sequences) if not sequence.can_sample]
    if not late:
        return output
    for i in late:
        output.sequences[i].hold(np.array(output.logits[i : i + 1])[0])
    return output.only([i for i in range(len(output.sequences)) if i not in late])
