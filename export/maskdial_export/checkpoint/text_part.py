"""The text part of a model that also reads images or sound.

Such a model is a wrapper: towers turn images into embeddings, which a text model reads among those
of its tokens. On text alone it computes what its text model and its head compute; that is compared
before the rest is dropped.
"""

import copy
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from maskdial.bundle.manifest import TaskName
from maskdial_export.checkpoint.architectures import text_class
from maskdial_export.errors import ExportError, first_line

_LENGTH = 24  # tokens of the text by which both are compared
_TOLERANCE = 1e-4  # of the largest value
_ROLES = ("pad_token_id", "bos_token_id", "eos_token_id")


_SPECIAL = re.compile(r"_token(_id|_index)?$")
# Settings of wrappers that name the tokens around and in place of images and sound
_MEDIA = re.compile(
    r"(image|video|audio|vision|speech|sound|bo[iav]|eo[iav])\w*_token_(id|index)$|"
    r"^(image|video|audio)_token$"
)


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text model within a wrapper, with its head if the task has one.

    Attributes:
        model: the text model.
        left_out: the paths of the outermost modules that it does without.
        media_tokens: the tokens that stand for images or sound.
        prefix: what stands before the paths in a checkpoint that was saved with a head.
    """

    model: PreTrainedModel
    left_out: tuple[str, ...]
    media_tokens: tuple[int, ...]
    prefix: str

    @classmethod
    def of(
        cls, model: PreTrainedModel, wrapper: PreTrainedModel, kept: Collection[nn.Module]
    ) -> "TextPart":
        """The text part of a wrapper.

        Args:
            model: the part; its configuration gets the wrapper's special tokens.
            wrapper: the whole model.
            kept: the wrapper's modules that belong to the part.
        """
        given: Any = wrapper.config
        for role in _ROLES:  # as generate() does, the outer one's first
            if getattr(given, role, None) is not None:
                setattr(model.config, role, getattr(given, role))
        left_out = tuple(_others(wrapper, kept, ""))
        media_tokens = tuple(_media_tokens(given, model.config.vocab_size))
        return cls(model, left_out, media_tokens, f"{wrapper.base_model_prefix}.")

    @property
    def summary(self) -> str:
        """One line for the terminal."""
        names = [path.rpartition(".")[2] for path in self.left_out]
        return f"the text part alone; left out: {', '.join(names) or 'nothing that has weights'}"

    def leaves_out(self, weight: str) -> bool:
        """Whether a weight belongs to a module that is left out."""
        names = weight, weight.removeprefix(self.prefix)
        return any(name.startswith(f"{path}.") for path in self.left_out for name in names)


class _Headed:
    """The forward function of a text model and its head."""

    model: PreTrainedModel
    lm_head: nn.Module

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> CausalLMOutput:
        """The logits (batch, length, vocab_size)."""
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        return CausalLMOutput(logits=self.lm_head(output[0]))


class _Tower(nn.Module):
    """Takes the place of a module for images or sound, which is not even built.

    Some need packages that text does not (timm), and a tower may have a billion weights.
    """

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def make_preprocessor_external(self) -> None:
        """Nemotron 3 Omni calls it of its tower as it is built."""


@contextmanager
def towers_left_out(config: Any) -> Iterator[None]:
    """Builds no module for images or sound by an auto class inside the block.

    ``config`` is the wrapper's. A classifier builds the whole wrapper by an auto class.
    """
    kept = type(config), type(config.get_text_config())
    built = transformers.AutoModel.from_config

    def build(config: Any, **settings: Any) -> nn.Module:
        return built(config, **settings) if type(config) in kept else _Tower(config)

    with mock.patch.object(transformers.AutoModel, "from_config", build):
        yield


def take_text_part(wrapper: PreTrainedModel, task: TaskName) -> TextPart:
    """The text model within a model that also reads images or sound.

    Raises:
        ExportError: there is none, or on text alone the whole model computes something else.
    """
    body = _find_body(wrapper)
    text = _text(wrapper.config)
    expected = _first_output(wrapper, text)
    room = _TOLERANCE * max(1.0, float(expected.abs().max()))
    for model in _models(wrapper, body, task):
        found = _first_output(model, text)
        if expected.shape == found.shape and float((expected - found).abs().max()) <= room:
            break
    else:
        raise ExportError(
            f"the text part of {type(wrapper).__name__} ({type(body).__name__}) does not compute "
            "on text what the whole model does, which is not supported"
        )
    return TextPart.of(model, wrapper, set(model.modules()))


def _find_body(wrapper: PreTrainedModel) -> PreTrainedModel:
    """The outermost module that has the text part's configuration."""
    config = wrapper.config.get_text_config()
    for module in wrapper.modules():
        if module is wrapper or not isinstance(module, PreTrainedModel):
            continue
        if config is not wrapper.config and type(module.config) is type(config):
            return module
    raise ExportError(f"{type(wrapper).__name__} has no text model that could be exported alone")


