"""A checkpoint's tokenizer, checked against the model and a plain text.

The bundle gets tokenizer.json under the settings of tokenizer_config.json and with the tokens that
other files add, not the file itself. Without it, transformers makes a tokenizer of the files that
it finds, and one with nothing but special tokens if it finds none: what it converts is compared
with the vocabulary files.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sentencepiece
import transformers
from rich.console import Console
from tokenizers import Tokenizer

from maskdial.bundle.manifest import TOKENIZER, Tokenization
from maskdial_export.checkpoint.gliner import gliner_tokenizer
from maskdial_export.checkpoint.gliner2 import gliner2_tokenizer
from maskdial_export.checkpoint.pieces import read_pieces
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checkpoint.sentence import lower_case, tokenizer_settings
from maskdial_export.checkpoint.source import Source
from maskdial_export.checkpoint.tokenizer_file import let_file_rule
from maskdial_export.checkpoint.vocabulary import VOCABULARY_FILES, check_size, check_words
from maskdial_export.errors import ExportError, first_line
from maskdial_export.phase import finding

_VOCABULARY = "vocab.txt"  # WordPiece: a token per line
# Others split texts in a way of their own before, such as BertJapaneseTokenizer
_WORDPIECE = frozenset({"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"})
_MIN_ALIKE = 0.9  # part of the lines or sentences; a few may be treated in a special way
_TYPES = "token_type_ids"
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        backend: what the bundle gets, with padding and truncation turned off.
        original: transformers' own, to compare with; None if it has none for these files.
        by_class: what transformers' class makes of tokenizer.json; None if that is not overruled.
        sends_token_types: whether it hands the parts of a text pair to the model.
        leading_code: whether it reads a code of a language at the very start of a text.
    """

    backend: Tokenizer
    original: Any
    sends_token_types: bool = True
    leading_code: bool = False
    by_class: Tokenizer | None = None

    @property
    def settings(self) -> Tokenization:
        """What tokenizer.json does not say, for the manifest."""
        side = getattr(self.original, "truncation_side", "right")
        return Tokenization(
            truncation_side="left" if side == "left" else "right", leading_code=self.leading_code
        )


def load_tokenizer(
    source: Source, vocab_size: int, sample: Sample, console: Console | None = None
) -> LoadedTokenizer:
    """The checkpoint's tokenizer.

    Raises:
        ExportError: there is none, it does not fit the model's vocabulary, or it knows next to none
            of the sample's words.
    """
    console = console or Console(quiet=True)
    if source.task in ("entities", "extract"):
        own = gliner_tokenizer if source.task == "entities" else gliner2_tokenizer
        original = own(source)
        loaded: LoadedTokenizer | None = LoadedTokenizer(
            original.backend_tokenizer, original, _TYPES in original.model_input_names
        )
    else:
        loaded = _read_pieces(source, sample)
    if loaded is None and (source.path / TOKENIZER).is_file():
        loaded = _read(source, console)
    elif loaded is None:
        loaded = _convert(source, sample)
    lower_case(source, loaded.backend)
    # A copy, as calls of transformers' tokenizer change the settings of its own
    backend = _without_strangers(source, loaded.backend, vocab_size)
    backend.no_padding()
    backend.no_truncation()
    check_size(source, backend, vocab_size)
    check_words(source, backend, sample)
    return replace(loaded, backend=backend)


def _read_pieces(source: Source, sample: Sample) -> LoadedTokenizer | None:
    """The tokenizer of a Marian or M2M-100 checkpoint, which transformers runs in Python."""
    pieces = read_pieces(source, sample)
    if pieces is None:
        return None
    with _quiet():
        try:
            original = _auto(source)
        except Exception:  # transformers raises many types for missing files
            original = None
    return LoadedTokenizer(
        pieces.backend, original, sends_token_types=False, leading_code=pieces.leading_code
    )


def _read(source: Source, console: Console) -> LoadedTokenizer:
    """tokenizer.json with what transformers reads in the files beside it."""
    path = source.path / TOKENIZER
    try:
        file = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no error class of its own
        raise ExportError(f"cannot read {path}: {first_line(error)}") from error
    kind = type(file.model).__name__
    inputs = source.read_json("tokenizer_config.json").get("model_input_names")
    with _quiet():
        try:
            original = _auto(source)
            inputs = original.model_input_names
            made: Tokenizer | None = getattr(original, "backend_tokenizer", None)
            why = None
            if made is None:
                return LoadedTokenizer(file, original, sends_token_types=_TYPES in inputs)
            if type(made.model).__name__ != kind:
                why = f"is one of {type(made.model).__name__}, not of {kind}"
        except Exception as error:  # transformers raises many types for files of another class
            why = f"cannot be loaded ({first_line(error)})"
    if why is not None:
        original = _by_file_alone(source)
        finding(
            console,
            f"transformers' tokenizer of {source.read_json('config.json').get('model_type')} "
            f"models {why}, so {TOKENIZER} is read by itself",
        )
    by_class = _ruled_by_file(source, original)
    made = original.backend_tokenizer
    return LoadedTokenizer(made, original, inputs is None or _TYPES in inputs, by_class=by_class)


