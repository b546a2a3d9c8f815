"""Tokenizers of GGUF files read texts as those that the files were made from."""

import importlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from maskdial_export.checkpoint.gguf.file import read_file
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.checkpoint.gguf.splits import SPLITS
from maskdial_export.checkpoint.gguf.tokenizer import ReadTokenizer, read_tokenizer
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.errors import ExportError
from tests.export.gguf_files import CONTROL, NORMAL, UNKNOWN, USER_DEFINED

Writer = Any  # gguf.GGUFWriter has no types
Fill = Callable[[Writer], None]

SAMPLE = read_sample(None).text + (
    "\n\n    if x == 3:\t# don't I'LL we're\r\n Größe déjà 中文字符 日本語 1234567 3.14 🙂 …" * 20
)


def hostile_texts() -> list[str]:
    """Spaces, controls, scripts, emoji, special tokens in full and in part, and random ones."""
    texts = ["", " ", "  a", "a  b ", "\n\n\n", "\t\tx\r\n", "it's I'LL WE'RE", "1234567890 12 3"]
    texts += ["<|end|>", "a<|end|> b", "<|en", "<think>x</think>", "<s>a</s>", "[MASK] [SEP"]
    texts += [
        "é\u0301 中文 한국어 🙂🙃 \u200b\u00a0x",
        "ﬁ ﷺ Å \u2028",
        "x" * 300,
        "\U0010fffd\ufffd",
    ]
    rng = random.Random(0)
    ranges = [(32, 127), (160, 0x500), (0x4E00, 0x9000), (0x1F300, 0x1F600), (9, 11), (32, 33)]
    for _ in range(150):
        letters = [chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40))]
        texts.append("".join(letters))
        place = rng.randrange(len(SAMPLE))
        texts.append(SAMPLE[place : place + rng.randrange(120)])
    return texts


TEXTS = hostile_texts()


def read(path: Path, fill: Fill, architecture: str = "llama") -> ReadTokenizer:
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_tokenizer(Settings(read_file(path), architecture))


def add_tokens(writer: Writer, tokenizer: Tokenizer, size: int) -> None:
    """The vocabulary as the converter writes it, with fillers for ids that no token has."""
    tokens, kinds = [], []
    added = tokenizer.get_added_tokens_decoder()
    for index in range(size):
        token = tokenizer.id_to_token(index)
        kind = CONTROL if index in added and added[index].special else NORMAL
        if token is None:
            token, kind = f"[PAD{index}]", 5
        elif index in added and not added[index].special:
            kind = USER_DEFINED
        tokens.append(token)
        kinds.append(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


def assert_alike(
    found: ReadTokenizer, expected: Callable[[str], Sequence[int]], *, special: bool = False
) -> None:
    for text in TEXTS:
        assert found.backend.encode(text, add_special_tokens=special).ids == expected(text), text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "starcoder", "tekken", "gpt-4o"])
