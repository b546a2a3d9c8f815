"""`/token-classify` over HTTP against transformers' pipeline on the same weights."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import httpx
import huggingface_hub
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from maskdial import Model
from maskdial_export.export import export

LABELS = dict(enumerate(("O", "B-PER", "I-PER", "B-LOC", "I-LOC")))
Strategy = Literal["none", "simple", "first", "average", "max"]
STRATEGIES: tuple[Strategy, ...] = ("none", "simple", "first", "average", "max")
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "id2label": LABELS,
}
LONGEST = 64
TEXTS = [
    "Ada Lovelace met Charles Babbage in London, England.",
    "Élodie Müller a visité l'Île-de-Bréhat à Noël",
    "E\u0301lodie Mu\u0308ller, decomposed",
    "Été à Orléans",
    "😀 Ana 👩‍👩‍👧 went to 東京 and 서울 😀",
    "דנה גרה בתל אביב, שָׁלוֹם",
    "مرحبا أنا من القاهرة",
    "New  York   City\t has   spaces ",
    "\n Line one\nline two\r\n\nParis\n",
    "x" * 40 + " pneumonoultramicro",
    "Mr. O'Neil doesn't live at 5, Rue X. Do you? I'm not!",
    "[MASK] Ada [UNK] Babbage <s> Paris",
    ".",
    "\u200b",
]
WORDS = ["ada", "lovelace", "met", "charles", "babbage", "in", "london", "while", "paris", "ana"]


def word_piece() -> tokenizers.Tokenizer:
    """Words and letters, uncased, as BERT's."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,'?!-"
    pieces = [*WORDS[:6], *letters, *(f"##{letter}" for letter in letters), "##ov", "##ar"]
    vocab = {t: i for i, t in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.add_special_tokens(list(vocab)[:5])
    return backend


def byte_level() -> tokenizers.Tokenizer:
    """Bytes and a few merges, cased, as RoBERTa's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "n"), ("e", "r"), ("Ġ", "m"), ("a", "n"), ("Ġ", "Ġ"), ("o", "n")]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    vocab = {t: i for i, t in enumerate(("<s>", "<pad>", "</s>", "<unk>", "<mask>", *pieces))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    backend.add_special_tokens(list(vocab)[:5])
    return backend


def bert(longest: int, vocab_size: int) -> transformers.BertForTokenClassification:
    torch.manual_seed(1)
    settings = SHAPE | {"vocab_size": vocab_size, "max_position_embeddings": longest}
    return transformers.BertForTokenClassification(transformers.BertConfig(**settings))


def vary(model: transformers.PreTrainedModel) -> None:
    """Makes the weights large enough that predictions vary with the text."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def forget_context(model: transformers.BertForTokenClassification) -> None:
    """Makes a token's logits depend on the token alone."""
    embeddings = model.bert.embeddings
    silenced = [layer.attention.output.dense for layer in model.bert.encoder.layer]
    with torch.no_grad():
        for module in (embeddings.position_embeddings, embeddings.token_type_embeddings, *silenced):
            for parameter in module.parameters():
                parameter.zero_()


def balance(model: transformers.PreTrainedModel) -> None:
    """Makes every label the best one for some tokens."""
    with torch.no_grad():
        logits = model.eval()(torch.randint(5, model.config.vocab_size, (40, 30))).logits
        mean, deviation = logits.mean((0, 1)), logits.std((0, 1))
        model.classifier.weight.mul_(2 / deviation[:, None])
        model.classifier.bias.sub_(mean).mul_(2 / deviation)


class Checkpoint:
    """A checkpoint, its bundle, and transformers' pipeline."""

    def __init__(
        self,
        folder: Path,
        model: transformers.PreTrainedModel,
        backend: tokenizers.Tokenizer,
        longest: int,
    ) -> None:
        self.bundle = folder / "bundle"
        self.longest = longest
        self.backend = backend
        self.model = model.eval()
        source = folder / "checkpoint"
        model.save_pretrained(source)
        file = source / "tokenizer.json"
        backend.save(str(file))
        is_bert = backend.token_to_id("[UNK]") is not None
        unknown, padding = ("[UNK]", "[PAD]") if is_bert else ("<unk>", "<pad>")
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(file), unk_token=unknown, pad_token=padding, model_max_length=longest
        )
        self.pipeline = transformers.TokenClassificationPipeline(model=model, tokenizer=fast)
        self.source = source

    def export(self) -> "Checkpoint":
        export(str(self.source), self.bundle)
        return self


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("token-classify")
    pieces, bytes_ = word_piece(), byte_level()
    large = bert(1024, pieces.get_vocab_size())
    vary(large)
    forget_context(large)
    balance(large)
    small = bert(LONGEST, pieces.get_vocab_size())
    weights = {n: w for n, w in large.state_dict().items() if "position" not in n}
    small.load_state_dict(weights, strict=False)
    forget_context(small)
    settings = SHAPE | {"vocab_size": bytes_.get_vocab_size(), "pad_token_id": 1}
    settings |= {"bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": LONGEST * 2 + 2}
    roberta = transformers.RobertaForTokenClassification(transformers.RobertaConfig(**settings))
    vary(roberta)
    balance(roberta)
    return {
        "bert": Checkpoint(root / "bert", small, pieces, LONGEST).export(),
        "large": Checkpoint(root / "large", large, pieces, 1024),
        "roberta": Checkpoint(root / "roberta", roberta, bytes_, LONGEST * 2).export(),
    }


