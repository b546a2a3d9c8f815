"""`huggingface_hub.InferenceClient`, unmodified, at the task routes and at `/models/NAME`."""

from typing import Any

import pytest

from maskdial_client import Client, DeadlineError, ValidationError
from tests.held import held, held_passes
from tests.servers import engine_of

huggingface_hub = pytest.importorskip("huggingface_hub")

MASKED = "The old king lived in a [MASK] by the sea."


@pytest.mark.parametrize("path", ["fill-mask", "models/hybrid"])
def test_fill_mask(url: str, path: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
    fillings = client.fill_mask(MASKED, top_k=3)
    assert len(fillings) == 3
    assert 0 < fillings[0].score < 1
    assert fillings[0].token_str in fillings[0].sequence
    targeted = client.fill_mask(MASKED, targets=[" house", " tree"])
    assert {filling.token_str for filling in targeted} == {" house", " tree"}


@pytest.mark.parametrize("path", ["classify", "models/sentiment"])
def test_text_classification(url: str, path: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
    labels = client.text_classification("A warm, funny and moving film.", top_k=2)
    assert {label.label for label in labels} == {"POSITIVE", "NEGATIVE"}
    assert labels[0].score >= labels[1].score
    raw = client.text_classification("A film.", function_to_apply="none")
    assert sum(label.score for label in raw) != pytest.approx(1)


@pytest.mark.parametrize("path", ["generate", "models/hybrid"])
def test_text_generation(url: str, path: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
    prompt = "Once upon a time there was"
    text = client.text_generation(prompt, max_new_tokens=12)
    assert isinstance(text, str)

    detailed = client.text_generation(
        prompt, max_new_tokens=12, details=True, temperature=0.7, top_p=0.9, seed=4
    )
    assert detailed.details.seed == 4
    assert detailed.details.generated_tokens == len(detailed.details.tokens)

    assert "".join(client.text_generation(prompt, max_new_tokens=12, stream=True)) == text
    events = list(
        client.text_generation(
            prompt, max_new_tokens=12, stream=True, details=True, temperature=0.7, top_p=0.9, seed=4
        )
    )
    assert events[-1].generated_text == detailed.generated_text
    assert events[-1].details.finish_reason == detailed.details.finish_reason
    assert [event.token.id for event in events] == [t.id for t in detailed.details.tokens]


PROMPT = "Once upon a time there was"
# Everything that text_generation knows, but adapter_id, of which there are none here.
EVERYTHING = {
    "best_of": 2,
    "decoder_input_details": True,
    "details": True,
    "do_sample": True,
    "frequency_penalty": 0.1,
    "grammar": {"type": "regex", "value": "[a-z ,.]{4,60}"},
    "max_new_tokens": 12,
    "repetition_penalty": 1.1,
    "return_full_text": True,
    "seed": 42,
    "stop": ["zzz"],
    "temperature": 0.9,
    "top_k": 50,
    "top_n_tokens": 3,
    "top_p": 0.95,
    "truncate": 4,
    "typical_p": 0.95,
    "watermark": False,
}


TOKEN_KEYS = {"id", "text", "logprob", "special"}


@pytest.mark.parametrize("path", ["generate", "models/hybrid"])
def test_text_generation_with_every_parameter(url: str, path: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
    output = client.text_generation(PROMPT, **EVERYTHING)
    assert isinstance(output, huggingface_hub.TextGenerationOutput)
    text = output.generated_text.removeprefix(PROMPT)
    assert text != output.generated_text
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ,.")

    details = output.details
    prefill = ["<|endoftext|>", " time", " there", " was"]  # what begins every text is kept
    assert [token.text for token in details.prefill] == prefill
    assert details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in details.prefill[1:])
    assert "".join(token.text for token in details.tokens) == text
    assert len(details.top_tokens) == details.generated_tokens == len(details.tokens)
    # The hub's dataclasses leave lists in lists as they came.
    assert all(len(top) == 3 and set(top[0]) == TOKEN_KEYS for top in details.top_tokens)
    (other,) = details.best_of_sequences
    assert {details.seed, other.seed} == {42, 43}
    assert other.generated_text.startswith(PROMPT)
    assert len(other.tokens) == len(other.top_tokens) == other.generated_tokens


def test_text_generation_streams_with_every_parameter(url: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/generate")
    single = EVERYTHING | {"best_of": None, "decoder_input_details": None}
    output = client.text_generation(PROMPT, **single)
    events = list(client.text_generation(PROMPT, **single, stream=True))
    assert all(isinstance(event, huggingface_hub.TextGenerationStreamOutput) for event in events)
    assert [event.token.id for event in events] == [t.id for t in output.details.tokens]
    assert [len(event.top_tokens) for event in events] == [3] * len(events)
    assert events[-1].generated_text == output.generated_text
    assert events[-1].details.seed == 42
    assert events[-1].details.finish_reason == output.details.finish_reason
    texts = client.text_generation(PROMPT, **(single | {"details": False}), stream=True)
    assert PROMPT + "".join(texts) == output.generated_text


def test_text_generation_errors_are_the_hubs(url: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/generate")
    with pytest.raises(huggingface_hub.errors.ValidationError, match="at least 1"):
        client.text_generation(PROMPT, max_new_tokens=0)
    with pytest.raises(huggingface_hub.errors.ValidationError, match="at least 1"):
        list(client.text_generation(PROMPT, max_new_tokens=0, stream=True))


def test_our_own_client(server: Any, url: str) -> None:
    """What it sends is what this server reads, and the other way round."""
    options: Any = {"max_new_tokens": 10, "temperature": 0.9, "seed": 7, "min_p": 0.01}
    with Client(url) as client:
        texts = client.generate(PROMPT, details=True, n=2, best_of=4, top_n_tokens=2, **options)
        assert len(texts.texts) == 2
        seeds = {text.details.seed for text in (texts, *texts.others) if text.details}
        assert len(seeds) == 2
        assert seeds < {7, 8, 9, 10}
        assert texts.details is not None
        assert all(len(top) == 2 for top in texts.details.top_tokens)
        best = client.generate(PROMPT, details=True, best_of=4, top_n_tokens=2, **options)
        assert best.details is not None
        assert len(best.details.best_of_sequences) == 3
        assert best.generated_text == texts.generated_text

        described = client.generate(PROMPT, decoder_input_details=True, **options)
        assert described.details is not None
        prefill = described.details.prefill
        assert "".join(token.text for token in prefill) == "<|endoftext|>" + PROMPT
        assert prefill[0].logprob is None

        grammar: Any = {"type": "regex", "value": "[ab]{6}"}
        options |= {"grammar": grammar, "logit_bias": {66: 2.5}, "priority": -1, "cache_salt": "x"}
        batch = client.generate([PROMPT, "A cat"], **options)
        assert all(set(text.generated_text) <= {"a", "b"} for text in batch)
        with client.stream(PROMPT, top_n_tokens=2, **options) as stream:
            events = list(stream)
        assert "".join(event.text for event in events) == batch[0].generated_text
        assert all(len(event.top_tokens) == 2 for event in events)

        with held(engine_of(server, "hybrid")), pytest.raises(DeadlineError) as late:
            client.generate(PROMPT, deadline=0.02)
        assert late.value.status == 504
        with held_passes(), pytest.raises(DeadlineError):
            client.fill_mask(MASKED, deadline=1e-3)
        with pytest.raises(ValidationError, match="no chat template"):
            client.generate(messages=[{"role": "user", "content": "hello"}])
