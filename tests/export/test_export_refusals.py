"""Refused exports print one sentence and leave nothing behind."""

import contextlib
import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir
import pydantic
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.bert.modeling_bert import BertPredictionHeadTransform

import maskdial.cli
import maskdial_export.writing
from maskdial.bundle.manifest import KVLayout
from maskdial_export.checkpoint.config import check_config, prefix_note
from maskdial_export.checks.parity import CausalParity, MaskedParity
from maskdial_export.destination import new_folder
from maskdial_export.errors import ExportError, first_line
from maskdial_export.export import export
from maskdial_export.tracing.causal import kv_layout
from maskdial_export.tracing.survey import survey
from tests.traces import Traces

New = Callable[[str], Path]
Refuse = Callable[..., None]
Command = Callable[..., tuple[int, str]]


def test_disagreement(assert_refused: Refuse, checkpoint: New) -> None:
    assert_refused(
        checkpoint("bert"), "disagree on a ragged batch", "--tolerance", "1e-12", late=True
    )


@pytest.mark.parametrize(("name", "parity"), [("bert", MaskedParity), ("llama", CausalParity)])
def test_parity_sees_another_weight(
    name: str,
    parity: Any,
    bundle: New,
    checkpoint: New,
    load_reference: Callable[[Path], Any],
) -> None:
    model = load_reference(checkpoint(name))
    graph = bundle(name) / "model.onnx"
    arguments = [model, None, graph, 128]
    if name == "llama":
        arguments = [model, graph, 128, kv_layout(survey(model))]
    parity(*arguments).measure(1e-4)
    with torch.no_grad():
        next(model.parameters())[7] += 0.01
    with pytest.raises(ExportError, match="disagree"):
        parity(*arguments).measure(1e-4)


