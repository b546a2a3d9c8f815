"""Decoding piece by piece says what decoding at once says, and never half a character."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from maskdial.bundle import SpecialTokens
from maskdial.tokenizer import Tokenizer


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
    """Words that carry their leading space, and bytes for all else, as Llama's has."""
    vocab = {"<unk>": 0, "<s>": 1}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = []
    for word in ("the", "cat", "a"):
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


TOKENIZERS = {"byte-level": byte_level(), "sentence-piece": sentence_piece()}
texts = st.text(st.sampled_from([*"the cat.\n", "é", "語", "🙂", "ß"]), max_size=40)


@given(name=st.sampled_from(sorted(TOKENIZERS)), text=texts, cut=st.integers(0, 60))
def test_pieces_join_to_the_whole(name: str, text: str, cut: int) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the " + text, add_special_tokens=False).ids
    # The prompt ends at a character's border: what came before it is not ours to say.
    while cut < len(ids) and "\ufffd" in tokenizer.decode(ids[:cut]):
        cut += 1
    prompt, new = ids[:cut], ids[cut:]
    decoder = tokenizer.decoder(prompt)
    pieces = [decoder.push(token_id) for token_id in new]
    assert all("\ufffd" not in piece for piece in pieces)
    assert tokenizer.decode(prompt) + "".join(pieces) + decoder.flush() == tokenizer.decode(ids)


@given(st.lists(st.integers(1, 256), max_size=20))
def test_bytes_that_are_no_text_lose_nothing_but_themselves(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    prompt = tokenizer.encode("the cat").ids
    decoder = tokenizer.decoder(prompt)
    text = "".join(decoder.push(token_id) for token_id in ids) + decoder.flush()
    whole = tokenizer.decode(prompt + ids)[len("the cat") :]
    assert text.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_special_tokens_do_not_eat_the_space_of_the_next_word() -> None:
    tokenizer = TOKENIZERS["sentence-piece"]
    the, cat = tokenizer.encode("the cat").ids
    decoder = tokenizer.decoder([the])
    assert [decoder.push(1), decoder.push(cat)] == ["", " cat"]
