"""Reading config.json so that nothing it says is passed over."""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from maskdial_export.direct.decoder import NotDirectError

# What changes nothing that a decoder computes in inference: training, provenance, other libraries
_HARMLESS = frozenset(
    {
        *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version"),
        *("use_cache", "_name_or_path", "initializer_range", "attention_dropout"),
        *("resid_pdrop", "embd_pdrop", "pad_token_id", "bos_token_id", "eos_token_id"),
        *("unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("cache_implementation", "bos_token", "eos_token", "is_llama_config"),
        *("_from_model_config", "_model_name_or_path", "model_name", "_commit_hash"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
        *(
            "pretraining_tp",
            "unsloth_fixed",
            "unsloth_version",
            "tokenizer_class",
            "task_specific_params",
        ),
        *("gradient_checkpointing", "torchscript", "use_bfloat16", "finetuning_task"),
        *("transformers.js_config", "id2label", "label2id", "output_router_logits"),
        # What a class returns beside its output
        *("output_attentions", "output_hidden_states", "return_dict", "tf_legacy_loss"),
        *("internal_version",),
    }
)
# What says nothing if it is one of these
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    # Older versions of transformers wrote all settings of `generate`, mostly at their defaults
    "output_scores": (False,),
    "return_dict_in_generate": (False,),
    "remove_invalid_values": (False,),
    "max_length": (20,),
    "min_length": (0,),
    "do_sample": (False,),
    "early_stopping": (False,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0.0,),
    "temperature": (1.0,),
    "top_k": (50,),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
}
_REPEATED = frozenset(
    {
        *("num_hidden_layers", "n_layer", "altup_num_inputs"),
        *("num_experts", "num_local_experts", "n_routed_experts"),
    }
)
_MOST_PARTS = 2**10
"""Layers of a model, or experts of a layer: each has names in memory before a file is looked at."""
# What transformers reads where it is null, as false: attention both ways
_NULL_SAYS = frozenset({"is_causal"})


class Config:
    """The entries of a configuration; those that nobody reads have to be known as harmless."""

    def __init__(
        self,
        values: Mapping[str, Any],
        prefix: str = "",
        *,
        harmless: Collection[str] = (),
        neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    ) -> None:
        """``harmless`` and ``neutral`` entries are those that a family has beside the usual ones:
        they say nothing, whatever they are or if they are one of these."""
        self._values = values
        self._prefix = prefix
        self._harmless = _HARMLESS | {*harmless}
        self._neutral = {**_NEUTRAL, **neutral}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def take(self, key: str, default: Any = None) -> Any:
        """The value; the default if it is missing or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def stated(self, key: str, default: Any) -> Any:
        """The value, of which null is one; the default if it is missing."""
        self._read.add(key)
        return self._values.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A number above 0.

        Raises:
            NotDirectError: it is missing or is none, or counts more parts than a model has.
        """
        value = self.take(key, default)
        if type(value) is not int or value < 1 or (key in _REPEATED and value > _MOST_PARTS):
            self.refuse(key)
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises: NotDirectError: it is missing or is none."""
        value = self.take(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            self.refuse(key)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Raises: NotDirectError: it is not true or false, or null, which classes read as false,
        where true is the default."""
        value = self.take(key, default)
        if not isinstance(value, bool) or (default and self._values.get(key, True) is None):
            self.refuse(key)
        return bool(value)

    def one_of(self, key: str, choices: Sequence[str], default: str) -> str:
        """Raises: NotDirectError: it is another one."""
        value = self.take(key, default)
        if value not in choices:
            self.refuse(key)
        return str(value)

    def expect(self, **known: Any) -> None:
        """Of entries that no class reads, such as of a maker's own code: what they have to be.

        Raises:
            NotDirectError: one is there, and another than this.
        """
        for key, value in known.items():
            if self.take(key, value) != value:
                self.refuse(key)

    def part(self, key: str) -> "Config | None":
        """An object within; None if there is none. Raises: NotDirectError: it is something else."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key)
        return Config(value, f"{self._prefix}{key}.")

    def refuse(self, key: str) -> None:
        """Says that the direct path does not know an entry. Raises: NotDirectError: always."""
        where = f"{self._prefix}{key}"
        if key not in self._values:
            raise NotDirectError(
                f"config.json lacks {where}, without which the direct path cannot go on"
            )
        shown = repr(self._values[key])
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise NotDirectError(f"{where} {shown} in config.json is not known to the direct path")

    def finish(self) -> None:
        """Refuses what nobody has read, unless it is null, which sets nothing in nearly all cases.

        Raises:
            NotDirectError: there is such an entry.
        """
        for key, value in self._values.items():
            if value is None and key in _NULL_SAYS:
                self.refuse(key)
            if value is None or key in self._read or key in self._harmless:
                continue
            if key in self._neutral and value in self._neutral[key]:
                continue
            self.refuse(key)