def test_unknown_architecture(
    assert_refused: Refuse, new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", model_type="bert5", architectures=["Bert5ForMaskedLM"])
    assert_refused(source, "has no model type 'bert5'")
    add_json(source / "config.json", model_type=None)
    assert_refused(source, 'add "model_type", such as "bert"')


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bart", "has an encoder and a decoder"),
        ("vit", "no task on text"),
        ("whisper", "read more than text"),
    ],
)
def test_models_of_another_kind(
    model_type: str,
    why: str,
    assert_refused: Refuse,
    new_checkpoint: New,
    add_json: Callable[..., None],
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", model_type=model_type, architectures=["Any"])
    assert_refused(source, why)


def test_canvases_in_fewer_bits(
    assert_refused: Refuse, new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source, name = new_checkpoint("bert"), "DiffusionGemmaForBlockDiffusion"
    add_json(source / "config.json", model_type="diffusion_gemma", architectures=[name])
    sentence = f"{name} writes canvases in many passes, and nothing measures what int8 would lose"
    assert_refused(source, sentence, "--precision", "int8")


def test_code_of_a_checkpoint_is_not_run(
    assert_refused: Refuse, new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    ran = source / "ran"
    (source / "modeling.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForMaskedLM": "modeling.Model"}
    add_json(source / "config.json", model_type="other", auto_map=auto_map)
    assert_refused(source, "code in a checkpoint is never run")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        ("nomic_bert", {"num_experts": 8}, "is a Nomic BERT with 8 experts"),
        ("neobert", {}, "has no model type 'neobert' (code in a checkpoint is never run)"),
        ("new", {}, "has no model type 'new' (code in a checkpoint is never run)"),
        ("nomic_bert", {}, "pass --ignore-remote-code if it does not"),
        ("gte", {}, "pass --ignore-remote-code if it does not"),
    ],
    ids=["nomic-v2-moe", "neobert", "gte-v1.5", "arctic-m-long", "arctic-m-v2"],
)
def test_encoders_with_code_of_their_own(
    model_type: str,
    settings: dict[str, Any],
    why: str,
    assert_refused: Refuse,
    new_checkpoint: New,
    add_json: Callable[..., None],
) -> None:
    source = new_checkpoint("bert")
    auto_map = {"AutoConfig": "a/b--c.Config", "AutoModel": "a/b--c.Model"}
    architectures = ["NomicBertModel" if model_type == "nomic_bert" else "GteModel"]
    add_json(
        source / "config.json",
        model_type=model_type,
        auto_map=auto_map,
        architectures=architectures,
        **settings,
    )
    assert_refused(source, why)
    assert_refused(source, why if settings else "", "--ignore-remote-code")


def test_architecture_without_a_task(
    assert_refused: Refuse, new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", architectures=["BertForSomethingElse"])
    assert_refused(source, "pass --task fill-mask or --task classify")


def test_task_that_the_model_cannot_do(assert_refused: Refuse, checkpoint: New) -> None:
    assert_refused(checkpoint("bert"), "bert models do not support generate", "--task", "generate")


def test_classifier_without_a_padding_token(
    assert_refused: Refuse, new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("llama-classify")
    add_json(source / "config.json", pad_token_id=None)
    assert_refused(source, "config.json has no pad_token_id")


def test_head_that_the_checkpoint_lacks(assert_refused: Refuse, checkpoint: New) -> None:
    assert_refused(checkpoint("bert"), "lacks", "--task", "classify")


def test_tokenizer_of_another_model(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    path = source / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["##z"] = 5600
    path.write_text(json.dumps(content))
    assert_refused(source, "they do not belong together")


def test_missing_weights(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    (source / "model.safetensors").unlink()
    assert_refused(source, "has no weights")


def test_damaged_weights(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    (source / "model.safetensors").write_bytes(b"not weights")
    assert_refused(source, "model.safetensors is damaged or incomplete (")


def test_pickles_need_a_flag(
    assert_refused: Refuse, export_by_command: Command, new_checkpoint: New, bundles: Path
) -> None:
    source = new_checkpoint("distilbert")
    weights = source / "model.safetensors"
    torch.save(load_file(weights), source / "pytorch_model.bin")
    weights.unlink()
    assert_refused(source, "--allow-pickle")
    code, line = export_by_command(str(source), str(bundles / "bundle"), "--allow-pickle")
    assert code == 0
    assert "DistilBertForMaskedLM for fill-mask" in line


def test_not_a_checkpoint(assert_refused: Refuse, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "no config.json")


def test_revision_of_a_folder(assert_refused: Refuse, checkpoint: New) -> None:
    why = "--revision applies to Hub ids"
    assert_refused(checkpoint("bert"), why, "--revision", "main")


def test_file_system_that_takes_no_more(
    assert_refused: Refuse, checkpoint: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("bert")  # written without the limit
    monkeypatch.setattr("tests.traces.MAX_BYTES", 0)  # a kept trace would be written first
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # the weights are larger
    try:
        assert_refused(folder, "larger than is allowed here (ulimit -f)", late=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left"), OSError("4096 requested and 0 written")],
    ids=["system", "numpy"],
)
def test_full_disk(
    error: OSError, assert_refused: Refuse, checkpoint: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(onnx_ir, "save", fail)
    assert_refused(checkpoint("bert"), "the disk is full", late=True)


@pytest.mark.parametrize(
    ("config", "noted"),
    [
        ({"model_type": "hrm_text"}, True),  # the default of its class
        ({"model_type": "hrm_text", "prefix_lm": True}, True),
        ({"model_type": "wrapper", "text_config": {"prefix_lm": True}}, True),
        ({"model_type": "paligemma"}, True),
        ({"model_type": "hrm_text", "prefix_lm": False}, False),
        ({"model_type": "llama"}, False),
    ],
)
def test_models_that_read_prompts_both_ways_are_noted(config: dict[str, Any], noted: bool) -> None:
    note = prefix_note(config)
    assert (note is not None and "it is exported causally" in note) == noted


@pytest.mark.parametrize("use_dsa", [False, True, None])
def test_an_indexer_that_is_not_used_is_no_reason(use_dsa: bool | None) -> None:
    """dots 3 has the settings of one in any case; as published, and as transformers saves it."""
    given = {} if use_dsa is None else {"use_dsa": use_dsa}
    made: Any = transformers.Dots3NoteTextConfig(num_hidden_layers=4, **given)
    saved = json.loads(made.to_json_string())
    published = {"model_type": saved["model_type"], "index_topk": 2048, **given}
    for config in (published, saved | {"architectures": None}):
        if use_dsa is False:
            check_config("mine", config)
        else:
            with pytest.raises(ExportError, match="has an indexer that chooses 2048 tokens"):
                check_config("mine", config)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"architectures": "BertForMaskedLM"}, "it must be a list of class names"),
        ({"id2label": {"0": "no", "2": "yes"}}, "has the id 2, but its 2 labels need the ids 0 to"),
        ({"id2label": {"no": "0", "yes": "1"}}, "has the id no, but its 2 labels"),
        ({"id2label": {"0": None}}, "gives 0 the label None"),
        ({"id2label": ["no", "yes"]}, "is not an object of ids and labels"),
        ({"problem_type": "binary"}, "problem_type in config.json of"),
        ({"attn_config": {"prefix_lm": True}}, "is a prefix-LM (attn_config.prefix_lm"),
        ({"index_topk": 64}, "has an indexer that chooses 64 tokens"),
        ({"text_config": {"index_topk": 64}}, "has an indexer that chooses 64 tokens"),
        (
            {"model_type": "dots3_note_text", "index_topk": 64},
            "has an indexer that chooses 64 tokens",
        ),
        ({"hidden_size": "32"}, "Field 'hidden_size' expected int, got str (value: '32')"),
        ({"hidden_act": "none"}, "cannot be loaded: KeyError('none')"),
    ],
)
def test_malformed_config(
    entry: dict[str, Any],
    why: str,
    assert_refused: Refuse,
    new_checkpoint: New,
    add_json: Callable[..., None],
) -> None:
    source = new_checkpoint("bert-classify")
    add_json(source / "config.json", **entry)
    assert_refused(source, why)


def test_sentences_of_other_libraries() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        KVLayout.model_validate({"layers": [[0, 8], ["a", 8]]})
    assert first_line(caught.value) == (
        "KVLayout: layers.0.0: Input should be greater than 0; layers.1.0: Input should be a valid "
        "integer, unable to parse string as an integer"
    )
    two_lines = ValueError("Validation error for field 'hidden_size':\n  TypeError: expected int\n")
    joined = "Validation error for field 'hidden_size': TypeError: expected int"
    assert first_line(two_lines) == joined
    assert first_line(ValueError("\x1b[96mstep 1/3\x1b[0m\nmore")) == "step 1/3"
    assert first_line(KeyError("nope")) == "KeyError('nope')"
    assert first_line(ValueError()) == "ValueError()"


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ("</s>", "eos_token_id in generation_config.json of {} is '</s>', which is no token id"),
        ([3, 2.5], "is 2.5, which is no token id"),
        ([3, 101], "is 101, but the model has only the tokens 0 to 100"),
    ],
)
def test_wrong_token_ids(
    ids: Any,
    why: str,
    assert_refused: Refuse,
    new_checkpoint: New,
    add_json: Callable[..., None],
) -> None:
    source = new_checkpoint("llama")
    add_json(source / "generation_config.json", eos_token_id=ids)
    assert_refused(source, why.format(source))


def test_chat_template_that_is_not_utf8(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("llama")
    (source / "chat_template.jinja").write_bytes("{# caf\u00e9 #}".encode("latin-1"))
    assert_refused(source, "chat_template.jinja is not UTF-8 (byte 6)")


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_link_to_a_file_outside_the_checkpoint(
    name: str, assert_refused: Refuse, new_checkpoint: New, tmp_path: Path
) -> None:
    source = new_checkpoint("llama")
    (tmp_path / "secret").write_text('{"key": "secret"}')
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    assert_refused(source, f"{source / name} is a link to {tmp_path / 'secret'}, outside the")


@pytest.mark.parametrize("name", ["additional_chat_templates", "tool_use.jinja"])
def test_link_to_a_tool_template_outside_the_checkpoint(
    name: str, assert_refused: Refuse, new_checkpoint: New, tmp_path: Path
) -> None:
    source = new_checkpoint("llama")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    secrets, folder = tmp_path / "secrets", source / "additional_chat_templates"
    secrets.mkdir()
    (secrets / "tool_use.jinja").write_text("secret")
    if name == folder.name:
        folder.symlink_to(secrets)
        assert_refused(source, f"is a link to {secrets}")
    else:
        folder.mkdir()
        (folder / name).symlink_to(secrets / name)
        assert_refused(source, f"{folder / name} is a link to {secrets / name}, outside the")


def test_trace_that_fails(
    capfd: pytest.CaptureFixture[str],
    checkpoint: New,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    traces: Traces,
) -> None:
    """One sentence; torch would print its unfinished graph and a report with escape codes."""

    def branch(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if hidden.sum() > 0 else -hidden

    monkeypatch.setattr(BertPredictionHeadTransform, "forward", branch)
    with (
        traces.anew(),
        pytest.raises(ExportError, match=r"takes different paths for different values") as caught,
    ):
        export(str(checkpoint("bert")), tmp_path / "bundle")
    assert "\x1b" not in caught.value.message
    assert "def forward" not in capfd.readouterr().err


def test_interrupted(
    capsys: pytest.CaptureFixture[str],
    checkpoint: New,
    bundles: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C."""

    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(maskdial_export.writing, "load_checkpoint", interrupt)
    source, dest = str(checkpoint("bert")), str(bundles / "bundle")
    code = maskdial.cli.main(["export", source, dest, "--trace"])
    assert code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "maskdial: interrupted"
    assert list(bundles.iterdir()) == []


def test_terminated(checkpoint: New, bundles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminate(*_: object, **__: object) -> None:
        assert len(list(bundles.iterdir())) == 1
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(maskdial_export.writing, "load_checkpoint", terminate)
    with pytest.raises(SystemExit) as caught:
        maskdial.cli.main(["export", str(checkpoint("bert")), str(bundles / "bundle"), "--trace"])
    assert caught.value.code == 128 + signal.SIGTERM
    assert list(bundles.iterdir()) == []


def test_killed_exports_are_cleaned_up_by_the_next_one(bundles: Path) -> None:
    with new_folder(bundles / "bundle") as made:
        left = bundles / made.name
    # Of another export, and of nobody's that has a name like it.
    others = [made.name.replace("bundle", "other"), made.name.replace("bundle", "bundle.v2")]
    others += [".bundle.notes.maskdial-export", ".bundle.abcdefgh.partial"]
    folders = [left, *(bundles / name for name in others)]
    for folder in folders:
        folder.mkdir()
        (folder / "model.onnx.data").touch()
    link = bundles / left.name.replace(left.name.split(".")[2], "linked__")
    link.symlink_to(folders[1])
    with new_folder(bundles / "bundle"):
        assert not left.exists()
        assert all((folder / "model.onnx.data").exists() for folder in folders[1:])
        assert link.is_symlink()


def test_running_exports_are_left_alone(bundles: Path) -> None:
    dest = bundles / "bundle"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(new_folder(dest))
        with new_folder(dest) as second:
            assert first.is_dir()
            (second / "model.onnx").touch()
        assert first.is_dir()
        with pytest.raises(ExportError, match="already exists"):
            stack.close()
    assert [path.name for path in bundles.rglob("*")] == ["bundle", "model.onnx"]


def test_destination_that_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch, bundles: Path
) -> None:
    """A mount point, say. It is found before the checkpoint is."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    (bundles / "bundle").mkdir()
    monkeypatch.setattr(os, "replace", refuse)
    with (
        pytest.raises(ExportError, match=r"cannot write to .*busy"),
        new_folder(bundles / "bundle"),
    ):
        pytest.fail("this comes too late")
    assert [path.name for path in bundles.iterdir()] == ["bundle"]


def test_destination_below_a_file(bundles: Path) -> None:
    (bundles / "file").touch()
    with pytest.raises(ExportError, match=r"file is not a folder"):
        export("/no/such/checkpoint", bundles / "file" / "bundle")


def test_destination_is_a_link_to_an_empty_folder(bundles: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (bundles / "bundle").symlink_to(tmp_path / "disk")
    with new_folder(bundles / "bundle") as folder:
        (folder / "model.onnx").touch()
    assert (bundles / "bundle" / "model.onnx").is_file()


def test_destination_that_exists(
    export_by_command: Command, checkpoint: New, bundles: Path
) -> None:
    taken = bundles / "bundle"
    taken.mkdir()
    (taken / "precious").touch()
    code, line = export_by_command(str(checkpoint("bert")), str(taken))
    assert code == 1
    assert "already exists" in line
    assert [file.name for file in taken.iterdir()] == ["precious"]
