"""A token begins at the character that its first byte is part of, whoever finds that out."""

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from maskdial.bundle.manifest import TOKENIZER, SpecialTokens
from maskdial.bundle.token_offsets import OffsetCounter, spelled_offsets
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.registry.catalog import STARTER_FOLDER


def byte_level(
    normalizer: normalizers.Normalizer | None = None,
    processor: processors.PostProcessor | None = None,
) -> Tokenizer:
    """Every byte a token, a few merged words, and <s> (0)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0} | {letter: index for index, letter in enumerate(alphabet, 1)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "Ġ"), ("Ã", "©"), ("Ġ", "Ã")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    if processor is not None:
        backend.post_processor = processor
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, SpecialTokens(bos=0))


BOTH_ENDS = processors.TemplateProcessing(
    single="<s> $A <s>", pair="$A $B", special_tokens=[("<s>", 0)]
)
TOKENIZERS = {
    "plain": byte_level(),
    "trimming": byte_level(processor=processors.ByteLevel(trim_offsets=True)),
    "both ends": byte_level(
        processor=processors.Sequence([processors.ByteLevel(trim_offsets=True), BOTH_ENDS])
    ),
    "starter": Tokenizer.from_file(STARTER_FOLDER / "hybrid" / TOKENIZER, SpecialTokens(eos=(0,))),
}
texts = st.text(st.sampled_from([*"the cat \n", "é", "語", "🙂", "\u0308"]), max_size=30)


def first_characters(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The character of the whole text that each token's first byte is part of, by its prefixes."""
    offsets, text = [], b""
    for token_id in ids:
        new = tokenizer.token_bytes(token_id)
        offsets.append(len((text + new[:1]).decode(errors="replace")) - 1)
        text += new
    return offsets


@settings(deadline=None)
@given(name=st.sampled_from(sorted(TOKENIZERS)), text=texts)
@example(name="starter", text="The king 👍 slept.")
@example(name="both ends", text="  the  é ")
def test_all_ways_to_find_a_prompts_offsets_agree(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    encoding = tokenizer.encode(text)
    offsets = list(zip(encoding.ids, tokenizer.offsets(text, encoding), strict=True))
    before = [offset for token_id, offset in offsets[:1] if token_id in tokenizer.special_ids]
    assert not any(before)
    after = [offset for token_id, offset in offsets[1:] if token_id in tokenizer.special_ids]
    assert all(offset == len(text) for offset in after)
    ids = [token_id for token_id in encoding.ids if token_id not in tokenizer.special_ids]
    own = [offset for token_id, offset in offsets if token_id not in tokenizer.special_ids]
    assert own == first_characters(ids, tokenizer)
    assert spelled_offsets(ids, tokenizer) == own
    counter = OffsetCounter(tokenizer, [0], 7)
    assert [counter.push(token_id) - 7 for token_id in ids] == own


@settings(deadline=None)
@given(ids=st.lists(st.sampled_from([20, 70, 96, 125, 131, 150, 170, 200, 226, 241]), max_size=12))
def test_broken_characters_count_as_they_are_shown(ids: list[int]) -> None:
    """Bytes that are no text, one by one."""
    tokenizer = TOKENIZERS["plain"]
    counter = OffsetCounter(tokenizer)
    offsets = [counter.push(token_id) for token_id in ids]
    assert offsets == first_characters(ids, tokenizer)
    assert spelled_offsets(ids, tokenizer) == offsets


def test_a_character_that_began_in_the_prompt_is_the_texts_first() -> None:
    tokenizer = TOKENIZERS["plain"]
    first, second = tokenizer.encode("ñ").ids  # no token of its own
    (letter,) = tokenizer.encode("a").ids
    counter = OffsetCounter(tokenizer, [first])
    assert [counter.push(each) for each in (second, letter)] == [0, 1]
    counter = OffsetCounter(tokenizer, [first])
    assert [counter.push(each) for each in (letter, letter)] == [0, 1]


def test_special_tokens_have_their_spelling_among_ids_only() -> None:
    tokenizer = TOKENIZERS["plain"]
    lead, _ = tokenizer.encode("ñ").ids
    (letter,) = tokenizer.encode("a").ids
    ids = [0, letter, lead, 0, letter]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<s>a\ufffd<s>a"
    assert spelled_offsets(ids, tokenizer) == [0, 3, 4, 5, 8]
    counter = OffsetCounter(tokenizer)
    assert [counter.push(each) for each in (letter, 0, letter)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("normalizer", "text", "offsets"),
    [
        (normalizers.NFC(), "Cafe\u0301 the", [0, 1, 2, 3, 5]),
        (normalizers.NFKC(), "\ufb01 the", [0, 0, 1]),
        (normalizers.Lowercase(), "THE the", [0, 3]),
        (normalizers.Replace("\r", ""), "a\r\r the", [0, 3]),
    ],
)
def test_offsets_are_those_in_the_text_as_it_was_sent(
    normalizer: normalizers.Normalizer, text: str, offsets: list[int]
) -> None:
    tokenizer = byte_level(normalizer, processors.ByteLevel(trim_offsets=True))
    assert tokenizer.offsets(text, tokenizer.encode(text)) == offsets
