"""Quick traces: tiny models are exported some hundred times in a run of the tests."""

import contextlib
import functools
import gc
import re
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from filelock import FileLock
from torch.onnx._internal.exporter._registration import ONNXRegistry

from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checks.tokenizer_parity import check_tokenizer
from maskdial_export.model import Checkpoint

MODEL = Checkpoint.__module__
MAX_BYTES = 2**24  # of a checkpoint whose trace is kept
FOLDER = re.compile(r'"_name_or_path": "[^"]*"')  # the same model has a new one in each test


class Traces:
    """What was traced, in a folder that the processes of a run share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str, trace: Callable[[], ir.Model | None]) -> ir.Model | None:
        """A graph of one's own: that of the name, or else a traced one, which gets the name.

        Either names what the optimization adds in the same way, so a bundle's bytes are the same.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / name
        with FileLock(f"{path}.lock"):
            if path.is_file():
                kept: ir.Model = ir.from_proto(onnx.ModelProto.FromString(path.read_bytes()))
                for value in kept.graph.initializers.values():
                    weight = value.const_value
                    assert weight is not None
                    # Writable, as a model's own are: torch warns of arrays that are not.
                    array = weight.numpy().copy()
                    value.const_value = ir.Tensor(array, dtype=weight.dtype, name=weight.name)
                return kept
            traced = trace()
            if traced is None:
                return None
            path.write_bytes(ir.to_proto(traced).SerializeToString())
            return traced.clone()

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """Nothing was traced yet inside the block, and nobody else gets what is traced there."""
        folder = self._folder
        with tempfile.TemporaryDirectory() as name:
            self._folder = Path(name)
            try:
                yield
            finally:
                self._folder = folder


@contextlib.contextmanager
def quick_traces(folder: Path) -> Iterator[Traces]:
    """Makes torch quick for tiny models: one thread, a garbage collector with less to do.

    The collector would go through all of torch's and transformers' objects many times a trace,
    a third of its time. Another sixth goes into the table of torch's operators, which each trace
    makes anew, and a fourteenth is lost by a cache of the operators' shapes. And a checkpoint is
    traced once a run, whatever its folder and the precisions of its bundles: the graphs are kept in
    the folder. A tokenizer is compared with transformers' once a run as well, if it passes.
    """
    traces = Traces(folder)
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
        patch.setattr(f"{MODEL}.check_tokenizer", _passed_once(check_tokenizer, folder))
        yield traces
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def _once(part: str, trace: Callable[[Checkpoint], ir.Model | None], traces: Traces) -> Any:
    def trace_once(checkpoint: Checkpoint) -> ir.Model | None:
        key = fingerprint(checkpoint)
        if key is None:
            return trace(checkpoint)
        return traces.get(f"{part}-{key}", lambda: trace(checkpoint))

    return trace_once


def _passed_once(check: Callable[..., None], folder: Path) -> Callable[..., None]:
    """A check of tokenizers that has passed is not repeated for the same tokenizer: it takes twice
    as long as a trace where each byte is a token.
    """

    def check_once(name: str, loaded: Any, tokens: Any, sample: Sample, *, paired: bool) -> None:
        original = loaded.original
        if original is None or not original.is_fast:  # its vocabulary is in files
            check(name, loaded, tokens, sample, paired=paired)
            return
        files = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "tokenizer_object")
        settings = {
            key: str(each) for key, each in original.init_kwargs.items() if key not in files
        }
        described = (
            (loaded.backend.to_str(), loaded.settings, loaded.sends_token_types, tokens),
            (type(original), original.backend_tokenizer.to_str(), sorted(settings.items())),
            (original.truncation_side, original.padding_side, sample, paired),
        )
        passed = folder / f"tokenizer-{sha256(repr(described).encode()).hexdigest()}"
        if not passed.exists():
            check(name, loaded, tokens, sample, paired=paired)
            folder.mkdir(exist_ok=True)
            passed.touch()

    return check_once


def fingerprint(checkpoint: Checkpoint) -> str | None:
    """A hash of all that a trace depends on; None for a model too large to keep, and for one of
    whose layers a draft head reads, as nothing says which.
    """
    head = checkpoint.draft_head
    if head is not None and head.of_main.of_layers:
        return None
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
        head is not None,
    )
    digest = sha256(f"{type(checkpoint.model)} {settings}".encode())
    config = checkpoint.model.config.to_json_string(use_diff=False)
    digest.update(FOLDER.sub("", config).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()
