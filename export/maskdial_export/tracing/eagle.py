"""EAGLE-3 heads (`maskdial_export.checkpoint.eagle_head`), to be traced with their targets."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from maskdial_export.checkpoint.eagle_head import Eagle, layers_of
from maskdial_export.errors import ExportError
from maskdial_export.tracing.draft_head import DraftHead
from maskdial_export.tracing.hidden import HiddenStates
from maskdial_export.tracing.positions import max_length
from maskdial_export.tracing.survey import survey


def eagle_head(main: PreTrainedModel, eagle: Eagle) -> DraftHead:
    """An EAGLE-3 head, to be exported with its target.

    Args:
        main: the target.
        eagle: the head.

    Raises:
        ExportError: the target's layers do not have a hidden state for each token, or the head
            reads shorter texts than the target.
    """
    config, head, features = eagle.config, eagle.head, eagle.features
    if max_length(head) < max_length(main):
        raise ExportError(
            f"{eagle.source} has rotary positions that depend on the length of a text, which is "
            "not supported"
        )
    layers = layers_of(main)
    of_main = HiddenStates([layers[place] for place in config.places], features)
    of_itself = HiddenStates([] if config.norm_output else [head.model.eagle.norm])
    with torch.no_grad(), of_main.noted() as noted:
        main.base_model(input_ids=torch.ones(1, 2, dtype=torch.int64))
    if any(each.shape != (1, 2, config.target_size) for each in noted.values()):
        raise ExportError(
            f"the layers of {type(main).__name__} do not pass on one hidden state for each token, "
            "which an EAGLE-3 head reads"
        )

    def reference(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = main.base_model(input_ids=ids[:, :-1], output_hidden_states=True).hidden_states
        projected = features(torch.cat([read[place] for place in config.places], -1))
        with of_itself.noted() as own:
            last = head.model(ids[:, 1:], previous_hidden=projected).last_hidden_state
        return projected[0], head.eagle_head(last)[0], of_itself(own, last.flatten(0, 1))

    return DraftHead(
        "eagle",
        head,
        survey(head),
        of_main,
        of_itself,
        config.layer.hidden_size,
        reference,
        eagle.token_ids,
        eagle.source,
    )
