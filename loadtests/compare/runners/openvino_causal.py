"""OpenVINO GenAI: continuous batching over a paged cache, int8 weights."""

import random
import shutil
import time
from typing import Any

import nncf
import numpy as np
import openvino as ov
import openvino_genai as genai
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from openvino_tokenizers import convert_tokenizer
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from loadtests.checkpoints import causal_ids, new_folder
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work

_CACHE_GB = 1
_SETTLING = 2


def prepare(setup: Setup) -> None:
    """Converts the checkpoint to a model with state, as optimum-intel does, and quantises it."""
    with new_folder(setup.product) as path:
        model = _with_state(setup)
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        ov.save_model(model, path / "openvino_model.xml", compress_to_fp16=False)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(setup.checkpoint)
        encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
        ov.save_model(encoder, path / "openvino_tokenizer.xml")
        ov.save_model(decoder, path / "openvino_detokenizer.xml")
        for name in ("config.json", "generation_config.json"):
            shutil.copy(setup.checkpoint / name, path / name)


def open_runner(setup: Setup) -> Runner:
    """Loads the pipeline."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_seqs = setup.room.batch
    scheduler.max_num_batched_tokens = setup.room.batch * setup.room.context
    scheduler.enable_prefix_caching = False
    settings = {"INFERENCE_NUM_THREADS": setup.threads}
    pipeline = genai.ContinuousBatchingPipeline(str(setup.product), scheduler, "CPU", settings)
    return _Pipeline(pipeline, setup)


class _Pipeline:
    def __init__(self, pipeline: Any, setup: Setup) -> None:
        self._pipeline = pipeline
        self._num_words = setup.model.num_words
        self._rng = random.Random(setup.seed)
        self._num_requests = 0

    def run(self, work: Work) -> float:
        num_tokens = 1 if work.kind == "prefill" else work.repeats + 2 * _SETTLING
        requests = [self._request(work.length, num_tokens) for _ in range(work.batch)]
        started = time.perf_counter()
        if work.kind == "decode":
            # All prompts fit into the first step, which gives the first token of each.
            for _ in range(_SETTLING):
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
            assert len(generated.generated_ids) == num_tokens, "it went on to the end"
        return seconds

    def close(self) -> None:
        """Holds nothing but memory and waiting threads."""

    def _request(self, length: int, num_tokens: int) -> Any:
        config = genai.GenerationConfig()
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
    """The model with its cache as tensors that come and go: key and value of each layer."""

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
    """The converted model, its cache kept between calls: what GenAI turns into paged attention."""
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
    """Adds the input ``beam_idx``, as every model with state in OpenVINO has it."""
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
