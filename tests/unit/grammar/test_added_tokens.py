"""A grammar's text where it meets an added token, special or text, in each form that files have."""

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from maskdial.errors import ValidationError
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.grammar.matcher import Grammar

# Spelled as in Qwen, DeepSeek, Mistral, Kimi, and without any signs.
NAMES = ("<tag>", "</tag>", "<|tag|>", "<｜tag▁x｜>", "[TAG]", "◁tag▷", "tagword")
FLAGS = ("normalized", "lstrip", "rstrip", "single_word")
EOS = "<|end|>"
BYTE_LEVEL, METASPACE, BYTE_FALLBACK = "ByteLevel", "Metaspace", "ByteFallback"


def make(kind: str, added: Sequence[AddedToken]) -> tokenizers.Tokenizer:
    """A tokenizer of single characters, and these added tokens."""
    byte_level = kind == BYTE_LEVEL
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else []
    if not byte_level:
        letters = [chr(code) for code in range(33, 127)]
        alphabet = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, *"｜▁◁▷"]
    vocabulary = {text: index for index, text in enumerate(dict.fromkeys(alphabet))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    elif kind == METASPACE:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(stages)
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    backend.add_tokens(list(added))
    return backend


class Trusting:
    """Takes every grammar unseen: these are harmless, and a process for each takes a second."""

    def check(self, grammar: str) -> None:
        pass

    def close(self) -> None:
        pass


def compiler_of(backend: tokenizers.Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(
        backend.to_str(),
        vocab_size=backend.get_vocab_size(),
        eos_token_ids=[id_of(backend, EOS)],
        checker=Trusting(),
    )


def accepts(grammar: Grammar, ids: Sequence[int], eos: int) -> bool:
    """Whether a grammar takes these tokens, as an engine would offer them, and may end then."""
    matcher = grammar.matcher(first=True)
    for token_id in ids:
        if not matcher.allowed()[token_id]:
            return False
        matcher.accept(token_id)
        if matcher.finished:
            return token_id == ids[-1]
    return bool(matcher.allowed()[eos])


def id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None
    return token_id


def check(kind: str, token: AddedToken) -> None:
    name = token.content
    backend = make(kind, [token])
    eos, tag = id_of(backend, EOS), id_of(backend, name)
    bare = make(kind, [])

    def spelled(text: str) -> list[int]:
        return [int(each) for each in bare.encode(text, add_special_tokens=False).ids]

    compiler = compiler_of(backend)
    try:

        def grammar(form: Any, value: Any) -> Grammar:
            return compiler.submit(form, value).result()

        around = [*spelled("a"), tag, *spelled("b")] if kind != METASPACE else None
        text = grammar("lark", f"start: {json.dumps('a' + name + 'b', ensure_ascii=False)}")
        # Spelled out it is the text, whatever the token is.
        letters = backend.encode("a", add_special_tokens=False).ids
        assert text.matcher(first=True).allowed()[letters[0]], "the text can begin"
        if kind != METASPACE:
            assert around is not None
            # The token is its text, unless the file calls it special.
            assert accepts(text, around, eos) is (not token.special)
            spelling = spelled("a" + name + "b")
            if token.special:
                assert accepts(text, spelling, eos)
            quoted = [*spelled('"x'), tag, *spelled('"')]
            string = grammar("json_schema", {"type": "string"})
            assert accepts(string, quoted, eos) is (not token.special)
            constant = grammar("json_schema", {"const": f"x{name}"})
            # Its text is forced, so it is divided as the tokenizer divides it.
            value = f'"x{name}"'
            divided = backend.encode(value, add_special_tokens=False).ids
            assert accepts(constant, spelled(value) if token.special else divided, eos)
            free = grammar("regex", r"a(.|\n)*b")
            assert accepts(free, around, eos) is (not token.special)
        # By its id, or by its name where Lark has a name for it, it is the token alone.
        # Requests may not ask for special tokens.
        if token.special:
            with pytest.raises(ValidationError, match="no text of this model"):
                grammar("lark", f'start: <[{tag}]> "b"')
            return
        by_id = grammar("lark", f'start: <[{tag}]> "b"')
        assert np.flatnonzero(by_id.matcher(first=False).allowed()).tolist() == [tag]
        if name.startswith("<"):
            by_name = grammar("lark", f'start: {name} "b" // {name}')
            assert np.flatnonzero(by_name.matcher(first=False).allowed()).tolist() == [tag]
    finally:
        compiler.close()


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE, BYTE_FALLBACK])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_added_token_is_its_text_unless_it_is_special(
    kind: str, special: bool, name: str
) -> None:
    if kind != BYTE_LEVEL:
        name = name.replace("▁", "")  # which is a space there
    check(kind, AddedToken(name, special=special, normalized=False))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("flags", [*itertools.product([False, True], repeat=len(FLAGS))], ids=str)
def test_flags_of_an_added_token_change_nothing(special: bool, flags: tuple[bool, ...]) -> None:
    options = dict(zip(FLAGS, flags, strict=True))
    check(BYTE_LEVEL, AddedToken("<tag>", special=special, **options))


def test_a_name_that_no_token_has_is_refused() -> None:
    compiler = compiler_of(make(BYTE_LEVEL, [AddedToken("<tag>", special=False)]))
    try:
        with pytest.raises(ValidationError, match="unknown special token"):
            compiler.submit("lark", 'start: <other> "x"').result()
        # Within a text or an expression it is no name.
        compiler.submit("lark", 'start: "<other>" /<other>/ // <other>').result()
    finally:
        compiler.close()


def test_an_expression_that_is_never_closed_takes_no_time() -> None:
    compiler = compiler_of(make(BYTE_LEVEL, [AddedToken("<tag>", special=False)]))
    try:
        started = time.process_time()
        with pytest.raises(ValidationError):
            compiler.submit("lark", "start: /" + r"\/" * 8000).result()
        assert time.process_time() - started < 0.3  # it took 1.3 s
    finally:
        compiler.close()
