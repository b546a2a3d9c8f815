"""A causal language model as a reranker: one score, of the rows of its output layer that answer."""

import numpy as np
from tokenizers import Tokenizer

from maskdial.bundle.manifest import PairTemplate, SpecialTokens
from maskdial_export.checkpoint.reranking import TOKENS, answers, last_tokens, read_template
from maskdial_export.direct.backbones import SCORE, Backbone
from maskdial_export.direct.checkpoint import DirectCheckpoint
from maskdial_export.direct.decoder import Floats
from maskdial_export.direct.weights import HeldWeights, JoinedWeights, Weights
from maskdial_export.errors import ExportError


def find_padding(checkpoint: DirectCheckpoint, tokens: SpecialTokens) -> int:
    """The padding token, by which the last token of a text is found.

    Raises:
        ExportError: there is none.
    """
    given = checkpoint.config.get("pad_token_id")
    pad = tokens.pad if given is None else given
    if type(pad) is not int or pad < 0:
        raise ExportError(
            f"{checkpoint.name} finds the last token of a text by its padding, but names no "
            "padding token; add a pad_token_id to config.json that texts do not end with"
        )
    return pad


def read_prompt(checkpoint: DirectCheckpoint, tokenizer: Tokenizer, pad: int) -> PairTemplate:
    """What the model reads.

    Raises:
        ExportError: nothing says it, or it ends with the padding token.
    """
    template = read_template(checkpoint)
    last_tokens(checkpoint, template, tokenizer, pad)
    return template


def with_score(checkpoint: DirectCheckpoint, model: Backbone, tokenizer: Tokenizer) -> Weights:
    """The weights, with those of the score: the logit of a match, less that of none.

    Raises:
        ExportError: nothing says how it answers, or the output layer is missing.
    """
    weights = checkpoint.weights
    if f"{SCORE}.weight" in weights.shapes():
        module, tokens = SCORE, _rows_of_head(checkpoint)
    else:
        module, tokens = model.output, answers(checkpoint, tokenizer)
    name = f"{module}.weight"
    count, width = weights.shapes().get(name, (0, 0))
    wanted = [each for each in tokens if each is not None]
    if width != model.hidden_size or not all(0 <= each < count for each in wanted):
        raise ExportError(
            f"{checkpoint.name} has no rows {' and '.join(map(str, wanted))} of "
            f"{model.hidden_size:,} columns in {name}, by which it would answer"
        )
    rows: list[Floats] = [weights.values(name, slice(each, each + 1)) for each in wanted]
    score: Floats = rows[0] if len(rows) == 1 else np.subtract(*rows)
    held = HeldWeights(checkpoint.name, {"weight": score})
    return JoinedWeights(checkpoint.name, {"": weights, f"{SCORE}.": held})


def _rows_of_head(checkpoint: DirectCheckpoint) -> tuple[int, int | None]:
    """The rows for a match and none of a head that a checkpoint has in place of its output layer:
    of llama.cpp, which keeps two, or of a classifier, whose only one is the score itself.

    Raises:
        ExportError: nothing says which is which.
    """
    if checkpoint.weights.shapes()[f"{SCORE}.weight"][0] == 1:
        return 0, None
    labels, named = checkpoint.config.get("id2label"), checkpoint.config.get(TOKENS)
    places: dict[str, int] = {}
    if isinstance(labels, dict) and all(str(index).isdecimal() for index in labels):
        places = {str(label): int(index) for index, label in labels.items()}
    if not isinstance(named, list) or len(named) != 2 or {*map(str, named)} != places.keys():
        raise ExportError(
            f"the labels of {checkpoint.name} do not say which row of {SCORE}.weight stands for a "
            "match and which for none; leave out --task rerank, or name both labels in "
            f'"{TOKENS}" in config.json, that of none first'
        )
    none, match = (places[str(label)] for label in named)
    return match, none
