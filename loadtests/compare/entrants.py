"""The entrants: who takes part, what each needs, and whether it is here."""

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loadtests.compare.setup import BUNDLE
from loadtests.compare.work import WORK, Family, Work
from loadtests.errors import LoadTestError

ENGINE, HTTP, MEMORY = "engine", "http", "memory"
REQUIREMENTS = "loadtests/requirements-peers.txt"


@dataclass(frozen=True, slots=True)
class Entrant:
    """One column of the table.

    Attributes:
        name: on the command line and in the table.
        family: whose work it does.
        module: of `loadtests.compare.runners`, or a full dotted name.
        about: what exactly runs, for the report.
        needs: modules that have to be installed.
        variant: passed on to the module.
        makes: what it makes of the checkpoint once; see `Setup`.
    """

    name: str
    family: Family
    module: str
    about: str
    needs: tuple[str, ...] = ()
    variant: str = ""
    makes: str = ""

    @property
    def is_peer(self) -> bool:
        return self.name not in (ENGINE, HTTP, MEMORY)

    @property
    def missing(self) -> tuple[str, ...]:
        """The modules that are not installed."""
        return tuple(name for name in self.needs if importlib.util.find_spec(name) is None)

    @property
    def work(self) -> tuple[Work, ...]:
        """What it is asked to do."""
        return tuple(
            work for work in WORK[self.family] if (work.kind == "read") == (self.name == MEMORY)
        )


_OPENVINO = ("openvino", "nncf")
_GENAI = (*_OPENVINO, "openvino_genai", "openvino_tokenizers")

ENTRANTS = (
    Entrant(
        ENGINE,
        "causal",
        "ours_causal",
        "maskdial's engine in its own process, prefix cache off",
        makes=BUNDLE,
    ),
    Entrant(
        HTTP,
        "causal",
        "http_causal",
        "maskdial serve, streams of /generate over HTTP",
        makes=BUNDLE,
    ),
    Entrant(
        "openvino",
        "causal",
        "openvino_causal",
        "OpenVINO GenAI ContinuousBatchingPipeline, NNCF int8_asym weights per channel; "
        "activations, precision hint and KV cache as its CPU plugin chooses; prompts in one piece",
        _GENAI,
        makes="openvino-int8",
    ),
    Entrant(
        "llama.cpp-q8",
        "causal",
        "llama_cpp_causal",
        "llama.cpp, GGUF with Q8_0 weights, float16 KV cache",
        ("llama_cpp", "gguf"),
        "Q8_0",
        "gguf-q8",
    ),
    Entrant(
        "llama.cpp-q4",
        "causal",
        "llama_cpp_causal",
        "llama.cpp, GGUF with Q4_0 weights, float16 KV cache",
        ("llama_cpp", "gguf"),
        "Q4_0",
        "gguf-q4",
    ),
    Entrant(
        "onnxruntime-genai",
        "causal",
        "onnxruntime_genai_causal",
        "onnxruntime-genai, its model builder's int4 (block 32, accuracy level 4)",
        ("onnxruntime_genai",),
        "int4",
        "genai-int4",
    ),
    Entrant(
        "transformers",
        "causal",
        "transformers_causal",
        "transformers, float32, SDPA, its forward pass called with a DynamicCache",
    ),
    Entrant(MEMORY, "causal", "memory_read", "a buffer summed by all threads"),
    Entrant(
        ENGINE,
        "masked",
        "ours_masked",
        "maskdial's engine in its own process; LM head on one masked row a text",
        makes=BUNDLE,
    ),
    Entrant(
        HTTP,
        "masked",
        "http_masked",
        "maskdial serve, /fill-mask over HTTP with one mask a text",
        makes=BUNDLE,
    ),
    Entrant(
        "openvino-w8",
        "masked",
        "openvino_masked",
        "OpenVINO, NNCF int8_asym weights per channel; activations and precision hint as its CPU "
        "plugin chooses",
        _OPENVINO,
        "w8",
        "openvino-w8",
    ),
    Entrant(
        "openvino-ptq",
        "masked",
        "openvino_masked",
        "OpenVINO, NNCF post-training quantisation (W8A8, static scales of 64 random texts)",
        _OPENVINO,
        "ptq",
        "openvino-ptq",
    ),
    Entrant(
        "transformers", "masked", "transformers_masked", "transformers, float32, SDPA", (), "model"
    ),
    Entrant(
        "pipeline",
        "masked",
        "transformers_masked",
        "transformers' fill-mask pipeline, float32, texts in one batch",
        (),
        "pipeline",
    ),
    Entrant(
        "onnxruntime",
        "masked",
        "plain_onnx_masked",
        "ONNX Runtime, float32, torch.onnx.export of the model as it is",
        (),
        "fp32",
        "onnx-fp32",
    ),
    Entrant(
        "onnxruntime-int8",
        "masked",
        "plain_onnx_masked",
        "the same with ONNX Runtime's quantize_dynamic (int8, one activation scale a tensor)",
        (),
        "int8",
        "onnx-int8",
    ),
)


def choose(families: Iterable[Family], peers: tuple[str, ...] | None) -> Iterator[Entrant]:
    """Ours and the named peers of some families; None names them all.

    Raises:
        LoadTestError: no entrant of any family has such a name.
    """
    known = dict.fromkeys(entrant.name for entrant in ENTRANTS if entrant.is_peer)
    for name in peers or ():
        if name not in known:
            raise LoadTestError(f"{name!r} is no peer; there are {', '.join(known)}")
    for entrant in ENTRANTS:
        chosen = not entrant.is_peer or peers is None or entrant.name in peers
        if entrant.family in families and chosen:
            yield entrant
