"""Tokenizers of GGUF files, as the ``tokenizers`` library has them.

The file holds tokens with their kinds, and merges or scores; all else is a matter of
``tokenizer.ggml.model``: ``gpt2`` is byte-level BPE, split as ``tokenizer.ggml.pre`` says;
``llama`` sentencepiece's BPE, whose merges follow from the scores; ``gemma4`` the same with its
merges; ``bert`` WordPiece, with a mark
before words in place of one before their other parts; ``t5`` sentencepiece's unigram model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.checkpoint.gguf.splits import SPLITS
from maskdial_export.errors import ExportError, first_line

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"
_PART = "##"
# llama.cpp's name of the separator's entry has a letter less
_ROLES = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "cls": "tokenizer.ggml.cls_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
}
_WORDPIECE = {"cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"}
_UNIGRAM = {"eos": 1, "unk": 2, "pad": 0}
_SENTENCEPIECE = {"bos": 1, "eos": 2, "unk": 0}
# Tokens that end a reply wherever they are, as llama.cpp finds them
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)
_SEEN_END = "<|tool_response>"  # such a one that llama.cpp's converter marks as text
_GEMMA4 = "gemma4"
"""A kind of tokenizer: llama.cpp begins its texts with the first token, whatever a file says."""
# What long tokens cost grows with their squares; the longest of models have some 200 characters
_MAX_TOKEN = 1_000
_MAX_CHARACTERS = 2**23
_MAX_WORD = 100  # characters of a word that WordPiece splits


@dataclass(frozen=True, slots=True)
class ReadTokenizer:
    """A tokenizer, its special tokens' ids by role, and all tokens that end a reply."""

    backend: Tokenizer
    roles: Mapping[str, int]
    ends: Sequence[int]
    has_types: bool

    @property
    def tokens(self) -> dict[str, str]:
        """The special tokens' texts by role."""
        texts = {role: self.backend.id_to_token(index) for role, index in self.roles.items()}
        return {role: text for role, text in texts.items() if text is not None}


def read_tokenizer(settings: Settings) -> ReadTokenizer:
    """The tokenizer of a file.

    Raises:
        ExportError: its kind is not supported, or it is damaged.
    """
    kind = settings.text("tokenizer.ggml.model")
    build = _BUILDERS.get(kind)
    if build is None:
        raise ExportError(
            f"{settings.file.path} has a tokenizer of the kind {kind!r} (tokenizer.ggml.model), "
            f"which is not supported; supported: {', '.join(_BUILDERS)}"
        )
    vocabulary = _read_vocabulary(settings)
    try:
        return build(settings, vocabulary)
    except ExportError:
        raise
    except BaseException as error:  # the library has no error class of its own, and panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ExportError(
            f"the tokenizer of {settings.file.path} is damaged: {first_line(Exception(str(error)))}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float] | None

    def used(self) -> dict[str, int]:
        """Ids by token, without those that fill the table."""
        return {
            token: index for index, token in enumerate(self.tokens) if self.kinds[index] != _UNUSED
        }

    def added(self, settings: Settings, mask: int | None) -> list[AddedToken]:
        """Tokens that are found in a text before it is split."""
        strips = settings.architecture == "phi3" and (
            settings.text("tokenizer.ggml.model") == "llama"
        )
        found = []
        for index, token in enumerate(self.tokens):
            kind = self.kinds[index]
            if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                continue
            right = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
            found.append(
                AddedToken(
                    token,
                    normalized=False,
                    special=kind != _USER_DEFINED,
                    lstrip=index == mask,
                    rstrip=right,
                )
            )
        return found


