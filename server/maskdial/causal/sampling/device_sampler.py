"""DeviceSampler: tokens drawn on the device that holds the logits."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.device_penalties import MAX_PENALIZED, PenaltyStaging, TokenPenalties
from maskdial.causal.sampling.processors import forced_tokens
from maskdial.causal.sampling.sampler import Sample, Sampler
from maskdial.causal.sampling.sampler_graph import BLOCK, MAX_CANDIDATES, Kind, SamplerGraph
from maskdial.causal.sequence import Sequence
from maskdial.engine.philox import Philox
from maskdial.errors import MaskdialError
from maskdial.runtime.logits import DeviceLogits, Logits
from maskdial.runtime.memory import Buffer, Memory
from maskdial.runtime.session import SessionOptions

_OFF = 2.0  # a top_p that no set of tokens reaches
_MIN_TOP_P = 1e-300  # the likeliest token alone reaches it
_MAX_UNIFORM = 1 - 2.0**-52  # so that no product with it rounds to the other factor


@dataclass(frozen=True, slots=True)
class _Draw:
    """A token to draw on the device, and the graph that can draw it."""

    index: int
    sequence: Sequence
    kind: Kind
    penalties: TokenPenalties | None


class DeviceSampler:
    """Chooses tokens on the device; rows that it cannot do go to the host's `Sampler`.

    The device applies penalties, temperature, top-k, top-p, min-p and seeds. The host gets rows
    with a grammar, ``logit_bias``, banned tokens or n-grams, DRY, ``typical_p``, one of llama.cpp's
    samplers, ``top_n_tokens``, ``scored_tokens`` or an unfulfilled ``min_new_tokens``, rows whose
    token is forced, rows that need more candidates than the device sorts, and rows whose logits are
    not finite.

    Tokens are those that the host's sampler draws, unless the uniform number falls so close to the
    boundary of two tokens that rounding decides: weights on the device are float32.

    Args:
        memory: where the logits are.
        host: the sampler for the other rows.
        vocab_size: the length of the logits' rows.
        max_rows: maximum number of rows of one pass; more rows take several passes.
        options: for the sessions, with the device's provider and stream.

    Raises:
        BundleError: ONNX Runtime cannot load the graphs.
        ConfigError: the provider did not start, or the memory is too small.
    """

    def __init__(
        self,
        memory: Memory,
        host: Sampler,
        *,
        vocab_size: int,
        max_rows: int,
        options: SessionOptions,
    ) -> None:
        self._host = host
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._num_candidates = min(vocab_size, MAX_CANDIDATES)
        self._sees_all = vocab_size <= MAX_CANDIDATES
        self._random = Philox()
        self._graphs = {
            (kind, penalized): SamplerGraph(
                kind,
                penalized,
                memory,
                vocab_size=vocab_size,
                max_rows=max_rows,
                options=options,
            )
            for kind in Kind
            for penalized in (False, True)
        }
        self._penalties = PenaltyStaging(memory, max_rows)
        self._never = np.array(sorted(host.never), np.int64)

    def sample(self, logits: Logits, sequences: Iterable[Sequence]) -> list[Sample | MaskdialError]:
        """See `maskdial.causal.sampling.sampler.TokenSampler`."""
        if not isinstance(logits, DeviceLogits):
            return self._host.sample(logits, sequences)
        sequences = list(sequences)
        samples: dict[int, Sample | MaskdialError] = {}
        for draws in self._by_kind(sequences):
            for start, rows in self._passes(logits.rows, draws):
                samples |= self._pass(logits.buffer[start : start + max(rows) + 1], rows)
        rest = [i for i in range(len(sequences)) if i not in samples]
        if rest:
            on_host = self._host.sample(logits[rest], [sequences[i] for i in rest])
            samples |= zip(rest, on_host, strict=True)
        return [samples[i] for i in range(len(sequences))]

    def _by_kind(self, sequences: list[Sequence]) -> list[list[_Draw]]:
        """What the device can draw, grouped into as few kinds as possible."""
        draws: dict[Kind, list[_Draw]] = {kind: [] for kind in Kind}
        for i, sequence in enumerate(sequences):
            kind = self._kind(sequence)
            penalties = None if kind is None else TokenPenalties.of(sequence, self._never)
            if kind is not None and self._takes(penalties):
                draws[kind].append(_Draw(i, sequence, kind, penalties))
        if draws[Kind.FEW]:
            draws[Kind.FEW] += draws.pop(Kind.GREEDY)
        return [each for each in draws.values() if each]

    def _kind(self, sequence: Sequence) -> Kind | None:
        """The kind of graph that can draw a sequence's token; None for the host."""
        params = sequence.params
        if (
            sequence.grammar is not None
            or params.logit_bias
            or params.banned
            or params.dry is not None
            or params.no_repeat_ngram_size
            or params.no_source_ngram_size
            or params.top_n_tokens
            or params.scored_tokens
            or sequence.num_generated < params.min_new_tokens
            or forced_tokens(sequence)
        ):
            return None
        if params.greedy:
            return Kind.GREEDY
        if params.typical_p < 1.0 or params.as_llama or params.mirostat:
            return None
        if 0 < params.top_k < self._vocab_size:
            # The candidates must reach beyond top-k, to show which others equal the k-th.
            fits = params.top_k < self._num_candidates or self._sees_all
            return Kind.FEW if fits else None
        return Kind.FEW if params.top_p < 1.0 or params.min_p > 0.0 else Kind.ALL

    def _takes(self, penalties: TokenPenalties | None) -> bool:
        if penalties is None:
            return True
        token_ids = penalties.token_ids
        return len(token_ids) <= MAX_PENALIZED and token_ids[-1] < self._vocab_size

    def _passes(
        self, rows: NDArray[np.int64], draws: list[_Draw]
    ) -> Iterator[tuple[int, dict[int, _Draw]]]:
        """The first row of each pass, and what to draw by row, counted from that one."""
        start, together = 0, dict[int, _Draw]()
        for draw in sorted(draws, key=lambda draw: int(rows[draw.index])):
            place = int(rows[draw.index]) - start
            if together and (place in together or place >= self._max_rows):
                yield start, together
                together = {}
            if not together:
                start, place = start + place, 0
            together[place] = draw
        if together:
            yield start, together

    def _pass(self, logits: Buffer, draws: Mapping[int, _Draw]) -> dict[int, Sample]:
        """Draws from adjacent rows, not all of which need to have something to draw.

        Returns:
            Samples by the index of the sequence; what the device could not draw is missing.
        """
        kinds = {draw.kind for draw in draws.values()}
        kind = Kind.FEW if Kind.FEW in kinds else kinds.pop()
        penalties = {row: d.penalties for row, d in draws.items() if d.penalties is not None}
        inputs = self._inputs(len(logits), draws)
        sent = self._penalties.write(len(logits), penalties) if penalties else {}
        outputs = self._graphs[kind, bool(penalties)].run(logits, inputs, sent)
        covered = self._covered(kind, inputs, outputs)
        token_ids, logprobs = outputs["token_id"][:, 0].tolist(), outputs["logprob"][:, 0].tolist()
        return {
            draw.index: Sample(token_ids[row], logprobs[row])
            for row, draw in draws.items()
            if covered[row]
        }

    def _inputs(self, num_rows: int, draws: Mapping[int, _Draw]) -> dict[str, NDArray[Any]]:
        """The graphs' inputs for each row, by name, (num_rows,) each."""
        inputs: dict[str, NDArray[Any]] = {
            "repetition_penalty": np.ones(num_rows, np.float32),
            "temperature": np.ones(num_rows, np.float32),
            "kth": np.zeros(num_rows, np.int64),
            "least_total": np.zeros(num_rows),
            "top_p": np.full(num_rows, _OFF),
            "min_p": np.zeros(num_rows),
            "uniform": np.zeros(num_rows),
        }
        for row, draw in draws.items():
            params = draw.sequence.params
            if draw.penalties is not None:  # otherwise it would be for the token that pads the row
                inputs["repetition_penalty"][row] = params.repetition_penalty
            if params.greedy:
                continue  # rank 0 and uniform 0 give the first of the likeliest tokens
            inputs["temperature"][row] = params.temperature
            if 0 < params.top_k < self._vocab_size:
                inputs["kth"][row] = params.top_k - 1
            else:
                inputs["kth"][row] = self._num_candidates - 1
                inputs["least_total"][row] = 1
            if params.top_p < 1.0:
                inputs["top_p"][row] = max(params.top_p, _MIN_TOP_P)
            inputs["min_p"][row] = params.min_p
            uniform = self._random.uniform(draw.sequence.seed, draw.sequence.num_generated)
            inputs["uniform"][row] = min(uniform, _MAX_UNIFORM)
        return inputs

    def _covered(
        self, kind: Kind, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.bool_]:
        """Which rows have the token that the host would have drawn, bool (num_rows,)."""
        logprobs = outputs["logprob"][:, 0]
        if kind is Kind.GREEDY:
            covered: NDArray[np.bool_] = np.isfinite(logprobs) & np.isfinite(outputs["best"][:, 0])
            return covered
        # Penalties may turn finite logits into infinite scores. Then the weights are NaN, and no
        # candidate is kept.
        total = outputs["total"][:, 0]
        covered = np.isfinite(logprobs) & np.isfinite(total) & (total > 0)
        if kind is Kind.ALL:
            covered &= outputs["place"][:, 0] < BLOCK
        if kind is Kind.FEW and not self._sees_all:
            # If the last candidate is dropped, so is the rest of the vocabulary. If it is kept, or
            # within top-k, there may be more tokens like it beyond the candidates.
            has_top_k = inputs["least_total"] == 0
            cut_off = np.where(has_top_k, outputs["in_top_k"][:, -1], outputs["kept"][:, -1])
            covered &= ~cut_off
        return covered
