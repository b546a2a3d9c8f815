"""`/question-answering` against the algorithm of transformers' pipeline, on the same weights.

The pipeline left transformers after 5.2. The reference here does what it did, span by span in
float64, with transformers' own tokenizers, windows and models.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from maskdial_export.export import export

TOLERANCE = 1e-4
LONG = " ".join(
    f"In {year} the old king of the {place} hills, Anna's father, counted {year - 1000} sheep."
    for year in range(1801, 1813)
    for place in ("northern", "Southern", "éastern")
)
CONTEXTS = {
    "plain": "My name is Clara and I live in Berkeley. Clara likes tea.",
    "accents": "Zoë's café in São Paulo sells cre\u0300me bru\u0302le\u0301e and jalapeño à gogo.",
    "emoji": "She said 👩🏽‍🚀🚀 to Mars 🇧🇷🇧🇷 and waved 👋, then 😀😀 left.",
    "right-to-left": "אבא גר בירושלים ואמא גרה בחיפה. يعيش الولد في القاهرة منذ عام.",
    "spaces": "  The  answer \t is\n\n\n forty   two .\r\n   It was  known.\n",
    "long-word": "before " + "supercalifragilistic" * 6 + " after that",
    "one-word": "x",
    "repeated": "the cat, The Cat, THE CAT and the cat",
    "special": "a [SEP] token and </s> marks <s> in [CLS] text",
    "windows": LONG,
}
QUESTION = "Who counts the sheep, and where?"
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "several": {"top_k": 7},
    "tokens": {"top_k": 5, "align_to_words": False},
    "one-token": {"align_to_words": False, "max_answer_len": 1},
    "long-answers": {"top_k": 3, "max_answer_len": 200},
    "impossible": {"top_k": 30, "handle_impossible_answer": True, "max_answer_len": 3},
    "small-windows": {"top_k": 4, "max_seq_len": 64, "doc_stride": 9},
    "no-stride": {"top_k": 4, "max_seq_len": 70, "doc_stride": 0, "handle_impossible_answer": True},
}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 130,
    "initializer_range": 0.35,
}


# The pieces are listed, not trained: the WordPiece and Unigram trainers number theirs anew in
# every process, and the answers of random weights with them.
def pieces(normalizer: normalizers.Normalizer) -> tuple[list[str], list[str]]:
    """The letters of the texts, and the words that occur more than once."""
    texts = [normalizer.normalize_str(text) for text in (*CONTEXTS.values(), QUESTION)]
    words = Counter(re.findall(r"\w+", " ".join(texts)))
    letters = {letter for text in texts for letter in text if not letter.isspace()}
    return sorted(letters), sorted(word for word, n in words.items() if n > 1 and len(word) > 1)


def word_piece() -> Tokenizer:
    normalizer = normalizers.BertNormalizer()
    letters, words = pieces(normalizer)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *words]
    vocabulary += [f"##{letter}" for letter in letters]
    tokenizer = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(vocabulary[:5])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def byte_level() -> Tokenizer:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CONTEXTS.values(), QUESTION], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return tokenizer


def unigram() -> Tokenizer:
    normalizer = normalizers.NFKC()
    letters, words = pieces(normalizer)
    vocabulary = [(special, 0.0) for special in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")]
    vocabulary += [("\u2581", -3.0)]
    vocabulary += [(letter, -6.0) for letter in letters if letter != "\u2581"]
    vocabulary += [(f"\u2581{word}", -5.0 - len(word) / 8) for word in words]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([special for special, _ in vocabulary[:5]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer


ROBERTA = SHAPE | {"pad_token_id": 1, "type_vocab_size": 1}
# name -> (class, tokenizer, configuration, tokens that fit)
CHECKPOINTS: dict[str, tuple[str, Callable[[], Tokenizer], dict[str, Any], int]] = {
    "bert": ("BertForQuestionAnswering", word_piece, SHAPE | {"pad_token_id": 0}, 130),
    "roberta": ("RobertaForQuestionAnswering", byte_level, ROBERTA, 128),
    "xlm-roberta": ("XLMRobertaForQuestionAnswering", unigram, ROBERTA, 128),
}


def make_checkpoint(name: str, folder: Path) -> Path:
    """Saves a checkpoint with weights so large that answers and scores vary."""
    architecture, make_tokenizer, settings, max_length = CHECKPOINTS[name]
    backend = make_tokenizer()
    model_class = getattr(transformers, architecture)
    torch.manual_seed(5)
    model = model_class(model_class.config_class(vocab_size=backend.get_vocab_size(), **settings))
    model.save_pretrained(folder)
    brackets = make_tokenizer is word_piece
    named = (
        {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        if brackets
        else {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        # As BERT's own tokenizer: it tells the model which part is the question.
        model_input_names=[
            "input_ids",
            "attention_mask",
            *(["token_type_ids"] if brackets else []),
        ],
        **{f"{role}_token": token for role, token in named.items()},
    ).save_pretrained(folder)
    return folder


def softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(exponents / exponents.sum())


class Reference:
    """A checkpoint in transformers, with the algorithm of its former pipeline."""

    def __init__(self, folder: Path) -> None:
        architecture = CHECKPOINTS[folder.name][0]
        self.model = getattr(transformers, architecture).from_pretrained(folder).eval()
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.takes_types = getattr(self.model.config, "type_vocab_size", 0) > 1

    def answers(
        self,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        doc_stride: int | None = None,
        max_answer_len: int = 15,
        max_seq_len: int | None = None,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
    ) -> list[dict[str, Any]]:
        max_seq_len = max_seq_len or min(self.tokenizer.model_max_length, 384)
        windows = self.tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=max_seq_len,
            stride=min(max_seq_len // 2, 128) if doc_stride is None else doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        wanted = 2 * top_k + 10 if align_to_words else top_k
        answers: list[dict[str, Any]] = []
        null_score = 1e6
        for index in range(len(windows["input_ids"])):
            encoding = windows[index]
            start, end = self._logits(windows, index)
            tokens = [i for i, which in enumerate(windows.sequence_ids(index)) if which == 1]
            start, end = softmax(start[[0, *tokens]]), softmax(end[[0, *tokens]])
            null_score = min(null_score, start[0] * end[0])
            spans = []
            for (s, first), (e, last) in product(enumerate(tokens, 1), repeat=2):
                if s <= e < s + max_answer_len:
                    offsets = span_offsets(encoding, first, last, align_to_words)
                    spans.append((start[s] * end[e], *offsets))
            spans.sort(key=lambda span: span[0], reverse=True)
            with_text = [span for span in spans if span[1] < span[2]]
            best = [span for span in spans[:wanted] if span in with_text] or with_text[:1]
            for score, begin, stop in best:
                text = context[begin:stop]
                for answer in answers:
                    if answer["answer"].lower() == text.lower():
                        answer["score"] += score
                        break
                else:
                    answers.append({"answer": text, "score": score, "start": begin, "end": stop})
        if handle_impossible_answer:
            answers.append({"answer": "", "score": null_score, "start": 0, "end": 0})
        return sorted(answers, key=lambda answer: answer["score"], reverse=True)[:top_k]

    def _logits(self, windows: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
        names = ["input_ids", "attention_mask"] + ["token_type_ids"] * self.takes_types
        with torch.no_grad():
            output = self.model(**{name: torch.tensor([windows[name][index]]) for name in names})
        return output.start_logits[0].numpy(), output.end_logits[0].numpy()


def span_offsets(encoding: Any, first: int, last: int, align_to_words: bool) -> tuple[int, int]:
    words = encoding.token_to_word(first), encoding.token_to_word(last)
    if align_to_words and None not in words:
        begin, stop = (encoding.word_to_chars(word, sequence_index=1) for word in words)
        return begin[0], stop[1]
    return encoding.offsets[first][0], encoding.offsets[last][1]


class Served:
    """The bundles behind a server, and the checkpoints in transformers."""

    def __init__(self, url: str, checkpoints: Path) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)
        self.references = {name: Reference(checkpoints / name) for name in CHECKPOINTS}

    def reply(self, status: int = 200, **body: object) -> httpx.Response:
        reply = self.http.post("/question-answering", json=body)
        assert reply.status_code == status, reply.text
        return reply

    def post(self, status: int = 200, **body: object) -> Any:
        return self.reply(status, **body).json()


@pytest.fixture(scope="module")
def checkpoints(made_once: Callable[..., Path]) -> Path:
    def make(folder: Path) -> None:
        for name in CHECKPOINTS:
            make_checkpoint(name, folder / name)

    return made_once("question-answering-checkpoints", make)


@pytest.fixture(scope="module")
def bundles(checkpoints: Path, made_once: Callable[..., Path]) -> dict[str, Path]:
    def make(folder: Path) -> None:
        for name in CHECKPOINTS:
            export(str(checkpoints / name), folder / name)

    root = made_once("question-answering-bundles", make)
    return {name: root / name for name in CHECKPOINTS}


@pytest.fixture(scope="module")
def served(
    checkpoints: Path, bundles: dict[str, Path], start_server: Callable[..., Any]
) -> Iterator[Served]:
    """A server with all bundles and queues of 64 windows."""
    server = start_server(models=bundles, max_queue=64)
    served = Served(server.url, checkpoints)
    yield served
    served.http.close()
    server.stop()


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [answer["answer"] for answer in actual] == [answer["answer"] for answer in expected]
    for one, other in zip(actual, expected, strict=True):
        assert (one["start"], one["end"]) == (other["start"], other["end"])
        assert one["score"] == pytest.approx(other["score"], abs=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_answers_are_those_of_the_pipeline(served: Served, name: str, variant: str) -> None:
    parameters = VARIANTS[variant]
    questions = [{"question": QUESTION, "context": context} for context in CONTEXTS.values()]
    replies = served.post(model=name, inputs=questions, parameters=parameters)
    distinct = set()
    for context, reply in zip(CONTEXTS.values(), replies, strict=True):
        answers = [reply] if parameters.get("top_k", 1) == 1 else reply
        assert_same(answers, served.references[name].answers(QUESTION, context, **parameters))
        for answer in answers:
            assert answer["answer"] == context[answer["start"] : answer["end"]]
            distinct.add(answer["answer"])
    assert len(distinct) >= len(CONTEXTS) - 2


def test_inference_client(bundles: dict[str, Path], start_server: Callable[..., Any]) -> None:
    context = CONTEXTS["plain"]
    server = start_server(models={"bert": bundles["bert"]})  # the route means the only model
    for path in ("question-answering", "models/bert"):
        client = InferenceClient(model=f"{server.url}/{path}")
        best = client.question_answering(QUESTION, context)
        assert not isinstance(best, list)
        assert best.answer == context[best.start : best.end]
        several = client.question_answering(
            QUESTION,
            context,
            top_k=3,
            align_to_words=True,
            doc_stride=10,
            max_answer_len=4,
            max_question_len=40,
            max_seq_len=100,
            handle_impossible_answer=False,
        )
        assert len(several) == 3
        assert several[0].score > several[1].score > several[2].score > 0
    server.stop()


def test_a_batch_is_answered_as_its_questions_alone(served: Served) -> None:
    questions = [
        {"question": f"{QUESTION} {i}", "context": c} for i, c in enumerate(CONTEXTS.values())
    ]
    parameters = {"top_k": 3, "max_seq_len": 60, "doc_stride": 3}
    body: dict[str, Any] = {"model": "roberta", "parameters": parameters}
    together = served.post(inputs=questions, **body)
    assert together == [served.post(inputs=question, **body) for question in questions]
    assert together[0] == served.post(inputs=questions[:1], **body)[0]


def test_a_question_is_cut_where_the_request_says_so(served: Served) -> None:
    context = CONTEXTS["plain"]
    tokenizer = served.references["bert"].tokenizer
    ids = tokenizer(QUESTION, add_special_tokens=False, return_offsets_mapping=True)
    start = QUESTION[: ids["offset_mapping"][3][1]]
    assert len(tokenizer(start, add_special_tokens=False)["input_ids"]) == 4
    whole = served.reply(model="bert", inputs={"question": QUESTION, "context": context})
    assert "x-truncated-tokens" not in whole.headers
    reply = served.reply(
        model="bert",
        inputs={"question": QUESTION, "context": context},
        parameters={"max_question_len": 4},
    )
    assert reply.headers["x-truncated-tokens"] == str(len(ids["input_ids"]) - 4)
    assert reply.json() == served.post(model="bert", inputs={"question": start, "context": context})
    assert reply.json() != whole.json()


def test_windows_that_a_long_question_leaves_small_share_less(served: Served) -> None:
    # transformers' default stride, 65 tokens, would be more than the windows' 27
    question = " ".join(["known"] * 20)
    reply = served.reply(model="bert", inputs={"question": question, "context": LONG})
    answer = reply.json()
    assert answer["answer"] == LONG[answer["start"] : answer["end"]]
    assert int(reply.headers["x-compute-tokens"]) > 20 * 130


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_seq_len": 131}, "takes at most 130 tokens, not 131"),
        ({"max_seq_len": 12}, "leave no room for the context in windows of 12"),
        ({"max_seq_len": 60, "doc_stride": 60}, "doc_stride: 60 tokens are too many"),
        ({"max_seq_len": 40, "doc_stride": 17}, "windows; this request may have 64 more"),
        ({"top_k": 90_000}, "top_k: 90000 answers from each of"),
        ({"top_k": 0}, "parameters.top_k"),
        ({"max_answer_len": 0}, "parameters.max_answer_len"),
        ({"max_question_len": 0}, "parameters.max_question_len"),
        ({"topk": 1}, "parameters.topk: unknown field"),
    ],
)
def test_parameters_that_cannot_be(served: Served, parameters: dict[str, Any], words: str) -> None:
    inputs = {"question": QUESTION, "context": LONG}
    reply = served.post(422, model="bert", inputs=inputs, parameters=parameters)
    assert words in reply["error"]
    assert reply["error_type"] == "validation"
    reply = served.post(422, model="bert", inputs=[inputs], parameters=parameters)
    assert words in reply["error"]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("text", 'must be {"question": "...", "context": "..."}'),
        ({"question": "Who?"}, 'must be {"question": "...", "context": "..."}'),
        ({"question": "Who?", "context": 3}, "context must be a string"),
        ({"question": " \n", "context": "Me."}, "question must not be empty"),
        ({"question": "Who?", "context": ""}, "context must not be empty"),
        ({"question": "Who?", "context": "Me.", "id": 1}, "id: unknown field"),
        ({"question": "Who?", "context": "\u0007"}, "no text that could be an answer"),
    ],
)
def test_one_bad_question_is_named(served: Served, item: object, words: str) -> None:
    good = {"question": "Who?", "context": "Me."}
    error = served.post(422, model="bert", inputs=item)["error"]
    assert words in error
    assert "inputs[" not in error
    error = served.post(422, model="bert", inputs=[good, item])["error"]
    assert words in error
    assert "inputs[1]" in error


def test_nothing_asked(served: Served) -> None:
    error = served.post(422, model="bert", inputs=[])["error"]
    assert error == "inputs: must hold at least one question"
    error = served.post(422, inputs={"question": "Who?", "context": "Me."})["error"]
    assert "several models do question-answering" in error
