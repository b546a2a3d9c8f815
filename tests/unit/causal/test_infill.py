"""Infilling prompts, against the formats that the models and llama.cpp publish."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from maskdial.bundle.infill import find_infill_tokens
from maskdial.bundle.manifest import InfillTokens, SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.infill import end_ids, infill_tokens, read_infilling
from maskdial.causal.request import Infilling, Snippet
from maskdial.errors import ValidationError

QWEN = (
    *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
STARCODER = ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>")
MISTRAL = ("<s>", "[PREFIX]", "[SUFFIX]", "[MIDDLE]")
CODELLAMA = ("<unk>", "<s>", "</s>", "▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>")


def byte_level(special: Sequence[str], bos: str | None = None) -> Tokenizer:
    """A tokenizer as GPT-2's, a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *letters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
        )
    backend.add_special_tokens([*special])
    return Tokenizer(backend, SpecialTokens())


def sentence_piece() -> Tokenizer:
    """A tokenizer as Llama's, with spaces before words and a token for each character."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz():=+☺"]
    names = [*CODELLAMA, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "▁a", "▁b"]
    vocab = {token: index for index, token in enumerate(names)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([*CODELLAMA])
    return Tokenizer(backend, SpecialTokens(bos=1))


def model_with(tokenizer: Tokenizer, max_length: int = 1000) -> Any:
    manifest = SimpleNamespace(
        infill=find_infill_tokens(tokenizer.token_to_id), max_length=max_length
    )
    return SimpleNamespace(name="m", manifest=manifest, tokenizer=tokenizer, max_length=max_length)


def prompt(tokenizer: Tokenizer, prefix: str, infilling: Infilling, **settings: Any) -> str:
    ids, num_cut = read_infilling(prefix, infilling, model_with(tokenizer, **settings), 10)
    assert num_cut == 0
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        # Each model's card, with "def f(" before the gap and "  return 1" after it
        (byte_level(QWEN), "<|fim_prefix|>def f(<|fim_suffix|>  return 1<|fim_middle|>"),
        (byte_level(STARCODER), "<fim_prefix>def f(<fim_suffix>  return 1<fim_middle>"),
        (
            byte_level(DEEPSEEK, DEEPSEEK[0]),
            "<｜begin▁of▁sentence｜><｜fim▁begin｜>def f(<｜fim▁hole｜>  return 1<｜fim▁end｜>",
        ),
        (byte_level(MISTRAL, "<s>"), "<s>[SUFFIX]  return 1[PREFIX]def f("),
    ],
)
def test_prompts_are_those_that_the_models_were_trained_on(
    tokenizer: Tokenizer, expected: str
) -> None:
    assert prompt(tokenizer, "def f(", Infilling("  return 1")) == expected


def test_a_suffix_of_codellama_has_no_space_of_its_own() -> None:
    tokenizer = sentence_piece()
    ids, _ = read_infilling("a = b", Infilling("ab + b"), model_with(tokenizer), 10)
    pieces = [tokenizer.id_to_token(each) for each in ids]
    after = ["a", "b", "▁", "+", "▁b"]
    before = ["▁a", "▁", "=", "▁b"]
    assert pieces == ["<s>", "▁<PRE>", *before, "▁<SUF>", *after, "▁<MID>"]
    # As in Meta's `encode_infilling`: a suffix is tokenized behind a character that is dropped
    for suffix in ("ab + b", " a", "\nab", "☺a", ""):
        ids, _ = read_infilling("a", Infilling(suffix), model_with(tokenizer), 10)
        dropped = tokenizer.encode(f"☺{suffix}", add_special_tokens=False).ids[2:]
        at = ids.index(CODELLAMA.index("▁<SUF>"))
        assert ids[at + 1 : -1] == dropped


def test_other_files_stand_before_as_in_llama_cpp() -> None:
    infilling = Infilling("B", "C", [Snippet("one", "a.py"), Snippet("two")])
    assert prompt(byte_level(QWEN), "A", infilling) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\none<|file_sep|>tmp\ntwo"
        "<|file_sep|>filename\n<|fim_prefix|>AC<|fim_suffix|>B<|fim_middle|>"
    )
    assert prompt(byte_level(DEEPSEEK), "A", infilling) == (
        "\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo"
        "<｜fim▁begin｜>AC<｜fim▁hole｜>B<｜fim▁end｜>"
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (100, 100, (42, 14)),  # three quarters and one
        (100, 4, (52, 4)),
        (4, 100, (4, 52)),
        (20, 20, (20, 20)),
    ],
)
def test_what_has_no_room_is_cut_at_its_outer_end(
    before: int, after: int, expected: tuple[int, int]
) -> None:
    prefix = "".join(chr(ord("a") + place % 26) for place in range(before))
    suffix = "".join(chr(ord("A") + place % 26) for place in range(after))
    tokenizer = byte_level(STARCODER)
    # 70 tokens, of which 10 are for the gap, 3 for the marks and 1 for the beginning
    infilling = Infilling(suffix, "+", cut=True)
    ids, num_cut = read_infilling(prefix, infilling, model_with(tokenizer, 70), 10)
    kept = (prefix[before - expected[0] :], suffix[: expected[1]])
    text = f"<fim_prefix>{kept[0]}+<fim_suffix>{kept[1]}<fim_middle>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert num_cut == before + after - sum(expected)


def test_other_files_get_what_room_is_left() -> None:
    tokenizer = byte_level(STARCODER)
    infilling = Infilling("cd", "", [Snippet("x" * 100 + "end")], cut=True)
    ids, num_cut = read_infilling("ab", infilling, model_with(tokenizer, 20), 5)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "xxxxxend<fim_prefix>ab<fim_suffix>cd<fim_middle>"
    assert len(ids) == 15
    assert num_cut == len("\n\n--- snippet ---\n\n") + 103 - 8


def test_texts_end_at_the_model_s_own_marks() -> None:
    tokenizer = byte_level(QWEN)
    model = model_with(tokenizer)
    ends = {tokenizer.id_to_token(each) for each in end_ids(model)}
    assert ends == {"<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
    assert infill_tokens(model) == InfillTokens(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        repository="<|repo_name|>",
        file="<|file_sep|>",
        ends=("<|fim_pad|>", "<|endoftext|>", "<|file_sep|>", "<|repo_name|>"),
    )


def test_a_model_without_these_tokens_says_so() -> None:
    model = model_with(byte_level(["<|endoftext|>", "<fim_prefix>", "<fim_suffix>"]))
    with pytest.raises(ValidationError, match="model 'm' has no fill-in-the-middle tokens"):
        infill_tokens(model)
