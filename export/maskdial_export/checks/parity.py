"""Parity: compares a graph in ONNX Runtime with the torch model it was traced from.

torch gets each text alone and whole. ONNX Runtime gets ragged batches, prompts in chunks, and one
token at a time, as in the server. Each row also runs alone, to see whether its logits are
batch-invariant: bitwise the same in every batch. A quantized graph, whose logits differ from
torch's, is only tested for that. One more text reaches beyond every window that the configuration
names (`maskdial_export.checks.reach`), and torch's model is as it was loaded for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from maskdial.bundle.manifest import KVLayout, ParityReport, TextToText
from maskdial_export.checkpoint.pooling import Pooler
from maskdial_export.checks.reach import NEAR, Reach
from maskdial_export.errors import ExportError
from maskdial_export.session import (
    CausalSession,
    EncoderDecoderSession,
    Floats,
    Graph,
    Ids,
    MaskedSession,
)
from maskdial_export.tracing.graph import gather_rows, trunk
from maskdial_export.tracing.masked import head_logits

_LENGTHS = (40, 13, 1, 26)
_CHUNKS = (16, 7, 1)  # sizes of a prompt's first chunks; one more takes the rest
_CHUNK = 512  # tokens at a time of a long text
_LONGEST_WRITTEN = 512  # by an encoder-decoder model, token by token
_DECODE_STEPS = 10
_SEED = 20240229
_LARGEST_LOGIT = 1e9  # where the next float32 is 64 away
_BOTH = 2  # torch and the graph are each as far from the exact logits as rounding makes them
_MAX_ROUNDING = 0.02  # beyond which a difference could be anything


@dataclass(frozen=True, slots=True)
class Measured:
    """The report for the manifest, and whether the graph is batch-invariant."""

    report: ParityReport
    batch_invariant: bool


def expected_output(
    model: PreTrainedModel, pooler: Pooler | None, inputs: dict[str, torch.Tensor]
) -> Floats:
    """torch's logits or embedding for one text: (length, columns) or (columns,)."""
    with torch.no_grad():
        output = model(**inputs)
        if pooler is None:
            return head_logits(output)[0].numpy()
        length = inputs["input_ids"].shape[1]
        vectors: torch.Tensor = pooler(output[0], torch.tensor([length]))
        return vectors[0].numpy()


def random_texts(config: Any, lengths: Sequence[int], longest: int, extra: int) -> list[Ids]:
    """Texts of very different lengths plus ``extra`` tokens, without padding tokens."""
    generator = np.random.default_rng(_SEED)
    ids = np.setdiff1d(np.arange(config.vocab_size), [getattr(config, "pad_token_id", None) or 0])
    return [generator.choice(ids, min(length, longest) + extra) for length in lengths]


def identical(left: Sequence[Floats], right: Sequence[Floats]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(left, right, strict=True))


class Judge:
    """Compares logits, with a tolerance that scales with the largest logit.

    ``rounding`` measures how far two of torch's own ways to compute them are apart; a right graph
    may be as far from either. It is asked where the tolerance does not do.
    """

    def __init__(
        self,
        tolerance: float,
        expected: Sequence[Floats],
        rounding: Callable[[], float] = lambda: 0.0,
    ) -> None:
        peak = max(float(np.max(np.abs(each))) for each in expected)
        if not peak <= _LARGEST_LOGIT:  # also if it is NaN
            raise ExportError(
                f"torch's own logits reach {peak:.2g}; the weights are damaged, or overflow float32"
            )
        self.tolerance = tolerance * max(1.0, peak / 10)
        self._limit = _MAX_ROUNDING * max(1.0, peak / 10)
        self._rounding: Callable[[], float] | None = rounding

    def difference(self, what: str, expected: Sequence[Floats], actual: Sequence[Floats]) -> float:
        pairs = zip(expected, actual, strict=True)
        difference = max(float(np.max(np.abs(left - right))) for left, right in pairs)
        if not difference <= self.tolerance and self._rounding is not None:
            allowed = _BOTH * self._rounding()
            self._rounding = None
            if allowed <= self._limit:
                self.tolerance = max(self.tolerance, allowed)
        if not difference <= self.tolerance:
            raise ExportError(
                f"ONNX Runtime and torch disagree on {what}: the logits differ by up to "
                f"{difference:.2g}, more than the tolerance of {self.tolerance:.2g}"
            )
        return difference


