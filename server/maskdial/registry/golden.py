"""The golden check: does this machine compute what the exporting machine computed?

Providers differ, and int8 kernels saturate on some CPUs. So a bundle carries one short input with
its logits, which are compared when the model is loaded. A device has other kernels for long passes,
so there the text is read once more among padding, or repeated and in pieces. An int8 bundle also
carries a product of the largest numbers: a kernel that saturates may change one text little and
another one a lot.
"""

import logging
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.bundle import Bundle
from maskdial.bundle.exactness import multiplies_exactly
from maskdial.bundle.manifest import FULL_MANIFEST, KERNEL_CHECK, CacheInteger, GoldenCheck
from maskdial.errors import BundleError, CheckError
from maskdial.runtime.encoder import Encoder
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

_log = logging.getLogger("maskdial.models")

Policy = Literal["error", "warn"]
"""What to do with a model that fails a check: refuse it, or log a warning."""


LONG_PASS = 48
"""How many tokens the passes of golden checks have on devices, whose attention may have another
kernel for long passes: that of WebGPU from 32 on.
"""
_PIECE = 16

_CACHE_ROUNDING: dict[CacheInteger | None, float] = {None: 0.0, "int16": 0.01, "int8": 0.1}
"""Tolerance for a KV cache of integers, in standard deviations of the logits. With int8 the
starter's differ by 0.02, and a graph that computes something else is off by more than one.
"""


def check_kernels(bundle: Bundle, options: SessionOptions, policy: Policy) -> None:
    """Runs the kernel check, which int8 bundles have, with the provider's kernels.

    Raises:
        CheckError: products saturate, and the policy is to refuse such a model.
    """
    if KERNEL_CHECK not in bundle.manifest.files:
        return
    session = Session(bundle.path / KERNEL_CHECK, replace(options, kv_cache="float"))
    if not multiplies_exactly(lambda rows: np.asarray(session.run({"rows": rows}))):
        _complain(
            policy,
            f"model {bundle.name!r} is int8, and 8-bit products saturate on this processor (it has "
            "no VNNI instructions), so answers are worse than at export; export it with 7-bit "
            f"weights ({_remedy(bundle)}), or serve it anyway with --golden-check warn",
        )


def check_golden(
    bundle: Bundle,
    run: Callable[[GoldenCheck], NDArray[np.float32]],
    policy: Policy,
    *,
    kernels: str = "",
    kv_cache: CacheInteger | None = None,
) -> None:
    """Computes the golden logits again and compares them with those of the export.

    Args:
        bundle: the model.
        run: computes the checked row, float32 (vocab_size,) or (num_labels,).
        policy: for logits that differ by more than the tolerance.
        kernels: the instruction set of our kernels, if they have a part in it; else empty.
        kv_cache: the integers to which the KV cache rounds keys and values, which no export
            foresees; None for floats.

    Raises:
        BundleError: the model cannot run or has other outputs than its manifest says.
        CheckError: its logits differ, and the policy is to refuse it.
    """
    golden = bundle.manifest.golden
    expected_logits = (golden.kernel_logits if kernels else None) or golden.logits
    rounding = _CACHE_ROUNDING[kv_cache] * float(np.std(expected_logits))
    tolerance = max(golden.tolerance, rounding)
    try:
        row = run(golden)
        drift = golden.drift(row[list(golden.columns)], np.array(expected_logits))
    except Exception as error:  # ONNX Runtime raises any type
        raise BundleError(f"model {bundle.name!r}: the golden check failed: {error}") from error
    expected = bundle.manifest.num_outputs
    if expected is not None and len(row) != expected:
        raise BundleError(
            f"model {bundle.name!r}: the graph has {len(row):,} outputs, but labels, embedding or "
            f"vocabulary of the manifest {expected:,}; export the model again"
        )
    if not drift <= tolerance:  # also if it is NaN
        _complain(
            policy,
            f"model {bundle.name!r}: logits on this machine differ by {drift:.2g} from those at "
            f"export (tolerance {tolerance:.2g}); {_cause(bundle, kernels)}, or serve it anyway "
            "with --golden-check warn",
        )


def _cause(bundle: Bundle, kernels: str) -> str:
    """Why logits differ, as far as it is known, and what to do."""
    manifest = bundle.manifest
    rounds = manifest.precision in ("int8", "int4")
    if kernels and rounds and manifest.golden.kernel_logits is None:
        return (
            "the export had none of this server's kernels, which round some inputs to other "
            "integers than ONNX Runtime's operators; export the model again where they are built, "
            "serve it with --kernels off"
        )
    if kernels and rounds:
        return (
            f"these are of the same kernels, on {kernels}, so this processor or the file's weights "
            "are not what they were; export the model again on this machine"
        )
    return "this machine computes something else; export the model on it"


