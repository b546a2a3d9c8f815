"""Decoding piece by piece gives the text of decoding at once, and never half a character."""

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import maskdial
from maskdial.bundle.manifest import TOKENIZER, SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer, cut_tokens, longest_first, spans
from maskdial.errors import BundleError, ValidationError

STARTERS = Path(maskdial.__file__).parent / "starter"
WORDS = ("the", "cat", "a")


def byte_level() -> Tokenizer:
    """Every byte a token, and a few merged words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {letter: index for index, letter in enumerate(alphabet, 1)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, SpecialTokens(eos=(0,)))


def sentence_piece() -> Tokenizer:
    """Words with their leading space, and bytes for everything else, as in Llama's vocabulary."""
    vocab = {"<unk>": 0, "<s>": 1}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = []
    for word in WORDS:
        spelled = "▁" + word
        for letter in spelled:
            vocab.setdefault(letter, len(vocab))
        piece = spelled[0]
        for letter in spelled[1:]:
            merges.append((piece, letter))
            piece += letter
            vocab.setdefault(piece, len(vocab))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, SpecialTokens(bos=1))


def plain(
    pieces: Sequence[str], decoder: decoders.Decoder | None, *, added: Sequence[str] = ()
) -> Tokenizer:
    """A vocabulary of two special tokens, these pieces and the added tokens, in that order."""
    vocab = {piece: index for index, piece in enumerate(("<unk>", "<s>", *pieces))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(list(added))
    return Tokenizer(backend, SpecialTokens(bos=1))


def nested_byte_level() -> Tokenizer:
    """LFM2's kind of decoder, and an added token of letters that do not stand for bytes."""
    return plain(
        ["ĠtheÃ", "©Ã", *sorted(pre_tokenizers.ByteLevel.alphabet())],
        decoders.Sequence([decoders.ByteLevel()]),
        added=["語 é"],
    )


TOKENIZERS = {
    "byte-level": byte_level(),
    "nested-byte-level": nested_byte_level(),
    "sentence-piece": sentence_piece(),
    "metaspace": plain(["▁the", "▁", "▁▁", "cat", ".", "語"], decoders.Metaspace()),
    "word-piece": plain(["the", "##s", ".", "n't", "do not", "語"], decoders.WordPiece()),
    "word-ends": plain(["the</w>", "c", "at</w>", ".</w>", "語"], decoders.BPEDecoder()),
    "ctc": plain(["t", "h", "e", "|", "<pad>", "語"], decoders.CTC()),
    "no-decoder": plain(["the", "cat", ".", "語"], None),
    "starter": Tokenizer.from_file(STARTERS / "hybrid" / TOKENIZER, SpecialTokens(eos=(0,))),
}
NUM_PADDED = 16
"""Ids beyond the vocabulary, which models with a padded vocabulary may draw."""

names = st.sampled_from(sorted(TOKENIZERS))
texts = st.text(st.sampled_from([*"the cat.\n", "é", "語", "🙂", "ß"]), max_size=40) | st.text(
    st.characters(codec="utf-8"), max_size=20
)
cuts = st.integers(0, 60)


@st.composite
def named_ids(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A tokenizer's name, and token ids: of a text, random ones, or both."""
    name = draw(names)
    tokenizer = TOKENIZERS[name]
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size + NUM_PADDED - 1), max_size=20)
    ids_of_text = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    chunks = draw(st.lists(random_ids | ids_of_text, max_size=3))
    return name, [token_id for chunk in chunks for token_id in chunk]


def whole_text(name: str, ids: Sequence[int]) -> str:
    """The text of all tokens at once; only bytes that are not text become U+FFFD."""
    tokenizer = TOKENIZERS[name]
    if name != "sentence-piece":
        return tokenizer.decode(ids)
    spellings = [tokenizer.id_to_token(each) for each in ids if each not in tokenizer.special_ids]
    joined = b"".join(
        bytes.fromhex(spelling[3:5]) if spelling.startswith("<0x") else spelling.encode()
        for spelling in (each.replace("▁", " ") for each in spellings)
    )
    return joined.decode(errors="replace").removeprefix(" ")


