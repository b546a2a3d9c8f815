"""DiffusionGemma's text part: exported, served, and compared with transformers' own `generate`."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers

from maskdial.bundle.bundle import load_bundle
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.tracing import canvas
from tests.conftest import MakeOnce, make_byte_tokenizer
from tests.export.test_denoiser import Draws
from tests.export.zoo import GROUPED, TOWER, wrapped
from tests.http.written import WAYS
from tests.traces import Traces

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

VOCABULARY, CANVAS, WINDOW, EOS, IMAGE = 259, 8, 44, 2, 1
STEPS = 12
TEXT = GROUPED | {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # A layer normalizes what it reads, so the scale of the first of two would change nothing
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "global_head_dim": 32,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": IMAGE,
}
SETTINGS: dict[str, Any] = {
    "max_denoising_steps": STEPS,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 2.0},
    "t_min": 0.3,
    "t_max": 0.6,
    "stability_threshold": 1,
    "confidence_threshold": 1.0,
    "eos_token_id": [EOS, 150],
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
PROMPTS = ["Once", "Once upon a time there was a king who lived far away, by", "a", "The sea is"]


def make_model() -> transformers.PreTrainedModel:
    """Random weights, sure enough of some tokens that canvases may end early."""
    torch.manual_seed(0)
    tower = TOWER | {"model_type": "gemma4_vision", "head_dim": 16}
    settings = wrapped(TEXT, tower, canvas_length=CANVAS) | {"tie_word_embeddings": True}
    model = transformers.DiffusionGemmaForBlockDiffusion(
        transformers.DiffusionGemmaConfig(**settings)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.lm_head.weight.mul_(10)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.4, 1.2)
    return model.eval()


def make_source(folder: Path) -> None:
    make_model().save_pretrained(folder)
    make_byte_tokenizer(masks=False).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(SETTINGS), encoding="utf-8")


@pytest.fixture(scope="module")
def source(made_once: MakeOnce) -> Path:
    return made_once("checkpoints/diffusion_gemma", make_source)


@pytest.fixture(scope="module")
def bundle(source: Path, made_once: MakeOnce) -> Path:
    return made_once("bundles/diffusion_gemma", lambda folder: export(str(source), folder))


@pytest.fixture(scope="module")
def url(bundle: Path, start_server: Callable[..., Any]) -> Iterator[str]:
    running = start_server(models={"canvas": bundle}, threads=1, max_batch_tokens=4096)
    yield str(running.url)
    running.stop()


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference(source: Path) -> Any:
    return transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
        source, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return make_byte_tokenizer(masks=False)


def write(http: httpx.Client, prompt: str, status: int = 200, **parameters: object) -> Any:
    body = {"inputs": prompt, "parameters": {"details": True, **parameters}}
    reply = http.post("/generate", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def generate(
    reference: Any, ids: list[int], seed: int, **settings: object
) -> tuple[Any, list[int]]:
    """The tokens that `generate` writes with the draws of a seed, and the last pass of each."""
    draws = Draws(seed, CANVAS, VOCABULARY)
    ends: list[int] = []
    finalize = reference._finalize_canvas

    def note(**given: Any) -> Any:
        ends.extend([draws.num_passes - 1] * CANVAS)
        return finalize(**given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", draws.randint)
        patch.setattr(torch, "multinomial", draws.multinomial)
        patch.setattr(reference, "_finalize_canvas", note)
        found = reference.generate(torch.tensor([ids]), **settings).sequences[0, len(ids) :]
    ids_found: list[int] = found.tolist()
    return ids_found, ends


def test_the_bundle_says_how_canvases_are_written(bundle: Path) -> None:
    manifest = load_bundle("canvas", bundle).manifest
    assert (manifest.family, manifest.task, manifest.mask) == ("masked", "block-diffusion", "full")
    assert manifest.batch_invariant
    how = manifest.denoising
    assert how is not None
    assert (how.canvas_length, how.hidden_size, how.steps) == (CANVAS, 32, STEPS)
    assert (how.t_min, how.t_max, how.entropy_bound) == (0.3, 0.6, 2.0)
    assert (how.stability_threshold, how.confidence_threshold) == (1, 1.0)
    assert manifest.special_tokens.eos == (EOS, 150)
    assert manifest.left_out == ("model.encoder.vision_tower", "model.encoder.embed_vision")
    assert manifest.media_tokens == (IMAGE,)
    assert manifest.parity.long_text is not None


def test_a_scale_of_the_other_part_is_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    scaled = canvas._scaled
    monkeypatch.setattr(
        canvas, "_scaled", lambda model, in_canvas: scaled(model, torch.ones_like(in_canvas))
    )
    with (
        traces.anew(),
        pytest.raises(ExportError, match="ONNX Runtime and torch disagree on a first pass"),
    ):
        export(str(source), tmp_path / "bundle")


def test_masks_of_other_models_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="only supports its own mask"):
        export(str(source), tmp_path / "bundle", mask="both")


def test_texts_are_those_of_generate(
    http: httpx.Client, reference: Any, tokenizer: tokenizers.Tokenizer
) -> None:
    reasons, lengths = set(), []
    for seed, prompt in enumerate(PROMPTS * 3):
        ids = tokenizer.encode(prompt).ids
        expected, ends = generate(reference, ids, seed, max_new_tokens=20)
        reply = write(http, prompt, max_new_tokens=20, seed=seed)
        details = reply["details"]
        found = [token["id"] for token in details["tokens"]]
        stop = next((i + 1 for i, each in enumerate(expected) if each in (EOS, 150)), 20)
        assert found == expected[: min(stop, 20)]
        assert [token["step"] for token in details["tokens"]] == ends[: len(found)]
        assert details["finish_reason"] == ("eos_token" if found[-1] in (EOS, 150) else "length")
        assert (details["seed"], details["input_length"]) == (seed, len(ids))
        assert reply["generated_text"] == tokenizer.decode(found)
        reasons.add(details["finish_reason"])
        lengths += np.diff([-1, *ends[::CANVAS]]).tolist()
    assert reasons == {"eos_token", "length"}
    assert min(lengths) < max(lengths) == STEPS, "some canvases end early, some do not"


def test_fewer_passes(http: httpx.Client, reference: Any, tokenizer: tokenizers.Tokenizer) -> None:
    ids = tokenizer.encode("Once").ids
    settings = {"max_new_tokens": CANVAS, "max_denoising_steps": 3}
    expected, ends = generate(reference, ids, 5, **settings)
    tokens = write(http, "Once", max_new_tokens=CANVAS, steps=3, seed=5)["details"]["tokens"]
    assert [token["id"] for token in tokens] == expected[: len(tokens)]
    assert max(ends) <= 2


def test_probabilities_are_those_of_the_last_pass(
    http: httpx.Client, reference: Any, tokenizer: tokenizers.Tokenizer
) -> None:
    ids = tokenizer.encode("The sea").ids
    reply = write(http, "The sea", max_new_tokens=CANVAS, steps=1, seed=3)
    noise = Draws(3, CANVAS, VOCABULARY).randint(0, VOCABULARY, (1, CANVAS))
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([ids]), decoder_input_ids=noise).logits[0]
    tokens = reply["details"]["tokens"]
    expected = logits.log_softmax(-1).amax(-1)[: len(tokens)]
    found = torch.tensor([token["logprob"] for token in tokens])
    assert torch.allclose(found, expected, atol=1e-4)


def test_seeds_give_the_same_texts_in_company(http: httpx.Client) -> None:
    def one(number: int) -> Any:
        prompt = PROMPTS[number % len(PROMPTS)] + " a" * number
        return write(http, prompt, max_new_tokens=20, seed=number)

    def num_passes() -> float:
        name = 'maskdial_batch_size_count{model="canvas"} '
        return float(http.get("/metrics").text.partition(name)[2].partition("\n")[0])

    begun = num_passes()
    alone = [one(number) for number in range(10)]
    needed = num_passes() - begun
    with ThreadPoolExecutor(10) as threads:
        together = list(threads.map(one, range(10)))
    assert together == alone
    assert num_passes() - begun - needed < needed, "texts shared passes"
    assert one(3) == alone[3]
    fresh = {write(http, "a", max_new_tokens=4)["details"]["seed"] for _ in range(2)}
    assert len(fresh) == 2


def test_streams_send_a_canvas_when_it_is_done(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 20, "seed": 0, "details": True}
    body = {"inputs": "Once", "parameters": parameters, "mask": "full"}
    reply = http.post("/generate_stream", json=body)
    lines = reply.text.split("\n\n")
    events = [json.loads(line.removeprefix("data:")) for line in lines if line]
    whole = write(http, "Once", max_new_tokens=20, seed=0)
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert events[-1]["generated_text"] == whole["generated_text"]


def test_openai_routes_write_canvases(
    url: str, http: httpx.Client, tokenizer: tokenizers.Tokenizer
) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        completion = sdk.completions.create(model="canvas", prompt="Once", max_tokens=20, seed=0)
        text = write(http, "Once", max_new_tokens=20, seed=0)["generated_text"]
        assert completion.choices[0].text == text
        chunks = sdk.completions.create(
            model="canvas", prompt="Once", max_tokens=20, seed=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        chat = sdk.chat.completions.create(
            model="canvas", messages=[{"role": "user", "content": "Who?"}], max_tokens=9, seed=1
        )
    ids = tokenizer.encode("u:Who?;a:", add_special_tokens=False).ids
    body = {"model": "canvas", "prompt": ids, "max_tokens": 9, "seed": 1}
    same = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert chat.choices[0].message.content == same


@pytest.mark.parametrize("way", WAYS)
def test_every_dialect_writes_canvases(http: httpx.Client, way: str) -> None:
    prompt = "u:Who?;a:" if WAYS[way].chats else "Once"
    asked = "Who?" if WAYS[way].chats else "Once"
    texts = [WAYS[way].ask(http, "canvas", asked, 20, seed=0)]
    if way != "kserve tensors":
        texts.append(WAYS[way].stream(http, "canvas", asked, 20, seed=0))
    if WAYS[way].seed:  # without one, a text may be of special tokens
        assert all(texts)
        before = rendered(prompt) if WAYS[way].chats else prompt
        body = {"prompt": before, "max_tokens": 20, "seed": 0}
        expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert texts == [expected] * len(texts)


def rendered(prompt: str) -> list[int]:
    """A rendered prompt, with the special tokens that it has."""
    return make_byte_tokenizer(masks=False).encode(prompt, add_special_tokens=False).ids


def test_the_model_writes_at_its_own_path(http: httpx.Client) -> None:
    (model,) = http.get("/models").json()
    assert (model["tasks"][0], model["family"], model["mask"]) == ("generate", "masked", "full")
    parameters = {"max_new_tokens": 20, "seed": 0}
    reply = http.post("/models/canvas", json={"inputs": "Once", "parameters": parameters})
    text = write(http, "Once", **parameters)["generated_text"]
    assert reply.json() == [{"generated_text": text}]


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"temperature": 0.5}, "parameters.temperature: means nothing to model 'canvas'"),
        ({"temperature": 0}, "parameters.temperature: means nothing to model 'canvas'"),
        ({"top_p": 0.5}, "parameters.top_p: means nothing to model 'canvas', which writes whole"),
        ({"block_length": 4}, "parameters.block_length: means nothing to model 'canvas'"),
        ({"steps": STEPS + 1}, f"parameters.steps: must be at most {STEPS}, the passes that"),
        ({"steps": 0}, "parameters.steps: must be at least 1"),
        ({"max_new_tokens": 126}, "inputs: has 5 tokens, and 128 are to be written"),
    ],
)
def test_what_canvases_do_not_have_is_refused(
    http: httpx.Client, parameters: dict[str, Any], sentence: str
) -> None:
    assert write(http, "Once", 422, **parameters)["error"].startswith(sentence)


@pytest.mark.parametrize(
    ("route", "body", "sentence"),
    [
        ("/generate", {"inputs": "a", "mask": "causal"}, "does not run under the causal mask"),
        ("/generate", {"inputs": "a", "mask": "block"}, "does not run under the block mask"),
        (
            "/generate",
            {"inputs": ["a", "b"], "parameters": {"max_new_tokens": 128}},
            "inputs[0]: has 2 tokens, and 128 are to be written",
        ),
        ("/v1/completions", {"prompt": [5, IMAGE]}, "stands for an image, a video or sound"),
        ("/v1/completions", {"prompt": [VOCABULARY]}, "has token ids from 0 to"),
        ("/v1/completions", {"prompt": "a", "temperature": 0.5}, "means nothing to model 'canvas'"),
        ("/vertex", {"instances": [{"inputs": "a"}]}, "cannot do vertex; it does generate"),
        ("/fill-mask", {"inputs": "a"}, "cannot do fill-mask; it does generate"),
        ("/score", {"inputs": "a"}, "cannot do score; it does generate"),
    ],
)
def test_what_is_not_for_canvases_is_refused(
    http: httpx.Client, route: str, body: dict[str, Any], sentence: str
) -> None:
    reply = http.post(route, json={"model": "canvas", **body})
    assert reply.status_code in (400, 404, 422), reply.text
    assert sentence in reply.text
