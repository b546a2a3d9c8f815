"""The two ways from a checkpoint to a bundle: directly where that is known, otherwise by tracing.

The direct path (`maskdial_export.direct`) writes the graph of a known family from the file; the
tracer needs torch and takes minutes, and knows nearly every architecture.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from maskdial.bundle.manifest import Manifest
from maskdial.extras import how_to_install
from maskdial_export.choices import DIRECT_TASKS, TOLERANCE
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.errors import ExportError, QualityError, UntraceableError, io_reason
from maskdial_export.phase import say
from maskdial_export.quantize.gate import Gate

_NEEDED = ("torch", "transformers", "onnxscript")
# What only the tracer does: option -> the value that asks for nothing
_OF_TRACER: dict[str, tuple[Any, ...]] = {
    "task": ("auto", *DIRECT_TASKS),
    "mask": (None, "causal"),
    "adapter": (None,),
    "draft": (None,),
    "allow_pickle": (False,),
    "strict": (True,),
    "ignore_remote_code": (False,),
}


def export_any_way(
    source: str,
    dest: Path,
    *,
    trace: bool = False,
    gate: Gate | None = None,
    precision: str | None = None,
    revision: str | None = None,
    max_length: int | None = None,
    tolerance: float = TOLERANCE,
    console: Console | None = None,
    **options: Any,
) -> Manifest:
    """Exports a checkpoint to the new or empty folder ``dest``, and returns its manifest.

    Without a precision, integers of a GGUF file are kept, and floats become int8 if the quality
    gate accepts that; otherwise the bundle is fp32.

    Args:
        trace: whether to trace the model even if the direct path knows it.
        options: the others of `maskdial_export.export.export`, which describes all of them.

    Raises:
        QualityError: the precision that was asked for loses more than the gate allows.
        ExportError: the checkpoint cannot be exported, or has to be traced and torch is missing.
    """
    console, gate = console or Console(quiet=True), gate or Gate()
    if ":" in source:
        source, revision = _downloaded(source, revision)
    common: dict[str, Any] = {
        "revision": revision,
        "max_length": max_length,
        "tolerance": tolerance,
        "console": console,
        **options,
    }
    try:
        return _export(source, dest, trace=trace, precision=precision, gate=gate, **common)
    except QualityError as error:
        if precision is not None:
            raise
        say(
            console,
            f"{dest}: {error.measured}, so it becomes fp32; --precision int8 --max-loss inf takes "
            "any loss",
        )
        # The text is read in any case, such as by a tokenizer that knows no other.
    floats = Gate(text=gate.text)
    return _export(source, dest, trace=trace, precision="fp32", gate=floats, **common)


def _downloaded(source: str, revision: str | None) -> tuple[str, str | None]:
    """The path of a GGUF file that is named as on the Hub; another source as it is."""
    from maskdial_export.checkpoint.hub import download_gguf, split_gguf  # takes time to import

    of_hub = split_gguf(source)
    if of_hub is None:
        return source, revision
    try:
        return str(download_gguf(*of_hub, revision)), None
    except OSError as error:
        raise ExportError(f"cannot download {source}: {io_reason(error)}") from error


def _export(
    source: str,
    dest: Path,
    *,
    trace: bool,
    precision: str | None,
    gate: Gate,
    revision: str | None,
    max_length: int | None,
    tolerance: float,
    console: Console,
    **options: Any,
) -> Manifest:
    common: dict[str, Any] = {
        "precision": precision,
        "gate": gate,
        "revision": revision,
        "max_length": max_length,
        "tolerance": tolerance,
        "console": console,
    }
    lost: QualityError | None = None
    reason = "as --trace asks" if trace else _option(gate, options)
    if reason is None:
        try:
            from maskdial_export.direct.checkpoint import GraphsOnlyError
            from maskdial_export.direct.export import export_direct
            from maskdial_export.stock.export import export_stock
        except ImportError as error:
            raise ExportError(f"export needs a package that is missing: {error}") from error
        try:
            task = options.get("task", "auto")
            manifest = export_direct(source, dest, task=task, complete=_can_trace(), **common)
        except GraphsOnlyError as error:
            del common["revision"]
            manifest = export_stock(error, dest, task=task, **common)
            say(console, f"{dest}: the graph as it is, and what a server needs around it")
            return manifest
        except NotDirectError as error:
            if not _can_trace():
                raise ExportError(
                    f"{error.message}; to trace the model, install torch and transformers: "
                    f"{how_to_install('export')}"
                ) from error
            reason = f"as {error.message}"
        except QualityError as error:
            if not (error.traceable and _can_trace()):
                raise
            lost = error
            reason = f"as {error.measured}, and the tracer can leave layers as they are"
        else:
            say(console, f"{dest}: written directly from the file, without torch")
            return manifest
    export_traced = load_tracer()
    say(console, f"{dest}: tracing, {reason}")
    try:
        return export_traced(source, dest, rounds=True, **common, **options)
    except UntraceableError:
        if lost is None:
            raise
        raise lost from None


def _option(gate: Gate, options: dict[str, Any]) -> str | None:
    """Why the options ask for the tracer; None if they do not."""
    for name, values in _OF_TRACER.items():
        if options.get(name, values[0]) not in values:
            return f"as --{name.replace('_', '-')} needs it"
    measured = Gate(text=gate.text, max_loss=gate.max_loss)
    return None if gate == measured else "as the options of the quality gate need it"


def _can_trace() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ImportError:
        return False


def load_tracer() -> Callable[..., Manifest]:
    """`maskdial_export.export.export`. Raises: ExportError: a package is missing."""
    # Read when torch is imported. Otherwise its idle threads wait in loops, which on a busy machine
    # takes several times as long as the export's own work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from maskdial_export.export import export
    except ImportError as error:
        raise ExportError(
            f"this needs torch and transformers ({error}): {how_to_install('export')}"
        ) from error
    return export
