"""What decoders have beside their stream of hidden states: inputs of layers, further streams."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A vector of each token for each layer, which gates what that adds behind its MLP (Gemma 4).

    Attributes:
        vocab_size: rows of their table, each with the vectors of all layers.
        size: the columns of a vector.
        table: the module that looks them up.
        projection: what makes others of the embeddings, that are added.
        norm: of those.
        gate: a layer's product of its stream, by its name in the layer.
        output: that of the gated vector.
        output_norm: the norm behind it.
    """

    vocab_size: int
    size: int
    table: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    output: str = "per_layer_projection"
    output_norm: str = "post_per_layer_input_norm"

    def shapes(self, hidden: int, layers: list[str]) -> dict[str, tuple[int, ...]]:
        """The name and the shape of every weight."""
        columns = len(layers) * self.size
        found: dict[str, tuple[int, ...]] = {
            f"{self.table}.weight": (self.vocab_size, columns),
            f"{self.projection}.weight": (columns, hidden),
            f"{self.norm}.weight": (self.size,),
        }
        for layer in layers:
            found[f"{layer}.{self.gate}.weight"] = (self.size, hidden)
            found[f"{layer}.{self.output}.weight"] = (hidden, self.size)
            found[f"{layer}.{self.output_norm}.weight"] = (hidden,)
        return found


@dataclass(frozen=True, slots=True)
class AltUp:
    """Several streams, of which layers compute the first and correct the others (Gemma 3n).

    See Alternating Updates (arXiv:2301.13310). Beside attention a layer has a product of low rank.

    Attributes:
        num_inputs: how many streams there are.
        laurel_rank: of that product.
        scales_output: whether the corrected first one is scaled before it is gated.
        cutoffs: of each layer's MLP, how many standard deviations above the mean its gate's values
            are cut off; None: they are not.
    """

    num_inputs: int
    laurel_rank: int
    scales_output: bool
    cutoffs: tuple[float | None, ...]

    def shapes(self, hidden: int, layers: list[str]) -> dict[str, tuple[int, ...]]:
        """The name and the shape of every weight."""
        count, found = self.num_inputs, dict[str, tuple[int, ...]]()
        for index in range(count - 1):
            for name in ("altup_projections", "altup_unembed_projections"):
                found[f"model.{name}.{index}.weight"] = (hidden, hidden)
        for layer in layers:
            found |= {
                f"{layer}.altup.correct_output_scale": (hidden,),
                f"{layer}.altup.correction_coefs.weight": (count, count),
                f"{layer}.altup.prediction_coefs.weight": (count**2, count),
                f"{layer}.altup.modality_router.weight": (count, hidden),
                f"{layer}.altup.router_norm.weight": (hidden,),
                f"{layer}.laurel.linear_left.weight": (self.laurel_rank, hidden),
                f"{layer}.laurel.linear_right.weight": (hidden, self.laurel_rank),
                f"{layer}.laurel.post_laurel_norm.weight": (hidden,),
            }
        return found
