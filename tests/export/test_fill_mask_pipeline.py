"""`/fill-mask` against transformers' FillMaskPipeline, on the same weights."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post

from maskdial_export.export import export

TOLERANCE = 1e-4
MAX_LENGTH = 96
WORDS = ["the", "capital", "of", "france", "is", "paris", "city"]
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]

TEXTS = [
    "The capital of France is {}.",
    "{} is the city.",
    "the  capital \n\n of\tfrance is   {} .",
    "Café, naïve: {}! Ünïcödé",
    "😀 the {} 😀😀",
    "אבא {} פריז",
    "a" * 40 + " {}",
    "{}",
    "the{}city",
    "the capital of france is paris. " * 5 + "{}",
    "the {} of {} is {}.",
    "{}{} 語 {}",
]


def bert_tokenizer() -> Tokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz.,:!é語"
    spelled = [*BERT_SPECIAL, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    tokenizer = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(spelled)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = post.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(BERT_SPECIAL)
    return tokenizer


def roberta_tokenizer() -> Tokenizer:
    """Byte-level; the mask token absorbs the space before it, as RoBERTa's does."""
    spelled = [*ROBERTA_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(spelled)}
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocabulary.setdefault(word[:end], len(vocabulary))
        merges.append(("Ġ", word))
        vocabulary["Ġ" + word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = post.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.add_special_tokens(ROBERTA_SPECIAL[:-1])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer


def make_checkpoint(name: str, folder: Path) -> Path:
    if name == "bert":
        tokenizer, model_class = bert_tokenizer(), transformers.BertForMaskedLM
        pad, unknown, first, last, mask = BERT_SPECIAL
        positions = MAX_LENGTH
    else:
        tokenizer, model_class = roberta_tokenizer(), transformers.RobertaForMaskedLM
        first, pad, last, unknown, mask = ROBERTA_SPECIAL
        positions = MAX_LENGTH + 2
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_LENGTH,
        pad_token=pad,
        unk_token=unknown,
        cls_token=first,
        sep_token=last,
        mask_token=AddedToken(mask, lstrip=name == "roberta", special=True),
    )
    fast.save_pretrained(folder)
    config = model_class.config_class(
        vocab_size=len(fast),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=positions,
        pad_token_id=fast.pad_token_id,
        initializer_range=0.35,
    )
    torch.manual_seed(3)
    model_class(config).save_pretrained(folder)
    return folder


