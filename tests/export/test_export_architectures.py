"""Every architecture of the zoo compared with torch, without the exporter's own checks."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from maskdial.bundle.bundle import load_bundle
from maskdial.kernels.installed import find_kernels
from maskdial.runtime.piece import Piece
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from tests.export.zoo import CAUSAL, FILL_MASK, REFUSED, WRAPPED, marked

TOLERANCE = 1e-4
STEPS = 6
WRITERS = {**CAUSAL, **WRAPPED}
WINDOWS = {
    "mistral",
    "gemma3",
    "ministral",
    "olmo3",
    "exaone4",
    "gpt-oss",
    "gemma3-vision",
    "cwm",
} | {
    "gemma4",
    "gemma3n-text",
}
PACKED = {
    name: each
    for name, each in WRITERS.items()
    if name in WINDOWS or re.search("Mamba|delta|short convolutions", each.note)
}
Bundle = Callable[[str], Path]


def session(folder: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
    )


def run(graph: onnxruntime.InferenceSession, feeds: dict[str, Any]) -> list[np.ndarray]:
    declared = {value.name for value in graph.get_inputs()}
    outputs: list[np.ndarray] = graph.run(
        None, {name: feeds[name] for name in feeds if name in declared}
    )
    return outputs


def texts_of(lengths: Sequence[int]) -> list[np.ndarray]:
    generator = np.random.default_rng(11)
    return [generator.integers(4, 101, length) for length in lengths]


def pad(texts: Sequence[np.ndarray], value: int) -> np.ndarray:
    longest = max(map(len, texts))
    return np.stack([np.pad(t, (0, longest - len(t)), constant_values=value) for t in texts])


def masked_feeds(
    texts: Sequence[np.ndarray], rows: Sequence[tuple[int, int]], pad_id: int
) -> dict[str, np.ndarray]:
    ids = pad(texts, pad_id)
    return {
        "input_ids": ids,
        "lengths": np.array([len(text) for text in texts], np.int32),
        "token_type_ids": pad([np.arange(len(text)) >= len(text) // 2 for text in texts], 0).astype(
            np.int64
        ),
        "rows": np.array([text * ids.shape[1] + position for text, position in rows]),
    }


def torch_masked(model: Any, feeds: dict[str, np.ndarray], has_types: bool) -> list[np.ndarray]:
    """torch's logits for each text alone."""
    logits = []
    for row, length in enumerate(feeds["lengths"]):
        names = ["input_ids", *(["token_type_ids"] if has_types else [])]
        inputs = {name: torch.tensor(feeds[name][row : row + 1, :length]) for name in names}
        with torch.no_grad():
            output = model(**inputs)
        both = "prediction_logits" in output  # and the next-sentence head's
        logits.append((output.prediction_logits if both else output.logits)[0].numpy())
    return logits


@pytest.mark.parametrize("name", marked(FILL_MASK))
def test_fill_mask_logits_equal_torch_and_are_batch_invariant(
    name: str, bundle: Bundle, checkpoint: Bundle, load_reference: Callable[[Path], Any]
) -> None:
    manifest = load_bundle(name, bundle(name)).manifest
    graph = session(bundle(name))
    texts = texts_of([23, 4, 31])
    rows = [(0, 3), (0, 22), (1, 1), (2, 30)]
    pad_id = manifest.special_tokens.pad
    assert pad_id is not None
    feeds = masked_feeds(texts, rows, pad_id)
    (logits,) = run(graph, feeds)

    has_types = "token_type_ids" in {value.name for value in graph.get_inputs()}
    expected = torch_masked(load_reference(checkpoint(name)), feeds, has_types)
    np.testing.assert_allclose(
        logits, np.stack([expected[text][place] for text, place in rows]), atol=TOLERANCE, rtol=0
    )
    for index, (text, position) in enumerate(rows):
        (alone,) = run(graph, masked_feeds([texts[text]], [(0, position)], pad_id))
        if FILL_MASK[name].batch_invariant:
            np.testing.assert_array_equal(alone[0], logits[index])
    assert manifest.family == "masked"
    assert manifest.task == "fill-mask"
    assert manifest.batch_invariant == FILL_MASK[name].batch_invariant
    assert manifest.parity.ragged_batch <= manifest.parity.tolerance == TOLERANCE