class MaskedParity:
    """Parity of a masked model, whose output is per token or per text."""

    def __init__(
        self,
        model: PreTrainedModel,
        pooler: Pooler | None,
        graph: Graph,
        max_length: int,
        first: int = 0,
        reach: Reach = NEAR,
    ) -> None:
        """``first`` is the first position whose logits are meaningful."""
        self.model = model
        self.reach = reach
        self.pooler = pooler
        self.first = first
        self.session = MaskedSession(graph)
        self.has_types = "token_type_ids" in self.session.inputs
        lengths = [length + first for length in _LENGTHS]
        self.texts = random_texts(model.config, lengths, max_length, 0)
        self.asked = [np.arange(first, len(text)) for text in self.texts]
        generator = np.random.default_rng(_SEED)
        self.types = [generator.integers(0, 1 + self.has_types, len(text)) for text in self.texts]

    def expect(self, text: Ids, types: Ids) -> Floats:
        """torch's output for one text, from position ``first``."""
        inputs = {"input_ids": torch.from_numpy(text[None])}
        if self.has_types:
            inputs["token_type_ids"] = torch.from_numpy(types[None])
        self.reach.restore()
        return expected_output(self.model, self.pooler, inputs)[self.first :]

    def measure(self, tolerance: float) -> Measured:
        """Compares with torch; raises ExportError if logits differ by more than the tolerance."""
        expected = [self.expect(*pair) for pair in zip(self.texts, self.types, strict=True)]
        judge = Judge(tolerance, expected)
        ragged = self._together()
        report = ParityReport(
            tolerance=judge.tolerance,
            ragged_batch=judge.difference("a ragged batch", expected, ragged),
            long_text=self._read_far(judge),
        )
        return Measured(report, identical(ragged, self._alone()))

    def _read_far(self, judge: "Judge") -> float | None:
        if self.reach.length is None:
            return None
        text = random_texts(self.model.config, [self.reach.length], self.reach.length, 0)[0]
        types = np.zeros_like(text)
        places = np.arange(self.first, len(text))
        expected, actual = self.expect(text, types), self.session.run([text], [types], [places])
        return judge.difference(self.reach.title, [expected], actual)

    def batch_invariant(self) -> bool:
        """Whether each row has the same bits in a batch as alone; torch is not asked."""
        return identical(self._together(), self._alone())

    def _together(self) -> list[Floats]:
        return self.session.run(self.texts, self.types, self.asked)

    def _alone(self) -> list[Floats]:
        parts = zip(self.texts, self.types, self.asked, strict=True)
        return [self.session.run([text], [types], [asked])[0] for text, types, asked in parts]


@dataclass(frozen=True, slots=True)
class _Readings:
    """Logits of the same prompts and of the tokens after them, computed in different ways."""

    together: list[Floats]
    alone: list[Floats]
    decoded: list[Floats]
    decoded_alone: list[Floats]
    aligned: list[Floats]  # the first prompt in chunks of the attention kernel's block

    @property
    def identical(self) -> bool:
        return (
            identical(self.together, self.alone)
            and identical(self.decoded, self.decoded_alone)
            and identical(self.aligned, self.alone[:1])
        )


