"""Compares a written bundle's graph, run by ONNX Runtime, with the torch model it came from.

torch reads every text alone and in one piece; ONNX Runtime reads them in ragged batches, in chunks
and token by token, the ways in which the server will. Each row is also run alone, to see whether
its logits are the same to the last bit in every company.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from maskdial.bundle import Embedding, KVLayout, ParityReport
from maskdial_export.embedding import pool
from maskdial_export.errors import ExportError
from maskdial_export.masked import head_logits

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_LENGTHS = (40, 13, 1, 26)
_CHUNKS = (16, 7, 1)  # a prompt's first chunks; the last one takes what is left
_DECODE_STEPS = 10
_SEED = 20240229


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found: the report for the manifest, and whether rows ignore their company."""

    report: ParityReport
    batch_invariant: bool


def expected_output(
    model: PreTrainedModel, embedding: Embedding | None, inputs: dict[str, torch.Tensor]
) -> Floats:
    """torch's logits or embedding of one text, float32 (length, columns) or (columns,)."""
    with torch.no_grad():
        output = model(**inputs)
        if embedding is None:
            return head_logits(output)[0].numpy()
        length = inputs["input_ids"].shape[1]
        return pool(output[0], torch.tensor([length]), embedding)[0].numpy()


def load_session(path: Path) -> onnxruntime.InferenceSession:
    """A session on the CPU, with ONNX Runtime's own optimisations on."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _random_texts(config: Any, lengths: Sequence[int], longest: int, extra: int) -> list[Ids]:
    """Texts of very different lengths, ``extra`` tokens to go on with, without padding tokens."""
    generator = np.random.default_rng(_SEED)
    ids = np.setdiff1d(np.arange(config.vocab_size), [config.pad_token_id or 0])
    return [generator.choice(ids, min(length, longest) + extra) for length in lengths]


def _pad(texts: Sequence[Ids]) -> Ids:
    padded = np.zeros((len(texts), max(map(len, texts))), np.int64)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    return padded


def _flat_rows(texts: Sequence[Ids]) -> Ids:
    """Flat indices of every token that is not padding."""
    width = max(map(len, texts))
    return np.concatenate([row * width + np.arange(len(text)) for row, text in enumerate(texts)])


def _split(logits: Floats, texts: Sequence[Ids]) -> list[Floats]:
    return np.split(logits, np.cumsum([len(text) for text in texts])[:-1])


def _identical(left: Sequence[Floats], right: Sequence[Floats]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(left, right, strict=True))


class _Judge:
    """Keeps the largest difference of each kind."""

    def __init__(self, tolerance: float, peak: float) -> None:
        self.tolerance = tolerance * max(1.0, peak / 10)

    def difference(self, what: str, expected: Sequence[Floats], actual: Sequence[Floats]) -> float:
        pairs = zip(expected, actual, strict=True)
        difference = max(float(np.max(np.abs(left - right))) for left, right in pairs)
        if not difference <= self.tolerance:
            raise ExportError(
                f"ONNX Runtime and torch disagree on {what}: their logits differ by up to "
                f"{difference:.2g}, and {self.tolerance:.2g} is allowed"
            )
        return difference


class MaskedParity:
    """Tasks on tokens (logits of every token), classification (logits of the text), embeddings."""

    def __init__(
        self, model: PreTrainedModel, embedding: Embedding | None, path: Path, max_length: int
    ) -> None:
        self.model = model
        self.embedding = embedding
        self.session = load_session(path)
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.per_token = "rows" in self.inputs
        self.texts = _random_texts(model.config, _LENGTHS, max_length, 0)
        generator = np.random.default_rng(_SEED)
        has_types = "token_type_ids" in self.inputs
        self.types = [generator.integers(0, 1 + has_types, len(text)) for text in self.texts]

    def run(self, texts: Sequence[Ids], types: Sequence[Ids]) -> list[Floats]:
        """ONNX Runtime's output, the texts in one batch: (length, columns) or (columns,) each."""
        feeds = {
            "input_ids": _pad(texts),
            "token_type_ids": _pad(types),
            "lengths": np.array([len(text) for text in texts], np.int32),
            "rows": _flat_rows(texts),
        }
        declared = {name: value for name, value in feeds.items() if name in self.inputs}
        output = self.session.run(None, declared)[0]
        return _split(output, texts) if self.per_token else list(output)

    def expect(self, text: Ids, types: Ids) -> Floats:
        """torch's output for one text."""
        inputs = {"input_ids": torch.from_numpy(text[None])}
        if "token_type_ids" in self.inputs:
            inputs["token_type_ids"] = torch.from_numpy(types[None])
        return expected_output(self.model, self.embedding, inputs)

    def measure(self, tolerance: float) -> Measured:
        """Raises ExportError where the logits differ by more than the tolerance."""
        expected = [self.expect(*pair) for pair in zip(self.texts, self.types, strict=True)]
        judge = _Judge(tolerance, max(float(np.max(np.abs(each))) for each in expected))
        ragged = self.run(self.texts, self.types)
        alone = [
            self.run([text], [types])[0] for text, types in zip(self.texts, self.types, strict=True)
        ]
        report = ParityReport(
            tolerance=judge.tolerance,
            ragged_batch=judge.difference("a ragged batch", expected, ragged),
        )
        return Measured(report, _identical(ragged, alone))


