"""Parity reads beyond every window and length at which a model may compute something else."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from rich.console import Console

from maskdial.bundle.bundle import load_bundle
from maskdial_export.checks.reach import Snapshot, find_reach
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.session import CausalSession, MaskedSession
from maskdial_export.tracing.attention import CausalAttention
from maskdial_export.tracing.length import bound_positions
from maskdial_export.tracing.positions import max_length
from maskdial_export.tracing.survey import survey
from tests.export.zoo import EXPERTS, GROUPED, LOCAL_EXPERTS, SHAPE
from tests.traces import Traces

WINDOW = 120
LONG = {"max_position_embeddings": 256}
BY_MASK: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        EXPERTS
        | LONG
        | {"shared_expert_intermediate_size": 24, "use_sliding_window": True}
        | {"sliding_window": WINDOW},
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        LOCAL_EXPERTS | LONG | {"sliding_window": WINDOW},
    ),
}


def make(architecture: str, settings: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def save(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Callable[..., Path]:
    """Writes a checkpoint of random weights."""

    def write(architecture: str, settings: Mapping[str, Any]) -> Path:
        folder = tmp_path / "checkpoint"
        make(architecture, settings).save_pretrained(folder)
        shutil.copyfile(checkpoint("bert") / "tokenizer.json", folder / "tokenizer.json")
        return folder

    return write


@pytest.mark.parametrize("name", ["qwen2-moe", pytest.param("phimoe", marks=pytest.mark.zoo)])
def test_windows_that_only_a_mask_applies(
    name: str,
    tmp_path: Path,
    save: Callable[..., Path],
    load_reference: Callable[[Path], transformers.PreTrainedModel],
) -> None:
    folder = save(*BY_MASK[name])
    manifest = export(str(folder), tmp_path / "bundle")
    assert manifest.parity.long_text is not None
    assert manifest.parity.long_text < 1e-4
    text = torch.randint(5, 100, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model = load_reference(folder)
        expected = model(text, use_cache=False).logits[0]
        model.config.sliding_window = 1000
        everything = model(text, use_cache=False).logits[0]
    assert (expected - everything).abs()[WINDOW + 20 :].max() > 0.1
    assert manifest.kv is not None
    session = CausalSession(tmp_path / "bundle" / "model.onnx", manifest.kv, 1, 200)
    (logits,) = session.run(0, [text[0].numpy()])
    assert (expected - torch.from_numpy(logits)).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["qwen2-moe", pytest.param("phimoe", marks=pytest.mark.zoo)])
def test_a_window_that_is_lost_is_found(
    name: str,
    tmp_path: Path,
    save: Callable[..., Path],
    traces: Traces,
) -> None:
    """It is larger than the short texts."""
    folder = save(*BY_MASK[name])
    attend = CausalAttention.__call__

    def without_window(
        self: Any, *arguments: Any, sliding_window: Any = None, **others: Any
    ) -> Any:
        return attend(self, *arguments, sliding_window=1000, **others)

    with (
        traces.anew(),
        mock.patch.object(CausalAttention, "__call__", without_window),
        pytest.raises(ExportError, match="torch disagree on a text of 144 tokens"),
    ):
        export(str(folder), tmp_path / "bundle")


def test_windows_of_both_kinds_are_surveyed() -> None:
    by_argument = make("MistralForCausalLM", GROUPED | {"sliding_window": 5})
    assert [layer.window for layer in survey(by_argument).layers] == [None, None]
    by_mask = make(*BY_MASK["phimoe"])
    assert [layer.window for layer in survey(by_mask).layers] == [WINDOW, WINDOW]


BIG_BIRD = SHAPE | {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 128}


def test_big_bird_reads_as_far_as_it_attends_to_everything(
    tmp_path: Path,
    save: Callable[..., Path],
    load_reference: Callable[[Path], transformers.PreTrainedModel],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save("BigBirdForMaskedLM", BIG_BIRD | {"attention_type": "block_sparse"})
    manifest = export(str(folder), tmp_path / "bundle", console=Console())
    assert manifest.max_length == (5 + 2 * 1) * 4
    assert "texts of up to 28 tokens; in longer ones the model attends" in capsys.readouterr().out
    ids = torch.randint(5, 100, (1, manifest.max_length))
    with torch.no_grad():
        expected = load_reference(folder)(ids).logits[0]
    (logits,) = MaskedSession(tmp_path / "bundle" / "model.onnx").run([ids[0].numpy()])
    assert (expected - torch.from_numpy(logits)).abs().max() < 1e-3
    with pytest.raises(ExportError, match="reads at most 28 tokens, fewer than --max-length 64"):
        export(str(folder), tmp_path / "longer", max_length=64)


MINIMAX_M3 = (
    LOCAL_EXPERTS
    | {"max_position_embeddings": 256, "num_local_experts": 4, "head_dim": 16, "rotary_dim": 16}
    | {"dense_intermediate_size": 48, "shared_intermediate_size": 24}
    | {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 4}
)


def test_chosen_blocks_bound_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to all the blocks that MiniMax M3 chooses, it attends to everything; not beyond."""
    sparse, dense = (
        make("MiniMaxM3VLForCausalLM", MINIMAX_M3 | {"layer_types": [kind] * 2})
        for kind in ("minimax_m3_sparse", "full_attention")
    )
    dense.load_state_dict(sparse.state_dict(), strict=False)
    bound_positions(sparse, None, Console())
    shown = "texts of up to 64 tokens; in longer ones the model attends to blocks that it chooses"
    assert shown in capsys.readouterr().out
    longest = max_length(sparse)
    assert (longest, max_length(dense)) == (64, 256)
    ids = torch.randint(5, 100, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        differences = (sparse(ids).logits - dense(ids).logits)[0].abs().amax(-1)
    assert differences[:longest].max() < 1e-5
    assert differences[longest:].max() > 1e-3


def test_a_snapshot_undoes_what_a_short_text_switched() -> None:
    model = make("BigBirdForMaskedLM", BIG_BIRD | {"attention_type": "block_sparse"})
    long, short = torch.randint(5, 100, (1, 64)), torch.randint(5, 100, (1, 8))
    snapshot = Snapshot(model)
    with torch.no_grad():
        before = model(long).logits
        model(short)
        switched = model(long).logits
        snapshot.restore()
        after = model(long).logits
    assert (switched - before).abs().max() > 1e-3
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("settings", "length", "switches"),
    [
        ({}, None, ()),
        ({"sliding_window": 5}, None, ()),  # short texts are longer
        ({"sliding_window": 100}, 124, (100,)),
        ({"sliding_window": 250}, 256, (250,)),
        ({"sliding_window": 4096}, None, ()),  # no text is as long
        ({"sliding_window": 64, "index_topk": 100, "other": [48]}, 124, (64, 100)),
        ({"rope_scaling": {"original_max_position_embeddings": 128, "factor": 2.0}}, 152, (128,)),
        ({"index_block_size": 16, "index_topk_blocks": 8}, 152, (128,)),
        ({"index_block_size": 16, "other_topk_blocks": 8}, None, ()),
        ({"vision": {"window_size": 112}, "chunk_size_feed_forward": 64}, None, ()),
    ],
)
def test_lengths_that_a_configuration_names(
    settings: Mapping[str, Any], length: int | None, switches: tuple[int, ...]
) -> None:
    model = make("LlamaForCausalLM", GROUPED | LONG)
    model.config.to_dict = lambda: dict(settings)
    reach = find_reach(model, 256, Snapshot(model))
    assert (reach.length, reach.switches, reach.unread) == (length, switches, ())
    if length is not None:
        rows = reach.rows()
        assert {length - 1, *(each for each in switches)} <= set(rows.tolist())
        assert len(rows) < length


def test_lengths_that_take_too_long_are_named(
    tmp_path: Path,
    save: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("maskdial_export.checks.reach._MAX_OPERATIONS", 1)
    folder = save("MistralForCausalLM", GROUPED | LONG | {"sliding_window": 100})
    manifest = export(str(folder), tmp_path / "bundle", console=Console())
    assert manifest.parity.long_text is None
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "not compared with torch, as it would take too long: texts beyond sliding_window 100"
        in shown
    )
    assert load_bundle("mine", tmp_path / "bundle").manifest.parity.doubt is None
