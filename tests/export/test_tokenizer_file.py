"""tokenizer.json against transformers' classes: the file rules, under settings that are stated.

The reference for a file alone is the tokenizers library; for a stated setting, transformers' class
on the file that it writes itself.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from rich.console import Console
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from maskdial.bundle.manifest import SpecialTokens
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checkpoint.source import Source
from maskdial_export.checkpoint.tokenization import LoadedTokenizer, load_tokenizer
from maskdial_export.checkpoint.vocabulary import SETTINGS
from maskdial_export.checks.probes import probes
from maskdial_export.checks.tokenizer_parity import check_tokenizer, show_overruled

SAMPLE = read_sample(None)
SPECIAL = [
    *("<unk>", "<pad>", "<s>", "</s>", "<mask>", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"),
    *("<|endoftext|>", "<|padding|>", "<cls>", "<sep>", "<eop>"),
    *("eng_Latn", "deu_Latn", "en_XX", "de_DE"),
]
TEXTS = [text for text in probes(["[MASK]"], [], SAMPLE.sentences()) if len(text) < 1000]
LETTERS = sorted({each for text in TEXTS for each in text if each.isprintable() and each != " "})
Normalizer = normalizers.Normalizer | None
PreTokenizer = pre_tokenizers.PreTokenizer


def word_piece(normalizer: Normalizer) -> tokenizers.Tokenizer:
    pieces = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return framed(made, "[CLS]", "[SEP]")


@cache
def merges() -> str:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\p{N}+| *\p{L}+| +"), "isolated")
    trained.normalizer = normalizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*SAMPLE.sentences(), *["x =  1 + 2023", " 202 2023 2024 12345  if", "== 10"] * 40]
    trained.train_from_iterator(texts, trainer)
    return trained.to_str()


def byte_level(split: PreTokenizer, normalizer: Normalizer = None) -> tokenizers.Tokenizer:
    content = json.loads(merges()) | {"normalizer": None, "pre_tokenizer": None}
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.pre_tokenizer = split
    made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    return framed(made, "<s>", "</s>")


def unigram(split: PreTokenizer, normalizer: Normalizer = None) -> tokenizers.Tokenizer:
    pieces = [(token, 0.0) for token in SPECIAL] + [("▁", -2.0)]
    pieces += [(mark + letter, -3.0 - len(mark)) for letter in LETTERS for mark in ("", "▁")]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = split
    made.normalizer = normalizer
    made.decoder = decoders.Metaspace()
    return framed(made, "[CLS]", "[SEP]")


def framed(made: tokenizers.Tokenizer, first: str, last: str) -> tokenizers.Tokenizer:
    """The tokenizer with special tokens around texts, of other types than classes give them."""
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    ids = [(token, made.token_to_id(token)) for token in (first, last)]
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last} {last}",
        pair=f"{first} $A {last} $B:0 {last}",
        special_tokens=ids,
    )
    return made


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
THREES = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
)
SPACED = pre_tokenizers.Metaspace(prepend_scheme="first")
KINDS: dict[str, dict[str, Callable[[], tokenizers.Tokenizer]]] = {
    "wordpiece": {
        "cased": lambda: word_piece(normalizers.BertNormalizer(lowercase=False)),
        "uncased": lambda: word_piece(normalizers.BertNormalizer()),
        "accents": lambda: word_piece(normalizers.BertNormalizer(strip_accents=False)),
        "nfc": lambda: word_piece(normalizers.NFC()),
        "plain": lambda: word_piece(None),
    },
    "byte-level": {
        "plain": lambda: byte_level(BYTES),
        "prefix": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "digits": lambda: byte_level(DIGITS),
        "threes": lambda: byte_level(THREES),
        "nfc": lambda: byte_level(BYTES, normalizers.NFC()),
        "lower": lambda: byte_level(BYTES, normalizers.Lowercase()),
    },
    "unigram": {
        "plain": lambda: unigram(SPACED),
        "nfkc": lambda: unigram(SPACED, normalizers.NFKC()),
        "words": lambda: unigram(
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), SPACED]),
            normalizers.Sequence([normalizers.Nmt(), normalizers.Lowercase()]),
        ),
    },
}
CLASSES = {
    "wordpiece": (
        *(("bert", None), ("bert", "BertTokenizer"), ("bert", "BertTokenizerFast")),
        *(("distilbert", "DistilBertTokenizer"), ("distilbert", None), ("electra", None)),
        *(("electra", "ElectraTokenizer"), ("nomic_bert", "BertTokenizer"), ("nomic_bert", None)),
        *(("mpnet", None), ("mpnet", "MPNetTokenizer"), ("funnel", None), ("splinter", None)),
    ),
    "byte-level": (
        *(("roberta", None), ("roberta", "RobertaTokenizer"), ("bart", None), ("gpt2", None)),
        *(("bart", "BartTokenizer"), ("llama", "GPT2Tokenizer"), ("starcoder2", "GPT2Tokenizer")),
        *(("qwen3", None), ("qwen3", "Qwen2Tokenizer"), ("qwen2", "Qwen2Tokenizer")),
        *(("llama", "LlamaTokenizerFast"), ("llama", "PreTrainedTokenizerFast")),
        *(("phi", "CodeGenTokenizer"), ("codegen", None), ("gpt_neox", None), ("deberta", None)),
        *(("gpt_neox", "GPTNeoXTokenizer"), ("cohere", None), ("qwen3_5_text", None)),
    ),
    "unigram": (
        *(("xlm-roberta", None), ("xlm-roberta", "XLMRobertaTokenizer"), ("deberta-v2", None)),
        *(("deberta-v2", "DebertaV2TokenizerFast"), ("albert", None), ("camembert", None)),
        *(("t5", None), ("xlnet", None), ("rembert", None), ("big_bird", None)),
    ),
}


def load(folder: Path, model_type: str, **settings: Any) -> LoadedTokenizer:
    """The tokenizer of a folder with a tokenizer.json, under settings of tokenizer_config.json."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    return load_tokenizer(Source("mine", folder, "BertModel", "embed"), size, SAMPLE)


