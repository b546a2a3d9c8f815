"""Quick traces: tiny models are exported some hundred times in a run of the tests."""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from maskdial_export.model import Checkpoint

Traces = dict[str, ir.Model]

MAX_BYTES = 2**24  # of a checkpoint whose trace is kept
FOLDER = re.compile(r'"_name_or_path": "[^"]*"')  # the same model has a new one in each test


@contextlib.contextmanager
def quick_traces() -> Iterator[Traces]:
    """Makes torch quick for tiny models: one thread, a garbage collector with less to do.

    The collector would go through all of torch's and transformers' objects many times a trace,
    a third of its time. Another sixth goes into the table of torch's operators, which each trace
    makes anew, and a fourteenth is lost by a cache of the operators' shapes. And a checkpoint is
    traced once a process, whatever its folder and the precisions of its bundles. Every use gets a
    copy of the graph; where a test has cleared the dictionary that it is given, they are traced
    again.
    """
    traces: Traces = {}
    torch.set_num_threads(1)
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "fake_tensor_cache_enabled", False)
        make = functools.cache(ONNXRegistry.from_torchlib)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(make))
        for name in ("trace", "trace_encoder"):
            patch.setattr(Checkpoint, name, _once(name, getattr(Checkpoint, name), traces))
        yield traces
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def _once(part: str, trace: Callable[[Checkpoint], ir.Model | None], traces: Traces) -> Any:
    def trace_once(checkpoint: Checkpoint) -> ir.Model | None:
        key = fingerprint(checkpoint)
        if key is None:
            return trace(checkpoint)
        if (name := f"{part} of {key}") not in traces:
            traced = trace(checkpoint)
            if traced is None:
                return None
            traces[name] = traced
        return traces[name].clone()

    return trace_once


def fingerprint(checkpoint: Checkpoint) -> str | None:
    """A hash of all that a trace depends on; None for a model too large to keep."""
    tensors = {
        **dict(checkpoint.model.named_parameters()),
        **dict(checkpoint.model.named_buffers()),
        **({} if checkpoint.pooler is None else checkpoint.pooler.state_dict()),
    }
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_BYTES:
        return None
    pooled = checkpoint.pooler and (checkpoint.pooler.embedding, str(checkpoint.pooler))
    settings = (
        checkpoint.task,
        checkpoint.text_to_text,
        pooled,
        checkpoint.kv,
        checkpoint.reads_both_ways,
        checkpoint.survey.whole,
        checkpoint.sends_token_types,
    )
    digest = sha256(f"{type(checkpoint.model)} {settings}".encode())
    config = checkpoint.model.config.to_json_string(use_diff=False)
    digest.update(FOLDER.sub("", config).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()