@given(name=names, text=texts, cut=cuts)
@example(name="sentence-piece", text="ß.🙂.", cut=6)  # the prompt ends behind 3 of 4 bytes
@example(name="sentence-piece", text="語語語語", cut=7)
@example(name="starter", text="é語🙂", cut=3)
def test_pieces_join_to_the_whole(name: str, text: str, cut: int) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the " + text, add_special_tokens=False).ids
    # The prompt ends between two characters, so its own text is not repeated.
    while cut < len(ids) and "\ufffd" in tokenizer.decode(ids[:cut]):
        cut += 1
    prompt, new = ids[:cut], ids[cut:]
    decoder = tokenizer.decoder(prompt)
    pieces = [decoder.push(token_id) for token_id in new]
    assert "\ufffd" in tokenizer.decode(ids) or all("\ufffd" not in piece for piece in pieces)
    assert tokenizer.decode(prompt) + "".join(pieces) + decoder.flush() == tokenizer.decode(ids)


@given(named_ids=named_ids(), cut=cuts)
@example(named_ids=("byte-level", [170, 95]), cut=0)  # half of a surrogate, as no text has it
def test_all_text_is_shown_but_one_unfinished_character(
    named_ids: tuple[str, list[int]], cut: int
) -> None:
    name, ids = named_ids
    prompt, new = ids[:cut], ids[cut:]
    decoder = TOKENIZERS[name].decoder(prompt)
    before = whole_text(name, prompt)
    starts = {before, before.removesuffix("\ufffd")}  # what the prompt began may be completed
    # Python treats the first two bytes of a surrogate as an unfinished character, others do not.
    helds = ("", "\ufffd", "\ufffd\ufffd")
    shown = ""
    for num_pushed, token_id in enumerate(new, 1):
        shown += decoder.push(token_id)
        now = whole_text(name, prompt + new[:num_pushed])
        assert now in {start + shown + held for start in starts for held in helds}
    shown += decoder.flush()
    assert whole_text(name, ids) in {start + shown for start in starts}


@pytest.mark.parametrize("name", ["byte-level", "sentence-piece"])
@pytest.mark.parametrize(
    ("prompt", "new", "pieces"),
    [
        (b"the \xf0\x9f", b"\x99\x82.", ["", "🙂", ".", ""]),  # completed, so told whole
        (b"the \xf0\x9f\x99", b"\x82.", ["🙂", ".", ""]),
        (b"the \xf0\x9f", b"a.", ["a", ".", ""]),  # never completed: the prompt's own U+FFFD
        (b"the \xf0\x9f", b"\x99", ["", ""]),
        (b"the \xed\xa1", b"a.", ["a", ".", ""]),  # half of a surrogate, as no text has it
        (b"the \xf0\x9f", b"\xff", ["\ufffd", ""]),
        (b"the ", b"\xf0\x9fa", ["", "", "\ufffda", ""]),
        (b"the ", b"a\xf0", ["a", "", "\ufffd"]),
        (b"the ", b"\xff\xff\x80", ["\ufffd", "\ufffd", "\ufffd", ""]),
        (b"the ", b"\xe2\xe2\xe2", ["", "\ufffd", "\ufffd", "\ufffd"]),
    ],
)
def test_bytes_wait_only_while_they_may_become_a_character(
    name: str, prompt: bytes, new: bytes, pieces: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]
    decoder = tokenizer.decoder(byte_tokens(name, prompt))
    assert [decoder.push(each) for each in byte_tokens(name, new)] + [decoder.flush()] == pieces


def byte_tokens(name: str, data: bytes) -> list[int]:
    """A token for each byte."""
    tokenizer = TOKENIZERS[name]
    by_bytes = {  # the first that says it: SentencePiece has its byte tokens before its words
        tokenizer.token_bytes(token_id, 0): token_id
        for token_id in reversed(range(tokenizer.vocab_size))
    }
    return [by_bytes[bytes([byte])] for byte in data]


def test_tokens_that_all_end_within_a_character_do_not_hold_back_text() -> None:
    tokenizer = TOKENIZERS["nested-byte-level"]
    # The vocabulary's first words after its special tokens: " the" or the second byte of "é", and
    # the first byte of the next.
    first, again = 2, 3
    decoder = tokenizer.decoder([])
    assert [decoder.push(each) for each in (first, again, again)] == [" the", "é", "é"]
    assert decoder.flush() == "\ufffd"


def test_special_tokens_do_not_eat_the_space_of_the_next_word() -> None:
    tokenizer = TOKENIZERS["sentence-piece"]
    the, cat = tokenizer.encode("the cat").ids
    decoder = tokenizer.decoder([the])
    assert [decoder.push(1), decoder.push(cat)] == ["", " cat"]
    # A chat template may end the prompt with any number of them.
    assert tokenizer.decoder([the] + [1] * 10).push(cat) == " cat"
    # They are not words themselves: the text starts after them.
    assert tokenizer.decoder([1, 1]).push(cat) == "cat"


