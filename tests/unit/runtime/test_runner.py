"""The runner over a small real graph: embeddings, one GroupQueryAttention layer, a head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from maskdial.bundle.manifest import Heads, KVLayout
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

VOCAB, HEADS, HEAD_DIM, MAX_LENGTH, SLOTS = 37, 2, 16, 48, 4
WIDTH = HEADS * HEAD_DIM
LAYOUT = KVLayout(layers=(Heads(HEADS, HEAD_DIM),))


def build_graph(path: Path) -> None:
    """Writes a graph with the causal inputs and outputs that `maskdial.bundle.bundle` lists.

    It takes ``position_ids`` too, for learned positions beside the token embeddings.
    """
    rng = np.random.default_rng(0)
    shapes = {
        "tokens": (VOCAB, WIDTH),
        "positions": (MAX_LENGTH, WIDTH),
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH),
        "head": (WIDTH, VOCAB),
    }
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    weights.append(numpy_helper.from_array(np.array([-1, WIDTH], np.int64), "flat"))
    cache = ["batch", HEADS, "max_length", HEAD_DIM]
    node = helper.make_node
    nodes = [
        node("Gather", ["tokens", "input_ids"], ["token"]),
        node("Gather", ["positions", "position_ids"], ["position"]),
        node("Add", ["token", "position"], ["hidden"]),
        node("MatMul", ["hidden", "query"], ["q"]),
        node("MatMul", ["hidden", "key"], ["k"]),
        node("MatMul", ["hidden", "value"], ["v"]),
        node(
            "GroupQueryAttention",
            ["q", "k", "v", "past_key.0", "past_value.0", "seqlens_k", "total_sequence_length"],
            ["attended", "present_key.0", "present_value.0"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=HEADS,
        ),
        node("Add", ["hidden", "attended"], ["sum"]),
        node("Reshape", ["sum", "flat"], ["all_rows"]),
        node("Gather", ["all_rows", "rows"], ["wanted"]),
        node("MatMul", ["wanted", "head"], ["logits"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "causal",
        [
            info("input_ids", TensorProto.INT64, ["batch", "new_tokens"]),
            info("position_ids", TensorProto.INT64, ["batch", "new_tokens"]),
            info("seqlens_k", TensorProto.INT32, ["batch"]),
            info("total_sequence_length", TensorProto.INT32, []),
            info("rows", TensorProto.INT64, ["num_rows"]),
            info("past_key.0", TensorProto.FLOAT, cache),
            info("past_value.0", TensorProto.FLOAT, cache),
        ],
        [
            info("logits", TensorProto.FLOAT, ["num_rows", VOCAB]),
            info("present_key.0", TensorProto.FLOAT, cache),
            info("present_value.0", TensorProto.FLOAT, cache),
        ],
        weights,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("causal") / "model.onnx"
    build_graph(path)
    return Session(path, SessionOptions(intra_op_threads=1))


@pytest.fixture(params=["host", "device", "captured", "staged"])
def runner(
    request: pytest.FixtureRequest,
    session: Session,
    device_memory: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Runner:
    """A runner in main memory, and one that pads its steps in memory that stands in for a GPU's.

    ``captured`` feeds decode steps as for CUDA graphs, which the CPU provider ignores. In the
    memory of ``staged``, as in WebGPU's, a binding begins with an allocation. The cache is NaN
    wherever nothing was written, so that reading there would show.
    """
    monkeypatch.setattr(session, "captures", request.param == "captured")
    on_host = request.param == "host"
    binds_views = request.param != "staged"
    memory: Any = HostMemory() if on_host else device_memory(binds_views=binds_views)
    runner = Runner(
        session,
        LAYOUT,
        memory=memory,
        slots=SLOTS,
        max_length=MAX_LENGTH,
        vocab_size=VOCAB,
        max_tokens=3 * 16,
        max_rows=3,
        batch_sizes=() if on_host else (1, 2, 4, 8),
    )
    caches = (runner.cache,) if binds_views else (runner.cache, runner._staging)
    for buffer in (each for cache in caches for each in (*cache.keys, *cache.values)):
        (memory.view if on_host else memory.peek)(buffer)[...] = np.nan
    return runner


def tokens(seed: int, n: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, n)


def prefill(
    runner: Runner, slot: int, token_ids: NDArray[np.int64], start: int
) -> NDArray[np.float32]:
    (logits,) = np.array(runner.prefill(slot, token_ids, start))
    return logits  # type: ignore[no-any-return]


def decode(runner: Runner, token_ids: list[int], lengths: list[int]) -> NDArray[np.float32]:
    rows = np.arange(len(token_ids))
    return np.array(runner.decode(np.array(token_ids), np.array(lengths), rows))


def test_matches_plain_attention(runner: Runner, session: Session, tmp_path: Path) -> None:
    """One prompt against the same layer written out in numpy."""
    build_graph(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    w = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    ids = tokens(1, 9)
    hidden = w["tokens"][ids] + w["positions"][:9]

    def heads(name: str) -> NDArray[np.float64]:
        split: NDArray[np.float64] = (hidden @ w[name]).reshape(9, HEADS, HEAD_DIM)
        return split.transpose(1, 0, 2)

    scores = heads("query") @ heads("key").transpose(0, 2, 1) / np.sqrt(HEAD_DIM)
    scores[:, np.triu(np.ones((9, 9), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    attended = (shares @ heads("value")).transpose(1, 0, 2).reshape(9, WIDTH)
    wanted = (hidden + attended)[-1] @ w["head"]
    assert np.abs(prefill(runner, 2, ids, 0) - wanted).max() < 1e-3


@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_a_prompt_in_chunks_is_the_same_to_the_last_bit(runner: Runner, chunk: int) -> None:
    ids = tokens(2, 20)
    whole = prefill(runner, 0, ids, 0)
    for start in range(0, 20, chunk):
        pieces = prefill(runner, 3, ids[start : start + chunk], start)
    assert np.array_equal(whole, pieces)
    length = len(ids)
    assert np.array_equal(runner.cache.read(0, 0, length), runner.cache.read(3, 0, length))


def generate_alone(runner: Runner, ids: NDArray[np.int64], steps: int) -> list[NDArray[np.float32]]:
    """The logits of a greedy text in slot 0, while no other sequence runs."""
    logits = [prefill(runner, 0, ids, 0)]
    for step in range(steps):
        logits.append(decode(runner, [int(logits[-1].argmax())], [len(ids) + step])[0])
    return logits


def test_ragged_decode_steps_are_the_same_to_the_last_bit(runner: Runner) -> None:
    prompts = [tokens(seed, n) for seed, n in enumerate((3, 17, 1, 30))]
    alone = [generate_alone(runner, prompt, 6) for prompt in prompts]
    together = [[prefill(runner, slot, prompt, 0)] for slot, prompt in enumerate(prompts)]
    for step in range(6):
        newest = [int(logits[-1].argmax()) for logits in together]
        for logits, row in zip(
            together,
            decode(runner, newest, [len(prompt) + step for prompt in prompts]),
            strict=True,
        ):
            logits.append(row)
    assert np.array_equal(alone, together)


def test_an_idle_row_changes_neither_the_others_nor_its_own_prompt(runner: Runner) -> None:
    first, second, late = tokens(5, 8), tokens(6, 5), tokens(7, 12)
    wanted_second = generate_alone(runner, second, 1)[1]
    wanted_late = prefill(runner, 0, late, 0)
    prefill(runner, 0, first, 0)
    newest = int(prefill(runner, 2, second, 0).argmax())
    prefill(runner, 1, late[:4], 0)
    lengths = np.array([8, 4, 5])
    step = np.asarray(runner.decode(np.array([1, 0, newest]), lengths, np.array([0, 2])))
    assert step.shape == (2, VOCAB)
    assert np.array_equal(step[1], wanted_second)
    assert np.array_equal(prefill(runner, 1, late[4:], 4), wanted_late)


def test_a_copied_slot_goes_on_as_the_original_would(runner: Runner) -> None:
    prompt = tokens(8, 11)
    wanted = generate_alone(runner, prompt, 1)
    prefill(runner, 3, prompt, 0)
    runner.cache.copy(3, 1, 11)
    prefill(runner, 0, tokens(9, 2), 0)
    newest = int(wanted[0].argmax())
    assert np.array_equal(decode(runner, [0, newest], [2, 11])[1], wanted[1])


def test_the_logits_of_several_tokens(runner: Runner) -> None:
    ids = tokens(10, 12)
    wanted = [prefill(runner, 0, ids[:length], 0) for length in (10, 11, 12)]
    prefill(runner, 1, ids[:8], 0)
    assert np.array_equal(runner.prefill(1, ids[8:], 8, 3), wanted)


@pytest.mark.parametrize("runner", ["host", "device", "captured"], indirect=True)
def test_prompts_read_together_are_the_same_to_the_last_bit(runner: Runner) -> None:
    prompts = [tokens(11, 9), tokens(12, 2), tokens(13, 16)]
    alone = [generate_alone(runner, prompt, 1) for prompt in prompts]
    prefill(runner, 0, tokens(14, 5), 0)
    together = np.asarray(runner.prefill_together(1, prompts))
    assert np.array_equal(together, [first for first, _ in alone])
    newest = [1, *(int(logits.argmax()) for logits in together)]
    step = decode(runner, newest, [5, *(len(prompt) for prompt in prompts)])
    assert np.array_equal(step[1:], [second for _, second in alone])


def test_blocks_of_a_slot_can_be_kept_and_written_elsewhere(runner: Runner) -> None:
    prompt = tokens(15, 20)
    wanted = prefill(runner, 0, prompt, 0)
    blocks = [runner.cache.read(0, start, 6) for start in (0, 6)]
    assert blocks[0].shape == (6, 2 * HEADS * HEAD_DIM)
    for start, block in zip((0, 6), blocks, strict=True):
        runner.cache.write(2, start, block)
    assert np.array_equal(prefill(runner, 2, prompt[12:], 12), wanted)


def test_dummy_rows_change_no_prompt(runner: Runner) -> None:
    """With padding, three rows run as four, while a prompt is prefilled into the fourth slot."""
    late = tokens(16, 12)
    wanted = prefill(runner, 0, late, 0)
    for slot in range(3):
        prefill(runner, slot, tokens(slot, 3), 0)
    prefill(runner, 3, late[:5], 0)
    decode(runner, [1, 2, 3], [3, 3, 3])
    assert np.array_equal(prefill(runner, 3, late[5:], 5), wanted)


def test_full_slots_do_not_disturb_the_others(runner: Runner) -> None:
    """A dummy row in a full slot writes over its last token."""
    wanted = generate_alone(runner, tokens(17, 4), 2)[1:]
    prefill(runner, 3, tokens(18, MAX_LENGTH), 0)
    prefill(runner, 0, tokens(17, 4), 0)
    first = decode(runner, [int(prefill(runner, 0, tokens(17, 4), 0).argmax()), 0, 0], [4, 0, 0])
    assert np.array_equal(first[0], wanted[0])


def test_warming_up_leaves_the_slots_empty(runner: Runner) -> None:
    wanted = prefill(runner, 1, tokens(19, 6), 0)
    runner.warm_up()
    assert np.array_equal(prefill(runner, 0, tokens(19, 6), 0), wanted)


def test_more_logits_than_there_is_memory_for_are_refused(runner: Runner) -> None:
    """Otherwise the pass would write beyond the buffer."""
    with pytest.raises(Exception, match=r"[Ss]hape"):
        runner.prefill(0, tokens(20, 12), 0, SLOTS + 1)
