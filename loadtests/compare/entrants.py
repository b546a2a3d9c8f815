"""Entrants: their names, the packages that each needs, and whether those are installed."""

import importlib.util
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from loadtests import LoadTestError
from loadtests.compare.setup import BUNDLE
from loadtests.compare.work import WORK, Family, Load, Provider, Work

ENGINE, HTTP, MEMORY = "engine", "http", "memory"
REQUIREMENTS = "loadtests/requirements-peers.txt"
_OPENVINO = ("openvino", "nncf")
_GENAI = (*_OPENVINO, "openvino_genai", "openvino_tokenizers")
_BOTH: tuple[Provider, ...] = ("cpu", "cuda")
_WIDTHS = "float32 on the CPU, float16 on CUDA"


@dataclass(frozen=True, slots=True)
class Entrant:
    """One column of the table.

    Attributes:
        name: on the command line and in the table.
        family: the models that it runs.
        module: in `loadtests.compare.peers`, or a full dotted name.
        about: what exactly runs, for the report.
        needs: modules that must be installed.
        variant: passed on to the module.
        makes: what it converts the checkpoint to, once; see `Setup`.
        providers: where it takes part.
        on_request: where it takes part if it is named.
        ragged: whether it can batch texts of different lengths.
        load: the amount of work.
    """

    name: str
    family: Family
    module: str
    about: str
    needs: tuple[str, ...] = ()
    variant: str = ""
    makes: str = ""
    providers: tuple[Provider, ...] = ("cpu",)
    on_request: tuple[Provider, ...] = ()
    ragged: bool = False
    load: Load = "small"

    @property
    def is_peer(self) -> bool:
        return self.name not in (ENGINE, HTTP, MEMORY)

    @property
    def missing(self) -> tuple[str, ...]:
        """The modules that are not installed."""
        return tuple(name for name in self.needs if importlib.util.find_spec(name) is None)

    @property
    def work(self) -> tuple[Work, ...]:
        """What it measures."""
        return tuple(
            work
            for work in WORK[self.load][self.family]
            if (work.kind == "read") == (self.name == MEMORY) and (self.ragged or not work.least)
        )

    def takes_part(self, provider: Provider, peers: Container[str] | None) -> bool:
        """Whether it does if these peers are named; None stands for the usual ones."""
        if not self.is_peer or peers is None:
            return provider in self.providers
        return self.name in peers and provider in (*self.providers, *self.on_request)


