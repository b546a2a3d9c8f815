"""The routes of encoder-decoder models, compared with transformers' `generate`."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch

from maskdial.bundle.bundle import load_bundle
from maskdial_export.export import export
from tests.export.zoo import TASK_PARAMS

huggingface_hub = pytest.importorskip("huggingface_hub")

TEXT = "the door opened, and there stood the owner of the house."
LANGUAGES = {"en": "__en__", "de": "__de__"}
Folder = Callable[[str], Path]
Load = Callable[[Path], Any]


@pytest.fixture(scope="module")
def translator(checkpoint: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An M2M-100 whose tokenizer has languages: texts are __en__ X [SEP]."""
    folder = tmp_path_factory.mktemp("translator") / "checkpoint"
    shutil.copytree(checkpoint("m2m-100"), folder)
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(list(LANGUAGES.values()))
    english = tokenizer.token_to_id("__en__")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="__en__ $A [SEP]", special_tokens=[("__en__", english), ("[SEP]", 3)]
    )
    tokenizer.save(path)
    return folder


@pytest.fixture(scope="module")
def url(
    bundle: Folder,
    translator: Path,
    serve: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    folder = tmp_path_factory.mktemp("bundles") / "translator"
    export(str(translator), folder)
    text_to_text = load_bundle("m", folder).manifest.text_to_text
    assert text_to_text is not None
    assert text_to_text.languages.keys() == LANGUAGES.keys()
    return serve(t5=bundle("t5"), translator=folder)


def written(folder: Path, load: Load, text: str, **settings: Any) -> str:
    """What transformers writes, as text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = torch.tensor([tokenizer.encode(text).ids])
    output = load(folder).generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return tokenizer.decode(output[0].tolist(), skip_special_tokens=True)


def task_settings(name: str) -> dict[str, Any]:
    return {key: value for key, value in TASK_PARAMS[name].items() if key != "prefix"}


def test_summaries_are_written_as_the_checkpoint_has_it(
    url: str, checkpoint: Folder, load_reference: Load
) -> None:
    folder = checkpoint("t5")
    settings = task_settings("summarization")
    expected = written(folder, load_reference, f"summarize: {TEXT}", **settings)
    client = huggingface_hub.InferenceClient(model=f"{url}/summarize")
    assert client.summarization(TEXT, clean_up_tokenization_spaces=False).summary_text == expected
    own = {"max_length": 8, "min_length": 2, "num_beams": 1, "no_repeat_ngram_size": 2}
    expected = written(folder, load_reference, f"summarize: {TEXT}", **own)
    found = client.summarization(TEXT, generate_parameters=own, truncation="longest_first")
    assert found.summary_text == expected


def test_translations_by_the_names_of_tasks(
    url: str, checkpoint: Folder, load_reference: Load
) -> None:
    expected = written(
        checkpoint("t5"),
        load_reference,
        f"to French: {TEXT}",
        **task_settings("translation_en_to_fr"),
    )
    client = huggingface_hub.InferenceClient(model=f"{url}/models/t5")
    assert client.translation(TEXT, src_lang="en", tgt_lang="fr").translation_text == expected
    reply = httpx.post(f"{url}/translate", json={"model": "t5", "inputs": TEXT})
    assert reply.status_code == 422
    assert "name the languages: en to de, en to fr" in reply.json()["error"]
    parameters = {"src_lang": "de", "tgt_lang": "en"}
    reply = httpx.post(
        f"{url}/translate", json={"model": "t5", "inputs": TEXT, "parameters": parameters}
    )
    assert "does not translate from de to en" in reply.json()["error"]


def test_translations_by_the_tokens_of_languages(
    url: str, translator: Path, load_reference: Load
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(translator / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    english, german = (tokenizer.token_to_id(token) for token in LANGUAGES.values())
    assert english is not None
    assert german is not None
    ids = tokenizer.encode(TEXT).ids
    ids[ids.index(english)] = german
    source = torch.tensor([ids])
    settings: dict[str, Any] = {
        "max_length": 12,
        "no_repeat_ngram_size": 2,
        "forced_bos_token_id": english,
    }
    model = load_reference(translator)
    output = model.generate(source, attention_mask=torch.ones_like(source), **settings)
    expected = tokenizer.decode(output[0].tolist(), skip_special_tokens=True)

    client = huggingface_hub.InferenceClient(model=f"{url}/translate")
    generation = {"max_length": 12, "no_repeat_ngram_size": 2}
    body: dict[str, Any] = {
        "model": "translator",
        "inputs": [TEXT],
        "parameters": {"src_lang": "de", "tgt_lang": "en", "generate_parameters": generation},
    }
    reply = httpx.post(client.model, json=body)
    assert reply.json() == [{"translation_text": expected}]
    details = {"max_new_tokens": 4, "src_lang": "de", "tgt_lang": "en", "details": True}
    reply = httpx.post(
        f"{url}/generate", json={"model": "translator", "inputs": TEXT, "parameters": details}
    )
    tokens = reply.json()["details"]["tokens"]
    assert tokens[0] == {**tokens[0], "id": english, "text": "", "special": True}
    body["parameters"]["tgt_lang"] = "xx"
    assert "no language 'xx'; its languages are en, de" in httpx.post(client.model, json=body).text


def test_a_text_begins_without_a_space_under_a_grammar(url: str) -> None:
    """The decoder's prompt has no text, so the first token is spelled as the tokenizer does."""
    grammar = {"type": "regex", "value": "[a-d] [a-z] [x-z]"}
    body = {"model": "translator", "inputs": TEXT, "parameters": {"grammar": grammar}}
    reply = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert re.fullmatch("[a-d] [a-z] [x-z]", reply.json()["generated_text"]), reply.text


def test_what_the_models_do_is_listed(url: str) -> None:
    listed = {each["name"]: each for each in httpx.get(f"{url}/models").json()}
    assert listed["t5"]["tasks"] == ["generate", "summarize", "translate", "tokenize"]
    assert listed["translator"]["tasks"] == ["generate", "translate", "tokenize"]
    assert listed["t5"]["family"] == "encoder-decoder"
    assert listed["t5"]["max_source_length"] == 128


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/generate"])
def test_a_conversation_is_refused(url: str, path: str) -> None:
    body: dict[str, Any] = {"model": "t5", "messages": [{"role": "user", "content": "hello"}]}
    reply = httpx.post(f"{url}{path}", json=body | {"max_tokens": 4} if "v1" in path else body)
    assert reply.status_code in (400, 422)
    assert "reads a source text and does not chat" in reply.text


@pytest.mark.parametrize(
    ("parameters", "field", "why"),
    [
        ({"num_beams": 2, "do_sample": True}, "num_beams", "cannot be combined with sampling"),
        ({"num_beams": 2, "stop": ["a"]}, "num_beams", "stop strings"),
        ({"num_beams": 2, "n": 3}, "n", "finds as many texts"),
        ({"n": 2}, "n", "without sampling, all texts are the same"),
        ({"src_lang": "en"}, "src_lang", "no tokens for languages"),
        ({"decoder_input_details": True}, "decoder_input_details", "no log-probabilities"),
        ({"truncate": 2}, "truncate", "adds 2 special tokens"),
    ],
)
def test_what_a_model_cannot_do(url: str, parameters: dict[str, Any], field: str, why: str) -> None:
    body = {"model": "t5", "inputs": TEXT, "parameters": parameters}
    reply = httpx.post(f"{url}/generate", json=body)
    assert reply.status_code == 422
    assert reply.json()["error"].startswith(f"parameters.{field}: ")
    assert why in reply.json()["error"]


def test_a_source_text_that_is_too_long(url: str) -> None:
    body: dict[str, Any] = {"model": "t5", "inputs": "ab " * 100, "parameters": {}}
    reply = httpx.post(f"{url}/generate", json=body)
    assert "reads at most 128" in reply.json()["error"]
    body["parameters"] = {"truncate": 20, "max_new_tokens": 4}
    reply = httpx.post(f"{url}/generate", json=body)
    assert reply.status_code == 200
    assert reply.headers["x-truncated-tokens"] == "182"


def test_streams_and_completions(url: str) -> None:
    """A beam search's tokens come at its end, as the same events."""
    searches: list[dict[str, Any]] = [{}, {"num_beams": 2}]
    for search in searches:
        parameters = {"max_new_tokens": 5, "no_repeat_ngram_size": 1, "details": True} | search
        body = {"model": "t5", "inputs": TEXT, "parameters": parameters}
        whole = httpx.post(f"{url}/generate", json=body).json()
        lines = httpx.post(f"{url}/generate_stream", json=body).text.split("\n\n")
        events = [json.loads(line.removeprefix("data:")) for line in lines if line]
        assert [event["token"] for event in events] == whole["details"]["tokens"]
        assert events[-1]["generated_text"] == whole["generated_text"]
    prompt = {"model": "t5", "prompt": TEXT, "max_tokens": 5, "temperature": 0}
    completion = httpx.post(f"{url}/v1/completions", json=prompt).json()
    plain = {"model": "t5", "inputs": TEXT, "parameters": {"max_new_tokens": 5}}
    text = httpx.post(f"{url}/generate", json=plain).json()["generated_text"]
    assert completion["choices"][0]["text"] == text


def test_copies_are_encoded_once(url: str) -> None:
    """Text i is what the seed plus i gives alone."""

    def texts(**parameters: Any) -> Any:
        body = {"model": "t5", "inputs": TEXT, "parameters": {"max_new_tokens": 9} | parameters}
        return httpx.post(f"{url}/generate", json=body).json()

    copies = texts(n=3, seed=7, temperature=2.0)
    alone = [texts(seed=7 + i, temperature=2.0) for i in range(3)]
    assert copies == alone
    assert len({each["generated_text"] for each in copies}) > 1
