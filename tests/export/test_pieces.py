"""The tokenizers of Marian and M2M-100, compared with transformers' own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from maskdial.bundle.manifest import SpecialTokens, Tokenization
from maskdial.bundle.tokenizer import Tokenizer
from maskdial_export.checkpoint.pieces import read_pieces
from maskdial_export.checkpoint.sample import Sample, read_sample
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError

TEXTS = ["  Hello   world  ", "\ufb01ne \xbd caf\xe9 \u2603 xyz", "a", "...", "Don't!"]


@pytest.fixture(scope="module")
def sample() -> Sample:
    return read_sample(None)


def train(path: Path, kind: str, sample: Sample) -> list[str]:
    """Writes a sentencepiece model and returns its pieces."""
    text = path.parent / "sample.txt"
    text.write_text(sample.text, encoding="utf-8")
    trained = path.parent / "trained"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(trained),
        vocab_size=400,
        model_type=kind,
        character_coverage=1.0,
        minloglevel=2,
    )
    trained.with_suffix(".model").rename(path)
    read = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [read.id_to_piece(i) for i in range(3, read.get_piece_size())]


def write(folder: Path, model_type: str, tokens: list[str]) -> Source:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return Source("tiny", folder, "MarianMTModel", "generate")


def served(source: Source, sample: Sample) -> Tokenizer:
    """The server's tokenizer of a checkpoint."""
    pieces = read_pieces(source, sample)
    assert pieces is not None
    settings = Tokenization(leading_code=pieces.leading_code)
    return Tokenizer(pieces.backend, SpecialTokens(), settings)


def assert_alike(source: Source, theirs: Any, sample: Sample, *texts: str) -> None:
    ours = served(source, sample)
    for text in (*sample.sentences(), *TEXTS, *texts):
        ids = ours.encode(text).ids
        assert ids == theirs(text).input_ids
        # Theirs spells out languages, which are special tokens of ours
        written = [each for each in ids if str(ours.id_to_token(each))[:2] not in ("__", ">>")]
        assert ours.decode(written) == theirs.decode(written, skip_special_tokens=True)


@pytest.fixture
def marian(tmp_path: Path, sample: Sample) -> Source:
    pieces = train(tmp_path / "source.spm", "unigram", sample)
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    tokens = ["</s>", "<unk>", "\u2581fremd", *reversed(pieces), ">>deu<<", "<pad>"]
    return write(tmp_path, "marian", tokens)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_marian(marian: Source, sample: Sample) -> None:
    """Pieces of the target language are in the vocabulary, and never split a source text."""
    theirs = transformers.MarianTokenizer.from_pretrained(marian.path)
    assert_alike(marian, theirs, sample, ">>deu<< Good morning.", ">>deu<<Good morning.")


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (">>deu<< Hello", ">>deu<<"),
        (">>xyz<< Hello", "<unk>"),
        (">>no language<<", "<unk>"),
        (">><<", "<unk>"),
        (">>deu<< a >>deu<< b", ">>deu<<"),
        ("a >>deu<< b", None),
        (" >>deu<< Hello", None),
        (">>deu", None),
        ("<<deu>>", None),
    ],
)
def test_a_code_is_read_at_the_very_start_only(
    text: str, begin: str | None, kind: str, tmp_path: Path, sample: Sample
) -> None:
    pieces = train(tmp_path / "source.spm", kind, sample)
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    source = write(tmp_path, "marian", ["</s>", "<unk>", *pieces, ">>deu<<", "<pad>"])
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    ours = served(source, sample)
    encoding = ours.encode(text)
    assert encoding.ids == theirs(text).input_ids
    assert encoding.ids.count(ours.token_to_id(">>deu<<") or -1) == (begin == ">>deu<<")
    if begin is not None:
        assert encoding.tokens[0] == begin
        assert encoding.offsets[0] == (0, text.index("<<") + 2)
        assert text[slice(*encoding.offsets[1])] == text[text.index("<<") + 2 :].strip()[:1]
    assert (
        ours.encode_cut(text, max_length=2)[0].ids
        == theirs(text, truncation=True, max_length=2).input_ids
    )


def test_m2m_100(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "sentencepiece.bpe.model"
    pieces = train(path, "bpe", sample)
    source = write(tmp_path, "m2m_100", ["<s>", "<pad>", "</s>", "<unk>", *pieces])
    vocabulary = str(tmp_path / "vocab.json")
    theirs = transformers.M2M100Tokenizer(vocabulary, str(path), src_lang="en")
    assert_alike(source, theirs, sample)
    ours = served(source, sample)
    for code in ("en", "de", "zu"):
        assert ours.token_to_id(f"__{code}__") == theirs.get_lang_id(code)


def test_what_cannot_be_converted_is_refused(
    marian: Source, sample: Sample, add_json: Callable[..., None]
) -> None:
    path = marian.path / "vocab.json"
    tokens = json.loads(path.read_text(encoding="utf-8"))
    common = [token for token in tokens if len(token) > 2 and token not in ("</s>", "<unk>")][:300]
    left = [token for token in tokens if token not in common]
    path.write_text(json.dumps({token: index for index, token in enumerate(left)}))
    with pytest.raises(ExportError, match=r"sentences .* are split differently"):
        read_pieces(marian, sample)
    path.write_text("{}")
    with pytest.raises(ExportError, match="cannot read"):
        read_pieces(marian, sample)
    (marian.path / "source.spm").unlink()
    assert read_pieces(marian, sample) is None