class Served:
    """One checkpoint's bundle behind a server, and transformers' pipeline of it."""

    def __init__(self, name: str, url: str, checkpoint: Path) -> None:
        self.name = name
        self.url = url
        self.graph = checkpoint.parent / name / "model.onnx"
        self.http = httpx.Client(base_url=url, timeout=60)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
        self.mask = tokenizer.mask_token
        model_class = getattr(transformers, f"{'Bert' if name == 'bert' else 'Roberta'}ForMaskedLM")
        self.pipeline = transformers.pipeline(
            "fill-mask",
            model=model_class.from_pretrained(checkpoint).eval(),
            tokenizer=tokenizer,
            device="cpu",
        )

    def fill(self, inputs: object, status: int = 200, **parameters: object) -> Any:
        body = {"model": self.name, "inputs": inputs, "parameters": parameters}
        reply = self.http.post("/fill-mask", json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def written(self, text: str) -> str:
        return text.replace("{}", self.mask)


@pytest.fixture(scope="module")
def everyone(
    tmp_path_factory: pytest.TempPathFactory, start_server: Callable[..., Any]
) -> Iterator[dict[str, Served]]:
    root = tmp_path_factory.mktemp("fill-mask")
    names = ("bert", "roberta")
    for name in names:
        export(str(make_checkpoint(name, root / f"{name}-checkpoint")), root / name)
    server = start_server(models={name: root / name for name in names})
    served = {name: Served(name, server.url, root / f"{name}-checkpoint") for name in names}
    yield served
    for each in served.values():
        each.http.close()
    server.stop()


@pytest.fixture(params=["bert", "roberta"])
def served(request: pytest.FixtureRequest, everyone: dict[str, Served]) -> Served:
    return everyone[request.param]


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    """One mask's fillings, or a list of them per mask."""
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if isinstance(theirs, list):
            assert_same(ours, theirs)
        else:
            assert ours["token"] == theirs["token"]
            assert ours["token_str"] == theirs["token_str"]
            assert ours["sequence"] == theirs["sequence"]
            np.testing.assert_allclose(ours["score"], theirs["score"], atol=TOLERANCE)


@pytest.mark.parametrize("top_k", [None, 1, 20])
def test_fills_as_transformers(served: Served, top_k: int | None) -> None:
    texts = [served.written(text) for text in TEXTS]
    asked = {} if top_k is None else {"top_k": top_k}
    answers = served.fill(texts, **asked)
    for text, answer in zip(texts, answers, strict=True):
        assert_same(answer, served.pipeline(text, **asked))
    assert [served.fill(text, **asked) for text in texts] == answers
    best = {answer[0]["token"] for answer in answers[:9]}
    assert len(best) > 3, "the weights always say the same"


def test_targets_as_transformers(served: Served) -> None:
    targets = ["city", "paris", "capital", "é"]
    if served.name == "roberta":
        targets = [" city", "paris", "Ġcapital", "x"]
    texts = [served.written(text) for text in TEXTS]
    answers = served.fill(texts, targets=targets)
    for text, answer in zip(texts, answers, strict=True):
        assert_same(answer, served.pipeline(text, targets=targets))
    assert_same(
        served.fill(texts[0], targets=targets, top_k=2),
        served.pipeline(texts[0], targets=targets, top_k=2),
    )


def test_a_target_that_splits_says_how(served: Served) -> None:
    error = served.fill(served.written(TEXTS[0]), 422, targets=["paris", "xyz"])["error"]
    assert "the target 'xyz' is not a single token of the model's vocabulary" in error
    assert "it splits into 'x'," in error


def test_blanks_match_grammars_as_the_tokenizer_decodes_them(everyone: dict[str, Served]) -> None:
    served, expression = everyone["bert"], "[a-z]{2,3}( of)?,?"
    grammar = {"type": "regex", "value": expression}
    search = {"joint": True, "top_k": 8, "num_beams": 8, "max_new_tokens": 4}
    fillings = served.fill("the [MASK] is paris.", grammar=grammar, **search)
    texts = [
        served.pipeline.tokenizer.decode([token["token"] for token in filling["tokens"]])
        for filling in fillings
    ]
    assert len(set(texts)) == 8
    for text, filling in zip(texts, fillings, strict=True):
        assert re.fullmatch(expression, text)
        assert filling["sequence"] == f"the {text} is paris."
    body = {"model": "bert", "input_prefix": "the", "input_suffix": "is paris.", "n": 3}
    for guided in ({"guided_regex": expression}, {"guided_grammar": 'start: "is" " of"?'}):
        reply = served.http.post("/infill", json={**body, **guided}).json()
        for filling in reply["fillings"]:
            assert re.fullmatch(f"{expression}|is( of)?", filling["content"])
    error = served.http.post("/infill", json={**body, "guided_json": {}}).json()["error"]
    assert error == "guided_json: the grammar cannot be used: no text matches it"


def test_either_mask_may_be_written(served: Served) -> None:
    expected = served.fill(served.written(TEXTS[10]))
    for alias in ("[MASK]", "<mask>"):
        assert served.fill(TEXTS[10].replace("{}", alias)) == expected


@pytest.mark.parametrize("direction", ["left", "right"])
def test_long_texts_are_cut_as_transformers_cuts(served: Served, direction: str) -> None:
    filler = "the capital of france is paris. " * 20
    text = served.written("{} is " + filler if direction == "right" else filler + "is {} .")
    length = len(served.pipeline.tokenizer(text)["input_ids"])
    assert length > MAX_LENGTH
    error = served.fill(["the " + served.mask, text], 422)["error"]
    assert error.startswith("inputs[1]: ")
    assert f"{length} tokens" in error
    assert f"at most {MAX_LENGTH}" in error

    served.pipeline.tokenizer.truncation_side = direction
    expected = served.pipeline(text, tokenizer_kwargs={"truncation": True})
    body = {"truncate": True, "truncation_direction": direction}
    reply = served.http.post(
        "/fill-mask", json={"model": served.name, "inputs": text, "parameters": body}
    )
    assert reply.status_code == 200, reply.text
    assert int(reply.headers["x-truncated-tokens"]) == length - MAX_LENGTH
    assert_same(reply.json(), expected)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_a_mask_that_would_be_cut_off_is_refused(served: Served, direction: str) -> None:
    filler = "the capital of france is paris. " * 20
    masks = served.written("{} is " + filler + "is {}")
    asked = {"truncate": True, "truncation_direction": direction}
    error = served.fill(["the " + served.mask, masks], 422, **asked)["error"]
    assert error.startswith("inputs[1]: 1 of the text's 2 masks would be truncated")
    lost = filler + served.mask if direction == "right" else served.mask + filler
    error = served.fill(lost, 422, **asked)["error"]
    assert error.startswith("1 of the text's 1 masks would be truncated")


def test_inference_client(served: Served) -> None:
    client = InferenceClient(model=f"{served.url}/models/{served.name}")
    fillings = client.fill_mask(served.written(TEXTS[0]), top_k=3, targets=["paris", "city"])
    expected = served.fill(served.written(TEXTS[0]), targets=["paris", "city"])
    assert [(each.token, each.score) for each in fillings] == [
        (each["token"], each["score"]) for each in expected
    ]


def test_only_masked_tokens_reach_the_head(served: Served) -> None:
    graph = onnx.load(served.graph)
    producers = {output: node for node in graph.graph.node for output in node.output}
    node = producers["logits"]
    while node.op_type not in ("MatMul", "Gemm", "FusedMatMul"):
        node = producers[node.input[0]]
    graph.graph.output.append(onnx.ValueInfoProto(name=node.input[0]))
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feeds = {
        "input_ids": np.full((3, 7), 5, np.int64),
        "lengths": np.array([7, 7, 4], np.int32),
        "token_type_ids": np.zeros((3, 7), np.int64),
        "rows": np.array([2, 9, 15, 16], np.int64),
    }
    declared = {each.name for each in session.get_inputs()}
    logits, hidden = session.run(None, {name: feeds[name] for name in feeds if name in declared})
    assert logits.shape == (4, len(served.pipeline.tokenizer))
    assert hidden.reshape(-1, hidden.shape[-1]).shape == (4, 32)


def fill_one_by_one(served: Served, ids: torch.Tensor) -> tuple[list[int], list[int]]:
    """The most probable mask is filled first; the tokens, and the order of the masks."""
    tokenizer, model = served.pipeline.tokenizer, served.pipeline.model
    masks = torch.nonzero(ids == tokenizer.mask_token_id)[:, 0]
    steps = [-1] * len(masks)
    for step in range(len(masks)):
        with torch.no_grad():
            probabilities = model(ids[None]).logits[0, masks].softmax(-1)
        probabilities[:, tokenizer.all_special_ids] = 0
        best = probabilities.max(-1)
        open_ones = torch.where(ids[masks] == tokenizer.mask_token_id, best.values, -1.0)
        place = int(open_ones.argmax())
        ids[masks[place]] = best.indices[place]
        steps[place] = step
    return ids[masks].tolist(), steps


def test_masks_are_filled_together_as_by_the_model_itself(served: Served) -> None:
    text = served.written("the {} of {} is {}. {} city")
    ids = torch.tensor(served.pipeline.tokenizer(text)["input_ids"])
    tokens, steps = fill_one_by_one(served, ids)
    (filling,) = served.fill(text, joint=True)
    assert [token["token"] for token in filling["tokens"]] == tokens
    assert [token["step"] for token in filling["tokens"]] == steps
    assert filling["sequence"] == served.pipeline.tokenizer.decode(ids, skip_special_tokens=True)
    # A word of several tokens has a mask for each of them.
    word = "xyz" if served.name == "bert" else " xyz"
    (spelled,) = served.fill(served.written("the {} city"), joint=True, targets=[word])
    assert spelled["sequence"] == "the xyz city"
    assert len(spelled["tokens"]) == len(served.pipeline.tokenizer.tokenize(word))


def test_texts_are_unmasked_before_the_last_special_token(served: Served) -> None:
    prompt = served.pipeline.tokenizer("the capital")["input_ids"]
    masks = [served.pipeline.tokenizer.mask_token_id] * 6
    ids = torch.tensor([*prompt[:-1], *masks, prompt[-1]])
    tokens, steps = fill_one_by_one(served, ids)
    body = {"model": f"{served.name}:full", "inputs": "the capital"}
    parameters = {"max_new_tokens": 6, "details": True, "return_full_text": True}
    reply = served.http.post("/generate", json=body | {"parameters": parameters}).json()
    assert [token["id"] for token in reply["details"]["tokens"]] == tokens
    assert [token["step"] for token in reply["details"]["tokens"]] == steps
    whole = served.pipeline.tokenizer.decode(ids, skip_special_tokens=True)
    assert reply["generated_text"] == whole
