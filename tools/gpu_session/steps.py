"""The steps of a session on a GPU, in order of worth."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tools.gpu_session.session import Step

Provider = Literal["cuda", "cpu"]

# Variables of ONNX Runtime that choose among its kernels.
_FPA_INTB = {"ORT_FPA_INTB_GEMM": "1"}
_XQA = {"ORT_ENABLE_XQA": "1"}
_SHAPES = {
    # To quantize 8 billion weights would take the time of the session.
    "cuda": {"many": "8b", "int4": "1.1b", "host": "135m", "encoder": "bert-base"},
    "cpu": {
        "many": "tiny-llama",
        "int4": "tiny-llama",
        "host": "tiny-llama",
        "encoder": "tiny-bert",
    },
}


def steps(provider: Provider, folder: Path) -> Iterator[Step]:
    """All steps; those of the CPU are the same on tiny models, to try the session.

    Their models and reports are in ``folder``.
    """
    shapes, load = _SHAPES[provider], "many" if provider == "cuda" else "small"
    half = "fp16" if provider == "cuda" else "int8"
    int4 = "int4-fp16" if provider == "cuda" else "int4"

    def compare(
        name: str,
        asks: str,
        shape: str,
        precision: str,
        seconds: int,
        limit: int,
        environment: dict[str, str] | None = None,
    ) -> Step:
        report = folder / name
        command = (
            *(sys.executable, "-m", "loadtests", "compare", "--provider", provider),
            *("--shapes", shapes[shape], "--load", load, "--precision", precision),
            *("--peers", "", "--apart", "--seconds", str(seconds)),
            *("--work", str(folder / "models"), "--output", str(report)),
        )
        return Step(name, asks, command, limit, environment or {}, report.with_suffix(".json"))

    def tests(name: str, chosen: str, limit: int) -> Step:
        command = (
            *(sys.executable, "-m", "pytest", "tests/cuda", "-q", "-m", "cuda", "-n", "2"),
            *("-p", "no:cacheprovider", "-k", chosen),
        )
        return Step(name, "Are the answers still those of the CPU and of torch?", command, limit)

    probe = (sys.executable, "-m", "tools.gpu_session.probe")
    yield Step("environment", "Which GPU, driver and ONNX Runtime?", (*probe, provider), 60)
    yield tests("tests-fp16", "not int4", 150)
    yield compare(
        "encoders",
        "What do ragged texts of BERT-base give now that they share a pass? (1,274 texts/s before)",
        *("encoder", half, 20, 90),
    )
    measuring = compare("models", "The 8B model is built.", "many", half, 1, 200)
    yield replace(measuring, command=(*measuring.command, "--prepare-only"), report=None)
    yield compare(
        "streams",
        "An 8B model: tokens/s of 256 ragged texts (aim 10,000); the share of the bandwidth with 1 "
        "text (aim 70%) and 64 (55%).",
        *("many", half, 60, 240),
    )
    yield compare(
        "int4",
        "A 1.1B model in int4-fp16 with 1, 64 and 256 texts, as the server has it.",
        *("int4", int4, 40, 150),
    )
    yield compare(
        "int4-fpa-intb",
        "The same with ONNX Runtime's fast products of several rows (ep.cuda.fpa_intb_gemm).",
        *("int4", int4, 40, 120),
        _FPA_INTB,
    )
    report = folder / "packed.json"
    yield Step(
        "packed-attention",
        "What does attention without padding save for encoders, and is it right?",
        (sys.executable, "-m", "tools.gpu_session.packed", provider, str(report)),
        60,
        report=report,
    )
    yield compare(
        "streams-xqa",
        "Does the XQA kernel make decode steps of grouped queries faster?",
        *("many", half, 30, 120),
        _XQA,
    )
    yield compare(
        "host",
        "How much of a step of a small model is the host's? (0.8 of 2.25 ms; aim 0.2)",
        *("host", half, 25, 90),
    )
    yield compare(
        "host-without-graphs",
        "The same without CUDA graphs.",
        *("host", half, 15, 60),
        {"MASKDIAL_CUDA_GRAPHS": "off"},
    )
    for tokens in (512, 8192):
        yield compare(
            f"chunks-of-{tokens}",
            f"Prompts in chunks of {tokens} tokens in place of 2,048.",
            *("many", half, 20, 120),
            {"MASKDIAL_PREFILL_CHUNK_TOKENS": str(tokens)},
        )
    yield tests("tests-int4", "int4", 150)
    yield Step("webgpu", "Is there a driver of Vulkan for a real GPU?", (*probe, "webgpu"), 30)