def _read_vocabulary(settings: Settings) -> _Vocabulary:
    tokens = settings.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ExportError(f"the tokenizer of {settings.file.path} has no tokens")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if max(map(len, tokens)) > _MAX_TOKEN or sum(map(len, tokens)) > _MAX_CHARACTERS:
        raise ExportError(
            f"the tokenizer of {settings.file.path} has tokens of up to "
            f"{max(map(len, tokens)):,} characters, {sum(map(len, tokens)):,} together; no model's "
            "are as long, so the file is damaged"
        )
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        first = next(each for each in tokens if each in seen or seen.add(each))  # type: ignore[func-returns-value]
        raise ExportError(f"the tokenizer of {settings.file.path} has the token {first!r} twice")
    kinds = settings.numbers("tokenizer.ggml.token_type", len(tokens))
    scores = settings.numbers("tokenizer.ggml.scores", len(tokens))
    if scores is not None and not np.isfinite(scores).all():
        raise ExportError(f"tokenizer.ggml.scores of {settings.file.path} are not all numbers")
    return _Vocabulary(
        tokens, [1] * len(tokens) if kinds is None else list(map(int, kinds)), scores
    )


def _roles(
    settings: Settings, vocabulary: _Vocabulary, defaults: Mapping[str, int]
) -> dict[str, int]:
    """Ids of special tokens by role; one out of the vocabulary counts as none, as in llama.cpp."""
    roles = {}
    if _UNKNOWN in vocabulary.kinds:
        defaults = {**defaults, "unk": vocabulary.kinds.index(_UNKNOWN)}
    for role, key in _ROLES.items():
        given = settings.find(key)
        known = type(given) is int and 0 <= given < len(vocabulary.tokens)
        index = given if known else defaults.get(role)
        if index is not None and index < len(vocabulary.tokens):
            roles[role] = index
    return roles


def _ends(vocabulary: _Vocabulary, settings: Settings, roles: Mapping[str, int]) -> list[int]:
    named = [roles.get("eos")]
    named += [settings.find(f"tokenizer.ggml.{role}_token_id") for role in ("eot", "eom")]
    found = [
        index
        for index, token in enumerate(vocabulary.tokens)
        if (token in _ENDS and vocabulary.kinds[index] == _CONTROL) or token == _SEEN_END
    ]
    harmony = {vocabulary.tokens[index] for index in found} >= {"<|return|>", "<|call|>", "<|end|>"}
    if harmony:  # there it ends a message, not the reply
        found = [index for index in found if vocabulary.tokens[index] != "<|end|>"]
    ids = [each for each in (*named, *found) if type(each) is int]
    return [each for each in dict.fromkeys(ids) if 0 <= each < len(vocabulary.tokens)]


def _finish(
    settings: Settings,
    vocabulary: _Vocabulary,
    backend: Tokenizer,
    roles: Mapping[str, int],
    begins: bool,
    ends: bool,
    double: bool = False,
    has_types: bool = False,
) -> ReadTokenizer:
    """Adds the special tokens, and those at the start and the end of each text."""
    backend.add_tokens(vocabulary.added(settings, roles.get("mask") if double else None))
    if settings.text("tokenizer.ggml.model") != _GEMMA4:
        begins = settings.flag("tokenizer.ggml.add_bos_token", begins)
    ends = settings.flag("tokenizer.ggml.add_eos_token", ends)
    first = roles.get("cls" if has_types else "bos", roles.get("cls", roles.get("bos")))
    last = roles.get("sep" if has_types else "eos", roles.get("sep", roles.get("eos")))
    special = {}
    start = end = middle = ""
    if begins and first is not None:
        start, special["FIRST"] = "FIRST ", first
    if ends and last is not None:
        end, special["LAST"] = " LAST", last
        middle = " LAST" if double else ""
    if special:
        kind = ":1" if has_types else ""
        again = "" if double or has_types else start
        ending = end.replace("LAST", f"LAST{kind}")
        backend.post_processor = TemplateProcessing(
            single=f"{start}$A{end}",
            pair=f"{start}$A{end}{middle} {again}$B{kind or ':0'}{ending}",
            special_tokens=[
                {"id": name, "ids": [index], "tokens": [vocabulary.tokens[index]]}
                for name, index in special.items()
            ],
        )
    return ReadTokenizer(backend, roles, _ends(vocabulary, settings, roles), has_types)