@pytest.fixture(scope="module")
def url(checkpoints: dict[str, Checkpoint], start_server: Callable[..., Any]) -> Iterator[str]:
    bundles = {name: checkpoints[name].bundle for name in ("bert", "roberta")}
    running = start_server(models=bundles)
    yield running.url
    running.stop()


@pytest.fixture(scope="module")
def narrow_url(
    checkpoints: dict[str, Checkpoint], start_server: Callable[..., Any]
) -> Iterator[str]:
    """A server with one model and a queue of 8 windows."""
    running = start_server(models={"names": checkpoints["bert"].bundle}, max_queue=8)
    yield running.url
    running.stop()


def ask(url: str, model: str, inputs: object, **parameters: object) -> Any:
    body = {"model": model, "inputs": inputs, "parameters": parameters}
    reply = httpx.post(f"{url}/token-classify", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(url: str, inputs: object, **parameters: object) -> str:
    body = {"inputs": inputs, "parameters": parameters}
    reply = httpx.post(f"{url}/token-classify", json=body, timeout=60)
    assert reply.status_code == 422, reply.text
    assert reply.json()["error_type"] == "validation"
    return str(reply.json()["error"])


def long_text(num_words: int) -> str:
    generator = np.random.default_rng(3)
    return " ".join(word.title() for word in generator.choice(WORDS, num_words))


def assert_alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Asserts that all fields are equal and scores are close."""
    assert [each | {"score": 0} for each in ours] == [each | {"score": 0} for each in theirs]
    np.testing.assert_allclose(
        [each["score"] for each in ours], [each["score"] for each in theirs], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("ignore_labels", [None, [], ["PER", "I-LOC"]])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_word_piece_equals_the_pipeline(
    strategy: str, ignore_labels: list[str] | None, checkpoints: dict[str, Checkpoint], url: str
) -> None:
    parameters: dict[str, Any] = {"aggregation_strategy": strategy}
    if ignore_labels is not None:
        parameters["ignore_labels"] = ignore_labels
    expected = [checkpoints["bert"].pipeline(text, **parameters) for text in TEXTS]
    answers = ask(url, "bert", TEXTS, **parameters)
    for ours, theirs in zip(answers, expected, strict=True):
        assert_alike(ours, theirs)
    key = "entity" if strategy == "none" else "entity_group"
    found = {each[key] for answer in answers for each in answer}
    assert len(found) >= 2
    assert [ask(url, "bert", text, **parameters) for text in TEXTS[:3]] == answers[:3]


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_byte_level_equals_the_pipeline(
    strategy: str, checkpoints: dict[str, Checkpoint], url: str
) -> None:
    parameters: dict[str, Any] = {"aggregation_strategy": strategy, "ignore_labels": []}
    answers = ask(url, "roberta", TEXTS, **parameters)
    for text, ours in zip(TEXTS, answers, strict=True):
        theirs = checkpoints["roberta"].pipeline(text, **parameters)
        for mine, other in zip(ours, theirs, strict=True):
            # What the pipeline decodes twice is no text any more.
            if "\ufffd" in other["word"]:
                other["word"] = mine["word"]
        assert_alike(ours, theirs)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_words_keep_the_accents_that_the_pipeline_loses(
    checkpoints: dict[str, Checkpoint], url: str
) -> None:
    parameters: dict[str, Any] = {"aggregation_strategy": "first", "ignore_labels": []}
    (theirs,) = checkpoints["roberta"].pipeline("Noël", **parameters)
    assert "\ufffd" in theirs["word"]
    assert_alike(ask(url, "roberta", "Noël", **parameters), [theirs | {"word": "Noël"}])


def test_default_strategy_merges(checkpoints: dict[str, Checkpoint], url: str) -> None:
    expected = checkpoints["bert"].pipeline(TEXTS[0], aggregation_strategy="simple")
    assert_alike(ask(url, "bert", TEXTS[0]), expected)
    assert expected


def test_in_process_the_entities_are_those_of_the_server(
    checkpoints: dict[str, Checkpoint], url: str
) -> None:
    texts = [TEXTS[0], long_text(90)]
    with Model(checkpoints["bert"].bundle) as model:
        merged = model.token_classify(texts)
        tokens = model.token_classify(
            texts, aggregation_strategy="none", ignore_labels=(), stride=5
        )
    assert [[asdict(each) for each in found] for found in merged] == ask(url, "bert", texts)
    assert [[asdict(each) for each in found] for found in tokens] == ask(
        url, "bert", texts, aggregation_strategy="none", ignore_labels=[], stride=5
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stride", [None, 0, 1, 31, 61])
def test_windows_say_what_one_pass_says(
    strategy: str, stride: int | None, checkpoints: dict[str, Checkpoint], url: str
) -> None:
    """If context has no effect, windows of 62 tokens and the whole text give the same result."""
    texts = [long_text(90), "Ada", long_text(7), "x" * 95 + " Ada"]
    parameters: dict[str, Any] = {"aggregation_strategy": strategy, "ignore_labels": []}
    answers = ask(url, "bert", texts, **parameters, stride=stride)
    for text, ours in zip(texts, answers, strict=True):
        assert_alike(ours, checkpoints["large"].pipeline(text, **parameters))
    if strategy not in ("none", "simple"):
        assert answers[-1][0]["end"] >= 95  # one word of two windows
        assert len({each["entity_group"] for each in answers[0]}) >= 2


def test_tokens_are_read_where_they_see_most(checkpoints: dict[str, Checkpoint], url: str) -> None:
    """Of several windows with a token, the one with most context around it decides."""
    checkpoint = checkpoints["roberta"]
    text = long_text(80)
    room, stride = 2 * LONGEST - 2, 40
    ids = checkpoint.backend.encode(text, add_special_tokens=False).ids
    most_context = np.full(len(ids), -1.0)
    scores = np.empty((len(ids), len(LABELS)))
    for start in range(0, len(ids) - stride, room - stride):
        piece = ids[start : start + room]
        with torch.no_grad():
            logits = checkpoint.model(torch.tensor([[0, *piece, 2]])).logits[0, 1:-1]
        for offset, token_scores in enumerate(logits.softmax(-1).numpy()):
            before = offset if start else np.inf
            after = len(piece) - 1 - offset if start + room < len(ids) else np.inf
            if min(before, after) > most_context[start + offset]:
                most_context[start + offset] = min(before, after)
                scores[start + offset] = token_scores
    answer = ask(url, "roberta", text, aggregation_strategy="none", ignore_labels=[], stride=stride)
    assert [each["entity"] for each in answer] == [LABELS[i] for i in scores.argmax(axis=1)]
    assert [each["index"] for each in answer] == list(range(1, len(ids) + 1))
    np.testing.assert_allclose([each["score"] for each in answer], scores.max(axis=1), atol=1e-4)
    assert len(ids) > 3 * room


def test_byte_level_offsets_hold_in_every_window(
    checkpoints: dict[str, Checkpoint], url: str
) -> None:
    """Post-processors trim the offsets of a text's first token, but not of a window's."""
    text = long_text(60)
    encoding = checkpoints["roberta"].backend.encode(text)
    for stride in (0, 40):
        answer = ask(
            url, "roberta", text, aggregation_strategy="none", ignore_labels=[], stride=stride
        )
        offsets = [(each["start"], each["end"]) for each in answer]
        assert offsets == encoding.offsets[1:-1]
        assert [each["word"] for each in answer] == encoding.tokens[1:-1]


@pytest.mark.parametrize("path", ["token-classify", "models/names"])
def test_inference_client(path: str, checkpoints: dict[str, Checkpoint], narrow_url: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{narrow_url}/{path}")
    text = "Ada Lovelace met Ana in London"
    for strategy in STRATEGIES[1:]:
        expected = checkpoints["large"].pipeline(text, aggregation_strategy=strategy)
        entities = client.token_classification(text, aggregation_strategy=strategy)
        assert [(each.entity_group, each.word, each.start, each.end) for each in entities] == [
            (each["entity_group"], each["word"], each["start"], each["end"]) for each in expected
        ]
    tokens = client.token_classification(
        text, aggregation_strategy="none", ignore_labels=["B-PER"], stride=3
    )
    theirs = checkpoints["large"].pipeline(text, ignore_labels=["B-PER"])
    assert [(each.entity, each.word) for each in tokens] == [
        (each["entity"], each["word"]) for each in theirs
    ]
    assert tokens


def test_a_text_without_tokens(url: str) -> None:
    assert ask(url, "bert", "\u200b") == []
    assert ask(url, "bert", ["\u200b", TEXTS[0]]) == [[], ask(url, "bert", TEXTS[0])]


def test_the_stride_is_less_than_the_window(narrow_url: str) -> None:
    for text in ("Ada", long_text(90)):
        assert refusal(narrow_url, text, stride=62) == (
            "parameters.stride: must be less than 62, the tokens of a text in one window of model "
            "'names' (64 with special tokens), not 62"
        )
    assert refusal(narrow_url, "Ada", stride=-1) == "parameters.stride: must be at least 0, not -1"


def test_the_windows_of_a_request_are_bounded(narrow_url: str) -> None:
    limit = "one request may have at most 8 windows"
    too_long = "a " * (8 * 62 + 1)
    alone = "the text has 497 tokens, which are 9 windows of 62 (stride 0); "
    assert refusal(narrow_url, too_long, stride=0) == alone + limit
    assert refusal(narrow_url, ["a", too_long], stride=0) == "inputs[1]: " + alone + limit
    together = ["a " * 63] * 5
    assert refusal(narrow_url, together, stride=0) == (
        f"inputs: 5 texts are 10 windows of 62 tokens (stride 0); {limit}"
    )
    assert len(ask(narrow_url, "names", "a " * 8 * 62, stride=0, ignore_labels=[])) > 0
    # As many windows as tokens, which must not be made before they are refused.
    assert "938 windows" in refusal(narrow_url, "a " * 999, stride=61)


def test_reply_headers_count_what_was_computed(url: str) -> None:
    body = {"model": "bert", "inputs": "a " * 124, "parameters": {"stride": 0}}
    reply = httpx.post(f"{url}/token-classify", json=body)
    assert reply.headers["x-compute-tokens"] == "128"
    assert "x-truncated-tokens" not in reply.headers
