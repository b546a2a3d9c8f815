"""`huggingface_hub.InferenceClient`, unmodified, at the task routes and at `/models/NAME`."""

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")

MASKED = "The old king lived in a [MASK] by the sea."


@pytest.mark.parametrize("path", ["fill-mask", "models/masked"])
def test_fill_mask(url: str, path: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
    fillings = client.fill_mask(MASKED, top_k=3)
    assert len(fillings) == 3
    assert 0 < fillings[0].score < 1
    assert fillings[0].token_str in fillings[0].sequence
    targeted = client.fill_mask(MASKED, targets=["house", "tree"])
    assert {filling.token_str for filling in targeted} == {"house", "tree"}


@pytest.mark.parametrize("path", ["classify", "models/sentiment"])
def test_text_classification(url: str, path: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
    labels = client.text_classification("A warm, funny and moving film.", top_k=2)
    assert {label.label for label in labels} == {"POSITIVE", "NEGATIVE"}
    assert labels[0].score >= labels[1].score
    raw = client.text_classification("A film.", function_to_apply="none")
    assert sum(label.score for label in raw) != pytest.approx(1)


@pytest.mark.parametrize("path", ["generate", "models/causal"])
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