def _byte_level(settings: Settings, vocabulary: _Vocabulary) -> ReadTokenizer:
    pre = settings.text("tokenizer.ggml.pre", "")
    split = SPLITS.get(pre)
    if split is None:
        named = f"the pre-tokenizer {pre!r}" if pre else "no pre-tokenizer (tokenizer.ggml.pre)"
        raise ExportError(
            f"{settings.file.path} names {named}, so it is not known how texts are split; "
            "export the checkpoint that it was made from, or convert that with a current llama.cpp"
        )
    merges = _stored_merges(settings)
    backend = Tokenizer(models.BPE(vocabulary.used(), merges, ignore_merges=split.ignores_merges))
    stages = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in split.expressions
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*stages, last])
    backend.decoder = decoders.ByteLevel()
    encoder = settings.architecture in ("bert", "modern-bert")
    return _finish(
        settings,
        vocabulary,
        backend,
        _roles(settings, vocabulary, {}),
        begins=split.adds_bos or encoder,
        ends=encoder,
        double=settings.architecture == "bert",  # RoBERTa
    )


def _stored_merges(settings: Settings) -> list[tuple[str, str]]:
    merges = []
    for merge in settings.texts("tokenizer.ggml.merges"):
        place = merge.find(" ", 1)
        if place == -1:
            raise ExportError(f"the merge {merge!r} of {settings.file.path} has no two parts")
        merges.append((merge[:place], merge[place + 1 :]))
    return merges


def _pieces(vocabulary: _Vocabulary) -> dict[str, int]:
    """Ids of the tokens that texts are made of."""
    return {
        token: index
        for index, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[index] not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE)
    }


def _gemma4(settings: Settings, vocabulary: _Vocabulary) -> ReadTokenizer:
    return _of_pieces(settings, vocabulary, _stored_merges(settings), prefix=False, roles={})


def _sentencepiece(settings: Settings, vocabulary: _Vocabulary) -> ReadTokenizer:
    if vocabulary.scores is None:
        raise ExportError(f"{settings.file.path} has no tokenizer.ggml.scores")
    pieces = _pieces(vocabulary)
    scores = {token: vocabulary.scores[index] for token, index in pieces.items()}
    prefix = settings.flag("tokenizer.ggml.add_space_prefix", True)
    merges = _merges(pieces, scores)
    return _of_pieces(settings, vocabulary, merges, prefix=prefix, roles=_SENTENCEPIECE)


