"""DeviceSampler: tokens drawn where the logits lie."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.counter_random import CounterRandom
from maskdial.causal.sampling.device_penalties import MOST_PENALISED, PenaltyStaging, TokenPenalties
from maskdial.causal.sampling.sampler import Sample, Sampler
from maskdial.causal.sampling.sampler_graph import BLOCK, MOST_CANDIDATES, Kind, SamplerGraph
from maskdial.causal.sequence import Sequence
from maskdial.errors import MaskdialError
from maskdial.runtime.device_logits import DeviceLogits
from maskdial.runtime.memory import Device, DeviceArray
from maskdial.runtime.session import SessionOptions

_OFF = 2.0  # a share that no set of tokens reaches
_LEAST_SHARE = 1e-300  # reached by the likeliest token alone
_GREATEST_UNIFORM = 1 - 2.0**-52  # so that no product with it rounds to the other factor


@dataclass(frozen=True, slots=True)
class _Draw:
    """A token that the device is to draw, and the graph for it."""

    index: int
    sequence: Sequence
    kind: Kind
    penalties: TokenPenalties | None


class DeviceSampler:
    """Chooses tokens where the logits lie; what it cannot do there, the host's `Sampler` does.

    Penalties, temperature, top-k, top-p, min-p and seeds are for the device. Grammars, biases,
    typical-p, the likeliest tokens beside the chosen one and ends that are held back are for the
    host; so are rows that need more candidates than the device sorts, and those whose logits are
    no numbers.

    The tokens are those of the host's sampler, but where a share falls on the boundary of two
    tokens so closely that rounding decides: weights on the device are as exact as float32 is.

    Args:
        device: where the logits are.
        host: the sampler for the rest.
        vocab_size: the length of the logits' rows.
        max_rows: most rows of one pass; more of them take several.
        options: of the sessions, with the device's provider and stream.

    Raises:
        BundleError: ONNX Runtime cannot load the graphs.
        ConfigError: the provider did not come up, or the memory is not there.
    """

    def __init__(
        self,
        device: Device,
        host: Sampler,
        *,
        vocab_size: int,
        max_rows: int,
        options: SessionOptions,
    ) -> None:
        self._host = host
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._num_candidates = min(vocab_size, MOST_CANDIDATES)
        self._sees_all = vocab_size <= MOST_CANDIDATES
        self._random = CounterRandom()
        self._graphs = {
            (kind, penalised): SamplerGraph(
                kind,
                penalised,
                device,
                vocab_size=vocab_size,
                max_rows=max_rows,
                options=options,
            )
            for kind in Kind
            for penalised in (False, True)
        }
        self._penalties = PenaltyStaging(device, max_rows)

    def sample(
        self, logits: NDArray[np.float32] | DeviceLogits, sequences: Iterable[Sequence]
    ) -> list[Sample | MaskdialError]:
        """As `maskdial.causal.sampling.sampler.TokenSampler` says."""
        if not isinstance(logits, DeviceLogits):
            return self._host.sample(logits, sequences)
        sequences = list(sequences)
        samples: dict[int, Sample | MaskdialError] = {}
        for draws in self._by_kind(sequences):
            for start, rows in self._passes(logits.rows, draws):
                samples |= self._pass(logits.array[start : start + max(rows) + 1], rows)
        rest = [i for i in range(len(sequences)) if i not in samples]
        if rest:
            on_host = self._host.sample(logits[rest], [sequences[i] for i in rest])
            samples |= zip(rest, on_host, strict=True)
        return [samples[i] for i in range(len(sequences))]

    def _by_kind(self, sequences: list[Sequence]) -> list[list[_Draw]]:
        """What the device can draw, in as few kinds as may be."""
        draws: dict[Kind, list[_Draw]] = {kind: [] for kind in Kind}
        for i, sequence in enumerate(sequences):
            kind = self._kind(sequence)
            penalties = None if kind is None else TokenPenalties.of(sequence)
            if kind is not None and self._takes(penalties):
                draws[kind].append(_Draw(i, sequence, kind, penalties))
        if draws[Kind.FEW]:
            draws[Kind.FEW] += draws.pop(Kind.GREEDY)
        return [each for each in draws.values() if each]

    def _kind(self, sequence: Sequence) -> Kind | None:
        """What can draw a sequence's token; None is the host."""
        params = sequence.params
        if (
            sequence.grammar is not None
            or params.logit_bias
            or params.top_n_tokens
            or sequence.num_generated < params.min_new_tokens
        ):
            return None
        if params.greedy:
            return Kind.GREEDY
        if params.typical_p < 1.0:
            return None
        if 0 < params.top_k < self._vocab_size:
            # The candidates must reach beyond top-k, to show how many are equal to the k-th.
            fits = params.top_k < self._num_candidates or self._sees_all
            return Kind.FEW if fits else None
        return Kind.FEW if params.top_p < 1.0 or params.min_p > 0.0 else Kind.ALL

    def _takes(self, penalties: TokenPenalties | None) -> bool:
        if penalties is None:
            return True
        token_ids = penalties.token_ids
        return len(token_ids) <= MOST_PENALISED and token_ids[-1] < self._vocab_size

    def _passes(
        self, rows: NDArray[np.int64], draws: list[_Draw]
    ) -> Iterator[tuple[int, dict[int, _Draw]]]:
        """The first row of each pass, and what is drawn from each row, counted from the first."""
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

    def _pass(self, logits: DeviceArray, draws: Mapping[int, _Draw]) -> dict[int, Sample]:
        """One pass over adjoining rows, of which only some may have something to draw.

        What the device could not draw after all is left out.
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
        """What the graphs need to know of each row; the names are theirs."""
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
            inputs["repetition_penalty"][row] = params.repetition_penalty
            if params.greedy:
                continue  # the first of the tokens that are as likely as the likeliest
            inputs["temperature"][row] = params.temperature
            if 0 < params.top_k < self._vocab_size:
                inputs["kth"][row] = params.top_k - 1
            else:
                inputs["kth"][row] = self._num_candidates - 1
                inputs["least_total"][row] = 1
            if params.top_p < 1.0:
                inputs["top_p"][row] = max(params.top_p, _LEAST_SHARE)
            inputs["min_p"][row] = params.min_p
            uniform = self._random.uniform(draw.sequence.seed, draw.sequence.num_generated)
            inputs["uniform"][row] = min(uniform, _GREATEST_UNIFORM)
        return inputs

    def _covered(
        self, kind: Kind, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.bool_]:
        """Whose token is what the host would have drawn."""
        logprobs = outputs["logprob"][:, 0]
        if kind is Kind.GREEDY:
            covered: NDArray[np.bool_] = np.isfinite(logprobs) & np.isfinite(outputs["best"][:, 0])
            return covered
        # Penalties may make infinite scores of finite logits. The weights are no numbers then, and
        # no candidate is kept.
        total = outputs["total"][:, 0]
        covered = np.isfinite(logprobs) & np.isfinite(total) & (total > 0)
        if kind is Kind.ALL:
            covered &= outputs["place"][:, 0] < BLOCK
        if kind is Kind.FEW and not self._sees_all:
            # Where the last candidate is left out, so are all others of the vocabulary. That it is
            # within top-k says that there may be more like it.
            has_top_k = inputs["least_total"] == 0
            left = np.where(has_top_k, outputs["in_top_k"][:, -1], outputs["kept"][:, -1])
            covered &= ~left
        return covered