def test_byte_level(pre: str, tmp_path: Path) -> None:
    split = SPLITS[pre]
    original = Tokenizer(models.BPE(ignore_merges=split.ignores_merges))
    stages = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [*stages, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    original.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    original.train_from_iterator(
        SAMPLE.splitlines(),
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False),
    )
    original.add_special_tokens(
        [AddedToken(each, normalized=False) for each in ("<|begin|>", "<|end|>")]
    )
    original.add_tokens([AddedToken("<think>", normalized=False)])
    begin, end = (original.token_to_id(each) for each in ("<|begin|>", "<|end|>"))
    if split.adds_bos:
        original.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A",
            pair="<|begin|> $A <|begin|> $B:1",
            special_tokens=[("<|begin|>", begin)],
        )

    def fill(writer: Writer) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        add_tokens(writer, original, original.get_vocab_size() + 3)
        merges = json.loads(original.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(each) for each in merges])
        writer.add_bos_token_id(begin)
        writer.add_eos_token_id(end)

    found = read(tmp_path / "model.gguf", fill)
    assert_alike(found, lambda text: original.encode(text).ids, special=True)
    assert list(found.ends) == [end]
    assert found.tokens["bos"] == "<|begin|>"
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert found.backend.decode(ids) == original.decode(ids)
    assert found.backend.token_to_id("[PAD503]") is None


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    """Merges by scores, bytes for what no piece has, symbols before all else."""
    (tmp_path / "text").write_text(SAMPLE)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "pieces"),
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=[] if prefix else ["<think>", "\n\n"],
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
    ids = range(original.get_piece_size())

    def kind(index: int) -> int:
        for number, holds in ((2, "unknown"), (3, "control"), (5, "unused"), (6, "byte")):
            if getattr(original, f"is_{holds}")(index):
                return number
        return NORMAL

    def fill(writer: Writer) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([original.id_to_piece(each) for each in ids])
        writer.add_token_scores([original.get_score(each) for each in ids])
        writer.add_token_types([kind(each) for each in ids])
        writer.add_add_space_prefix(prefix)

    found = read(tmp_path / "model.gguf", fill)

    def expected(text: str) -> list[int]:
        # What is between special tokens is a text of its own, as llama.cpp has it
        if "<s>" in text or "</s>" in text:
            return found.backend.encode(text, add_special_tokens=False).ids
        return list(original.encode(text))

    assert_alike(found, expected)
    assert found.backend.encode("a").ids[0] == original.bos_id()
    assert found.tokens == {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    for text in TEXTS:
        pieces = original.encode(text)
        assert found.backend.decode(pieces) == original.decode(pieces)


@pytest.mark.parametrize("begins", [True, False, None])
def test_gemma4(begins: bool | None, tmp_path: Path) -> None:
    """Merges of the file over whole texts, bytes for what no piece has, always a first token."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator([SAMPLE], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    ended = [*special, "<turn|>", "<|tool_response>"]
    tokens = [*ended, *(f"<0x{each:02X}>" for each in range(256))]
    tokens += [each for each, _ in sorted(trained.get_vocab().items(), key=lambda pair: pair[1])]
    merges = [tuple(each) for each in json.loads(trained.to_str())["model"]["merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    original = Tokenizer(model)
    original.normalizer = normalizers.Replace(" ", "▁")
    original.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    original.decoder = decoders.Sequence(stages)
    original.add_special_tokens([AddedToken(each, normalized=False) for each in ended])
    kinds = [CONTROL] * 3 + [UNKNOWN, CONTROL, USER_DEFINED] + [6] * 256

    def fill(writer: Writer) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_scores([-1000.0] * len(tokens))
        writer.add_token_types(kinds + [NORMAL] * (len(tokens) - len(kinds)))
        writer.add_token_merges([" ".join(each) for each in merges])
        writer.add_add_space_prefix(False)
        for add, index in ((writer.add_pad_token_id, 0), (writer.add_eos_token_id, 1)):
            add(index)
        writer.add_bos_token_id(2)
        if begins is not None:
            writer.add_add_bos_token(begins)

    found = read(tmp_path / "model.gguf", fill)
    assert_alike(found, lambda text: original.encode(text).ids)
    assert found.backend.encode("a").ids[0] == 2
    assert sorted(found.ends) == [1, 4, 5]
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert found.backend.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("cased", [True, False])
def test_word_pieces(cased: bool, tmp_path: Path) -> None:
    """Without an entry for it, a vocabulary with capital letters is one that keeps them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    original = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    original.train_from_iterator(
        SAMPLE.splitlines(),
        trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False),
    )
    original.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )

    def fill(writer: Writer) -> None:
        tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
        marked = [
            each if each in special else each[2:] if each.startswith("##") else f"▁{each}"
            for each in tokens
        ]
        writer.add_tokenizer_model("bert")
        writer.add_token_list(marked)
        writer.add_token_types([CONTROL] * 5 + [NORMAL] * (len(tokens) - 5))

    found = read(tmp_path / "model.gguf", fill, "bert")
    assert found.has_types
    assert_alike(found, lambda text: original.encode(text).ids, special=True)
    for pair in zip(TEXTS, reversed(TEXTS), strict=True):
        mine, other = found.backend.encode(*pair), original.encode(*pair)
        assert (mine.ids, mine.type_ids) == (other.ids, other.type_ids)


