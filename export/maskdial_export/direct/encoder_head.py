"""The head of a model that embeds: sentence-transformers' modules behind the encoder."""

from pathlib import Path
from typing import Any

from maskdial.bundle.manifest import Embedding
from maskdial_export.checkpoint.files import Files
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.module_settings import check_modules
from maskdial_export.checkpoint.sentence import (
    MODULES,
    SENTENCE_CONFIG,
    kept_entries,
    module_folders,
    module_types,
    pooling_modes,
    read_prompts,
)
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.encoder import Dense, Function, Head, Leading, Norm, Normalize, Step
from maskdial_export.direct.weights import SafetensorsWeights

_FUNCTIONS: dict[str, Function | None] = {
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": None,
}
_EPSILON = 1e-5  # of torch's LayerNorm


def read_head(checkpoint: Files, columns: int) -> tuple[Head, dict[str, SafetensorsWeights]]:
    """Pooling and what follows it; and the weights of modules, by the prefix of their names.

    Without modules.json it is the mean over the tokens, sentence-transformers' own default.

    Args:
        checkpoint: a folder.
        columns: of the hidden states.

    Raises:
        NotDirectError: a module is not known.
        ExportError: a setting is refused by the tracer as well, or a file is damaged.
    """
    kind = checkpoint.read_json(SENTENCE_CONFIG).get("model_type")
    if kind not in (None, "SentenceTransformer"):
        raise NotDirectError(f"model_type {kind!r} in {SENTENCE_CONFIG} is not known")
    for name, _ in module_types(checkpoint):
        if not name.startswith("sentence_transformers."):
            raise NotDirectError(f"the module {name} in {MODULES} is not known to the direct path")
    check_modules(checkpoint)
    reads: tuple[str, ...] = ("mean",)
    width = columns
    steps: list[Step] = []
    weights: dict[str, SafetensorsWeights] = {}
    for kind, folder in module_folders(checkpoint):
        settings = read_json(folder / "config.json")
        prefix = f"pooler.steps.{len(steps)}."
        if kind in ("Transformer", "Dropout"):
            continue
        if kind == "Pooling":
            reads = tuple(pooling_modes(checkpoint, settings))
            width = columns * len(reads)
        elif kind == "Normalize":
            steps.append(Normalize())
        elif kind in ("Dense", "LayerNorm"):
            weights[prefix] = _weights(checkpoint, kind, folder)
            step = _dense(weights[prefix], settings, prefix, width)
            if kind == "LayerNorm":
                step = Norm(f"{prefix}norm", width, _EPSILON)
            width = step.num_outputs if isinstance(step, Dense) else width
            steps.append(step)
        else:
            raise NotDirectError(f"the module {kind} in {MODULES} is not known to the direct path")
    kept = kept_entries(checkpoint, "truncate_dim")
    if kept is not None and kept < width:
        steps.append(Leading(kept))
        width = kept
    prompts, default = read_prompts(checkpoint)
    embedding = Embedding(
        dimension=width,
        pooling="+".join(reads),
        normalized=bool(steps) and isinstance(steps[-1], Normalize),
        prompts=prompts,
        default_prompt=default,
    )
    return Head("embed", reads, tuple(steps), embedding=embedding), weights


def pools(checkpoint: Files) -> bool:
    """Whether a module of sentence-transformers pools the encoder's hidden states."""
    return any(kind == "Pooling" for kind, _ in module_folders(checkpoint))


def check_no_modules(checkpoint: Files) -> None:
    """Refuses what stands behind a model with a head: the tracer may read it as another one.

    Raises:
        NotDirectError: there is a module beside the model itself, and a reranker's.
    """
    known = ("Transformer", "Dropout", *(["LogitScore"] if checkpoint.task == "rerank" else []))
    for kind, _ in module_folders(checkpoint):
        if kind not in known:
            raise NotDirectError(f"the module {kind} behind a head is not known to the direct path")


def _weights(checkpoint: Files, kind: str, folder: Path) -> SafetensorsWeights:
    file = folder / "model.safetensors"
    if not file.is_file():
        raise NotDirectError(
            f"the {kind} module of {checkpoint.name} ({folder.name}) has no model.safetensors"
        )
    return SafetensorsWeights(f"{checkpoint.name} ({folder.name})", [file])


def _dense(weights: SafetensorsWeights, settings: dict[str, Any], prefix: str, width: int) -> Step:
    if settings.get("use_residual"):
        raise NotDirectError("use_residual of a Dense module is not known to the direct path")
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, "sentence_embedding"):
            raise NotDirectError(f"{key} {settings[key]!r} is not known to the direct path")
    name = settings.get("activation_function") or "torch.nn.modules.activation.Tanh"
    if name not in _FUNCTIONS:
        raise NotDirectError(f"the activation {name!r} is not known to the direct path")
    shapes = weights.shapes()
    shape = shapes.get("linear.weight", (0,))
    return Dense(f"{prefix}linear", width, shape[0], "linear.bias" in shapes, _FUNCTIONS[name])
