"""EAGLE-3 heads against plain torch, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from maskdial.bundle.bundle import Bundle, load_bundle
from maskdial.bundle.manifest import GRAPH
from maskdial.errors import BundleError
from maskdial_export.checkpoint.eagle import load_eagle
from maskdial_export.checkpoint.eagle_head import Eagle
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from maskdial_export.session import CausalSession
from maskdial_export.tracing.eagle import eagle_head
from tests.eagle import (
    PLACES,
    SIZE,
    Tensors,
    make_head,
    make_target,
    predict,
    save,
    save_speculator,
)
from tests.export.conftest import make_tokenizer

ANY_LOSS = Gate(max_loss=math.inf)
# Of the largest logit: what rounding to int8 may take
TOLERANCE = 0.1


def compare(target: Any, tensors: Tensors, folder: Path, settings: Any = None) -> None:
    """Reads a text as the server does, in pieces, and drafts three tokens."""
    ids = np.random.default_rng(7).integers(5, target.config.vocab_size, 30)
    with torch.no_grad():
        expected = predict(tensors, target, torch.from_numpy(ids), 3, settings).numpy()
    bundle = load_bundle("eagle", folder)
    kv, own = bundle.manifest.kv, bundle.manifest.draft_head
    assert kv is not None
    assert own is not None
    assert own.kind == "eagle"
    assert own.vocab_size == expected.shape[1]
    token_ids = bundle.draft_tokens()
    assert token_ids is not None
    np.testing.assert_array_equal(np.arange(len(token_ids)) + tensors["d2t"].numpy(), token_ids)
    main = CausalSession(folder / GRAPH, kv, 1, 40)
    head = CausalSession(bundle.draft_graph, own.kv, 1, 40)
    for start, end in ((0, 12), (12, 13), (13, 29)):
        main.run(0, [ids[start:end]])
        logits = head.run(0, [ids[start + 1 : end + 1]], previous_hidden=main.hidden)[0][-1]
    for wanted in expected:
        assert np.abs(logits - wanted).max() < TOLERANCE * np.abs(wanted).max()
        drafted = token_ids[[wanted.argmax()]]
        logits = head.run(0, [drafted], previous_hidden=head.hidden[-1:])[0][-1]


def test_the_head_predicts_what_plain_torch_does(circling_eagle: Path) -> None:
    target = transformers.AutoModelForCausalLM.from_pretrained(circling_eagle)
    tensors = safetensors.torch.load_file(circling_eagle / "head" / "model.safetensors")
    compare(target, tensors, circling_eagle / "bundle")


VARIANTS: list[dict[str, bool]] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "norm_before_residual": True, "norm_output": True},
]


def add_norms(tensors: Tensors, settings: dict[str, bool]) -> None:
    generator = torch.Generator().manual_seed(2)
    if settings.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(96, generator=generator)
    if settings.get("fc_norm"):
        for index in range(len(PLACES)):
            weight = 1 + 0.2 * torch.randn(SIZE, generator=generator)
            tensors[f"fc_norm.{index}.weight"] = weight


@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("saved", [save, save_speculator])
def test_both_layouts_and_their_variants(
    target: Any, saved: Callable[..., None], settings: dict[str, bool], tmp_path: Path
) -> None:
    """In fp32: what graphs are compared with."""
    tensors = make_head(40, target.config.vocab_size)
    add_norms(tensors, settings)
    saved(tensors, tmp_path, target, **settings)
    head = eagle_head(target, load(tmp_path, target))
    assert head.token_ids is not None
    ids = torch.from_numpy(np.random.default_rng(7).integers(5, head.num_tokens, 20))
    with torch.no_grad():
        expected = predict(tensors, target, ids, 2, settings)
        features, logits, own = head.reference(ids[None])
        torch.testing.assert_close(logits[-1], expected[0], rtol=0, atol=1e-4)
        drafted = int(head.token_ids[int(expected[0].argmax())])
        text = torch.tensor([[*ids[1:].tolist(), drafted]])
        read = torch.cat([features, own[-1:]])[None]
        logits = head.model(text, previous_hidden=read).logits[0]
        torch.testing.assert_close(logits[-1], expected[1], rtol=0, atol=1e-4)


@pytest.mark.zoo
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("settings", VARIANTS)
def test_graphs_of_variants(settings: dict[str, bool], precision: str, tmp_path: Path) -> None:
    """The export compares those in fp32 with torch."""
    target, tensors = prepare(tmp_path)
    add_norms(tensors, settings)
    save_speculator(tensors, tmp_path / "head", target, **settings)
    bundle, draft = tmp_path / "bundle", str(tmp_path / "head")
    export(str(tmp_path), bundle, precision=precision, gate=ANY_LOSS, draft=draft)
    if precision == "int8":
        compare(target, tensors, bundle, settings)


def prepare(folder: Path) -> tuple[Any, Tensors]:
    tokenizer = make_tokenizer()
    target = make_target(tokenizer, 64)
    target.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return target, make_head(40, target.config.vocab_size)


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target(make_tokenizer(), 64)


def load(folder: Path, target: Any, *, allow_pickle: bool = False) -> Eagle:
    return load_eagle(str(folder), target, 64, allow_pickle=allow_pickle)


Change = Callable[[Tensors, dict[str, Any]], object]


def layers(*numbers: int) -> Change:
    return lambda _tensors, settings: settings["eagle_config"].update(
        eagle_aux_hidden_state_layer_ids=[*numbers]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, _: t.pop("fc.weight"), "is not an EAGLE-3 head"),
        (lambda t, _: t.pop("midlayer.self_attn.q_proj.weight"), "is not an EAGLE-3 head"),
        (
            lambda t, _: t.update({"midlayer.self_attn.q_proj.weight": torch.ones(SIZE, SIZE)}),
            "twice hidden_size columns",
        ),
        (
            lambda t, _: t.update({"fc.weight": torch.ones(SIZE, 3 * 24)}),
            "it reads 72 columns, and 3 layers of LlamaForCausalLM have 96; is it the head of "
            "another model?",
        ),
        (lambda t, _: t.pop("d2t"), "it predicts 40 tokens and has no d2t"),
        (lambda t, _: t.update(d2t=t["d2t"] + 5000), "d2t does not map its 40 columns to tokens"),
        (
            lambda t, _: t.update({"embed_tokens.weight": torch.ones(99, SIZE)}),
            "it has embeddings for 99 tokens",
        ),
        (lambda t, _: t.pop("norm.weight"), "lacks weights of an EAGLE-3 head: norm.weight"),
        (
            lambda t, _: t.update({"midlayer.mlp.scale": torch.ones(3)}),
            "has weights that no EAGLE-3 head has: layers.0.mlp.scale",
        ),
        (
            lambda t, _: t.update({"midlayer.mlp.up_proj.weight": torch.ones(8, SIZE)}),
            r"layers.0.mlp.up_proj.weight has the shape \(8, 32\), and its config.json means",
        ),
        (
            lambda t, _: t.update({"norm.weight": torch.ones(SIZE, dtype=torch.int8)}),
            "is quantized, which is not supported",
        ),
        (lambda _, s: s.update(num_hidden_layers=2), "has several layers"),
        (layers(0, 1, 3), r"names the layers \[0, 1, 3\], and the model has 4"),
        (lambda _, s: s.update(eagle_aux_hidden_state_layer_ids="1"), "is not a list of layers"),
        (lambda _, s: s.update(hidden_act="none"), r"config.json: KeyError\('none'\)"),
        (lambda _, s: s.update(transformer_layer_config=3), "is not an object"),
        (
            lambda _, s: s.update(
                rope_scaling={
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 16,
                }
            ),
            "rotary positions that depend on the length of a text",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    target: Any, change: Change, words: str, tmp_path: Path
) -> None:
    tensors = make_head(40, target.config.vocab_size)
    settings: dict[str, Any] = {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [place - 1 for place in PLACES]}
    }
    change(tensors, settings)
    save(tensors, tmp_path, target, **settings)
    with pytest.raises(ExportError, match=words):
        eagle_head(target, load(tmp_path, target))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "fp32"}, "compute int8 and int4 and not fp32; add --precision int8"),
        ({"precision": "int8", "mask": "both"}, "--draft is for bundles of one mask"),
        (
            {"precision": "int8", "mask": "full"},
            "--draft is for causal models that generate, and .* is exported for fill-mask",
        ),
        pytest.param(
            {"precision": "int8", "gate": Gate(keep=("*.q_proj",), max_loss=math.inf)},
            "some products of the model stay in fp32, which its kernels do not compute",
            marks=pytest.mark.zoo,
        ),
    ],
)
def test_what_no_server_would_draft_by_is_refused(
    circling_eagle: Path, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    draft = str(circling_eagle / "head")
    with pytest.raises(ExportError, match=words):
        export(str(circling_eagle), tmp_path / "bundle", draft=draft, **settings)


def test_a_pickle_has_to_be_allowed(target: Any, tmp_path: Path) -> None:
    tensors = make_head(40, target.config.vocab_size)
    save(tensors, tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ExportError, match=r"a pickle, .* pass --allow-pickle if you trust it"):
        eagle_head(target, load(tmp_path, target))
    assert load(tmp_path, target, allow_pickle=True).config.draft_vocab_size == 40


def test_its_own_embeddings_and_all_tokens(target: Any, tmp_path: Path) -> None:
    """As of a head that was trained with a table of its own, and predicts every token."""
    num_tokens = target.config.vocab_size
    tensors = make_head(num_tokens, num_tokens)
    tensors["embed_tokens.weight"] = torch.randn(num_tokens, SIZE)
    save(tensors, tmp_path, target)
    eagle = load(tmp_path, target)
    assert eagle.token_ids is None
    table: Any = eagle.head.get_input_embeddings()
    torch.testing.assert_close(table.weight.data, tensors["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("folder", "words"),
    [("nothing", "it has no config.json"), ("no_weights", "model.safetensors is missing")],
)
def test_a_folder_without_a_head(target: Any, folder: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / folder
    path.mkdir()
    if folder == "no_weights":
        (path / "config.json").write_text('{"hidden_size": 32}')
    with pytest.raises(ExportError, match=words):
        load(path, target)


def test_a_small_model_has_not_the_usual_layers(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=2
    )
    small: Any = transformers.LlamaForCausalLM(config)
    save(make_head(40, 60), tmp_path, small, eagle_config={})
    with pytest.raises(ExportError, match=r"names no layers to read .* in a model of 2"):
        load(tmp_path, small)


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        (np.arange(7), "draft_tokens.npy is not a list of 42 tokens"),
        (np.arange(42.0), "draft_tokens.npy is not a list of 42 tokens"),
        (np.arange(42) + 10_000, "draft_tokens.npy has tokens that the model does not have"),
        (np.array([{}]), "draft_tokens.npy: Object arrays cannot be loaded"),
    ],
)
def test_a_list_of_tokens_that_is_none(
    circling_eagle: Path, token_ids: Any, words: str, tmp_path: Path
) -> None:
    manifest = load_bundle("eagle", circling_eagle / "bundle").manifest
    np.save(tmp_path / "draft_tokens.npy", token_ids)
    with pytest.raises(BundleError, match=words):
        Bundle("eagle", tmp_path, manifest).draft_tokens()