def test_unigram(tmp_path: Path) -> None:
    """XLM-RoBERTa's, with sentencepiece's normalization."""
    (tmp_path / "text").write_text(SAMPLE)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "pieces"),
        model_type="unigram",
        vocab_size=300,
        normalization_rule_name="nmt_nfkc",
        pad_id=3,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
    proto = sentencepiece.sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((tmp_path / "pieces.model").read_bytes())
    ids = range(original.get_piece_size())

    def fill(writer: Writer) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([original.id_to_piece(each) for each in ids])
        writer.add_token_scores([original.get_score(each) for each in ids])
        kinds = [CONTROL if original.is_control(each) else NORMAL for each in ids]
        kinds[original.unk_id()] = UNKNOWN
        writer.add_token_types(kinds)
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    found = read(tmp_path / "model.gguf", fill, "bert")
    for text in TEXTS:
        if "<s>" in text:
            continue
        mine = found.backend.encode(text, add_special_tokens=False)
        assert mine.ids == original.encode(text), text
    start, *_, end = found.backend.encode("a").ids
    assert (start, end) == (1, 2)


@pytest.mark.parametrize("pre", sorted(SPLITS.keys() & theirs.GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_splits_are_those_of_transformers(pre: str) -> None:
    (expression,) = SPLITS[pre].expressions
    mine, other = (
        pre_tokenizers.Split(Regex(each), "isolated")
        for each in (expression, theirs.GGUF_PRE_TOKENIZER_SPLITS[pre])
    )
    for text in TEXTS:
        assert mine.pre_tokenize_str(text) == other.pre_tokenize_str(text), text


def test_kimi_splits_between_scripts_and_capitals() -> None:
    """Its classes of letters have intersections, which other engines of expressions lack."""
    (expression,) = SPLITS["kimi-k2"].expressions
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    parts = [part for part, _ in split.pre_tokenize_str("HTTPServer's 世界abc 12345 //x")]
    assert parts == ["HTTPServer's", " ", "世界", "abc", " ", "123", "45", " //", "x"]
    regex: Any = importlib.import_module("regex")  # transformers needs it; it has no types
    theirs_too = regex.compile(expression, regex.V1)
    for text in TEXTS:
        found = [part for part, _ in split.pre_tokenize_str(text)]
        assert found == [each.group() for each in theirs_too.finditer(text)], text


def test_every_split_keeps_every_character() -> None:
    for name, split in SPLITS.items():
        stages = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
        made = pre_tokenizers.Sequence(stages)
        for text in TEXTS[::5]:
            assert "".join(part for part, _ in made.pre_tokenize_str(text)) == text, name


def tiny(writer: Writer, **changes: Any) -> None:
    """A tokenizer of a few tokens, with other entries."""
    entries = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": ["a", "b", "ab"],
        "merges": ["a b"],
    } | changes
    for key, value in entries.items():
        if isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{key}", value)
        elif value is not None:
            writer.add_array(f"tokenizer.ggml.{key}", value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "rwkv"}, "a tokenizer of the kind 'rwkv' .* supported: gpt2, llama, bert, t5"),
        ({"model": None}, "has no tokenizer.ggml.model"),
        ({"pre": "brand-new"}, "names the pre-tokenizer 'brand-new', so it is not known how"),
        ({"pre": None}, r"names no pre-tokenizer \(tokenizer.ggml.pre\)"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens of .* is 'abc'; it must be a list of texts"),
        ({"tokens": ["a", "b", "a"]}, "has the token 'a' twice"),
        ({"tokens": ["a", "b" * 1001, "ab"]}, "has tokens of up to 1,001 characters"),
        ({"merges": ["ab"]}, "the merge 'ab' of .* has no two parts"),
        ({"merges": ["a c"]}, "the tokenizer of .* is damaged: .*Token `c` out of vocabulary"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, "token_type of .* must be a list of 3 numbers"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0, float("nan"), 1.0]}, "scores of .* are not all"),
        (
            {"model": "llama", "scores": [0.0, 0.0, 0.0, 0.0], "tokens": ["a", "b", "ab", "[X]"]},
            r"has 1 tokens that no others make up, such as '\[X\]'",
        ),
        (
            {"model": "t5", "scores": [0.0] * 3, "precompiled_charsmap": [1.0, 2.0]},
            "precompiled_charsmap of .* are not bytes",
        ),
        (
            {"model": "t5", "scores": [0.0] * 3, "precompiled_charsmap": b"\xff\xff\xff\xff12345"},
            "the tokenizer of .* is damaged",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=why):
        read(tmp_path / "model.gguf", lambda writer: tiny(writer, **changes))