def check_long_pass(bundle: Bundle, runner: Runner, policy: Policy) -> None:
    """Compares a text that a causal model reads in one pass with the same in pieces.

    Raises:
        CheckError: its last logits differ, and the policy is to refuse such a model.
    """
    golden = bundle.manifest.golden
    size = min(LONG_PASS, runner.max_length)
    token_ids = np.resize(np.array(golden.input_ids, np.int64), size).tolist()
    text = golden.model_copy(update={"input_ids": token_ids})
    at_once = causal_logits(runner, text).copy()
    drift = golden.drift(at_once, causal_logits(runner, text, _PIECE))
    if not drift <= golden.tolerance:  # also if it is NaN
        _complain(
            policy,
            f"model {bundle.name!r}: a text of {size} tokens has other logits in one pass than in "
            f"pieces of {_PIECE} (they differ by {drift:.2g}, tolerance {golden.tolerance:.2g}), "
            "so this device computes long passes wrongly; serve it with --provider cpu, or anyway "
            "with --golden-check warn",
        )


def masked_logits(
    session: Session,
    golden: GoldenCheck,
    *,
    of_entities: bool = False,
    soft_columns: int = 0,
    width: int = 0,
) -> NDArray[np.float32]:
    """The checked row of a masked model, float32 (num_columns,).

    Args:
        session: of its graph.
        golden: the text.
        of_entities: whether it finds entities, whose head may read all rows of a text.
        soft_columns: of a model that writes canvases, for which the row is one.
        width: the least number of tokens of the pass; padding follows the text.
    """
    length = len(golden.input_ids)
    padding = [golden.input_ids[0]] * (width - length)
    others = [row for row in range(length) if row != golden.row] if of_entities else []
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": np.array([[*golden.input_ids, *padding]], np.int64),
        "lengths": np.array([length], np.int32),
        "token_type_ids": np.zeros((1, length + len(padding)), np.int64),
        "rows": np.array([golden.row, *others], np.int64),
        "pairs": np.zeros((1, 2), np.int64),
        "adapters": np.zeros(1, np.int64),
        "canvas": np.ones(1, np.int32),
        "soft": np.zeros((1, soft_columns), np.float32),
        "temperatures": np.ones(1, np.float32),
    }
    return np.asarray(session.run(feeds)[0])


def causal_logits(
    runner: Runner, golden: GoldenCheck, chunk_tokens: int | None = None
) -> NDArray[np.float32]:
    """The checked row of a causal model, float32 (vocab_size,), whose slot 0 is not in use.

    ``chunk_tokens``: how many tokens to read in one pass; None for all.
    """
    token_ids = np.array(golden.input_ids, np.int64)
    size = chunk_tokens or len(token_ids)
    for start in range(0, len(token_ids), size):
        logits = runner.prefill(0, token_ids[start : start + size], start)
    return np.asarray(logits, np.float32).reshape(-1)


def text_to_text_logits(
    runner: Runner, encoder: Encoder, start_token_id: int, golden: GoldenCheck, width: int = 0
) -> NDArray[np.float32]:
    """The checked row of an encoder-decoder model, float32 (vocab_size,); slot 0 is not in use.

    ``width``: the least number of tokens of the encoder's pass; padding follows the text.
    """
    encoder.encode([0], [np.array(golden.input_ids, np.int64)], width)
    start, zeros = np.array([start_token_id]), np.zeros(1, np.int64)
    logits = np.array(runner.decode(start, zeros, zeros), np.float32)
    return logits.reshape(-1)


def _remedy(bundle: Bundle) -> str:
    """The command that exports the model with 7-bit weights, next to the bundle."""
    manifest = bundle.manifest
    checkpoint, _, adapter = manifest.source.partition(" + ")
    source, _, commit = checkpoint.partition("@")
    words = ["maskdial", "export", source, f"{bundle.path}-7bit"]
    words += ["--revision", commit] if commit else []
    words += ["--adapter", adapter] if adapter else []
    if (bundle.path / FULL_MANIFEST).is_file():
        words += ["--mask", "both"]
    else:
        words += ["--task", manifest.task]
    words += ["--precision", manifest.precision]
    # What int4 had in whole rows, it now has in blocks, which do not saturate
    words += ["--reduce-range"] if manifest.precision == "int8" else []
    if manifest.quality is not None and manifest.quality.max_loss is None:
        words += ["--max-loss", "inf"]
    return shlex.join(words)


def _complain(policy: Policy, message: str) -> None:
    if policy == "error":
        raise CheckError(message)
    _log.warning("%s", message)
