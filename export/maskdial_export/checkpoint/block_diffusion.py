"""DiffusionGemma's text part: the encoder and the decoder of canvases as one model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pydantic
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
)

from maskdial.bundle.manifest import Denoising
from maskdial_export.checkpoint.text_part import TextPart
from maskdial_export.errors import ExportError, first_line


class CanvasModel(PreTrainedModel):  # type: ignore[misc]
    """The decoder's modules, whose layers also have the encoder's scales.

    Attributes:
        whole: the checkpoint's model, which has the same weights; in a tuple, as it is no part.
    """

    main_input_name = "input_ids"
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, whole: Any) -> None:
        super().__init__(whole.config.text_config)
        decoder = whole.model.decoder
        self.whole = (whole,)
        self.embed_tokens = decoder.embed_tokens
        self.layers = decoder.layers
        self.norm = decoder.norm
        self.rotary_emb = decoder.rotary_emb
        self.self_conditioning = decoder.self_conditioning
        self.lm_head = whole.lm_head
        pairs = zip(self.layers, whole.model.encoder.language_model.layers, strict=True)
        for layer, reader in pairs:
            layer.register_buffer("canvas_scalar", layer.layer_scalar, persistent=False)
            layer.register_buffer("prompt_scalar", reader.layer_scalar, persistent=False)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for it in this file

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Lets the layers leave their output as it is, inside the block."""
        for layer in self.layers:
            layer.layer_scalar = torch.ones_like(layer.canvas_scalar)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.layer_scalar = layer.canvas_scalar

    def logits(self, states: Tensor) -> Tensor:
        """Of the last layer's states (num_rows, hidden_size): (num_rows, vocab_size)."""
        cap = self.config.final_logit_softcapping
        logits: Tensor = self.lm_head(self.norm(states))
        capped: Tensor = torch.tanh(logits / cap) * cap
        return capped

    def mean_embedding(self, shares: Tensor) -> Tensor:
        """The mean of all tokens' embeddings, weighted by shares (num_rows, vocab_size)."""
        table = self.embed_tokens
        mean: Tensor = torch.matmul(shares, table.weight) * table.embed_scale
        return mean

    @torch.no_grad()
    def read(
        self, input_ids: Tensor, num_canvas: int, soft_logits: Tensor | None, temperature: float
    ) -> Tensor:
        """What transformers computes of the last ``num_canvas`` tokens of a text (1, length).

        Args:
            input_ids: the prompt and the canvas.
            num_canvas: tokens of the canvas.
            soft_logits: of the pass before, divided by its temperature, (1, num_canvas,
                vocab_size); None in a first pass.
            temperature: of this pass.

        Returns:
            The logits, and what the next pass reads beside its tokens: (num_canvas, vocab_size +
            hidden_size).
        """
        (whole,) = self.whole
        prompt, canvas = input_ids[:, :-num_canvas], input_ids[:, -num_canvas:]
        logits = whole(
            input_ids=prompt,
            decoder_input_ids=canvas,
            self_conditioning_logits=soft_logits,
            past_key_values=DynamicCache(config=self.config),
        ).logits[0]
        shares = (logits / temperature).softmax(-1)
        return torch.cat([logits, self.mean_embedding(shares)], dim=-1)


def take_canvas_model(wrapper: PreTrainedModel) -> TextPart:
    """The text part of a DiffusionGemma, which also reads images."""
    model, whole = CanvasModel(wrapper).eval(), cast(Any, wrapper)
    kept = {*model.modules(), *whole.model.encoder.language_model.modules()}
    return TextPart.of(model, wrapper, kept)


def read_denoising(model: CanvasModel) -> Denoising:
    """How `generate` writes, by generation_config.json or its own defaults.

    Raises:
        ExportError: a setting is out of its range.
    """
    (whole,) = model.whole
    given, defaults = whole.generation_config, DiffusionGemmaGenerationConfig()
    settings = defaults._get_default_generation_params()
    settings |= {
        name: getattr(given, name) for name in settings if getattr(given, name) is not None
    }
    try:
        return Denoising(
            canvas_length=whole.config.canvas_length,
            hidden_size=model.config.hidden_size,
            steps=settings["max_denoising_steps"],
            t_min=settings["t_min"],
            t_max=settings["t_max"],
            entropy_bound=settings["sampler_config"].entropy_bound,
            stability_threshold=settings["stability_threshold"],
            confidence_threshold=settings["confidence_threshold"],
        )
    except pydantic.ValidationError as error:
        raise ExportError(f"generation_config.json or config.json: {first_line(error)}") from error