def file_alone(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids(tokenizer: tokenizers.Tokenizer, framed: bool = True) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(TEXTS, add_special_tokens=framed)]


@pytest.mark.parametrize(
    ("model_type", "named", "kind", "file"),
    [
        (*each, kind, file)
        for kind, files in KINDS.items()
        for file in files
        for each in CLASSES[kind]
    ],
)
def test_the_file_rules(
    model_type: str, named: str | None, kind: str, file: str, tmp_path: Path
) -> None:
    """Token ids and types are the tokenizers library's, whatever the class's defaults are."""
    KINDS[kind][file]().save(str(tmp_path / "tokenizer.json"))
    settings = {} if named is None else {"tokenizer_class": named}
    loaded = load(tmp_path, model_type, **settings)
    alone = file_alone(tmp_path)
    assert ids(loaded.backend) == ids(alone)
    mine, theirs = (each.encode("A b", "Ç d") for each in (loaded.backend, alone))
    assert (mine.ids, mine.type_ids) == (theirs.ids, theirs.type_ids)
    assert loaded.backend.decode(mine.ids) == alone.decode(theirs.ids)
    assert loaded.original.backend_tokenizer.encode(TEXTS[0]).ids == alone.encode(TEXTS[0]).ids


def own_file(kind: Any, folder: Path) -> None:
    """The tokenizer.json that a class writes by its defaults."""
    if kind.model is models.Unigram:
        pieces = json.loads(unigram(SPACED).to_str())["model"]["vocab"]
        made = kind(vocab=[tuple(piece) for piece in pieces])
    elif kind.model is models.WordPiece:
        made = kind(vocab=word_piece(None).get_vocab(with_added_tokens=False))
    else:
        model = json.loads(merges())["model"]
        known = [*model["vocab"], *(letter for letter in ["▁", *LETTERS])]
        vocabulary = {token: index for index, token in enumerate(dict.fromkeys(known))}
        made = kind(vocab=vocabulary, merges=[tuple(pair) for pair in model["merges"]])
    made.backend_tokenizer.save(str(folder / "tokenizer.json"))


