"""The wire schemas: a value out of range is refused with a sentence that has field and range."""

import json
import math
import re
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.sampling.params import CONTROLS, SamplingParams
from maskdial.dialects import ROUTES, systemone
from maskdial.dialects.anthropic import body as anthropic_schema
from maskdial.dialects.body import TaskBody, parse_body
from maskdial.dialects.cohere import chat as cohere_chat
from maskdial.dialects.cohere import embed as cohere_embed
from maskdial.dialects.kserve import generate as kserve_generate
from maskdial.dialects.kserve import infer as kserve_infer
from maskdial.dialects.kserve import predict as kserve_predict
from maskdial.dialects.kserve import repository
from maskdial.dialects.llamacpp import completion, infill
from maskdial.dialects.native import admin, seq2seq_bodies, tei, tokens
from maskdial.dialects.native.classify_bodies import ClassifyBody, ZeroShotClassifyBody
from maskdial.dialects.native.extract_bodies import ExtractBody
from maskdial.dialects.native.fill_mask_bodies import FillMaskBody, ScoreBody
from maskdial.dialects.native.generate_bodies import GenerateBody, GenerateParameters
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
    SparseEmbedBody,
)
from maskdial.dialects.ollama import changes as ollama_changes
from maskdial.dialects.ollama import chat as ollama_chat
from maskdial.dialects.ollama import embed as ollama_embed
from maskdial.dialects.ollama import generate as ollama_generate
from maskdial.dialects.ollama import models as ollama_models
from maskdial.dialects.openai import adapters as openai_adapters
from maskdial.dialects.openai import chat as openai_chat
from maskdial.dialects.openai import (
    completions,
    decisions,
    embeddings,
    fim,
    moderations,
    pooling,
    prefill,
    rerank,
    scores,
)
from maskdial.dialects.openai import tokens as openai_tokens
from maskdial.dialects.openai.responses import body as openai_responses_body
from maskdial.dialects.openai.responses import compact as responses_compact
from maskdial.dialects.openai.responses import stored as responses_stored
from maskdial.dialects.unmasking import UnmaskingFields
from maskdial.errors import ValidationError
from maskdial.http.route import TaskRoute
from maskdial.registry.choice import ModelChoice

PLAIN = GenerationDefaults()

# The least that each body holds
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    GenerateBody: {"inputs": "a"},
    seq2seq_bodies.SummarizeBody: {"inputs": "a"},
    seq2seq_bodies.TranslateBody: {"inputs": "a"},
    FillMaskBody: {"inputs": "a [MASK]"},
    infill.InfillBody: {"input_prefix": "a", "input_suffix": "b"},
    ClassifyBody: {"inputs": "a"},
    TokenClassifyBody: {"inputs": "a"},
    tei.PredictBody: {"inputs": "a"},
    tei.VertexBody: {"instances": [{}]},
    RedactBody: {"inputs": "a"},
    ExtractBody: {"inputs": "a", "parameters": {"schema": {"entities": ["b"]}}},
    QuestionAnsweringBody: {"inputs": {"question": "a", "context": "b"}},
    ZeroShotClassifyBody: {"inputs": "a", "parameters": {"candidate_labels": ["b"]}},
    EmbedBody: {"inputs": "a"},
    SparseEmbedBody: {"inputs": "a"},
    EmbedAllBody: {"inputs": "a"},
    HybridEmbedBody: {"inputs": "a"},
    ChunkEmbedBody: {"inputs": "a", "chunks": [[0, 1]]},
    SimilarityBody: {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    RerankBody: {"query": "a", "texts": ["b"]},
    ScoreBody: {"inputs": "a"},
    tokens.TokenizeBody: {"inputs": "a"},
    tokens.DetokenizeBody: {"ids": [1]},
    completions.CompletionsBody: {"prompt": "a"},
    openai_chat.ChatBody: {"messages": [{"role": "user", "content": "a"}]},
    prefill.PrefillBody: {"messages": [{"role": "user", "content": "a"}]},
    embeddings.EmbeddingsBody: {"input": "a"},
    openai_responses_body.ResponsesBody: {"input": "a"},
    responses_compact.CompactBody: {"input": "a"},
    openai_tokens.PromptBody: {"prompt": "a"},
    completion.TemplateBody: {"messages": [{"role": "user", "content": "a"}]},
    openai_tokens.ContentBody: {"content": "a"},
    fim.FimBody: {"prompt": "a"},
    completion.CompletionBody: {"prompt": "a"},
    openai_tokens.TokensBody: {"tokens": [1]},
    cohere_embed.CohereEmbedBody: {"texts": ["a"]},
    cohere_chat.CohereChatBody: {"messages": [{"role": "user", "content": "a"}]},
    rerank.RankBody: {"query": "a", "documents": ["b"]},
    moderations.ModerationsBody: {"input": "a"},
    pooling.PoolingBody: {"input": "a"},
    scores.ScoresBody: {"text_1": "a", "text_2": "b"},
    decisions.DecisionsBody: {
        "input": "a",
        "questions": [{"type": "predicate", "instructions": "b"}],
    },
    systemone.SystemOneBody: {"state": "a", "questions": {"b": {"type": "noul"}}},
    anthropic_schema.MessagesBody: {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
    },
    anthropic_schema.CountBody: {"messages": [{"role": "user", "content": "a"}]},
    ollama_chat.OllamaChatBody: {"messages": []},
    ollama_generate.OllamaGenerateBody: {"prompt": "a"},
    ollama_embed.EmbedBody: {"input": "a"},
    ollama_embed.EmbeddingsBody: {"prompt": "a"},
    ollama_models.ShowBody: {"model": "a"},
    ollama_changes.PullBody: {"model": "a"},
    kserve_infer.InferBody: {
        "inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": ["b"]}]
    },
    kserve_generate.GenerateTextBody: {"text_input": "a"},
    kserve_predict.PredictInstancesBody: {"instances": ["a"]},
}

# The bodies of routes that no model answers
MANAGEMENT: set[type[BaseModel]] = {
    ollama_changes.AnyBody,
    admin.LoadBody,
    responses_stored.CancelBody,
    admin.UnloadBody,
    openai_adapters.LoadAdapterBody,
    openai_adapters.UnloadAdapterBody,
    repository.RepositoryIndexBody,
    repository.RepositoryLoadBody,
    repository.RepositoryUnloadBody,
}


def generate(**fields: object) -> GenerateBody:
    return parse_body(GenerateBody, json.dumps({"inputs": "a"} | fields).encode())


def parameters(**given: object) -> GenerateParameters:
    parsed = generate(parameters=given).parameters
    assert parsed is not None
    return parsed


def refusal(body: bytes) -> str:
    with pytest.raises(ValidationError) as caught:
        parse_body(GenerateBody, body)
    return caught.value.message


def chat(*messages: object) -> bytes:
    return json.dumps({"messages": list(messages)}).encode()


RANGES: list[tuple[str, list[Any], list[tuple[Any, str]]]] = [
    ("stream_unmasking", [True, False], [(1, "valid boolean")]),
    ("max_new_tokens", [1, 4096], [(0, "at least 1, not 0"), (2**31, "between 1 and 2147483647")]),
    ("min_new_tokens", [0, 9], [(-1, "at least 0"), (1.5, "valid integer")]),
    ("do_sample", [True, False], [(1, "valid boolean"), ("true", "valid boolean")]),
    ("temperature", [0, 0.7, 100], [(-0.1, "between 0 and 100, not -0.1"), (100.5, "not 100.5")]),
    ("top_k", [0, 50], [(-1, "at least 0"), (True, "valid integer"), (10**400, "not 1000")]),
    ("top_p", [0, 1, 1.0], [(1.01, "between 0 and 1"), ("1", "valid number")]),
    ("min_p", [0, 1], [(-0.01, "between 0 and 1"), (True, "valid number")]),
    ("typical_p", [0.001, 1], [(0, "above 0 and at most 1, not 0"), (1.1, "at most 1, not 1.1")]),
    ("repetition_penalty", [0.01, 100], [(0, "between 0.01 and 100"), (101, "0.01 and 100")]),
    ("frequency_penalty", [-2, 2], [(-2.1, "between -2 and 2"), (2.1, "between -2 and 2")]),
    ("presence_penalty", [-2, 2], [(-2.1, "between -2 and 2"), (2.1, "between -2 and 2")]),
    (
        "logit_bias",
        [
            {},
            {"0": -100, "2147483647": 100.0},
            {str(i): 1 for i in range(1024)},
            {"five": 1, "7": False},
            [[5, 1], ["five", False]],
            [],
        ],
        [
            ({"5": 100.1}, ".5: must be between -100 and 100, not 100.1"),
            ({"5": True}, ".5: Input should be a valid number"),
            ({"5": "no"}, ".5: "),
            ({"-1": 1}, "a key must be a token id, such as \"42\", or a text, not '-1'"),
            ({"05": 1}, "a token id"),
            ({"1.5": 1}, "a token id"),
            ({"\u0665": 1}, "a token id"),
            ({"": 1}, "a token id"),
            ({"2147483648": 1}, "a token id"),
            ({"9" * 5000: 1}, "a token id"),
            ({"a" * 1025: 1}, "at most 1024 characters, not 1025"),
            ({str(i): 1 for i in range(1025)}, "at most 1024 token ids and texts, not 1025"),
            ([1], "item 0 must be a pair of a token id or a text, and its bias"),
            ([["a", 1], [True, 1]], "item 1 must begin with a token id or a text"),
            ([[5, 101]], ".5: must be between -100 and 100, not 101"),
            (1, "should be an object"),
        ],
    ),
    ("bad_words", [[], ["a b"] * 256], [([""], "[0]: must have between 1"), ("a", "valid array")]),
    ("dry_multiplier", [0, 0.8], [(-1, "between 0 and 100"), ("1", "valid number")]),
    ("dry_base", [1, 1.75], [(0.9, "between 1 and 100, not 0.9")]),
    ("dry_allowed_length", [0, 1000], [(-1, "between 0 and 1000"), (1.5, "valid integer")]),
    ("dry_penalty_last_n", [-1, 0, 64], [(-2, "at least -1")]),
    (
        "dry_sequence_breakers",
        [[], ["\n"] * 16],
        [
            (["a"] * 17, "at most 16 items, not 17"),
            (["x" * 41], "[0]: must have between 1 and 40 characters, not 41"),
            ('["a"]', "valid array"),
        ],
    ),
    ("top_n_sigma", [-1, 0, 1.5], [(-2, "between -1 and 100")]),
    ("xtc_probability", [0, 1], [(1.1, "between 0 and 1")]),
    ("xtc_threshold", [0, 1], [(-0.1, "between 0 and 1")]),
    ("dynatemp_range", [0, 2.5], [(-0.1, "between 0 and 100")]),
    ("dynatemp_exponent", [0, 1], [(-0.1, "between 0 and 100")]),
    ("mirostat", [0, 2], [(1, "Input should be 0 or 2"), ("2", "should be 0 or 2")]),
    ("mirostat_tau", [0, 5], [(-1, "between 0 and 100")]),
    ("mirostat_eta", [0, 0.1], [(1.5, "between 0 and 1, not 1.5")]),
    ("seed", [0, 2**63 - 1], [(2**63, "between 0 and 9223372036854775807, not 9223"), (-1, "0")]),
    (
        "stop",
        [[], ["x" * 1024] * 64],
        [
            ("end", "valid array"),
            ([1], "[0]: Input should be a valid string"),
            (["x"] * 65, "at most 64 items, not 65"),
            (["", "x" * 1025], "[1]: must have at most 1024 characters, not 1025"),
        ],
    ),
    (
        "stop_token_ids",
        [[], [0] * 256],
        [([-1], "[0]: must be at least 0"), ([0] * 257, "at most 256 items, not 257")],
    ),
    ("ignore_eos", [True], [(0, "valid boolean")]),
    ("return_full_text", [True], [("yes", "valid boolean")]),
    ("truncate", [1], [(0, "at least 1")]),
    ("details", [True], [(1, "valid boolean")]),
    ("decoder_input_details", [True], [(1, "valid boolean")]),
    ("top_n_tokens", [0, 20], [(-1, "between 0 and 20"), (21, "between 0 and 20, not 21")]),
    ("n", [1, 128], [(0, "between 1 and 128"), (129, "between 1 and 128")]),
    ("best_of", [1, 128], [(0, "between 1 and 128"), (129, "between 1 and 128")]),
    (
        "grammar",
        [
            {"type": "json"},
            {"type": "json", "value": {}},
            {"type": "json", "value": True},
            {"type": "json", "value": '{"type": "object"}'},
            {"type": "json_schema", "value": {"type": "object"}},
            {"type": "regex", "value": "a+"},
            {"type": "lark", "value": 'start: "a"'},
        ],
        [
            ("json", "should be an object"),
            ({"type": "xml", "value": ""}, ".type: Input should be 'json', 'json_schema'"),
            ({"type": "json", "value": [1]}, ".value: must be an object, a string, true or false"),
            ({"type": "json", "value": 1}, ".value: must be an object, a string, true or false"),
            ({"type": "regex"}, ".value: must be a string that holds a regex"),
            ({"type": "regex", "value": {}}, ".value: must be a string that holds a regex"),
            ({"type": "lark", "value": ""}, ".value: must be a string that holds a lark"),
            ({"type": "regex", "value": "a", "flags": "i"}, ".flags: unknown field"),
        ],
    ),
    ("no_repeat_ngram_size", [0, 1000], [(-1, "between 0 and 1000"), (1001, "not 1001")]),
    ("num_beams", [1, 8], [(0, "between 1 and 8"), (9, "between 1 and 8, not 9")]),
    ("length_penalty", [-100, 1.5], [(100.5, "between -100 and 100"), ("1", "valid number")]),
    ("early_stopping", [True, False, "never"], [("always", "must be true, false"), (1, '"never"')]),
    ("src_lang", ["en"], [("", "between 1 and 64 characters"), (1, "valid string")]),
    ("tgt_lang", ["deu_Latn"], [("x" * 65, "between 1 and 64 characters, not 65")]),
    ("watermark", [False], [(True, "should be False")]),
    ("block_length", [1, 4096], [(0, "at least 1")]),
    ("steps", [1], [(0, "at least 1")]),
    ("order", ["confidence", "topk_margin"], [("best", "Input should be")]),
    ("threshold", [0.1, 1], [(0, "above 0"), (1.1, "1")]),
]


@pytest.mark.parametrize(("name", "good", "bad"), RANGES, ids=[row[0] for row in RANGES])
def test_ranges_of_parameters(name: str, good: list[Any], bad: list[tuple[Any, str]]) -> None:
    for value in [None, *good]:
        parameters(**{name: value})
    for value, words in bad:
        content = json.dumps({"inputs": "a", "parameters": {name: value}}).encode()
        message = refusal(content)
        assert message.startswith(f"parameters.{name}")
        assert words in message


def test_every_parameter_has_its_row() -> None:
    assert set(GenerateParameters.model_fields) == {name for name, _, _ in RANGES}


def test_no_body_is_left_out() -> None:
    bodies = [route.body for route in ROUTES if isinstance(route, TaskRoute)]
    # Some routes take one of several.
    found = {body for each in bodies for body in (get_args(each) or (each,))}
    assert found == set(BODIES) | MANAGEMENT


@pytest.mark.parametrize("schema", BODIES)
def test_what_every_body_takes(schema: type[BaseModel]) -> None:
    least = BODIES[schema]
    common = {"timeout": 2, "model": "m", "mask": "full"}
    body = parse_body(schema, json.dumps(least | common).encode())
    assert isinstance(body, TaskBody)
    assert body.timeout == 2.0
    assert body.choice() == ModelChoice("m", "full")
    assert body.choice("in/path") == ModelChoice("in/path", "full")
    for timeout in ("0", "-1", "86400.5", "1e999"):
        content = json.dumps(least)[:-1] + f', "timeout": {timeout}}}'
        with pytest.raises(ValidationError, match=r"^timeout: .*(between 0.001 and 86400|finite)"):
            parse_body(schema, content.encode())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", "inputs: give a prompt as inputs, or a conversation as messages"),
        (b'{"inputs": null, "messages": null}', "inputs: give a prompt"),
        (b'{"inputs": ""}', "inputs: must not be empty"),
        (b'{"inputs": "a", "messages": [{"role": "user", "content": "b"}]}', "not both"),
        (b'{"inputs": "a", "priority": 101}', "priority: must be between -100 and 100"),
        (b'{"inputs": "a", "priority": -101}', "priority: must be between -100 and 100"),
        (b'{"inputs": "a", "cache_salt": ""}', "cache_salt: must have between 1 and 256"),
        (b'{"inputs": "a", "cache_salt": "%s"}' % (b"x" * 257), "between 1 and 256"),
        (b'{"inputs": "a", "stream": 1}', "stream: Input should be a valid boolean"),
        (b'{"inputs": "a", "%s": 1}' % (b"x" * 999), "x" * 64 + "...: unknown field"),
        (b'{"inputs": "a", "": 1}', '"": unknown field'),
        (b'{"inputs": "a", "a\\nb": 1}', '"a\\nb": unknown field'),
        (chat(), "messages: must have between 1 and 10000 messages, not 0"),
        (chat(*[{"role": "user", "content": "a"}] * 10_001), "at most 10000 items, not 10001"),
        (chat({"role": "", "content": "a"}), "messages[0].role: must have between 1 and 64"),
        (chat({"role": "user"}), "messages[0].content: this field is required"),
        (chat({"role": "user", "content": None}), "messages[0].content: this field is required"),
        (chat({"role": "user", "content": []}), "messages[0].content: must be a string or"),
        (chat({"role": "user", "content": ["a"]}), "messages[0].content: part 0 must be"),
        (
            chat({"role": "user", "content": [{"type": "image_url", "text": "a"}]}),
            "messages[0].content: part 0 is an image, and no model here reads images",
        ),
        (
            chat({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "b"}),
            "messages[1].name: unknown field",
        ),
        (chat("a"), "messages[0]: "),
    ],
)
def test_a_bad_body_is_a_sentence(body: bytes, words: str) -> None:
    assert words in refusal(body)


def test_one_prompt_several_and_a_conversation() -> None:
    one = generate(inputs="a")
    assert (one.request(PLAIN).prompts, one.batch, one.request(PLAIN).conversation) == (
        ["a"],
        False,
        None,
    )
    several = generate(inputs=["a", "b"]).request(PLAIN)
    assert (several.prompts, several.conversation) == (["a", "b"], None)
    assert generate(inputs=["a"]).batch
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    body = parse_body(
        GenerateBody, chat({"role": "system", "content": ""}, {"role": "user", "content": parts})
    )
    assert (body.request(PLAIN).prompts, body.batch) == ([], False)
    conversation = body.request(PLAIN).conversation
    assert conversation is not None
    assert conversation.messages == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "b\nc"},
    ]


def test_related_parameters_agree() -> None:
    assert parameters(n=2, best_of=2).num_sequences == 2
    assert (parameters(best_of=3).num_sequences, parameters().num_sequences) == (3, 1)
    with pytest.raises(ValidationError, match=r"parameters.best_of: must be at least n \(3\)"):
        parameters(n=3, best_of=2)
    with pytest.raises(
        ValidationError, match=r"min_new_tokens: must be at most max_new_tokens \(4\)"
    ):
        parameters(min_new_tokens=5, max_new_tokens=4)


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_a_parameter_of_sampling_turns_it_on(name: str) -> None:
    value = 2 if name == "mirostat" else 1
    assert parameters(**{name: value}).sampling(PLAIN).do_sample
    assert not parameters(**{name: value}, do_sample=False).sampling(PLAIN).do_sample
    assert not parameters(repetition_penalty=2, seed=1).sampling(PLAIN).do_sample


def test_what_the_engine_is_given() -> None:
    given = parameters(stop=["", "end"], logit_bias={"7": -1, "3": 0.5}).sampling(PLAIN)
    assert given.stop == ("end",)
    assert given.logit_bias == ((7, -1.0), (3, 0.5))
    assert parameters().sampling(PLAIN) == SamplingParams()
    given = parameters(logit_bias=[["a b", False], [7, 2]], bad_words=["c"]).sampling(PLAIN)
    assert (given.logit_bias, given.text_bias) == (((7, 2.0),), (("a b", -math.inf),))
    assert given.bad_words == ("c",)


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**400, -(10**400), 2**31, 2**63, 2**64]),
    st.floats(),
    st.booleans(),
)
JSON = st.recursive(
    st.none() | NUMBERS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": JSON, "content": JSON | st.just([{"type": "text", "text": "a"}])}
)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={name: JSON | st.sampled_from(good) for name, good, _ in RANGES}
    | {"logit_bias": st.dictionaries(st.text("0123456789-.", max_size=4), NUMBERS)},
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "inputs": JSON | st.just("a"),
        "messages": st.lists(MESSAGE, max_size=2) | JSON,
        "parameters": PARAMETERS | JSON,
        "timeout": JSON,
        "priority": JSON,
        "cache_salt": JSON,
        "stream": JSON,
        "model": JSON,
    },
)


def parse(schema: type[BaseModel], body: object) -> BaseModel | ValidationError:
    try:
        return parse_body(schema, json.dumps(body).encode())
    except ValidationError as error:
        return error


@settings(max_examples=300)
@given(body=BODY | JSON, schema=st.sampled_from(list(BODIES)))
def test_any_json_is_a_body_or_a_refusal_that_names_the_field(
    body: Any, schema: type[BaseModel]
) -> None:
    result = parse(schema, body)
    if isinstance(result, ValidationError):
        keys = body if isinstance(body, dict) else ()
        names = (*schema.model_fields, *keys, *(json.dumps(key)[:64] for key in keys))
        whole = () if isinstance(body, dict) else ("the body must be a JSON object",)
        assert result.message.startswith(tuple(name for name in (*names, *whole) if name))
        assert len(result.message) < 500
    elif isinstance(result, GenerateBody):
        parameters = result.parameters or GenerateParameters()
        if not parameters.given(*UnmaskingFields.model_fields):  # those ask for another mask
            request = result.request(PLAIN)
            assert bool(request.prompts) != bool(request.conversation)


@settings(max_examples=100)
@given(content=st.binary(max_size=40))
@example(content=b'{"":0}')
def test_any_bytes_are_refused_in_a_sentence(content: bytes) -> None:
    """Which names the body, or the field, in quotes if it is no word.

    Hypothesis knows the strings of the sources, and finds bodies that have all they need.
    """
    reason = ""
    try:
        parse_body(GenerateBody, content)
    except ValidationError as error:
        reason = error.message
    if reason:
        assert re.match(r"the body|\w|\".*\":", reason)
    else:
        assert json.loads(content).keys() & {"inputs", "messages"}