ENTRANTS = (
    Entrant(
        ENGINE,
        "causal",
        "ours",
        "maskdial's engine in its own process, prefix cache off",
        makes=BUNDLE,
        providers=_BOTH,
        ragged=True,
    ),
    Entrant(
        HTTP,
        "causal",
        "http",
        "maskdial serve, streams of /generate over HTTP",
        makes=BUNDLE,
    ),
    Entrant(
        "openvino",
        "causal",
        "openvino",
        "OpenVINO GenAI ContinuousBatchingPipeline, NNCF int8_asym weights per channel; "
        "activations, precision hint and KV cache as its CPU plugin chooses; prompts in one piece",
        _GENAI,
        makes="openvino-int8",
    ),
    Entrant(
        "llama.cpp-q8",
        "causal",
        "llama_cpp",
        "llama.cpp, GGUF with Q8_0 weights, float16 KV cache",
        ("llama_cpp", "gguf"),
        "Q8_0",
        "gguf-q8",
    ),
    Entrant(
        "llama.cpp-q4",
        "causal",
        "llama_cpp",
        "llama.cpp, GGUF with Q4_0 weights, float16 KV cache",
        ("llama_cpp", "gguf"),
        "Q4_0",
        "gguf-q4",
    ),
    Entrant(
        "llama.cpp-q4-k-m",
        "causal",
        "llama_cpp",
        "llama.cpp, GGUF with Q4_K_M weights (those whose rows are no multiple of 256 as llama.cpp "
        "chooses), float16 KV cache",
        ("llama_cpp", "gguf"),
        "Q4_K_M",
        "gguf-q4-k-m",
    ),
    Entrant(
        "onnxruntime-genai",
        "causal",
        "onnxruntime",
        "onnxruntime-genai, its model builder's int4 (block 32, accuracy level 4)",
        ("onnxruntime_genai",),
        "int4",
        "genai-int4",
    ),
    Entrant(
        "transformers",
        "causal",
        "torch",
        "transformers, float32, SDPA, its forward pass called with a DynamicCache",
        variant="forward",
    ),
    Entrant(
        "transformers-compiled",
        "causal",
        "torch",
        f"transformers' generate, {_WIDTHS}, SDPA, a static cache of the size that the work needs, "
        "decode steps by torch.compile (reduce-overhead, on CUDA with CUDA graphs; one compilation "
        "per batch size); ragged texts as one batch padded on the left, until the longest ends",
        variant="generate",
        providers=("cuda",),
        on_request=("cpu",),
        ragged=True,
    ),
    Entrant(
        MEMORY,
        "causal",
        "torch",
        "a buffer summed by all threads; on CUDA the faster of a sum and half a copy, by torch",
        variant="memory",
        providers=_BOTH,
    ),
    Entrant(
        ENGINE,
        "masked",
        "ours",
        "maskdial's engine in its own process; LM head on one masked row per text",
        makes=BUNDLE,
        providers=_BOTH,
        ragged=True,
    ),
    Entrant(
        HTTP,
        "masked",
        "http",
        "maskdial serve, /fill-mask over HTTP with one mask per text",
        makes=BUNDLE,
    ),
    Entrant(
        "openvino-plugin",
        "masked",
        "ours",
        "the first of these on OpenVINO's plug-in for ONNX Runtime: the same bundle",
        ("onnxruntime_ep_openvino",),
        "openvino",
        BUNDLE,
    ),
    Entrant(
        "openvino-w8",
        "masked",
        "openvino",
        "OpenVINO, NNCF int8_asym weights per channel; activations and precision hint as its CPU "
        "plugin chooses",
        _OPENVINO,
        "w8",
        "openvino-w8",
    ),
    Entrant(
        "openvino-ptq",
        "masked",
        "openvino",
        "OpenVINO, NNCF post-training quantization (W8A8, static scales of 64 random texts)",
        _OPENVINO,
        "ptq",
        "openvino-ptq",
    ),
    Entrant(
        "transformers",
        "masked",
        "torch",
        f"transformers, {_WIDTHS}, SDPA; ragged texts padded to the longest",
        (),
        "model",
        providers=_BOTH,
        ragged=True,
    ),
    Entrant(
        "transformers-encoder",
        "masked",
        "torch",
        "the same without its LM head",
        (),
        "encoder",
        providers=("cuda",),
        on_request=("cpu",),
        ragged=True,
    ),
    Entrant(
        "transformers-compiled",
        "masked",
        "torch",
        "the first of these with torch.compile (reduce-overhead, one compilation per batch size "
        "and length)",
        (),
        "compiled",
        providers=("cuda",),
        on_request=("cpu",),
        ragged=True,
    ),
    Entrant(
        "pipeline",
        "masked",
        "torch",
        "transformers' fill-mask pipeline, float32, texts in one batch",
        (),
        "pipeline",
    ),
    Entrant(
        "onnxruntime",
        "masked",
        "onnxruntime",
        "ONNX Runtime, float32, torch.onnx.export of the model as it is",
        (),
        "fp32",
        "onnx-fp32",
    ),
    Entrant(
        "onnxruntime-int8",
        "masked",
        "onnxruntime",
        "the same with ONNX Runtime's quantize_dynamic (int8, one activation scale per tensor)",
        (),
        "int8",
        "onnx-int8",
    ),
)


def choose(
    family: Family, peers: tuple[str, ...] | None, provider: Provider, load: Load
) -> Iterator[Entrant]:
    """Our entrants of a family and the named peers; None stands for the usual peers.

    Raises:
        LoadTestError: no peer of any family has such a name on that provider.
    """
    known = dict.fromkeys(
        each.name
        for each in ENTRANTS
        if each.is_peer and provider in (*each.providers, *each.on_request)
    )
    for name in peers or ():
        if name not in known:
            raise LoadTestError(f"unknown peer {name!r}; choose from {', '.join(known)}")
    for entrant in ENTRANTS:
        if entrant.family == family and entrant.takes_part(provider, peers):
            yield replace(entrant, load=load)