def _ruled_by_file(source: Source, original: Any) -> Tokenizer | None:
    try:
        with _quiet():
            settings = _LOCAL | tokenizer_settings(source)
            return let_file_rule(original, source.path, **settings)
    except Exception as error:  # transformers raises many types for damaged files
        raise ExportError(
            f"transformers cannot load the tokenizer of {source.name}: {first_line(error)}"
        ) from error


def _auto(source: Source) -> Any:
    return transformers.AutoTokenizer.from_pretrained(
        source.path, **_LOCAL, **tokenizer_settings(source)
    )


def _by_file_alone(source: Source) -> Any:
    """transformers' tokenizer of no class: tokenizer.json with what tokenizer_config.json adds."""
    try:
        with _quiet():
            return transformers.PreTrainedTokenizerFast.from_pretrained(
                source.path, **_LOCAL, **tokenizer_settings(source)
            )
    except Exception as error:  # transformers raises many types for damaged files
        raise ExportError(
            f"transformers cannot load the tokenizer of {source.name}: {first_line(error)}"
        ) from error


def _without_strangers(source: Source, tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """A copy without tokens that no file gives an id and the model has no row for.

    transformers adds the special tokens that a class has by default, such as ``<mask>``.
    """
    given = source.read_json("tokenizer_config.json").get("added_tokens_decoder") or {}
    numbered = {*map(int, given), *source.read_json("added_tokens.json").values()}
    path = source.path / TOKENIZER
    if path.is_file():
        numbered |= set(Tokenizer.from_file(str(path)).get_added_tokens_decoder())
    strange = {
        index
        for index in tokenizer.get_added_tokens_decoder()
        if index >= vocab_size and index not in numbered
    }
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        each for each in content["added_tokens"] if each["id"] not in strange
    ]
    return Tokenizer.from_str(json.dumps(content))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers, which warns of what is compared here anyway."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _convert(source: Source, sample: Sample) -> LoadedTokenizer:
    """Builds the tokenizer from the vocabulary files of an older checkpoint."""
    with _quiet():
        made = list(_conversions(source))
    files = sorted({path.name for name in VOCABULARY_FILES for path in source.path.glob(name)})
    if not files:
        expected = [name for each in made[:1] for name in each.vocab_files_names.values()]
        others = " and ".join(name for name in expected if name != TOKENIZER)
        missing = f"{TOKENIZER} is missing" + (f", and so is {others}" if others else "")
        raise ExportError(f"{source.name} has no tokenizer: {missing}")
    for each in made:
        tokenizer: Tokenizer | None = getattr(each, "backend_tokenizer", None)
        if tokenizer is not None and _is_whole(source, tokenizer, sample):
            return LoadedTokenizer(tokenizer, each, _TYPES in each.model_input_names)
    raise ExportError(
        f"{source.name} has no {TOKENIZER}, and transformers {transformers.__version__} cannot "
        f"convert {' and '.join(files)} exactly; write {TOKENIZER} with save_pretrained() of the "
        "tokenizer that the model was trained with"
    )


def _conversions(source: Source) -> Iterator[Any]:
    """The tokenizers that transformers makes: by the model's type, then by the files alone."""
    settings = _LOCAL | tokenizer_settings(source)
    makers = [(transformers.AutoTokenizer, settings)]
    named = source.read_json("tokenizer_config.json").get("tokenizer_class") or source.read_json(
        "config.json"
    ).get("tokenizer_class")
    plain = named is None or str(named).removesuffix("Fast") in _WORDPIECE
    if (source.path / _VOCABULARY).is_file() and plain and source.family == "masked":
        makers.append((transformers.BertTokenizer, settings))
    if (source.path / "tokenizer.model").is_file():
        begins = source.read_json("tokenizer_config.json").get("add_bos_token", True)
        makers.append((transformers.LlamaTokenizer, settings | {"add_bos_token": begins}))
    for maker, options in makers:
        try:
            made = maker.from_pretrained(source.path, **options)
        except Exception:  # transformers raises many types for missing files
            continue
        yield made


def _is_whole(source: Source, tokenizer: Tokenizer, sample: Sample) -> bool:
    """Whether a converted tokenizer has the vocabulary of the files, and splits texts alike."""
    path = source.path / _VOCABULARY
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        found = sum(vocabulary.get(line) == index for index, line in enumerate(lines))
        if found < _MIN_ALIKE * len(lines):
            return False
    for path in source.path.glob("*.model"):
        try:
            original = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError):  # another format of the same name
            continue
        # Some tokenizers lower-case and strip accents before
        texts = [text for line in sample.sentences() if (text := line.lower()).isascii()]
        alike = [
            original.encode(text, out_type=str)
            == tokenizer.encode(text, add_special_tokens=False).tokens
            for text in texts
        ]
        if texts and sum(alike) < _MIN_ALIKE * len(texts):
            return False
    return tokenizer.get_vocab_size(with_added_tokens=False) > 0