class CausalParity:
    """Parity of a causal model: a ragged batch, a prompt in chunks, and ten decode steps."""

    def __init__(
        self,
        model: PreTrainedModel,
        graph: Graph,
        max_length: int,
        layout: KVLayout,
        reach: Reach = NEAR,
    ) -> None:
        self.model = model
        self.reach = reach
        self.layout = layout
        self.graph = graph
        self.steps = min(_DECODE_STEPS, max_length - 1)
        self.block = layout.query_block
        lengths = (self.block + _LENGTHS[0], *_LENGTHS[1:])
        self.texts = random_texts(model.config, lengths, max_length - self.steps, self.steps)
        self.prompts = [text[: -self.steps] for text in self.texts]
        room = max(map(len, self.texts))
        self.session = CausalSession(graph, layout, len(self.texts), room)

    def expect(self, text: Ids) -> Floats:
        """torch's logits for one whole text, (length, vocab_size)."""
        self.reach.restore()
        with torch.no_grad():
            output = self.model(torch.from_numpy(text[None]), use_cache=False)
        return output.logits[0].numpy()  # type: ignore[no-any-return]

    def _decode(self, slots: range) -> list[Floats]:
        """Decodes the last tokens of these slots' texts: (steps, vocab_size) for each slot."""
        steps = []
        for step in range(-self.steps, 0):
            tokens = [self.texts[slot][step : step + 1 or None] for slot in slots]
            steps.append(self.session.run(slots.start, tokens))
        return [np.concatenate(rows) for rows in zip(*steps, strict=True)]

    def _in_chunks(self, starts: Sequence[int] | Ids) -> list[Floats]:
        """The logits of the first prompt, split into chunks at ``starts``."""
        self.session.seen[0] = 0
        chunks = [chunk for chunk in np.split(self.prompts[0], starts) if len(chunk)]
        return [np.concatenate([self.session.run(0, [chunk])[0] for chunk in chunks])]

    def _read(self) -> _Readings:
        slots = range(len(self.prompts))
        together = self.session.run(0, self.prompts)
        decoded = self._decode(slots)
        self.session.seen[:] = 0
        return _Readings(
            together=together,
            alone=[self.session.run(slot, [self.prompts[slot]])[0] for slot in slots],
            decoded=decoded,
            decoded_alone=[self._decode(range(slot, slot + 1))[0] for slot in slots],
            aligned=self._in_chunks([self.block]),
        )

    def measure(self, tolerance: float) -> Measured:
        """Compares with torch; raises ExportError if logits differ by more than the tolerance."""
        expected = [self.expect(text) for text in self.texts]
        judge = Judge(tolerance, expected, lambda: self._rounding(expected[0]))
        prompts = [each[: -self.steps] for each in expected]
        readings = self._read()
        in_chunks = self._in_chunks(np.cumsum(_CHUNKS))
        ends = [each[-self.steps :] for each in expected]
        differences = {
            "ragged_batch": judge.difference("a ragged batch", prompts, readings.together),
            "chunked_prompt": judge.difference("a prompt in chunks", prompts[:1], in_chunks),
            "decode_steps": judge.difference("decode steps", ends, readings.decoded),
            "long_text": self._read_far(judge),
        }
        report = ParityReport(tolerance=judge.tolerance, **differences)
        return Measured(report, readings.identical)

    def _rounding(self, expected: Floats) -> float:
        """How far torch's logits for the longest text change if it reads token by token.

        0 of models without recurrent states, of which only rounding by the thousandfold would show.
        """
        if not self.layout.states:
            return 0.0
        self.reach.restore()
        rows, past = [], None
        with torch.no_grad():
            for token in torch.from_numpy(self.texts[0]):
                output = self.model(token.reshape(1, 1), past_key_values=past, use_cache=True)
                past = output.past_key_values
                rows.append(output.logits[0].numpy())
        return float(np.max(np.abs(np.concatenate(rows) - expected)))

    def _read_far(self, judge: "Judge") -> float | None:
        """Reads a long text in chunks, as the server does; logits are computed where they count."""
        length = self.reach.length
        if length is None:
            return None
        text = random_texts(self.model.config, [length], length, 0)[0]
        rows = self.reach.rows()
        self.reach.restore()
        with torch.no_grad(), gather_rows(trunk(self.model), torch.from_numpy(rows)):
            expected = self.model(torch.from_numpy(text[None]), use_cache=False).logits[0].numpy()
        session = CausalSession(self.graph, self.layout, 1, length)
        size = max(_CHUNK // self.block, 1) * self.block
        found = []
        for start in range(0, length, size):
            chunk = text[start : start + size]
            inside = rows[(rows >= start) & (rows < start + size)] - start
            found += session.run(0, [chunk], [inside])
        return judge.difference(self.reach.title, [expected], [np.concatenate(found)])

    def batch_invariant(self) -> bool:
        """Whether each row has the same bits in a batch as alone; torch is not asked."""
        return self._read().identical


class EncoderDecoderParity:
    """Parity of an encoder-decoder model: ragged sources in one batch, and decode steps.

    The texts have different lengths and begin at different steps, so that each step has rows of
    different lengths.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        graph: Graph,
        max_length: int,
        layout: KVLayout,
        text_to_text: TextToText,
        reach: Reach = NEAR,
    ) -> None:
        self.model = model
        self.reach = reach
        config = model.config
        max_length = text_to_text.max_source_length
        far = [] if reach.length is None else [min(reach.length, _LONGEST_WRITTEN)]
        self.sources = random_texts(config, [*_LENGTHS, *far], max_length, 0)
        lengths = [*reversed(_LENGTHS), *far]
        texts = random_texts(config, [n - 1 for n in lengths], max_length - 1, 0)
        start = np.array([text_to_text.start_token_id])
        self.texts = [np.concatenate([start, text]) for text in texts]
        room, source_room = (max(map(len, each)) for each in (self.texts, self.sources))
        self.session = EncoderDecoderSession(
            graph, layout, len(self.texts), room + 1, source_room
        )  # a text that has ended takes part in the others' steps

    def expect(self, source: Ids, text: Ids) -> Floats:
        """torch's logits after each token of a text, (length, vocab_size)."""
        self.reach.restore()
        return expected_text(self.model, source, text)

    def _together(self) -> list[Floats]:
        self.session.encode(0, self.sources)
        rows: list[list[Floats]] = [[] for _ in self.texts]
        # Each text begins three steps after the last one
        for step in range(max(3 * slot + len(text) for slot, text in enumerate(self.texts))):
            places = [step - 3 * slot for slot in range(len(self.texts))]
            slots = [s for s, at in enumerate(places) if 0 <= at < len(self.texts[s])]
            if not slots:
                continue
            tokens = [int(self.texts[slot][places[slot]]) for slot in slots]
            for slot, logits in zip(slots, self.session.step(slots, tokens), strict=True):
                rows[slot].append(logits)
        return [np.stack(each) for each in rows]

    def _alone(self) -> list[Floats]:
        texts = []
        for source, text in zip(self.sources, self.texts, strict=True):
            self.session.encode(0, [source])
            rows = [self.session.step([0], [token])[0] for token in text.tolist()]
            texts.append(np.stack(rows))
        return texts

    def measure(self, tolerance: float) -> Measured:
        """Compares with torch; raises ExportError if logits differ by more than the tolerance."""
        pairs = zip(self.sources, self.texts, strict=True)
        expected = [self.expect(source, text) for source, text in pairs]
        judge = Judge(tolerance, expected)
        together = self._together()
        report = ParityReport(
            tolerance=judge.tolerance,
            ragged_batch=judge.difference(
                "a ragged batch", *([rows[:1] for rows in each] for each in (expected, together))
            ),
            decode_steps=judge.difference("decode steps", expected, together),
        )
        return Measured(report, identical(together, self._alone()))

    def batch_invariant(self) -> bool:
        """Whether each row has the same bits in a batch as alone; torch is not asked."""
        return identical(self._together(), self._alone())


def expected_text(model: PreTrainedModel, source: Ids, text: Ids) -> Floats:
    """torch's logits after each token of a text for a source, (length, vocab_size)."""
    with torch.no_grad():
        output = model(
            input_ids=torch.from_numpy(source[None]),
            attention_mask=torch.ones(1, len(source), dtype=torch.int64),
            decoder_input_ids=torch.from_numpy(text[None]),
            use_cache=False,
        )
    return output.logits[0].numpy()  # type: ignore[no-any-return]