def _models(
    wrapper: PreTrainedModel, body: PreTrainedModel, task: TaskName
) -> Iterator[PreTrainedModel]:
    """The text model with its head: in transformers' class for the task, and as it stands.

    A class may scale or cap logits that the wrapper leaves as they are, so there may be two.
    """
    if body.get_output_embeddings() is not None or task in ("embed", "embed-all", "embed-hybrid"):
        yield body
        return
    name = text_class(task, body.config.model_type)
    if name is not None:
        with torch.device("meta"):
            model: PreTrainedModel = getattr(transformers, name)(copy.copy(body.config))
        parts = {each: getattr(wrapper, each, None) for each, _ in model.named_children()}
        parts[model.base_model_prefix] = body
        if type(model.base_model) is type(body) and None not in parts.values():
            for each, module in parts.items():
                setattr(model, each, module)
            model.config = body.config
            yield model.eval()
    head = wrapper.get_output_embeddings()
    if head is not None:
        yield _headed(body, head)


def _headed(body: PreTrainedModel, head: nn.Module) -> PreTrainedModel:
    """The two in a class of the text model's own file, whose functions the tracing replaces."""
    family = next(each for each in type(body).__mro__ if each.__name__.endswith("PreTrainedModel"))
    names = {"__module__": type(body).__module__, "base_model_prefix": "model"}
    model: Any = type(f"{type(body).__name__}WithHead", (_Headed, family), names)(body.config)
    model.model, model.lm_head = body, head
    return cast(PreTrainedModel, model.eval())


def _text(config: Any) -> Tensor:
    """Random token ids (1, length), none of them special by the wrapper's configuration."""
    text_config = config.get_text_config()
    settings = (*config.to_dict().items(), *text_config.to_dict().items())
    special = {value for name, value in settings if _SPECIAL.search(name) and type(value) is int}
    ids = torch.tensor([each for each in range(text_config.vocab_size) if each not in special])
    generator = torch.Generator().manual_seed(0)
    return ids[torch.randint(len(ids), (1, _LENGTH), generator=generator)]


def _first_output(model: PreTrainedModel, text: Tensor) -> Tensor:
    """The logits, or hidden states without a head."""
    try:
        with torch.no_grad():
            output = model(input_ids=text, use_cache=False)
    except Exception as error:  # models raise any type
        raise ExportError(
            f"{type(model).__name__} cannot run on token ids alone: {first_line(error)}"
        ) from error
    first: Tensor = output["logits"] if "logits" in output else output[0]
    return first


def _others(module: nn.Module, kept: Collection[nn.Module], prefix: str) -> Iterator[str]:
    """The paths of the outermost modules that have no part in what is kept."""
    for name, child in module.named_children():
        if child in kept:
            continue
        if not any(module in kept for module in child.modules()):
            yield prefix + name
        else:
            yield from _others(child, kept, f"{prefix}{name}.")


def _media_tokens(config: Any, vocab_size: int) -> list[int]:
    """The ids that a wrapper's configuration says to stand for images, videos or sound."""
    named = {
        value
        for name, value in config.to_dict().items()
        if _MEDIA.search(name) and type(value) is int
    }
    return sorted(value for value in named if 0 <= value < vocab_size)
