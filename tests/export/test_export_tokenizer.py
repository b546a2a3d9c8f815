"""Tokenizers that are missing, converted from older files, or another model's."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers

from maskdial.bundle.manifest import InfillTokens
from maskdial_export.checkpoint.sample import Sample, read_sample
from maskdial_export.checkpoint.source import Source
from maskdial_export.checkpoint.tokenization import load_tokenizer
from maskdial_export.errors import ExportError
from maskdial_export.writing import infill_tokens

New = Callable[[str], Path]
Refuse = Callable[..., None]
Command = Callable[..., tuple[int, str]]
SAMPLE = read_sample(None)
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY += [mark + letter for mark in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small sentencepiece models: byte-pair as Llama's, unigram as XLM-RoBERTa's."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    for kind, size in (("bpe", 400), ("unigram", 300)):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SAMPLE.sentences()),
            model_prefix=str(folder / kind),
            model_type=kind,
            vocab_size=size,
            byte_fallback=kind == "bpe",
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            minloglevel=2,
        )
    return {kind: folder / f"{kind}.model" for kind in ("bpe", "unigram")}


def make_source(folder: Path, model_type: str, **files: str | bytes) -> Source:
    """A checkpoint without weights; names of files have "__" for the dot."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(data)
    causal = model_type in ("llama", "gpt2", "gpt_neox")
    architecture = "LlamaForCausalLM" if causal else "BertForMaskedLM"
    return Source("mine", folder, architecture, "generate" if causal else "fill-mask")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("bert", "tokenizer.json is missing, and so is vocab.txt"),
        ("gpt2", "tokenizer.json is missing, and so is vocab.json and merges.txt"),
        ("xlm-roberta", "tokenizer.json is missing, and so is sentencepiece.bpe.model"),
        ("llama", "tokenizer.json is missing"),
    ],
)
def test_missing_tokenizer(
    name: str, missing: str, assert_refused: Refuse, new_checkpoint: New
) -> None:
    """What ``model.save_pretrained()`` alone leaves."""
    source = new_checkpoint(name)
    (source / "tokenizer.json").unlink()
    assert_refused(source, f"{source} has no tokenizer: {missing}")


@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert", "albert"])
def test_vocabulary_file_alone(model_type: str, tmp_path: Path) -> None:
    """transformers ignores it for types that usually have another one."""
    source = make_source(tmp_path, model_type, vocab__txt="\n".join(VOCABULARY) + "\n")
    tokenizer = load_tokenizer(source, len(VOCABULARY), SAMPLE).backend
    assert tokenizer.encode("Abc").tokens == ["[CLS]", "a", "##b", "##c", "[SEP]"]


def test_vocabulary_file_of_a_causal_model(tmp_path: Path) -> None:
    """A WordPiece tokenizer would end every prompt with [SEP]."""
    source = make_source(tmp_path, "gpt2", vocab__txt="\n".join(VOCABULARY) + "\n")
    with pytest.raises(ExportError, match=r"cannot convert vocab\.txt exactly"):
        load_tokenizer(source, len(VOCABULARY), SAMPLE)


def test_vocabulary_file_of_a_tokenizer_that_splits_otherwise(tmp_path: Path) -> None:
    """The same tokens, but words found by MeCab."""
    source = make_source(tmp_path, "bert", vocab__txt="\n".join(VOCABULARY) + "\n")
    settings = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ExportError, match=r"cannot convert vocab\.txt exactly"):
        load_tokenizer(source, len(VOCABULARY), SAMPLE)


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_sentencepiece_model_alone(
    model_type: str, tmp_path: Path, sentence_pieces: dict[str, Path]
) -> None:
    """transformers' own conversion drops spaces, or the one before the first word."""
    content = sentence_pieces["bpe"].read_bytes()
    source = make_source(tmp_path, model_type, tokenizer__model=content)
    tokenizer = load_tokenizer(source, 400, SAMPLE).backend
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentence_pieces["bpe"]))
    for text in SAMPLE.sentences():
        if text.startswith(" "):
            continue  # sentencepiece adds one more there
        begun = [original.bos_id(), *original.encode(text)]
        assert tokenizer.encode(text).ids == begun