def _of_pieces(
    settings: Settings,
    vocabulary: _Vocabulary,
    merges: Sequence[tuple[str, str]],
    *,
    prefix: bool,
    roles: Mapping[str, int],
) -> ReadTokenizer:
    """BPE of characters, with bytes for those that it lacks.

    ``prefix``: whether a space stands before texts. ``roles``: the special tokens of files that
    name none.
    """
    pieces = _pieces(vocabulary)
    vocabulary = _with_symbols(settings, vocabulary, pieces, merges, prefix)
    roles = _roles(settings, vocabulary, roles)
    unknown = roles.get("unk")
    backend = Tokenizer(
        models.BPE(
            vocabulary.used(),
            merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    stages = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if prefix else stages)
    return _finish(settings, vocabulary, backend, roles, begins=True, ends=False)


def _merges(pieces: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs of pieces that make up another one, in the order in which they are joined.

    sentencepiece joins by the score of the result. What it leaves open is settled as transformers
    does (``convert_slow_tokenizer.generate_merges``): the longest first part first, then the
    longest second one, then by the order of the results, then by the ids of the parts.
    """
    found: list[tuple[float, str, str]] = []
    for piece, score in scores.items():
        cuts = (cut for cut in range(1, len(piece)) if piece[:cut] in pieces)
        pairs = [(piece[:cut], piece[cut:]) for cut in cuts if piece[cut:] in pieces]
        pairs.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        found += [(score, *pair) for pair in pairs]
    found.sort(key=lambda each: (-each[0], -len(each[1]), -len(each[2])))
    return [(left, right) for _, left, right in found]


def _with_symbols(
    settings: Settings,
    vocabulary: _Vocabulary,
    pieces: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    prefix: bool,
) -> _Vocabulary:
    """Marks pieces that no others make up: they are found in a text before it is split.

    Such are sentencepiece's user-defined symbols, which llama.cpp's converter does not mark.
    """
    made = {left + right for left, right in merges}
    symbols = [token for token in pieces if len(token) > 1 and token not in made]
    if symbols and prefix:
        raise ExportError(
            f"the tokenizer of {settings.file.path} has {len(symbols):,} tokens that no others "
            f"make up, such as {symbols[0]!r}, and puts a space before texts, which is not "
            "supported; export the checkpoint that it was made from"
        )
    kinds = list(vocabulary.kinds)
    for token in symbols:
        kinds[pieces[token]] = _USER_DEFINED
    return replace(vocabulary, kinds=kinds)


def _wordpiece(settings: Settings, vocabulary: _Vocabulary) -> ReadTokenizer:
    tokens = [
        token
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        else token.removeprefix(_SPACE)
        if token.startswith(_SPACE)
        else _PART + token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    vocabulary = _Vocabulary(tokens, vocabulary.kinds, None)
    ids = vocabulary.used()
    roles = _roles(
        settings,
        vocabulary,
        {role: ids[token] for role, token in _WORDPIECE.items() if token in ids},
    )
    cased = any(
        token != token.lower() and not token.startswith("[") and kind == _NORMAL
        for token, kind in zip(tokens, vocabulary.kinds, strict=True)
    )
    lower = settings.flag("tokenizer.ggml.normalizer.lowercase", not cased)
    strip = settings.flag("tokenizer.ggml.normalizer.strip_accents", lower)
    backend = Tokenizer(
        models.WordPiece(
            ids,
            unk_token=tokens[roles["unk"]] if "unk" in roles else "[UNK]",
            max_input_chars_per_word=_MAX_WORD,
        )
    )
    backend.normalizer = normalizers.BertNormalizer(strip_accents=strip, lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(_PART)
    return _finish(settings, vocabulary, backend, roles, begins=True, ends=True, has_types=True)


def _unigram(settings: Settings, vocabulary: _Vocabulary) -> ReadTokenizer:
    if vocabulary.scores is None:
        raise ExportError(f"{settings.file.path} has no tokenizer.ggml.scores")
    roles = _roles(settings, vocabulary, _UNIGRAM)
    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    backend = Tokenizer(models.Unigram(pieces, unk_id=roles.get("unk"), byte_fallback=False))
    stages: list[Any] = []
    charsmap = settings.find("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None:
        if not isinstance(charsmap, np.ndarray) or charsmap.dtype.itemsize != 1:
            raise ExportError(
                f"tokenizer.ggml.precompiled_charsmap of {settings.file.path} are not bytes"
            )
        stages.append(normalizers.Precompiled(charsmap.tobytes()))
    if settings.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        stages += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if stages:
        backend.normalizer = normalizers.Sequence(stages)
    prefix = settings.flag("tokenizer.ggml.add_space_prefix", True)
    is_encoder = settings.architecture in ("bert", "nomic-bert-moe")
    scheme = "always" if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _finish(
        settings,
        vocabulary,
        backend,
        roles,
        begins=is_encoder,
        ends=True,
        double=is_encoder,  # XLM-RoBERTa
    )


_BUILDERS: Mapping[str, Callable[[Settings, _Vocabulary], ReadTokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "bert": _wordpiece,
    "t5": _unigram,
    _GEMMA4: _gemma4,
}
