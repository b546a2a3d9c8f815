"""OpenVINO: GenAI's continuous batching for causal models, the CPU plugin itself for masked ones.

GenAI's packages are imported where they are used: masked models do without.
"""

import random
import shutil
import time
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from transformers import BertForMaskedLM, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from loadtests.checkpoints import causal_ids, masked_ids, new_folder
from loadtests.compare.peers import SETTLING, Runner, mean_seconds
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work

_CACHE_GB = 1
_MASKED_INPUTS = ("input_ids", "attention_mask")
_NUM_CALIBRATION_TEXTS = 64


def prepare(setup: Setup) -> None:
    """Converts and quantizes the checkpoint."""
    with new_folder(setup.product) as path:
        if setup.model.family == "causal":
            _prepare_causal(setup, path)
        else:
            _prepare_masked(setup, path)


def open_runner(setup: Setup) -> Runner:
    """Loads the model."""
    return _Pipeline(setup) if setup.model.family == "causal" else _Compiled(setup)


def _prepare_causal(setup: Setup, path: Path) -> None:
    """Makes a stateful model, as optimum-intel does, with int8 weights."""
    from openvino_tokenizers import convert_tokenizer

    model = nncf.compress_weights(_with_state(setup), mode=nncf.CompressWeightsMode.INT8_ASYM)
    ov.save_model(model, path / "openvino_model.xml", compress_to_fp16=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(setup.checkpoint)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(encoder, path / "openvino_tokenizer.xml")
    ov.save_model(decoder, path / "openvino_detokenizer.xml")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(setup.checkpoint / name, path / name)


def _prepare_masked(setup: Setup, path: Path) -> None:
    """Makes a model with int8 weights, or with NNCF's static W8A8."""
    model = _convert_masked(setup.checkpoint)
    if setup.variant == "w8":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    else:
        rng = random.Random(setup.seed)
        texts = [_feeds(rng, 1, rng.randint(8, 128)) for _ in range(_NUM_CALIBRATION_TEXTS)]
        model = nncf.quantize(
            model,
            nncf.Dataset(texts),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(texts),
        )
    ov.save_model(model, path / "model.xml")


class _Pipeline:
    """GenAI's continuous batching over a paged KV cache."""

    def __init__(self, setup: Setup) -> None:
        import openvino_genai

        self._genai: Any = openvino_genai
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_seqs = setup.room.batch
        scheduler.max_num_batched_tokens = setup.room.batch * setup.room.context
        scheduler.enable_prefix_caching = False
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            str(setup.product), scheduler, "CPU", {"INFERENCE_NUM_THREADS": setup.threads}
        )
        self._num_words = setup.model.num_words
        self._rng = random.Random(setup.seed)
        self._num_requests = 0

    def run(self, work: Work) -> float:
        num_tokens = 1 if work.kind == "prefill" else work.repeats + 2 * SETTLING
        requests = [self._request(work.length, num_tokens) for _ in range(work.batch)]
        started = time.perf_counter()
        if work.kind == "decode":
            # All prompts fit into the first step, which yields the first token of each.
            for _ in range(SETTLING):
                self._pipeline.step()
            started = time.perf_counter()
            for _ in range(work.repeats):
                self._pipeline.step()
            seconds = (time.perf_counter() - started) / work.repeats
        self._finish()
        if work.kind == "prefill":
            seconds = time.perf_counter() - started
        for request in requests:
            (generated,) = request.read_all()
            assert len(generated.generated_ids) == num_tokens, (
                "ignore_eos lets it generate all tokens"
            )
        return seconds

    def close(self) -> None:
        pass

    def _request(self, length: int, num_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        ids = causal_ids(self._rng, length, self._num_words)
        prompt = ov.Tensor(np.array([ids], np.int64))
        self._num_requests += 1
        return self._pipeline.add_request(self._num_requests, prompt, config)

    def _finish(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


class _Step(torch.nn.Module):
    """The model with its KV cache as inputs and outputs, a key and a value per layer."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self._model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache(config=self._model.config)
        for layer, key, value in zip(cache.layers, past[::2], past[1::2], strict=True):
            layer.dtype, layer.device = key.dtype, key.device
            layer.keys, layer.values, layer.is_initialized = key, value, True
        output = self._model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        present = (each for layer in cache.layers for each in (layer.keys, layer.values))
        return (output.logits, *present)


def _with_state(setup: Setup) -> Any:
    """The converted model with its KV cache as state, which GenAI turns into paged attention."""
    torch_model = LlamaForCausalLM.from_pretrained(
        setup.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    config = torch_model.config
    heads, width = config.num_key_value_heads, config.head_dim
    model = _convert(torch_model, heads, width)
    states = [
        f"{{}}.{i}.{part}" for i in range(config.num_hidden_layers) for part in ("key", "value")
    ]
    past = [state.format("past_key_values") for state in states]
    present = [state.format("present") for state in states]
    _name(model, past, present, heads, width)
    _reorder_by_beam(model, past)
    apply_make_stateful_transformation(model, dict(zip(past, present, strict=True)))
    _begin_empty(model, heads, width)
    model.validate_nodes_and_infer_types()
    return model


def _convert(model: LlamaForCausalLM, heads: int, width: int) -> Any:
    batch, length, past = 2, 3, 4
    example = {
        "input_ids": torch.ones(batch, length, dtype=torch.int64),
        "attention_mask": torch.ones(batch, past + length, dtype=torch.int64),
        "position_ids": torch.arange(past, past + length).repeat(batch, 1),
        "past": [
            torch.zeros(batch, heads, past, width)
            for _ in range(2 * model.config.num_hidden_layers)
        ],
    }
    with torch.no_grad():
        return ov.convert_model(_Step(model), example_input=example)


def _name(model: Any, past: list[str], present: list[str], heads: int, width: int) -> None:
    tokens = ("input_ids", "attention_mask", "position_ids")
    for given, name in zip(model.inputs, (*tokens, *past), strict=True):
        given.get_tensor().set_names({name})
        shape = [-1, -1] if name in tokens else [-1, heads, -1, width]
        given.get_node().set_partial_shape(ov.PartialShape(shape))
    for output, name in zip(model.outputs, ("logits", *present), strict=True):
        output.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()


def _reorder_by_beam(model: Any, past: list[str]) -> None:
    """Adds the input ``beam_idx`` that every stateful OpenVINO model has."""
    beam = ops.parameter(shape=ov.PartialShape([-1]), dtype=ov.Type.i32, name="beam_idx")
    beam.output(0).get_tensor().add_names({"beam_idx"})
    model.add_parameters([beam])
    for name in past:
        given = model.input(name)
        users = given.get_target_inputs()
        gathered = ops.gather(given, beam, ops.constant(0, dtype=ov.Type.i64))
        for user in users:
            user.replace_source_output(gathered.output(0))
    model.validate_nodes_and_infer_types()


def _begin_empty(model: Any, heads: int, width: int) -> None:
    shape = ops.shape_of(model.input("input_ids"), output_type="i64")
    batch = ops.gather(shape, _constant(0), ops.constant(0, dtype=np.int64))
    empty = ops.concat([batch, _constant(heads), _constant(0), _constant(width)], axis=0)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            zero = ops.constant(0.0, dtype=ov.Type.f32)
            node.set_arguments([ops.broadcast(zero, empty)])


def _constant(value: int) -> Any:
    return ops.constant(np.array([value]), dtype=np.int64)


def _convert_masked(checkpoint: Path) -> Any:
    model = BertForMaskedLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    texts = torch.ones(2, 16, dtype=torch.int64)
    with torch.no_grad():
        converted = ov.convert_model(
            _Logits(model), example_input={"input_ids": texts, "attention_mask": texts}
        )
    for given, name in zip(converted.inputs, _MASKED_INPUTS, strict=True):
        given.get_tensor().set_names({name})
        given.get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    converted.validate_nodes_and_infer_types()
    return converted


def _feeds(rng: random.Random, batch: int, length: int) -> dict[str, Any]:
    texts = np.array([masked_ids(rng, length) for _ in range(batch)])
    return {"input_ids": texts, "attention_mask": np.ones_like(texts)}


class _Logits(torch.nn.Module):
    def __init__(self, model: BertForMaskedLM) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=input_ids, attention_mask=attention_mask
        ).logits
        return logits


class _Compiled:
    """A masked model that returns the logits of every token, as the checkpoint does."""

    def __init__(self, setup: Setup) -> None:
        settings = {"INFERENCE_NUM_THREADS": setup.threads, "PERFORMANCE_HINT": "LATENCY"}
        model = ov.Core().compile_model(setup.product / "model.xml", "CPU", settings)
        self._request = model.create_infer_request()
        self._rng = random.Random(setup.seed)

    def run(self, work: Work) -> float:
        feeds = _feeds(self._rng, work.batch, work.length)
        return mean_seconds(lambda: self._request.infer(feeds), work.repeats)

    def close(self) -> None:
        pass
