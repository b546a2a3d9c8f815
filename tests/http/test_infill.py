"""`/infill` and `suffix`, by a causal model's own tokens and by a masked model's lengths."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from maskdial.bundle.bundle import hash_files, read_manifests, write_manifest
from maskdial.bundle.infill import find_infill_tokens
from maskdial.bundle.manifest import FULL_MANIFEST, MANIFEST
from maskdial.registry.catalog import STARTER_FOLDER

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
MANIFESTS = (MANIFEST, FULL_MANIFEST)
PREFIX, SUFFIX = "The old king lived in a", " by the sea."


def make_coder(folder: Path) -> Path:
    """The starter with fill-in-the-middle tokens in the place of its last ones."""
    shutil.copytree(STARTER_FOLDER / "hybrid", folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    for mark, token in zip(MARKS, sorted(vocab, key=vocab.__getitem__)[-len(MARKS) :], strict=True):
        merges = content["model"]["merges"]
        content["model"]["merges"] = [each for each in merges if "".join(each) != token]
        content["added_tokens"].append(
            {
                **content["added_tokens"][0],
                "id": vocab.pop(token),
                "content": mark,
            }
        )
    path.write_text(json.dumps(content), encoding="utf-8")
    infill = find_infill_tokens(tokenizers.Tokenizer.from_file(str(path)).token_to_id)
    for manifest, name in zip(read_manifests("coder", folder), MANIFESTS, strict=True):
        files = manifest.files | hash_files(folder, ["tokenizer.json"])
        own = infill if manifest.family == "causal" else None
        changes = {"files": files, "infill": own}
        write_manifest(folder, manifest.model_copy(update=changes), name)
    return folder


@pytest.fixture(scope="module")
def url(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    coder = make_coder(tmp_path_factory.mktemp("infill") / "coder")
    server = start_server(models={"coder": coder, "hybrid": STARTER_FOLDER / "hybrid"}, slots=2)
    yield str(server.url)
    server.stop()


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def post(http: httpx.Client, route: str, status: int = 200, **body: object) -> Any:
    reply = http.post(route, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def infill(http: httpx.Client, status: int = 200, **body: object) -> Any:
    given = {"model": "coder", "input_prefix": PREFIX, "input_suffix": SUFFIX, "temperature": 0}
    return post(http, "/infill", status, **{**given, **body})


def written(http: httpx.Client, prompt: str, num_tokens: int) -> str:
    """What the model writes behind a prompt with all marks in it."""
    body: dict[str, Any] = {"model": "coder", "prompt": prompt, "temperature": 0}
    body["max_tokens"] = num_tokens
    return str(post(http, "/v1/completions", **body)["choices"][0]["text"])


WHOLE = f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"


def test_a_causal_model_writes_behind_its_own_marks(http: httpx.Client) -> None:
    reply = infill(http, n_predict=6)
    assert reply["content"] == written(http, WHOLE, 6)
    assert (reply["stop"], reply["stop_type"], reply["truncated"]) == (True, "limit", False)
    assert reply["tokens_predicted"] == len(reply["tokens"]) == 6
    (read,) = post(http, "/tokenize", model="coder", inputs=WHOLE)
    assert reply["tokens_evaluated"] == len(read)
    extra = [{"text": "one", "filename": "a.txt"}]
    reply = infill(http, n_predict=5, input_extra=extra, prompt=" small")
    names = "<|file_sep|>a.txt\none<|file_sep|>filename\n"
    assert reply["content"] == written(http, names + WHOLE.replace(" a<", " a small<"), 5)


def test_a_text_ends_with_the_next_file(http: httpx.Client) -> None:
    found = post(http, "/tokenize", model="coder", inputs="<|file_sep|>")
    bias = {str(found[0][-1]["id"]): 100}
    assert infill(http, logit_bias=bias) | {"model": ""} == {
        "index": 0,
        "content": "",
        "tokens": [found[0][-1]["id"]],
        "stop": True,
        "model": "",
        "tokens_predicted": 1,
        "tokens_evaluated": infill(http, n_predict=1)["tokens_evaluated"],
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
    }


def test_streams_have_the_same_text(http: httpx.Client) -> None:
    body = {"model": "coder", "input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 5}
    body |= {"temperature": 0, "stream": True, "cache_prompt": True, "samplers": ["infill"]}
    lines = http.post("/infill", json=body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    whole = infill(http, n_predict=5)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * 5 + [True]
    assert events[-1] | {"content": whole["content"], "tokens": whole["tokens"]} == whole


def test_long_texts_are_cut_around_the_gap(http: httpx.Client) -> None:
    reply = http.post(
        "/infill",
        json={
            "model": "coder",
            "input_prefix": "word " * 400,
            "input_suffix": " word" * 400,
            "n_predict": 4,
        },
    )
    assert reply.json()["truncated"] is True
    assert int(reply.headers["x-truncated-tokens"]) > 250
    body = {"model": "hybrid", "input_prefix": "word " * 400, "input_suffix": " word" * 400}
    reply = http.post("/infill", json=body | {"n_predict": 2})
    assert reply.json()["truncated"] is True
    # 512 tokens with two masks and the token before a text; the mask takes the space before it
    whole = " word" * 255 + "[MASK]" * reply.json()["tokens_predicted"] + " word" * 254
    written = post(http, "/fill-mask", model="hybrid", inputs=whole, parameters={"joint": True})
    found, expected = reply.json()["fillings"][0]["tokens"], written[0]["tokens"]
    assert [(each["token"], each["score"]) for each in found] == [
        (each["token"], each["score"]) for each in expected
    ]
    assert int(reply.headers["x-truncated-tokens"]) == 801 - 509


def test_openai_s_client_and_ollama_s_api_send_a_suffix(url: str, http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        completion = client.completions.create(
            model="coder", prompt=PREFIX, suffix=SUFFIX, max_tokens=6, temperature=0
        )
    assert completion.choices[0].text == written(http, WHOLE, 6)
    options = {"num_predict": 6, "temperature": 0}
    body: dict[str, Any] = {"model": "coder", "prompt": PREFIX, "suffix": SUFFIX}
    body["options"] = options
    answer = post(http, "/api/generate", stream=False, **body)
    assert answer["response"] == written(http, WHOLE, 6)
    shown = post(http, "/api/show", model="coder")
    assert "insert" in shown["capabilities"]
    assert shown["template"] == (
        "{{ if .Suffix }}<|fim_prefix|>{{ .Prompt }}<|fim_suffix|>{{ .Suffix }}<|fim_middle|>"
        "{{ else }}{{ .Prompt }}{{ end }}"
    )
    assert "insert" not in post(http, "/api/show", model="hybrid")["capabilities"]


def test_who_can_infill_is_listed(http: httpx.Client) -> None:
    tasks = {
        f"{each['name']}:{each['mask']}": "infill" in each["tasks"]
        for each in http.get("/models").json()
    }
    assert tasks == {
        "coder:causal": True,
        "coder:full": True,
        "hybrid:causal": False,
        "hybrid:full": True,
    }


def test_a_masked_model_tries_all_lengths(http: httpx.Client) -> None:
    reply = infill(http, model="hybrid", n_predict=4, n=4, num_beams=3)
    assert reply["fillings"][0]["content"] == reply["content"]
    scores = [each["score"] for each in reply["fillings"]]
    assert scores == sorted(scores, reverse=True)
    for filling in reply["fillings"]:
        length = len(filling["tokens"])
        masks = "[MASK]" * length
        parameters = {"joint": True, "top_k": 3}
        body: dict[str, Any] = {"model": "hybrid", "inputs": PREFIX + masks + SUFFIX}
        body["parameters"] = parameters
        same = [
            each
            for each in post(http, "/fill-mask", **body)
            if each["sequence"] == PREFIX + filling["content"] + SUFFIX
        ]
        assert [each["log_likelihood"] for each in same] == [filling["log_likelihood"]]
    lengths = {len(each["tokens"]) for each in infill(http, model="hybrid", n=32)["fillings"]}
    assert lengths == set(range(1, 9))
    stream = http.post(
        "/infill",
        json={"model": "hybrid", "input_prefix": PREFIX, "input_suffix": SUFFIX, "stream": True},
    )
    assert json.loads(stream.text.removeprefix("data: "))["content"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            {"n_predict": 33},
            "n_predict: must be between 1 and 32 for the masked model 'hybrid', no",
        ),
        ({"n_predict": 0}, "n_predict: must be between 1 and 32 for the masked model 'hybrid', no"),
        ({"stop": ["a"]}, "stop: is for causal models; model 'hybrid' fills masks"),
        ({"top_k": 4, "temperature": 1}, "top_k: is for causal models; model 'hybrid' fills"),
        ({"input_prefix": "a [MASK]"}, "input_prefix: has a mask of its own; send texts with"),
        ({"input_prefix": " ", "input_suffix": ""}, "input_prefix: is empty, as the text after it"),
        ({"mask": "causal"}, "model 'hybrid:causal' cannot do infill; it does generate"),
        ({"model": "coder", "n": 2}, "n: is for masked models; model 'coder' writes one text"),
        ({"model": "coder", "n_predict": 0}, "n_predict: must be at least 1, or -1 for the model"),
        ({"input_suffix": None}, "input_suffix: this field is required"),
    ],
)
def test_what_cannot_be_infilled_is_refused(
    http: httpx.Client, body: dict[str, Any], sentence: str
) -> None:
    assert infill(http, 422, **{"model": "hybrid", **body})["error"].startswith(sentence)


def test_a_suffix_is_refused_where_it_means_nothing(http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "hybrid", "prompt": "a", "suffix": "b"}
    error = post(http, "/v1/completions", 400, **body)["error"]
    assert error["message"].startswith("suffix: model 'hybrid' has no fill-in-the-middle tokens")
    error = post(http, "/api/generate", 400, **body)["error"]
    assert error.startswith("suffix: model 'hybrid' has no fill-in-the-middle tokens")
    body = {"model": "coder", "prompt": [5], "suffix": "b"}
    error = post(http, "/v1/completions", 400, **body)["error"]
    assert error["message"] == "suffix: a prompt of token ids has no place for it; send a text"
    body |= {"prompt": "a"}
    error = post(http, "/v1/completions", 400, **body, truncate_prompt_tokens=3)["error"]
    assert error["param"] == "truncate_prompt_tokens"
    error = post(http, "/v1/completions", 400, **body, echo=True)["error"]
    assert error["param"] == "echo"
    error = post(http, "/api/generate", 400, **body, system="Be short.")["error"]
    assert error.startswith("system: ")


def test_a_gap_has_one_of_the_choices(http: httpx.Client) -> None:
    choices = [" castle", " golden chariot", " Wxqzk"]
    causal = infill(http, guided_choice=choices, n_predict=24)
    assert causal["content"] in choices
    assert "fillings" not in causal
    masked = infill(http, model="hybrid:full", guided_choice=choices, n=3, num_beams=3)
    found = [each["content"] for each in masked["fillings"]]
    assert sorted(found) == sorted(choices)
    scores = [each["score"] for each in masked["fillings"]]
    assert scores == sorted(scores, reverse=True)
    (only,) = infill(
        http, model="hybrid:full", guided_choice=[" Wxqzk", " castle"], n_predict=1, n=3
    )["fillings"]
    assert only["content"] == " castle"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"guided_choice": [" Wxqzk"], "n_predict": 1}, "guided_choice: the shortest has "),
        ({"guided_choice": []}, "guided_choice: must have between 1 and 256 choices, not 0"),
        ({"guided_choice": ["[MASK]"]}, "guided_choice: the target '[MASK]' cannot be written"),
    ],
)
def test_choices_that_no_gap_meets_are_refused(
    http: httpx.Client, given: dict[str, Any], sentence: str
) -> None:
    error = infill(http, 422, model="hybrid:full", **given)["error"]
    assert error.startswith(sentence), error


SMALL = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", ["coder:causal", "hybrid:full"])
def test_a_gap_matches_a_regular_expression_or_a_schema(http: httpx.Client, model: str) -> None:
    found = infill(http, model=model, guided_regex=r" (big|small) [a-z]{3,8}")
    assert re.fullmatch(r" (big|small) [a-z]{3,8}", found["content"])
    found = infill(http, model=model, guided_json=SMALL, n_predict=12)
    assert 0 <= json.loads(found["content"])["age"] <= 120
    grammar = 'start: " castle" | " house"'
    found = infill(http, model=model, guided_grammar=grammar)
    assert found["content"] in (" castle", " house")


def test_a_masked_model_fills_a_gap_of_each_length_that_a_grammar_allows(
    http: httpx.Client,
) -> None:
    reply = infill(http, model="hybrid:full", guided_regex=r" \d{2}|1850", n=32, n_predict=6)
    for filling in reply["fillings"]:
        assert re.fullmatch(r" \d{2}|1850", filling["content"])
    lengths = [len(each["tokens"]) for each in reply["fillings"]]
    assert len(set(lengths)) == len(lengths) > 1
    scores = [each["score"] for each in reply["fillings"]]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"guided_regex": "(a"}, "guided_regex: the grammar cannot be used: unclosed group"),
        ({"guided_regex": r"\d{40}"}, "guided_regex: no text of 1 to 8 tokens that matches it was"),
        ({"guided_json": False}, "guided_json: the JSON schema is false, which no value satisfi"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice: also given as guided_json;"),
    ],
)
def test_grammars_that_no_gap_meets_are_refused(
    http: httpx.Client, given: dict[str, Any], sentence: str
) -> None:
    error = infill(http, 422, model="hybrid:full", **given)["error"]
    assert error.startswith(sentence), error