# Classes of transformers that have a setting and do not heed it
UNHEEDED = {
    ("DPRQuestionEncoderTokenizer", "do_lower_case"),
    ("XLNetTokenizer", "keep_accents"),
}
OTHER = "LayoutLM|LayoutXLM|MarkupLM|SeamlessM4T|Udop|Whisper"  # more than text
LANGUAGES = {"MBart50Tokenizer": "de_DE", "MBartTokenizer": "de_DE"}
# Settings that say what tokens are called, that are of calls or of the conversion to
# tokenizer.json, or of what a model writes
WITHOUT_EFFECT = {
    *("self", "args", "kwargs", "vocab", "merges", "vocab_file", "merges_file", "extra_ids"),
    *("unk_id", "offset", "mask_token_sent", "additional_special_tokens", "extra_special_tokens"),
    *("legacy", "remove_space", "wordpieces_prefix", "_spm_precompiled_charsmap", "tgt_lang"),
    *("errors", "clean_up_tokenization_spaces", "use_default_system_prompt", "model_max_length"),
    *("return_token_type_ids", "token_type_ids_pattern", "task", "entity_vocab"),
    *("max_entity_length", "max_mention_length"),
}


def classes() -> dict[str, Any]:
    """transformers' classes that build normalizer and splitting themselves."""
    names = {*TOKENIZER_MAPPING_NAMES.values(), "DistilBertTokenizer", "CodeGenTokenizer"}
    found = [tokenizer_class_from_name(name) for name in names if name is not None]
    return {
        kind.__name__: kind
        for kind in found
        if getattr(kind, "model", None) is not None and not re.match(OTHER, kind.__name__)
    }


def parameters(kind: type) -> set[str]:
    made = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)]
    return {name for each in made for name in inspect.signature(each).parameters}


def stated() -> Iterator[tuple[str, str, Any]]:
    for name, kind in sorted(classes().items()):
        for setting in sorted(SETTINGS & parameters(kind)):
            values: tuple[Any, ...] = (True, False)
            if setting == "src_lang":
                values = (LANGUAGES.get(name, "deu_Latn"),)
            elif setting == "strip_accents":
                values = (True, False, None)
            if (name, setting) not in UNHEEDED:
                yield from ((name, setting, value) for value in values)


@pytest.mark.parametrize(("name", "setting", "value"), list(stated()))
def test_a_stated_setting_is_what_its_class_makes_of_it(
    name: str, setting: str, value: Any, tmp_path: Path
) -> None:
    own_file(classes()[name], tmp_path)
    loaded = load(tmp_path, "bert", tokenizer_class=name, **{setting: value})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs).__name__ == name
    framed = setting in ("src_lang", "legacy_behaviour")
    expected = theirs(TEXTS, add_special_tokens=framed)["input_ids"]
    assert ids(loaded.backend, framed) == expected


def test_every_setting_of_a_class_is_known() -> None:
    """A new one of transformers either changes how texts are split, or has no effect on that."""
    given = {each for kind in classes().values() for each in parameters(kind)}
    others = {each for each in given - SETTINGS if not each.endswith("_token")}
    assert others == WITHOUT_EFFECT


def test_a_class_that_is_overruled_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = word_piece(None).get_vocab(with_added_tokens=False)
    made: Any = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=False)
    made.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    show_overruled(load(tmp_path, "bert"), SAMPLE, Console(width=200))
    assert (
        "tokenizer.json overrules defaults of transformers' BertTokenizer, which would read "
        "'The Quick Brown Fox jumps over the LAZY dog, doesn...' otherwise"
    ) in capsys.readouterr().out
    stated = load(tmp_path, "bert", do_lower_case=True)
    show_overruled(stated, SAMPLE, Console(width=200))
    assert "overrules" not in capsys.readouterr().out
    check_tokenizer("mine", stated, SpecialTokens(), SAMPLE, paired=True)
    assert stated.backend.encode("Hello").tokens[1] == "h"


def test_a_space_that_the_file_puts_before_each_text_goes_where_a_setting_says_so(
    tmp_path: Path,
) -> None:
    """Llama's older files prepend it in the normalizer, which no class of transformers does."""
    letters = {letter: index for index, letter in enumerate(["<unk>", "▁", *LETTERS])}
    made = tokenizers.Tokenizer(models.BPE(letters, [], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "LlamaTokenizer"}
    for adds in (None, True, False):
        loaded = load(tmp_path, "llama", **named, add_prefix_space=adds)
        tokens = loaded.backend.encode("ab c", add_special_tokens=False)
        assert (tokens.tokens[0] == "▁") == (adds is not False)
        assert loaded.backend.decode(tokens.ids) == "ab c"
