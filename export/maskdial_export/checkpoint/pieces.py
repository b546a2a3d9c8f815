"""Tokenizers of translation models: sentencepiece pieces with ids of their own.

Marian and M2M-100 split texts by a sentencepiece model, and number the pieces by a vocab.json,
which also has the pieces of the target language. transformers has no tokenizer.json for them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers.convert_slow_tokenizer import generate_merges
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line

_MARIAN, _M2M = "source.spm", "sentencepiece.bpe.model"
_VOCABULARY = "vocab.json"
_UNIGRAM = 1  # of sentencepiece's ModelType
_FOREIGN = 100.0  # how much less likely than any of the source language a piece of the target's is
_MIN_ALIKE = 0.98  # part of the sample's sentences


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tokenizer made of a sentencepiece model and a vocabulary.

    ``leading_code``: whether a code such as ``>>deu<<`` is one token at the very start of a text.
    """

    backend: Tokenizer
    leading_code: bool


def read_pieces(source: Source, sample: Sample) -> Pieces | None:
    """The tokenizer of a Marian or M2M-100 checkpoint; None if it has none of this kind.

    Raises:
        ExportError: a file is damaged, or the tokenizer splits texts differently.
    """
    names = {"marian": _MARIAN, "m2m_100": _M2M}
    name = names.get(str(source.read_json("config.json").get("model_type")), "")
    paths = source.path / name, source.path / _VOCABULARY
    if not name or not all(path.is_file() for path in paths):
        return None
    try:
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(paths[0].read_bytes())
        original = sentencepiece.SentencePieceProcessor(model_proto=paths[0].read_bytes())
        vocabulary = read_json(paths[1])
        tokenizer = _build(proto, vocabulary)
    except ExportError:
        raise
    except Exception as error:  # the libraries raise many types for damaged files
        raise ExportError(f"cannot read {paths[0]} and {paths[1]}: {first_line(error)}") from error
    _add_special(tokenizer, vocabulary, source, languages=name == _M2M)
    _check(source, tokenizer, original, vocabulary, sample)
    return Pieces(tokenizer, leading_code=name == _MARIAN)


def _build(proto: Any, vocabulary: Mapping[str, int]) -> Tokenizer:
    scores = {piece.piece: piece.score for piece in proto.pieces}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        raise ExportError(f"{_VOCABULARY} has gaps between its ids")
    unknown = proto.trainer_spec.unk_piece
    if proto.trainer_spec.model_type == _UNIGRAM:
        lowest = min(scores.values()) - _FOREIGN
        pairs = [(token, scores.get(token, lowest)) for token in tokens]
        tokenizer = Tokenizer(models.Unigram(pairs, unk_id=vocabulary[unknown]))
    else:
        own = {token: index for token, index in vocabulary.items() if token in scores}
        merges = generate_merges(own, {token: scores[token] for token in own})
        model = models.BPE(dict(vocabulary), merges, unk_token=unknown, fuse_unk=True)
        tokenizer = Tokenizer(model)
    stages: list[Any] = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if proto.normalizer_spec.precompiled_charsmap:
        stages.insert(0, normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    tokenizer.normalizer = normalizers.Sequence(stages)
    tokenizer.pre_tokenizer = _pre_tokenizer(tokens)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _pre_tokenizer(tokens: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """sentencepiece's words; codes of languages such as ``>>deu<<`` are broken into two.

    They are in the vocabulary of Marian's multilingual models, but no pieces: the server reads the
    one at the start of a text, and any other is text.
    """
    codes = [token[2:] for token in tokens if token.startswith(">>") and token.endswith("<<")]
    if not codes:
        return pre_tokenizers.Metaspace()
    within = Regex(f"(?<=>>)(?={'|'.join(map(re.escape, codes))})")
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Split(within, "isolated")]
    )


def _add_special(
    tokenizer: Tokenizer, vocabulary: Mapping[str, int], source: Source, *, languages: bool
) -> None:
    """Adds the special tokens, and what they put around a source text."""
    special = [token for token in ("<s>", "</s>", "<unk>", "<pad>") if token in vocabulary]
    codes = []
    if languages:  # they follow the vocabulary, in transformers' own order
        codes = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
        + [AddedToken(token, normalized=False, special=True, rstrip=True) for token in codes]
    )
    template = ["$A", "</s>"]
    if languages:
        own = source.read_json("tokenizer_config.json").get("src_lang") or "en"
        template.insert(0, f"__{own}__")
    named = [token for token in template if token != "$A"]
    tokenizer.post_processor = TemplateProcessing(
        single=" ".join(template),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in named],
    )


def _check(
    source: Source,
    tokenizer: Tokenizer,
    original: sentencepiece.SentencePieceProcessor,
    vocabulary: Mapping[str, int],
    sample: Sample,
) -> None:
    texts = sample.sentences()
    unknown = vocabulary["<unk>"]
    alike = sum(
        [vocabulary.get(piece, unknown) for piece in original.encode(text, out_type=str)]
        == tokenizer.encode(text, add_special_tokens=False).ids
        for text in texts
    )
    if alike < _MIN_ALIKE * len(texts):
        raise ExportError(
            f"the tokenizer of {source.name} cannot be converted: of {len(texts)} sentences "
            f"{len(texts) - alike} are split differently; write tokenizer.json for it"
        )
