"""Tasks other than generation, on Client and AsyncClient: the bodies that are sent, and the results
that the replies become.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from maskdial.dialects.body import TaskBody, parse_body
from maskdial.dialects.llamacpp.infill import InfillBody
from maskdial.dialects.native import seq2seq_bodies, tokens
from maskdial.dialects.native.classify_bodies import ClassifyBody, ZeroShotClassifyBody
from maskdial.dialects.native.extract_bodies import ExtractBody
from maskdial.dialects.native.fill_mask_bodies import FillMaskBody, ScoreBody
from maskdial.dialects.native.span_bodies import (
    QuestionAnsweringBody,
    RedactBody,
    TokenClassifyBody,
)
from maskdial.dialects.native.vector_bodies import (
    ChunkEmbedBody,
    EmbedAllBody,
    EmbedBody,
    HybridEmbedBody,
    RerankBody,
    SimilarityBody,
)
from maskdial_client import (
    Answer,
    Classification,
    Entity,
    GapFill,
    HybridEmbedding,
    Infilled,
    JointFill,
    JointToken,
    LabelScore,
    NotFoundError,
    PromptToken,
    ProtocolError,
    RankedText,
    Redaction,
    Replacement,
    StoredVectors,
    TextScore,
    TextToken,
)

CUT = {"truncate": True, "truncation_direction": "left"}
COMMON = {"model": "m", "deadline": 2.5}
SENT_COMMON = {"model": "m", "timeout": 2.5}

SCORED = {
    "tokens": [{"id": 4, "text": "a", "logprob": None}, {"id": 5, "text": " b", "logprob": -1.5}],
    "log_likelihood": -1.5,
    "perplexity": 4.5,
    "method": "causal",
}
SCORE = TextScore((PromptToken(4, "a", None), PromptToken(5, " b", -1.5)), -1.5, 4.5, "causal")
PIECE = {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
TOKEN = TextToken(2, "[CLS]", True, None, None)
ANNA = {"entity_group": "PER", "score": 0.5, "word": "Anna", "start": 0, "end": 4}
ANSWER = {"answer": "Anna", "score": 0.5, "start": 0, "end": 4}
LABELS = [{"label": "news", "score": 0.75}, {"label": "sport", "score": 0.25}]
CLASSES = Classification((LabelScore("news", 0.75), LabelScore("sport", 0.25)))

Ask = Callable[[Any], Any]

# The call, the server's schema for its body, the body without COMMON.
EVERY_PARAMETER: dict[str, tuple[Ask, type[TaskBody], dict[str, Any]]] = {
    "/fill-mask": (
        lambda client: client.fill_mask("a [MASK]", top_k=2, targets=["b"], **CUT, **COMMON),
        FillMaskBody,
        {"inputs": "a [MASK]", "parameters": {"top_k": 2, "targets": ["b"], **CUT}},
    ),
    "/classify": (
        lambda client: client.classify(
            ("a", "b"), top_k=1, function_to_apply="none", **CUT, **COMMON
        ),
        ClassifyBody,
        {
            "inputs": {"text": "a", "text_pair": "b"},
            "parameters": {"top_k": 1, "function_to_apply": "none", **CUT},
        },
    ),
    "/token-classify": (
        lambda client: client.token_classify(
            "a", aggregation_strategy="max", ignore_labels=["O", "MISC"], stride=8, **COMMON
        ),
        TokenClassifyBody,
        {
            "inputs": "a",
            "parameters": {
                "aggregation_strategy": "max",
                "ignore_labels": ["O", "MISC"],
                "stride": 8,
            },
        },
    ),
    "/redact": (
        lambda client: client.redact(
            "a", labels=["PER"], threshold=0.5, replacement={"PER": "x"}, **COMMON
        ),
        RedactBody,
        {
            "inputs": "a",
            "parameters": {"labels": ["PER"], "threshold": 0.5, "replacement": {"PER": "x"}},
        },
    ),
    "/extract": (
        lambda client: client.extract(
            "a",
            {"entities": ["b"]},
            threshold=0.5,
            include_confidence=True,
            include_spans=False,
            **CUT,
            **COMMON,
        ),
        ExtractBody,
        {
            "inputs": "a",
            "parameters": {
                "schema": {"entities": ["b"]},
                "threshold": 0.5,
                "include_confidence": True,
                "include_spans": False,
                **CUT,
            },
        },
    ),
    "/question-answering": (
        lambda client: client.question_answering(
            ("Who?", "Anna sang."),
            top_k=2,
            doc_stride=16,
            max_answer_len=5,
            max_question_len=32,
            max_seq_len=64,
            handle_impossible_answer=True,
            align_to_words=False,
            **COMMON,
        ),
        QuestionAnsweringBody,
        {
            "inputs": {"question": "Who?", "context": "Anna sang."},
            "parameters": {
                "top_k": 2,
                "doc_stride": 16,
                "max_answer_len": 5,
                "max_question_len": 32,
                "max_seq_len": 64,
                "handle_impossible_answer": True,
                "align_to_words": False,
            },
        },
    ),
    "/zero-shot-classify": (
        lambda client: client.zero_shot_classify(
            "a",
            ["news", "sport"],
            multi_label=True,
            hypothesis_template="It is {}.",
            **CUT,
            **COMMON,
        ),
        ZeroShotClassifyBody,
        {
            "inputs": "a",
            "parameters": {
                "candidate_labels": ["news", "sport"],
                "multi_label": True,
                "hypothesis_template": "It is {}.",
                **CUT,
            },
        },
    ),
    "/embed": (
        lambda client: client.embed(
            "a",
            normalize=False,
            dimensions=2,
            output_dtype="binary",
            instruction="find it",
            task="retrieval.query",
            **CUT,
            **COMMON,
        ),
        EmbedBody,
        {
            "inputs": "a",
            "parameters": {
                "normalize": False,
                "dimensions": 2,
                "output_dtype": "binary",
                "instruction": "find it",
                "task": "retrieval.query",
                **CUT,
            },
        },
    ),
    "/embed-all": (
        lambda client: client.embed_all("a", prompt_name="query", **CUT, **COMMON),
        EmbedAllBody,
        {"inputs": "a", "parameters": {"prompt_name": "query", **CUT}},
    ),
    "/embed-hybrid": (
        lambda client: client.embed_hybrid("a", outputs=["dense", "sparse"], **CUT, **COMMON),
        HybridEmbedBody,
        {"inputs": "a", "parameters": {"outputs": ["dense", "sparse"], **CUT}},
    ),
    "/embed-chunks": (
        lambda client: client.embed_chunks(
            "a b", [(0, 1), (2, 3)], normalize=False, **CUT, **COMMON
        ),
        ChunkEmbedBody,
        {"inputs": "a b", "chunks": [[0, 1], [2, 3]], "normalize": False, **CUT},
    ),
    "/similarity": (
        lambda client: client.similarity("a", ["b", "c"], **CUT, **COMMON),
        SimilarityBody,
        {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}, "parameters": CUT},
    ),
    "/rerank": (
        lambda client: client.rerank(
            "q", ["b", "c"], raw_scores=True, return_text=False, instruction="i", **CUT, **COMMON
        ),
        RerankBody,
        {
            "query": "q",
            "texts": ["b", "c"],
            "raw_scores": True,
            "return_text": False,
            "instruction": "i",
            **CUT,
        },
    ),
    "/summarize": (
        lambda client: client.summarize("a", num_beams=2, truncate=True, **COMMON),
        seq2seq_bodies.SummarizeBody,
        {
            "inputs": "a",
            "parameters": {"truncation": "longest_first", "generate_parameters": {"num_beams": 2}},
        },
    ),
    "/translate": (
        lambda client: client.translate(
            "a", source="en", target="de", early_stopping="never", **COMMON
        ),
        seq2seq_bodies.TranslateBody,
        {
            "inputs": "a",
            "parameters": {"generate_parameters": {"early_stopping": "never"}}
            | {"src_lang": "en", "tgt_lang": "de"},
        },
    ),
    "/score": (
        lambda client: client.score("a", **CUT, **COMMON),
        ScoreBody,
        {"inputs": "a", "parameters": CUT},
    ),
    "/tokenize": (
        lambda client: client.tokenize("a", add_special_tokens=False, **COMMON),
        tokens.TokenizeBody,
        {"inputs": "a", "add_special_tokens": False},
    ),
    "/detokenize": (
        lambda client: client.detokenize([4, 5], skip_special_tokens=False, **COMMON),
        tokens.DetokenizeBody,
        {"ids": [4, 5], "skip_special_tokens": False},
    ),
}


@pytest.mark.parametrize("path", EVERY_PARAMETER)
def test_every_parameter_is_sent_as_the_server_expects_it(
    driver: Any, fake: Any, path: str
) -> None:
    ask, schema, body = EVERY_PARAMETER[path]
    fake.refuse(404, "not_found")
    with pytest.raises(NotFoundError):
        driver.wait(ask(driver.client(fake.url)))
    assert fake.paths == [path]
    assert fake.bodies == [body | SENT_COMMON]
    parse_body(schema, json.dumps(fake.bodies[0]).encode())


def test_redact_returns_texts_and_their_replacements(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    place = {"start": 0, "end": 4, "redacted_start": 0, "redacted_end": 5}
    entry = {"text": "[PER] sang.", "replacements": [{"label": "PER", "score": 0.5, **place}]}
    anna = Redaction("[PER] sang.", (Replacement("PER", 0.5, 0, 4, 0, 5),))
    fake.answer(entry)
    assert driver.wait(client.redact("Anna sang.")) == anna
    fake.answer([entry, {"text": "b", "replacements": []}])
    assert driver.wait(client.redact(["Anna sang.", "b"])) == [anna, Redaction("b", ())]


def test_extract_returns_what_the_schema_names(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    found = {"entities": {"b": ["Anna"]}, "trip": [{"to": None}]}
    fake.answer(found)
    assert driver.wait(client.extract("Anna sang.", {"entities": ["b"]})) == found
    fake.answer([found, {}])
    assert driver.wait(client.extract(["a", "b"], {"entities": ["b"]})) == [found, {}]


def test_token_classify_returns_entities_or_tokens(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    anna = Entity("PER", 0.5, "Anna", 0, 4)
    fake.answer([ANNA])
    assert driver.wait(client.token_classify("Anna sang.")) == (anna,)
    fake.answer([[ANNA, ANNA], []])
    assert driver.wait(client.token_classify(["Anna, Anna", "sang"])) == [(anna, anna), ()]
    token = {"entity": "B-PER", "score": 0.5, "index": 1, "word": "An", "start": 0, "end": 2}
    fake.answer([token])
    (first,) = driver.wait(client.token_classify("Anna", aggregation_strategy="none"))
    assert first == Entity("B-PER", 0.5, "An", 0, 2, index=1)
    assert [body["inputs"] for body in fake.bodies] == [
        "Anna sang.",
        ["Anna, Anna", "sang"],
        "Anna",
    ]


def test_question_answering_returns_one_answer_or_several(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    best = Answer("Anna", 0.5, 0, 4)
    fake.answer(ANSWER)
    result = driver.wait(client.question_answering(("Who?", "Anna sang.")))
    assert (result.answer, result.score, result.answers) == ("Anna", 0.5, (best,))
    second = {"answer": "", "score": 0.25, "start": 0, "end": 0}
    fake.answer([ANSWER, second])
    result = driver.wait(client.question_answering(("Who?", "Anna sang."), top_k=2))
    assert result.answers == (best, Answer("", 0.25, 0, 0))
    fake.answer([[ANSWER, second], ANSWER])
    several = driver.wait(client.question_answering([("Who?", "A."), ("What?", "B.")], top_k=2))
    assert [each.answers for each in several] == [result.answers, (best,)]
    assert fake.bodies[2]["inputs"] == [
        {"question": "Who?", "context": "A."},
        {"question": "What?", "context": "B."},
    ]


def test_zero_shot_classify_returns_labels_best_first(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    fake.answer(LABELS)
    result = driver.wait(client.zero_shot_classify("a", ["sport", "news"]))
    assert result == CLASSES
    assert result.label == "news"
    fake.answer([LABELS, LABELS])
    assert driver.wait(client.zero_shot_classify(["a", "b"], ["sport", "news"])) == [result] * 2
    assert fake.bodies[1] == {
        "inputs": ["a", "b"],
        "parameters": {"candidate_labels": ["sport", "news"]},
    }


def test_embed_returns_a_vector_per_text(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    fake.answer([[0.5, -1, 2e-3]])
    vector = driver.wait(client.embed("a"))
    assert vector == [0.5, -1.0, 0.002]
    assert all(type(number) is float for number in vector)
    fake.answer([[0.5, 1.0], [1.0, 0.5]])
    assert driver.wait(client.embed(["a", "b"])) == [[0.5, 1.0], [1.0, 0.5]]
    assert fake.bodies == [{"inputs": "a"}, {"inputs": ["a", "b"]}]


def test_embed_all_returns_a_vector_per_token(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    vectors: list[list[list[float]]] = [[[0.5, 1.0], [-1.0, 0.25]], [[1.0, 0.0]]]
    fake.answer(vectors)
    assert driver.wait(client.embed_all(["a b", "c"])) == vectors
    fake.answer(vectors[:1])
    assert driver.wait(client.embed_all("a b")) == vectors[0]


def test_embed_hybrid_and_embed_chunks(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    entry = {"dense": [1, 0.5], "sparse": [{"index": 3, "value": 0.25}], "multi_vector": [[1.0]]}
    whole = HybridEmbedding([1.0, 0.5], {3: 0.25}, [[1.0]])
    fake.answer(entry)
    assert driver.wait(client.embed_hybrid("a")) == whole
    fake.answer([entry, {"dense": [0.0]}])
    dense = HybridEmbedding([0.0], None, None)
    assert driver.wait(client.embed_hybrid(["a", "b"])) == [whole, dense]
    fake.answer([[1, 2], [3, 4]])
    chunks = [(0, 1), (2, 3)]
    assert driver.wait(client.embed_chunks("a b", chunks)) == [[1.0, 2.0], [3.0, 4.0]]


def test_stored_documents_are_ranked_by_their_vectors(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    stored: StoredVectors = {"documents": [[[1.0, 0.5]], [[0.0, 1.0]]], "dtype": "float"}
    fake.answer([{"index": 1, "score": 3.5}, {"index": 0, "score": 2.0}])
    ranking = driver.wait(client.rerank("q", vectors=stored, truncate=True))
    assert ranking == [RankedText(1, 3.5, None), RankedText(0, 2.0, None)]
    assert fake.bodies == [{"query": "q", "vectors": stored, "truncate": True}]
    assert RerankBody.model_validate(fake.bodies[0]).request()
    fake.answer([{"index": 0, "score": 2.0}])
    with pytest.raises(ProtocolError, match="1 results for 2 inputs"):
        driver.wait(client.rerank("q", vectors=stored))


def test_similarity_and_rerank_keep_the_order_of_the_reply(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    fake.answer([0.25, 1])
    assert driver.wait(client.similarity("a", ["b", "c"])) == [0.25, 1.0]
    fake.answer([{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}])
    ranking = driver.wait(client.rerank("q", ["b", "c"]))
    assert ranking == [RankedText(1, 0.9, None), RankedText(0, 0.1, None)]
    fake.answer([{"index": 0, "score": 0.9, "text": "b"}])
    (ranked,) = driver.wait(client.rerank("q", ["b"], return_text=True))
    assert ranked.text == "b"
    assert fake.bodies[1:] == [
        {"query": "q", "texts": ["b", "c"]},
        {"query": "q", "texts": ["b"], "return_text": True},
    ]


def test_score_returns_the_logprob_of_each_token(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    fake.answer([SCORED])
    assert driver.wait(client.score("a b")) == SCORE
    nothing = {"tokens": [], "log_likelihood": 0, "perplexity": None, "method": "pseudo"}
    fake.answer([SCORED, nothing])
    empty = TextScore((), 0.0, None, "pseudo")
    assert driver.wait(client.score(["a b", "a"])) == [SCORE, empty]


def test_summarize_and_translate_return_texts(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    fake.answer([{"summary_text": "a"}])
    assert driver.wait(client.summarize("a b")) == "a"
    fake.answer([{"translation_text": "c"}, {"translation_text": "d"}])
    assert driver.wait(client.translate(["a", "b"])) == ["c", "d"]
    assert fake.bodies == [{"inputs": "a b"}, {"inputs": ["a", "b"]}]


def test_tokenize_and_detokenize(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    fake.answer([[PIECE]])
    assert driver.wait(client.tokenize("a")) == (TOKEN,)
    piece = {"id": 4, "text": "a", "special": False, "start": 0, "stop": 1}
    fake.answer([[PIECE, piece], []])
    tokens = (TOKEN, TextToken(4, "a", False, 0, 1))
    assert driver.wait(client.tokenize(["a", "b"])) == [tokens, ()]
    fake.answer(["a b"])
    assert driver.wait(client.detokenize([4, 5])) == "a b"
    fake.answer(["a b", "a"])
    assert driver.wait(client.detokenize([[4, 5], [4]])) == ["a b", "a"]
    assert [body["ids"] for body in fake.bodies[2:]] == [[4, 5], [[4, 5], [4]]]


@pytest.mark.parametrize(
    ("content", "ask"),
    [
        ([ANNA, 3], lambda client: client.token_classify("a")),
        ([ANNA], lambda client: client.token_classify(["a"])),
        ({"a": [ANNA]}, lambda client: client.token_classify(["a"])),
        ([[]], lambda client: client.token_classify(["a", "b"])),
        ({"answer": "a"}, lambda client: client.question_answering(("q", "c"))),
        ([LABELS], lambda client: client.zero_shot_classify("a", ["b"])),
        ([0.5], lambda client: client.embed("a")),
        ([[0.5], [0.5]], lambda client: client.embed("a")),
        ([0.5], lambda client: client.similarity("a", ["b", "c"])),
        ({"index": 0, "score": 1.0}, lambda client: client.rerank("q", ["a"])),
        (SCORED, lambda client: client.score("a")),
        ({"summary_text": "a"}, lambda client: client.summarize("a")),
        ([{"summary_text": "a"}], lambda client: client.translate("a")),
        ([PIECE], lambda client: client.tokenize("a")),
        ("a", lambda client: client.detokenize([1])),
        ([["a"]], lambda client: client.detokenize([[1]])),
    ],
)
def test_an_unexpected_reply_is_a_protocol_error(
    driver: Any, fake: Any, content: Any, ask: Ask
) -> None:
    fake.answer(content)
    with pytest.raises(ProtocolError, match="is this a maskdial server"):
        driver.wait(ask(driver.client(fake.url)))


JOINT_TOKEN = {"mask": 0, "token": 7, "token_str": " sea", "score": 0.5, "step": 1}
FILLED = {"score": 0.25, "log_likelihood": -1.5, "tokens": [JOINT_TOKEN]}


def test_texts_filled_whole_and_gaps(driver: Any, fake: Any) -> None:
    client = driver.client(fake.url)
    token = JointToken(0, 7, " sea", 0.5, 1)
    filling = JointFill("a sea", 0.25, -1.5, (token,))
    fake.answer([{"sequence": "a sea", **FILLED}])
    words = [["sea"], None]
    parameters: dict[str, Any] = {"top_k": 1, "num_beams": 2, "order": [0, 1], "steps": 1}
    asked = client.fill_jointly("a [MASK]", targets=words, **parameters, **CUT, **COMMON)
    assert driver.wait(asked) == [filling]
    sent = {"targets": words, "joint": True, **parameters, **CUT}
    assert fake.bodies == [{"inputs": "a [MASK]", "parameters": sent} | SENT_COMMON]
    parse_body(FillMaskBody, json.dumps(fake.bodies[0]).encode())
    fake.answer([[{"sequence": "a sea", **FILLED}], []])
    assert driver.wait(client.fill_jointly(["a [MASK]", "b [MASK]"])) == [[filling], []]
    grammar: Any = [{"type": "regex", "value": "[a-z]+"}, None]
    fake.answer([{"sequence": "a sea", **FILLED}])
    driver.wait(client.fill_jointly("a [MASK]", grammar=grammar, max_new_tokens=3))
    sent = {"grammar": grammar, "max_new_tokens": 3, "joint": True}
    assert fake.bodies[-1] == {"inputs": "a [MASK]", "parameters": sent}
    parse_body(FillMaskBody, json.dumps(fake.bodies[-1]).encode())
    reply = {"content": " sea", "stop_type": "none", "truncated": False}
    fake.answer({**reply, "fillings": [{"content": " sea", **FILLED}]})
    gap = GapFill(" sea", 0.25, -1.5, (token,))
    given: dict[str, Any] = {"n_predict": 3, "input_extra": [{"text": "b"}], "n": 1}
    given["guided_regex"] = " [a-z]+"
    assert driver.wait(client.infill("a", ".", **given, **COMMON)) == Infilled(
        " sea", "none", False, (gap,)
    )
    sent = given
    body = {"input_prefix": "a", "input_suffix": ".", **sent} | SENT_COMMON
    assert fake.bodies[-1] == body
    parse_body(InfillBody, json.dumps(body).encode())
    fake.answer({**reply, "stop_type": "eos"})
    assert driver.wait(client.infill("a", ".")) == Infilled(" sea", "eos", False)