def test_special_tokens_do_not_split_a_character() -> None:
    tokenizer = TOKENIZERS["sentence-piece"]
    first, second = byte_tokens("sentence-piece", "é".encode())
    decoder = tokenizer.decoder([])
    assert [decoder.push(each) for each in (first, 1, second)] == ["", "", "é"]


def test_a_text_starts_as_it_does_when_decoded_at_once() -> None:
    tokenizer = TOKENIZERS["sentence-piece"]
    (space,) = byte_tokens("sentence-piece", b" ")
    (the,) = tokenizer.encode("the").ids
    for ids, pieces in (([the, the], ["the", " the"]), ([space, the], ["", " the"])):
        decoder = tokenizer.decoder([])
        assert [decoder.push(token_id) for token_id in ids] == pieces
        assert tokenizer.decode(ids) == "".join(pieces)


def test_added_tokens_are_spelled_as_they_are() -> None:
    tokenizer = TOKENIZERS["nested-byte-level"]
    (added,) = tokenizer.encode("語 é").ids
    assert tokenizer.decoder([]).push(added) == tokenizer.decode([added]) == "語 é"


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_every_id_can_be_decoded(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = range(tokenizer.vocab_size + NUM_PADDED)
    for previous, token_id in pairwise(ids):
        decoder = tokenizer.decoder([previous])
        new = decoder.push(token_id) + decoder.flush()
        if token_id >= tokenizer.vocab_size:
            assert new == tokenizer.decode([token_id]) == tokenizer.token_text(token_id) == ""
            assert tokenizer.token_bytes(token_id, previous) == tokenizer.token_bytes(token_id)
            assert not tokenizer.is_text(token_id)
        else:
            assert tokenizer.is_text(token_id) == (token_id not in tokenizer.special_ids)
    assert tokenizer.decode([]) == tokenizer.decode(sorted(tokenizer.special_ids)) == ""


def test_ids_beyond_the_vocabulary_and_gaps_within_are_no_tokens() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 5}, unk_token="a"))
    backend.add_tokens(["d"])
    tokenizer = Tokenizer(backend, SpecialTokens())
    added = backend.token_to_id("d")
    assert tokenizer.ids_without_token(9) == set(range(9)) - {0, 1, 5, added}
    assert not tokenizer.ids_without_token(2)
    starter = TOKENIZERS["starter"]
    assert not starter.ids_without_token(starter.vocab_size)


def test_token_bytes_are_exact() -> None:
    tokenizer = TOKENIZERS["sentence-piece"]
    the, cat = tokenizer.encode("the cat").ids
    assert tokenizer.token_bytes(cat) == b"cat"
    assert tokenizer.token_bytes(cat, the) == b" cat"
    assert tokenizer.token_bytes(byte_tokens("sentence-piece", b"\xf0")[0]) == b"\xf0"
    assert tokenizer.token_bytes(1, the) == b"<s>"


def test_a_decoder_that_would_panic_is_refused() -> None:
    with pytest.raises(BundleError, match="Strip with stop"):
        plain([" "], decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]))


def paired() -> Tokenizer:
    """A tokenizer that puts special tokens around pairs."""
    backend = tokenizers.Tokenizer.from_file(str(STARTERS / "sentiment" / TOKENIZER))
    return Tokenizer(backend, SpecialTokens())


PAIRED = paired()
lines = st.lists(st.sampled_from(["the", "cat", "é", "語", "unheardof"]), max_size=30).map(" ".join)


@given(first=lines, second=lines, direction=st.sampled_from(["left", "right"]), room=st.integers(1))
def test_cut_encodings_join_as_the_tokenizer_cuts_pairs(
    first: str, second: str, direction: Literal["left", "right"], room: int
) -> None:
    """And as the library's own truncation does."""
    max_length = 4 + room % 50
    alone = [PAIRED.encode(text, add_special_tokens=False) for text in (first, second)]
    room = max_length - PAIRED.num_special_tokens(pair=True)
    limits = longest_first(len(alone[0]), len(alone[1]), room)
    cut = [cut_tokens(each, limit, direction) for each, limit in zip(alone, limits, strict=True)]
    joined = PAIRED.join(*cut)
    expected, num_cut = PAIRED.encode_cut(first, second, max_length=max_length, direction=direction)
    truncated = [PAIRED.encode(text, add_special_tokens=False) for text in (first, second)]
    for encoding, limit in zip(truncated, limits, strict=True):
        encoding.truncate(limit, direction=direction)
    for other in expected, PAIRED.join(*truncated):
        assert joined.ids == other.ids
        assert joined.type_ids == other.type_ids
        assert joined.offsets == other.offsets
    assert num_cut == max(sum(map(len, alone)) - room, 0)
    assert not joined.overflowing
    assert not expected.overflowing