def test_sentencepiece_model_of_an_encoder(
    tmp_path: Path, sentence_pieces: dict[str, Path]
) -> None:
    content = sentence_pieces["unigram"].read_bytes()
    source = make_source(tmp_path, "xlm-roberta")
    (tmp_path / "sentencepiece.bpe.model").write_bytes(content)
    tokens = load_tokenizer(source, 302, SAMPLE).backend.encode("The door").tokens
    assert (tokens[0], tokens[-1]) == ("<s>", "</s>")
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentence_pieces["unigram"]))
    assert tokens[1:-1] == original.encode("The door", out_type=str)


def test_sentencepiece_model_that_transformers_overlooks(
    tmp_path: Path, sentence_pieces: dict[str, Path]
) -> None:
    content = sentence_pieces["unigram"].read_bytes()
    source = make_source(tmp_path, "xlm-roberta", spiece__model=content)
    with pytest.raises(ExportError, match=r"cannot convert spiece\.model exactly; write tokeni"):
        load_tokenizer(source, 302, SAMPLE)


def test_far_fewer_tokens_than_rows(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    vocabulary = {token: index for index, token in enumerate(VOCABULARY[:40])}
    small = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    small.save(str(source / "tokenizer.json"))
    assert_refused(source, "has 40 tokens, but the model's embedding has 101 rows")


def test_text_that_the_tokenizer_does_not_know(
    assert_refused: Refuse, export_by_command: Command, new_checkpoint: New, bundles: Path
) -> None:
    """A model of genes is exported with a text of its kind, whatever the precision."""
    source = new_checkpoint("bert")
    bases = {token: i for i, token in enumerate([*VOCABULARY[:5], *"ACGT"])}
    bases |= {f"[unused{i}]": i for i in range(len(bases), 101)}
    genes = tokenizers.Tokenizer(models.WordLevel(bases, unk_token="[UNK]"))
    genes.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    genes.save(str(source / "tokenizer.json"))
    path = source / "sequences.txt"
    path.write_text("GATTACA CATTAG GATC")
    assert_refused(source, "words of maskdial_export/sample.txt; tokenizer.json is damaged")
    options = ("--quality-text", str(path))
    code, _ = export_by_command(str(source), str(bundles / "bundle"), *options)
    assert code == 0


def test_tokenizer_without_letters(tmp_path: Path) -> None:
    """As many tokens as rows, but none of the text."""
    words = {f"word{i}": i for i in range(60)} | {"[UNK]": 60}
    empty = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    empty.pre_tokenizer = pre_tokenizers.Whitespace()
    source = make_source(tmp_path, "bert", tokenizer__json=empty.to_str())
    with pytest.raises(ExportError, match=r"knows 0 of \d+ words"):
        load_tokenizer(source, 61, SAMPLE)
    foreign = Sample("mine", "", "𐎀𐎁 𐎂𐎃𐎄 日本語")
    with pytest.raises(ExportError, match=r"knows 0 of 3 words of mine; .* with --quality-text"):
        load_tokenizer(source, 61, foreign)
    known = Sample("mine", "", "word1 word2")
    assert load_tokenizer(source, 61, known).backend.encode("word2").ids == [2]


def test_without_a_decoder_there_are_no_grammars(
    bundle: Callable[[str], Path], serve: Callable[..., str]
) -> None:
    url = serve(llama=bundle("llama"))
    grammar = {"type": "regex", "value": "a"}
    body: dict[str, Any] = {"inputs": "a", "parameters": {"grammar": grammar}}
    why = "this model cannot follow a grammar: its tokenizer has no decoder"
    reply = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert reply.status_code == 422, reply.text
    assert reply.json()["error"].startswith(f"parameters.grammar: {why}")
    body = {"model": "llama", "prompt": "a", "guided_regex": "a"}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"].startswith(f"guided_regex: {why}")


def test_fill_in_the_middle_tokens_are_found_for_models_that_write(tmp_path: Path) -> None:
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.add_special_tokens([*marks])
    checkpoint: Any = SimpleNamespace(tokenizer=backend)
    tokens = infill_tokens(make_source(tmp_path, "llama"), checkpoint)
    prefix, suffix, middle, pad = marks
    assert tokens == InfillTokens(prefix=prefix, suffix=suffix, middle=middle, ends=(pad,))
    assert infill_tokens(make_source(tmp_path, "bert"), checkpoint) is None