class Cache:
    """A causal graph and its KV cache, fed as by the server, but with past and present apart."""

    def __init__(self, folder: Path, slots: int) -> None:
        layout = load_bundle("causal", folder).manifest.kv
        assert layout is not None
        self.graph = session(folder)
        self.names = [value.name for value in self.graph.get_outputs()]
        self.block = layout.query_block
        self.past = {
            f"past_{kind}.{i}": np.zeros((slots, heads.num_heads, 96, heads.head_dim), np.float32)
            for i, heads in enumerate(layout.layers)
            for kind in ("key", "value")
        } | {
            f"past_state.{i}": np.zeros((slots, *shape), np.float32)
            for i, shape in enumerate(layout.states)
        }
        self.seen = np.zeros(slots, np.int64)

    def feed(self, slots: Sequence[int], texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The logits of each new token."""
        slots = list(slots)
        ids = pad(texts, 0)
        width = ids.shape[1]
        lengths = [len(text) for text in texts]
        totals = self.seen[slots] + lengths
        feeds = {
            "input_ids": ids,
            "position_ids": self.seen[slots][:, None] + np.arange(width),
            "seqlens_k": (totals - 1).astype(np.int32),
            "total_sequence_length": np.array(totals.max(), np.int32),
            "rows": np.concatenate([i * width + np.arange(len(t)) for i, t in enumerate(texts)]),
            "lengths": np.array(lengths, np.int32),
        } | {name: array[slots] for name, array in self.past.items()}
        outputs = dict(zip(self.names, run(self.graph, feeds), strict=True))
        for name, array in self.past.items():
            array[slots] = outputs[name.replace("past", "present")]
        self.seen[slots] = totals
        return np.split(outputs["logits"], np.cumsum([len(text) for text in texts])[:-1])


@pytest.mark.parametrize("name", marked(WRITERS))
def test_causal_logits_equal_torch_in_chunks_and_steps(
    name: str, bundle: Bundle, checkpoint: Bundle, load_reference: Callable[[Path], Any]
) -> None:
    manifest = load_bundle(name, bundle(name)).manifest
    texts = texts_of([33, 12, 19])
    model = load_reference(checkpoint(name))
    with torch.no_grad():
        expected = [model(torch.tensor(text[None])).logits[0].numpy() for text in texts]
    cache = Cache(bundle(name), 3)
    prompts = [text[:-4] for text in texts]
    chunks = [cache.feed([0], [prompts[0][:17]])[0], cache.feed([0], [prompts[0][17:]])[0]]
    actual = [[np.concatenate(chunks)], *([each] for each in cache.feed([1, 2], prompts[1:]))]
    for step in range(-4, 0):
        tokens = [text[step : step + 1 or None] for text in texts]
        for rows, logits in zip(actual, cache.feed([0, 1, 2], tokens), strict=True):
            rows.append(logits)
    for rows, each in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(rows), each, atol=TOLERANCE, rtol=0)
    assert manifest.family == "causal"
    assert manifest.parity.chunked_prompt is not None
    assert manifest.parity.decode_steps is not None
    assert max(manifest.parity.chunked_prompt, manifest.parity.decode_steps) <= TOLERANCE


@pytest.mark.parametrize("name", marked(WRITERS))
def test_causal_logits_do_not_depend_on_batch_or_chunks(name: str, bundle: Bundle) -> None:
    texts = texts_of([90, 12, 19])
    prompts = [text[:-4] for text in texts]
    together, alone, chunked = (Cache(bundle(name), 3) for _ in range(3))
    whole = together.feed([0, 1, 2], prompts)
    for slot, prompt in enumerate(prompts):
        np.testing.assert_array_equal(alone.feed([slot], [prompt])[0], whole[slot])
    block = chunked.block
    chunks = np.split(prompts[0], range(block, len(prompts[0]), block))
    pieces = [chunked.feed([0], [chunk])[0] for chunk in chunks]
    assert len(pieces) > 1
    np.testing.assert_array_equal(np.concatenate(pieces), whole[0])
    for step in range(-4, 0):
        tokens = [text[step : step + 1 or None] for text in texts]
        for slot, logits in enumerate(together.feed([0, 1, 2], tokens)):
            np.testing.assert_array_equal(alone.feed([slot], [tokens[slot]])[0], logits)
    manifest = load_bundle(name, bundle(name)).manifest
    assert manifest.batch_invariant == WRITERS[name].batch_invariant


def test_short_convolutions_keep_rows_in_order(bundle: Bundle) -> None:
    """The model turns channels and tokens around; products of turned rows are not quantized."""
    graph = onnx.load(bundle("lfm2") / "model.onnx", load_external_data=False).graph
    assert {"Transpose", "FusedMatMul"}.isdisjoint(node.op_type for node in graph.node)


@pytest.mark.parametrize("name", marked(PACKED))
def test_the_kernels_compute_windows_and_recurrent_layers_without_padding(
    name: str, bundle: Bundle
) -> None:
    """A text that goes on, one that begins and steps share a pass; each is as it is alone."""
    kernels = find_kernels("auto")
    if kernels is None:
        pytest.skip("the kernels are not built")
    loaded = load_bundle(name, bundle(name))
    texts = texts_of([33, 12, 19])
    cache = Cache(bundle(name), 3)
    expected = [cache.feed([slot], [text])[0] for slot, text in enumerate(texts)]

    def runner() -> Runner:
        options = SessionOptions("cpu", 1, False, kernels=kernels, kv_cache="float")
        layout, vocab_size = loaded.manifest.kv, expected[0].shape[1]
        assert layout is not None
        return Runner(
            Session(loaded.graph, options), layout, slots=3, max_length=64, vocab_size=vocab_size
        )

    def copied(logits: Any) -> np.ndarray:
        return np.array(logits[:])

    alone, shared = runner(), runner()
    whole = [copied(alone.prefill(slot, text, 0, len(text))) for slot, text in enumerate(texts)]
    for logits, wanted in zip(whole, expected, strict=True):
        np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)

    first, second, third = texts
    shared.prefill(0, first[:20], 0)
    shared.prefill(1, second[:11], 0)
    assert shared.decode_and_prefill is not None
    joined = shared.decode_and_prefill(
        np.array([0, second[11]]),
        np.array([0, 11]),
        np.array([1]),
        [Piece.of(0, first[20:], 20, 13), Piece.of(2, third, 0, 19)],
    )
    parts = np.split(copied(joined), [1, 14])
    for part, wanted in zip(parts, (whole[1][11:], whole[0][20:], whole[2]), strict=True):
        np.testing.assert_array_equal(part, wanted)


@pytest.mark.parametrize("name", marked(WRITERS))
def test_greedy_decoding_equals_generate(
    name: str, bundle: Bundle, checkpoint: Bundle, load_reference: Callable[[Path], Any]
) -> None:
    """transformers decodes with a cache of its own; a batch of ours writes the same tokens."""
    prompts = texts_of([21, 5])
    model = load_reference(checkpoint(name))
    model.generation_config.eos_token_id = None
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=STEPS, pad_token_id=0)
    cache = Cache(bundle(name), len(prompts))
    written: list[list[int]] = [[] for _ in prompts]
    texts = prompts
    for _ in range(STEPS):
        logits = cache.feed(range(len(prompts)), texts)
        texts = [rows[-1].argmax(keepdims=True) for rows in logits]
        for tokens, text in zip(written, texts, strict=True):
            tokens.append(int(text[0]))
    for prompt, tokens in zip(prompts, written, strict=True):
        whole = model.generate(torch.tensor(prompt[None]), generation_config=settings)
        assert tokens == whole[0, len(prompt) :].tolist()


def test_experts_compute_the_tokens_that_chose_them(bundle: Bundle, tmp_path: Path) -> None:
    """Each token chooses two of four in both layers; another may have none at all."""
    model = onnx.load(bundle("mixtral") / "model.onnx")
    results = [node.input[2] for node in model.graph.node if node.op_type == "ScatterND"]
    assert len(results) == 2 * 4
    sizes = [
        size.dim_param
        for value in model.graph.value_info
        for size in value.type.tensor_type.shape.dim
    ]
    counts = [size for size in sizes if re.search(r"\bu\d", size)]
    assert not counts, "ONNX Runtime takes sizes of one name as equal, and each expert has its own"
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in results)
    onnx.save(model, tmp_path / "model.onnx")
    graph = session(tmp_path)
    for length in (1, 40):
        past = [value.name for value in graph.get_inputs() if "past" in value.name]
        feeds: dict[str, Any] = {name: np.zeros((1, 1, 0, 16), np.float32) for name in past}
        feeds |= {
            "input_ids": texts_of([length])[0][None],
            "position_ids": np.arange(length)[None],
            "seqlens_k": np.array([length - 1], np.int32),
            "total_sequence_length": np.array(length, np.int32),
            "rows": np.array([length - 1]),
        }
        num_tokens = [len(rows) for rows in run(graph, feeds)[-len(results) :]]
        assert sum(num_tokens[:4]) == sum(num_tokens[4:]) == 2 * length
    assert max(num_tokens) < length


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proven_is_refused(name: str, checkpoint: Bundle, tmp_path: Path) -> None:
    """In one sentence, and no bundle is left behind."""
    with pytest.raises(ExportError, match=REFUSED[name][1]) as caught:
        export(str(checkpoint(name)), tmp_path / "bundle")
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []
