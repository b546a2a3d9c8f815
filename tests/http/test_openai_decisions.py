"""`/v1/decisions` with the SDK, held against the native routes that know the same probabilities."""

import json
import math
import string
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
from openai.types import decision_create_params as params

from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.chat_bundles import make_chat_bundle

TEXT = "Once upon a time a little girl found a happy dog in the park."
CHOICE: dict[str, Any] = {
    "type": "choice",
    "name": "who",
    "instructions": "Who is in the park?",
    "choices": [{"value": "dog"}, {"value": "cat", "description": "a small animal"}],
}
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "The girl is sad."}
SCORE: dict[str, Any] = {
    "type": "score",
    "name": "mood",
    "instructions": "How happy is it?",
    "levels": [{"label": "not"}, {"label": "little"}, {"label": "very", "description": "all day"}],
}
LABELS: list[dict[str, Any]] = [
    {
        "type": "choice",
        "instructions": "Which?",
        "choices": [{"value": "Positive"}, {"value": "negative"}],
    },
    {"type": "predicate", "instructions": "positive."},
    {
        "type": "score",
        "instructions": "How good?",
        "levels": [{"label": "NEGATIVE"}, {"label": "POSITIVE"}],
    },
]
QUESTIONS = [CHOICE, PREDICATE, SCORE]
# Its prompt ends within what the manifest calls thoughts.
THINKER = """\
{{- bos_token }}
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{{- 'assistant:' }}
"""


@pytest.fixture(scope="module")
def url(
    start_server: Callable[..., Any],
    chat_bundle: Path,
    masked_starter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    models = {
        "chat": chat_bundle,
        "thinker": make_chat_bundle(
            tmp_path_factory.mktemp("thinker") / "bundle",
            THINKER,
            thinking_marks=("assistant:", "Done."),
        ),
        "hybrid": STARTER_FOLDER / "hybrid",
        "masked": masked_starter,
        "sentiment": STARTER_FOLDER / "sentiment",
    }
    server = start_server(models=models, max_queue=64)
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def nli_url(
    torch: ModuleType,
    start_server: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
    byte_tokenizer: Callable[..., Any],
) -> Iterator[str]:
    """A tiny NLI model with random weights."""
    import transformers

    from maskdial_export.export import export

    folder = tmp_path_factory.mktemp("nli")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=256,
        pad_token_id=0,
        id2label={0: "contradiction", 1: "neutral", 2: "entailment"},
    )
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    export(str(folder), folder / "bundle")
    server = start_server(models={"nli": folder / "bundle"})
    yield server.url
    server.stop()


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def decide(url: str, model: str, questions: list[dict[str, Any]], text: Any = TEXT) -> Any:
    return post(url, "/v1/decisions", {"model": model, "input": text, "questions": questions})


def probabilities(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"]]
    return [each["probability"] for each in answer["probabilities"]]


def softmax(values: list[float]) -> list[float]:
    exponents = [math.exp(value - max(values)) for value in values]
    return [each / sum(exponents) for each in exponents]


@pytest.mark.parametrize(
    ("model", "method"), [("hybrid", "likelihood"), ("chat", "letters"), ("masked", "mask")]
)
def test_the_sdk_gets_an_answer_of_each_kind(url: str, model: str, method: str) -> None:
    questions: Any = [CHOICE, PREDICATE, SCORE]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        reply = client.decisions.create(model=model, input=TEXT, questions=questions)
    choice, predicate, score = reply.answers
    assert choice.type == "choice"
    assert choice.name == "who"
    shares = [each.probability for each in choice.probabilities]
    assert sum(shares) == pytest.approx(1)
    assert [each.value for each in choice.probabilities] == ["dog", "cat"]
    assert choice.choice == ("dog" if shares[0] >= shares[1] else "cat")
    assert choice.confidence == pytest.approx(2 * max(shares) - 1)
    assert predicate.type == "predicate"
    assert predicate.name is None
    assert 0 < predicate.probability < 1
    assert score.type == "score"
    assert [(each.value, each.label) for each in score.probabilities] == [
        (0, "not"),
        (1, "little"),
        (2, "very"),
    ]
    shares = [each.probability for each in score.probabilities]
    assert score.score == pytest.approx(shares[1] + 2 * shares[2])
    assert score.confidence == pytest.approx((3 * max(shares) - 1) / 2)
    assert reply.model == model
    assert reply.to_dict()["method"] == method
    assert reply.usage.input_tokens == reply.usage.total_tokens > 3 * 10
    assert reply.usage.output_tokens == 0


def test_a_classifier_answers_with_its_labels(url: str) -> None:
    reply = decide(url, "sentiment", LABELS)
    assert reply["method"] == "labels"
    (ranked,) = post(url, "/classify", {"model": "sentiment", "inputs": TEXT})
    expected = {each["label"]: each["score"] for each in ranked}
    choice, predicate, score = reply["answers"]
    assert probabilities(choice) == pytest.approx([expected["POSITIVE"], expected["NEGATIVE"]])
    assert choice["choice"] in ("Positive", "negative")
    assert predicate["probability"] == pytest.approx(expected["POSITIVE"])
    assert score["score"] == pytest.approx(expected["POSITIVE"])
    # One pass answers all of them.
    alone = decide(url, "sentiment", LABELS[:1])
    assert reply["usage"] == alone["usage"]


def test_an_nli_model_answers_with_entailment(nli_url: str) -> None:
    questions = [
        {**CHOICE, "instructions": "There is a {}."},
        PREDICATE,
        {**SCORE, "instructions": "It is"},
    ]
    reply = decide(nli_url, "nli", questions)
    assert reply["method"] == "entailment"

    def zero_shot(labels: list[str], *, multi_label: bool = False) -> dict[str, float]:
        parameters = {
            "candidate_labels": labels,
            "hypothesis_template": "{}",
            "multi_label": multi_label,
        }
        ranked = post(nli_url, "/zero-shot-classify", {"inputs": TEXT, "parameters": parameters})
        return {each["label"]: each["score"] for each in ranked}

    choice, predicate, score = reply["answers"]
    assert probabilities(choice) == list(zero_shot_values(zero_shot, CHOICE_HYPOTHESES))
    assert probabilities(score) == list(zero_shot_values(zero_shot, SCORE_HYPOTHESES))
    statement = PREDICATE["instructions"]
    assert predicate["probability"] == zero_shot([statement], multi_label=True)[statement]


CHOICE_HYPOTHESES = ["There is a dog.", "There is a cat."]
SCORE_HYPOTHESES = ["It is not", "It is little", "It is very (all day)"]


def zero_shot_values(
    zero_shot: Callable[[list[str]], dict[str, float]], hypotheses: list[str]
) -> Iterator[float]:
    scores = zero_shot(hypotheses)
    return (scores[each] for each in hypotheses)


@pytest.mark.parametrize(
    ("question", "text", "targets"),
    [
        (CHOICE, f"{TEXT} Who is in the park? [MASK].", ["dog", "cat"]),
        ({**CHOICE, "instructions": "A [MASK] is here."}, f"{TEXT} A [MASK] is here.", None),
        (PREDICATE, f"{TEXT} [MASK], The girl is sad.", ["Yes", "No"]),
    ],
)
def test_a_masked_model_answers_at_the_mask(
    url: str, question: dict[str, Any], text: str, targets: list[str] | None
) -> None:
    words = targets or ["dog", "cat"]
    body = {"model": "masked", "inputs": text, "parameters": {"targets": [f" {w}" for w in words]}}
    scores = {each["token_str"].strip(): each["score"] for each in post(url, "/fill-mask", body)}
    total = sum(scores.values())
    reply = decide(url, "masked", [question])
    expected = [scores[word] / total for word in words]
    found = probabilities(reply["answers"][0])
    assert found == pytest.approx(expected[: len(found)])


@pytest.mark.parametrize("model", ["hybrid", "chat", "thinker"])
def test_a_causal_model_answers_with_likelihoods(url: str, model: str) -> None:
    """Options of several tokens, none of which begins with another; more than there are letters."""
    values = ["a big brown dog", "cat", "two cats and a frog"]
    values += [f"{letter}-thing" for letter in string.ascii_lowercase[2:]]
    question = {**CHOICE, "choices": [{"value": value} for value in values]}
    listed = "".join(f"\n- {value}" for value in values)
    asked = f"{TEXT}\n\nWho is in the park?\nAnswer with one of these options:{listed}"
    prompt = f"{asked}\nAnswer:" if model == "hybrid" else f"user: {asked}\nassistant:"
    # Thoughts that the template opens are closed at once.
    before = "\nDone.\n\n" if model == "thinker" else " "
    inputs = [f"{prompt}{before}{value}" for value in values]
    scored = post(url, "/score", {"model": model, "inputs": inputs})
    # Of the chat prompt, its template writes what the tokenizer puts before the text scored.
    expected = softmax([each["log_likelihood"] for each in scored])
    reply = decide(url, model, [question])
    assert probabilities(reply["answers"][0]) == pytest.approx(expected, rel=1e-3)


def num_prefilled(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    name = 'maskdial_prompt_tokens_total{model="hybrid"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_the_prompt_is_prefilled_once(url: str) -> None:
    """However many options a question has."""
    words = ("dog", "cat", "girl", "boy", "man", "bird", "fish", "bear")
    question = {**CHOICE, "choices": [{"value": f"a {word}"} for word in words]}
    before = num_prefilled(url)
    usage = decide(url, "hybrid", [question], f"{uuid.uuid4()} has several tokens.")["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    num_options = len(words)
    assert usage["input_tokens"] - 3 * num_options <= num_prefilled(url) - before
    assert num_prefilled(url) - before <= usage["input_tokens"] - num_options


def test_cached_tokens_are_counted(url: str) -> None:
    text = "The king went to the sea. " * 60
    decide(url, "hybrid", [PREDICATE], text)
    usage = decide(url, "hybrid", [CHOICE], text)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > 100


def test_a_text_is_prefilled_once_for_all_questions(url: str) -> None:
    """As far as whole blocks of the prefix cache go."""
    text = f"{uuid.uuid4()}. " + "The king went to the sea. " * 60
    questions = [{**PREDICATE, "instructions": f"It is number {number}."} for number in range(6)]
    before = num_prefilled(url)
    usage = decide(url, "hybrid", questions, text)["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert cached > 0.6 * usage["input_tokens"]
    assert num_prefilled(url) - before <= usage["input_tokens"] - cached


def test_booleans_are_not_their_texts(url: str) -> None:
    values: list[Any] = [True, "true", False]
    question = {**CHOICE, "choices": [{"value": value} for value in values]}
    answer = decide(url, "hybrid", [question])["answers"][0]
    assert [each["value"] for each in answer["probabilities"]] == values
    shares = probabilities(answer)
    assert shares[0] == shares[1]
    assert sum(shares) == pytest.approx(1)
    only = {**CHOICE, "choices": [{"value": True}, {"value": "true"}]}
    assert probabilities(decide(url, "hybrid", [only])["answers"][0]) == [0.5, 0.5]


@pytest.mark.parametrize("model", ["hybrid", "masked", "sentiment"])
def test_an_answer_is_the_same_in_company(url: str, model: str) -> None:
    """To the last bit: with other questions in the request, and with other requests."""
    questions = LABELS if model == "sentiment" else QUESTIONS
    texts = [TEXT, "A dog.", "The king was very old and went to the park every day to play."]
    alone = {
        (text, index): decide(url, model, [question], text)["answers"][0]
        for text in texts
        for index, question in enumerate(questions)
    }

    def ask(text: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = decide(url, model, questions, text)["answers"]
        return answers

    with ThreadPoolExecutor(6) as pool:
        for text, answers in zip(texts * 4, pool.map(ask, texts * 4), strict=True):
            assert answers == [alone[text, index] for index in range(len(questions))]


def test_nli_answers_are_the_same_in_company(nli_url: str) -> None:
    together = decide(nli_url, "nli", QUESTIONS)["answers"]
    assert together == [decide(nli_url, "nli", [each])["answers"][0] for each in QUESTIONS]


def test_conversations_and_tool_calls_become_a_transcript(url: str) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":"sea"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "blue", "status": None},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1, "ü"]}}]},
    ]
    transcript = (
        "developer: Be brief.\nuser: Hi.\nassistant: Yes?\n"
        'assistant: look({"at":"sea"})\ntool: blue\nuser: {"a":[1,"ü"]}'
    )
    expected = decide(url, "hybrid", [PREDICATE], transcript)
    assert decide(url, "hybrid", [PREDICATE], items)["answers"] == expected["answers"]
    only = decide(url, "hybrid", [PREDICATE], [{"role": "user", "content": transcript}])
    assert only["answers"] == expected["answers"]


def test_a_long_input_is_cut_only_when_asked(url: str) -> None:
    body = {"model": "sentiment", "input": "good " * 400, "questions": LABELS}
    reply = httpx.post(f"{url}/v1/decisions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "input"
    cut = httpx.post(f"{url}/v1/decisions", json=body | {"truncate": True})
    assert cut.status_code == 200
    assert int(cut.headers["x-truncated-tokens"]) > 100


MANY = [{"value": str(number)} for number in range(65)]
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


@pytest.mark.parametrize(
    ("model", "body", "param", "words"),
    [
        ("hybrid", {"questions": []}, "questions", "between 1 and 400"),
        ("hybrid", {"questions": None}, "questions", "required"),
        ("hybrid", {"input": " "}, "input", "must not be empty"),
        ("hybrid", {"input": "a " * 600}, "input", "a context of 512"),
        ("hybrid", {"input": "a " * 500_000}, "input", "characters; model"),
        ("hybrid", {"input": "a", "truncate": True}, "truncate", "causal models"),
        ("hybrid", {"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'user'"),
        ("hybrid", {"input": [{"role": "user"}]}, "input[0].content", "required"),
        (
            "hybrid",
            {"input": [{"role": "user", "content": [IMAGE]}]},
            "input[0].content[0].type",
            "images are not supported",
        ),
        (
            "hybrid",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]},
            "input",
            "item 0 is the output of no call",
        ),
        (
            "hybrid",
            {"questions": [{**CHOICE, "choices": None}]},
            "questions[0].choices",
            "required",
        ),
        (
            "hybrid",
            {"questions": [{**PREDICATE, "levels": SCORE["levels"]}]},
            "questions[0].levels",
            "a predicate has none",
        ),
        (
            "hybrid",
            {"questions": [{**CHOICE, "choices": [{"value": "a"}]}]},
            "questions[0].choices",
            "between 2 and 255",
        ),
        (
            "hybrid",
            {"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]},
            "questions[0].choices",
            "different",
        ),
        (
            "hybrid",
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": 1}]}]},
            "questions[0].choices[1].value",
            "a string or a boolean",
        ),
        (
            "hybrid",
            {"questions": [PREDICATE, {**CHOICE, "choices": MANY}]},
            "questions",
            "67 options; the queue holds at most 64",
        ),
        (
            "hybrid",
            {"questions": [{**PREDICATE, "instructions": ""}]},
            "questions[0].instructions",
            "must not be empty",
        ),
        (
            "masked",
            {
                "questions": [
                    PREDICATE,
                    {**CHOICE, "choices": [{"value": "dog"}, {"value": "two big dogs"}]},
                ]
            },
            "questions[1]",
            "is not a single token",
        ),
        (
            "masked",
            {"questions": [{**CHOICE, "instructions": "[MASK] or <mask>"}]},
            "questions[0]",
            "2 masks",
        ),
        ("masked", {"questions": [PREDICATE] * 65}, "questions", "65 inputs"),
        ("sentiment", {"questions": [PREDICATE]}, "questions[0]", "its own labels: NEGATIVE, POS"),
        ("none", {}, "model", "no model 'none' here"),
    ],
)
def test_what_cannot_be_decided(
    url: str, model: str, body: dict[str, Any], param: str, words: str
) -> None:
    whole = {"model": model, "input": TEXT, "questions": QUESTIONS} | body
    reply = httpx.post(f"{url}/v1/decisions", json=whole)
    assert reply.status_code == (404 if model == "none" else 400), reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_fields_that_clients_send_by_habit(url: str) -> None:
    options: params.PromptCacheOptions = {"mode": "implicit", "ttl": "30m"}
    body = {
        "model": "hybrid",
        "input": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": TEXT,
                        "prompt_cache_breakpoint": {"mode": "explicit"},
                    }
                ],
            }
        ],
        "questions": [PREDICATE],
        "prompt_cache_key": "a",
        "prompt_cache_options": options,
        "safety_identifier": "b",
    }
    expected = decide(url, "hybrid", [PREDICATE])["answers"]
    assert post(url, "/v1/decisions", json.loads(json.dumps(body)))["answers"] == expected


def test_a_choice_may_be_the_models_own_mask(openai_http: httpx.Client) -> None:
    """Tokens that are not drawn can be forced."""
    question = {
        "type": "choice",
        "instructions": "What comes next?",
        "choices": [{"value": "[MASK]"}, {"value": "night"}],
    }
    body = {"model": "hybrid", "input": "It was a dark", "questions": [question]}
    reply = openai_http.post("/v1/decisions", json=body)
    assert reply.status_code == 200, reply.text
    assert sum(each["probability"] for each in reply.json()["answers"][0]["probabilities"]) > 0.99