def trimming() -> tokenizers.Tokenizer:
    """A byte-level tokenizer whose post-processor leaves spaces out of offsets, as GPT-2's."""
    backend = byte_level()._backend
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.add_tokens([tokenizers.AddedToken(" [X] ", normalized=False), "[Y]"])
    return backend


def roberta() -> tokenizers.Tokenizer:
    backend = byte_level()._backend
    backend.add_special_tokens(["</s>", "<s>"])
    backend.post_processor = processors.RobertaProcessing(("</s>", 260), ("<s>", 261))
    return backend


spaced = st.lists(st.sampled_from(["the", " ", "  ", "é", " a", "[X]", "\n"]), max_size=12)


@pytest.mark.parametrize("make", [trimming, roberta, lambda: paired()._backend])
@given(
    parts=spaced,
    others=st.none() | spaced,
    direction=st.sampled_from(["left", "right"]),
    room=st.integers(1, 12),
)
@example(parts=["the", " "], others=None, direction="right", room=2)  # a lone space is trimmed once
def test_cut_texts_are_those_of_the_library(
    make: Callable[[], tokenizers.Tokenizer],
    parts: list[str],
    others: list[str] | None,
    direction: Literal["left", "right"],
    room: int,
) -> None:
    """Offsets too, although post-processors trim them whenever they are called."""
    backend = make()
    ours = Tokenizer(make(), SpecialTokens())
    text, pair = "".join(parts), None if others is None else "".join(others)
    max_length = room + backend.num_special_tokens_to_add(pair is not None)
    num_tokens = len(backend.encode(text, pair))
    backend.enable_truncation(max_length, direction=direction)
    expected = backend.encode(text, pair)
    found, num_cut = ours.encode_cut(text, pair, max_length=max_length, direction=direction)
    assert found.ids == expected.ids
    assert found.offsets == expected.offsets
    assert found.special_tokens_mask == expected.special_tokens_mask
    assert list(spans(found)) == expected.offsets
    assert num_cut == num_tokens - len(expected)


def test_cutting_leaves_the_encoding_as_it_is() -> None:
    whole = PAIRED.encode("the cat and the dog", add_special_tokens=False)
    ids = whole.ids
    assert cut_tokens(whole, len(ids), "left") is whole
    assert cut_tokens(whole, 2, "right").ids == ids[:2]
    assert cut_tokens(whole, 2, "left").ids == ids[-2:]
    assert cut_tokens(whole, 0, "left").ids == []
    assert whole.ids == ids
    assert not whole.overflowing


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """One hostile text must not stop the event loop: tokenization releases the GIL."""
    tokenizer = Tokenizer.from_file(STARTERS / "hybrid" / TOKENIZER, SpecialTokens())
    text = "The old king " * 4000
    begins, has_ended = threading.Event(), threading.Event()

    def encode() -> None:
        begins.set()
        tokenizer.encode(text)
        has_ended.set()

    def gives_way() -> bool:
        begins.clear()
        has_ended.clear()
        encoding = threading.Thread(target=encode)
        encoding.start()
        begins.wait()
        was_running = not has_ended.is_set()
        encoding.join()
        return was_running

    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # a thread that does not give way runs until it has ended
    try:
        assert any(gives_way() for _ in range(100))
    finally:
        sys.setswitchinterval(before)


def _with_normalizer(*stages: normalizers.Normalizer) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence(list(stages))
    return Tokenizer(backend, SpecialTokens())


@pytest.mark.parametrize("pattern", ["a", tokenizers.Regex("a")])
def test_a_normalizer_that_multiplies_texts_is_refused(pattern: str | tokenizers.Regex) -> None:
    stage = normalizers.Replace(pattern, "a" * 9)
    assert _with_normalizer(stage).encode("a").ids == [0]
    with pytest.raises(BundleError, match="100 times as long"):
        _with_normalizer(stage, normalizers.Sequence([stage, stage]))


@pytest.mark.parametrize("length", [30, 3000])
def test_a_text_that_the_tokenizer_gives_up_on_is_refused(length: int) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    tokenizer = Tokenizer(backend, SpecialTokens())
    assert len(tokenizer.encode("a b")) > 0
    with pytest.raises(ValidationError, match="tokenizer cannot split this text"):
        tokenizer.encode("a" * length + "b")