class CausalParity:
    """Prompts in a ragged batch, in chunks, and ten decode steps after them."""

    def __init__(
        self, model: PreTrainedModel, path: Path, max_length: int, layout: KVLayout
    ) -> None:
        self.model = model
        self.session = load_session(path)
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.steps = min(_DECODE_STEPS, max_length - 1)
        self.block = layout.query_block
        lengths = (self.block + _LENGTHS[0], *_LENGTHS[1:])
        self.texts = _random_texts(model.config, lengths, max_length - self.steps, self.steps)
        room = max(map(len, self.texts))
        shape = (len(self.texts), layout.num_heads, room, layout.head_dim)
        names = [f"{kind}.{i}" for i in range(layout.num_layers) for kind in ("key", "value")]
        self.cache = {name: np.zeros(shape, np.float32) for name in names}
        self.seen = np.zeros(len(self.texts), np.int64)

    def run(self, first_slot: int, texts: Sequence[Ids]) -> list[Floats]:
        """Appends a text to each slot from ``first_slot`` on; logits (length, vocab_size) each."""
        slots = slice(first_slot, first_slot + len(texts))
        ids = _pad(texts)
        seen = self.seen[slots]
        totals = seen + [len(text) for text in texts]
        feeds = {
            "input_ids": ids,
            "position_ids": seen[:, None] + np.arange(ids.shape[1]),
            "seqlens_k": (totals - 1).astype(np.int32),
            "total_sequence_length": np.array(totals.max(), np.int32),
            "rows": _flat_rows(texts),
        }
        binding = self.session.io_binding()
        for name, array in feeds.items():
            if name in self.inputs:
                binding.bind_cpu_input(name, array)
        for name, cache in self.cache.items():
            # past and present are the same memory, as on the server
            view = cache[slots]
            place = ("cpu", 0, np.float32, view.shape, view.ctypes.data)
            binding.bind_input(f"past_{name}", *place)
            binding.bind_output(f"present_{name}", *place)
        binding.bind_output("logits")
        self.session.run_with_iobinding(binding)
        self.seen[slots] = totals
        return _split(binding.get_outputs()[-1].numpy(), texts)

    def expect(self, text: Ids) -> Floats:
        """torch's logits for one text in one piece, (length, vocab_size)."""
        with torch.no_grad():
            output = self.model(torch.from_numpy(text[None]), use_cache=False)
        return output.logits[0].numpy()  # type: ignore[no-any-return]

    def _decode(self, slots: range) -> list[Floats]:
        """The last tokens of these slots' texts, one a step; (steps, vocab_size) for each slot."""
        steps = []
        for step in range(-self.steps, 0):
            tokens = [self.texts[slot][step : step + 1 or None] for slot in slots]
            steps.append(self.run(slots.start, tokens))
        return [np.concatenate(rows) for rows in zip(*steps, strict=True)]

    def _in_chunks(self, prompt: Ids, starts: Sequence[int] | Ids) -> Floats:
        """Reads a prompt from the beginning, in chunks of which all but the first start there."""
        self.seen[0] = 0
        chunks = [chunk for chunk in np.split(prompt, starts) if len(chunk)]
        return np.concatenate([self.run(0, [chunk])[0] for chunk in chunks])

    def measure(self, tolerance: float) -> Measured:
        """Raises ExportError where the logits differ by more than the tolerance."""
        expected = [self.expect(text) for text in self.texts]
        judge = _Judge(tolerance, max(float(np.max(np.abs(each))) for each in expected))
        prompts = [text[: -self.steps] for text in self.texts]
        expected_prompts = [each[: -self.steps] for each in expected]
        slots = range(len(prompts))
        together = self.run(0, prompts)
        decoded = self._decode(slots)
        self.seen[:] = 0
        alone = [self.run(slot, [prompts[slot]])[0] for slot in slots]
        decoded_alone = [self._decode(range(slot, slot + 1))[0] for slot in slots]
        in_chunks = [self._in_chunks(prompts[0], np.cumsum(_CHUNKS))]
        aligned = [self._in_chunks(prompts[0], [self.block])]
        report = ParityReport(
            tolerance=judge.tolerance,
            ragged_batch=judge.difference("a ragged batch", expected_prompts, together),
            chunked_prompt=judge.difference("a prompt in chunks", expected_prompts[:1], in_chunks),
            decode_steps=judge.difference(
                "decode steps", [each[-self.steps :] for each in expected], decoded
            ),
        )
        return Measured(
            report,
            _identical(together, alone)
            and _identical(decoded, decoded_alone)
            and _identical(aligned, alone[:1]),
        )
