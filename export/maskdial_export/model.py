"""A loaded checkpoint, and how its task is traced, checked and evaluated."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from maskdial.bundle.manifest import (
    Denoising,
    Entities,
    Extraction,
    KVLayout,
    PairTemplate,
    SpecialTokens,
    TaskName,
    TextToText,
    Tokenization,
)
from maskdial_export.checkpoint.block_diffusion import read_denoising
from maskdial_export.checkpoint.config import prefix_note
from maskdial_export.checkpoint.decision import asks_together
from maskdial_export.checkpoint.embedding import read_pooler
from maskdial_export.checkpoint.files import chat_templates, special_tokens
from maskdial_export.checkpoint.gliner import read_entities
from maskdial_export.checkpoint.gliner2 import read_extraction
from maskdial_export.checkpoint.gliner_labels import label_pooler, label_source
from maskdial_export.checkpoint.hybrid import read_hybrid
from maskdial_export.checkpoint.module_settings import check_modules, is_cross_encoder
from maskdial_export.checkpoint.multi_vector import check_expansion, read_multi_vector
from maskdial_export.checkpoint.pooling import Pooler
from maskdial_export.checkpoint.reranking import read_template
from maskdial_export.checkpoint.sample import Sample, read_sample
from maskdial_export.checkpoint.sentence import longest_text
from maskdial_export.checkpoint.source import Source
from maskdial_export.checkpoint.static import load_static
from maskdial_export.checkpoint.text_to_text import read_text_to_text
from maskdial_export.checkpoint.tokenization import LoadedTokenizer, load_tokenizer
from maskdial_export.checkpoint.weights import load_model, map_widened
from maskdial_export.checks.canvas_parity import CanvasParity
from maskdial_export.checks.evaluation import (
    LABELS,
    Classify,
    ClassifyAll,
    Cosine,
    Evaluation,
    FillMask,
    FindBySchema,
    FindEntities,
    GreedyText,
    Order,
    QuestionAnswering,
    TokenClassify,
)
from maskdial_export.checks.next_tokens import NextTokens
from maskdial_export.checks.parity import (
    CausalParity,
    EncoderDecoderParity,
    MaskedParity,
    expected_output,
)
from maskdial_export.checks.reach import NEAR, Reach, Snapshot, find_reach
from maskdial_export.checks.tokenizer_parity import check_tokenizer, show_overruled
from maskdial_export.errors import ExportError
from maskdial_export.phase import finding
from maskdial_export.session import Floats, Graph
from maskdial_export.tracing import (
    bidirectional,
    canvas,
    causal,
    encoder_decoder,
    field_head,
    masked,
    two_parts,
)
from maskdial_export.tracing.draft_head import DraftHead
from maskdial_export.tracing.heads import adapt_head
from maskdial_export.tracing.length import bound_positions
from maskdial_export.tracing.positions import check_sizes, max_length
from maskdial_export.tracing.repeat import find_stack
from maskdial_export.tracing.reranking import make_scorer
from maskdial_export.tracing.rotary import Tables
from maskdial_export.tracing.survey import Survey, survey


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model with its tokenizer and settings.

    ``pooler`` is set for embed and embed-sparse, ``kv`` for models with a KV cache,
    ``text_to_text`` for those with an encoder and a decoder, ``reads_both_ways`` for causal
    architectures under the full mask, ``pair_template`` for rerank. ``packs`` are groups of modules
    to multiply as one product each. ``sends_token_types``: whether the tokenizer tells the model
    the parts of a text pair. ``entities`` is set for GLiNER models, ``label_vectors`` for those
    with an encoder of labels: its output for `LABELS`. ``extraction`` is set for GLiNER2 models.
    ``doubt``: why the model may not be the one that was trained.
    ``left_out`` are modules that read images or sound, ``media_tokens`` stand for these.
    ``draft_head`` drafts for the model, if it is exported with it. ``denoising`` is set for models
    that write canvases.
    """

    task: TaskName
    model: PreTrainedModel
    survey: Survey
    tokenizer: Tokenizer
    tokens: SpecialTokens
    max_length: int
    pooler: Pooler | None
    kv: KVLayout | None
    reads_both_ways: bool = False
    text_to_text: TextToText | None = None
    pair_template: PairTemplate | None = None
    packs: Sequence[tuple[str, ...]] = ()
    tokenization: Tokenization = field(default_factory=Tokenization)
    sends_token_types: bool = True
    reach: Reach = NEAR
    doubt: str | None = None
    left_out: Sequence[str] = ()
    media_tokens: Sequence[int] = ()
    entities: Entities | None = None
    label_vectors: Floats | None = None
    extraction: Extraction | None = None
    draft_head: DraftHead | None = None
    denoising: Denoising | None = None

    def whole(self) -> "Checkpoint | None":
        """The same, of which all layers are traced; None if they are anyway."""
        if self.text_to_text is not None or find_stack(self.model, self.survey) is None:
            return None
        return replace(self, survey=replace(self.survey, whole=True))

    def half(self) -> "Checkpoint":
        """A copy with weights and KV cache in float16.

        Buffers stay float32, as in a model that transformers loads in float16: rotary frequencies
        with 11 bits would give wrong angles at far positions.
        """
        kv = None if self.kv is None else causal.kv_layout(self.survey, torch.float16)
        model = copy.deepcopy(self.model)
        for parameter in model.parameters():
            parameter.data = parameter.data.half()
        return replace(self, model=model, survey=self.survey.half(), kv=kv)

    @property
    def reads_forward(self) -> bool:
        """Whether the graph has a KV cache, or shares its weights with one that has."""
        return self.kv is not None or self.reads_both_ways

    @property
    def predicts_tokens(self) -> bool:
        """Whether the model's output are distributions over the vocabulary."""
        return self.task in ("fill-mask", "generate")

    def answer(self, output: Any) -> torch.Tensor:
        """What the graph has as its output, of what the model returns for texts of one length."""
        if self.pooler is None:
            return masked.head_logits(output)
        hidden: torch.Tensor = output[0]
        lengths = torch.full((len(hidden),), hidden.shape[1])
        vectors: torch.Tensor = self.pooler(hidden, lengths)
        return vectors

    def trace(self) -> ir.Model:
        """The traced graph, before any optimization of ours; of two parts, the decoder's."""
        if self.text_to_text is not None and self.kv is not None:
            return encoder_decoder.trace_decoder(self.model, self.kv, self.survey.layers)
        if self.kv is not None:
            hidden = None if self.draft_head is None else self.draft_head.of_main
            return causal.trace(self.model, self.survey, hidden)
        if self.reads_both_ways:
            return bidirectional.trace(self.model, self.survey)
        if self.denoising is not None:
            return canvas.trace(self.model, self.survey)
        if two_parts.reads_twice(self.model):
            return two_parts.trace(self.model)
        return masked.trace(
            self.model, self.survey, self.task, self.pooler, typed=self.sends_token_types
        )

    def trace_field_head(self) -> ir.Model | None:
        """The traced graph that reads a GLiNER2 model's fields; None if it is no such model."""
        return None if self.extraction is None else field_head.trace(self.model.field_head)

    def check_field_head(self, graph: Path, tolerance: float) -> None:
        """Compares a graph of `trace_field_head` with torch.

        Raises:
            ExportError: they differ by more than the tolerance.
        """
        field_head.check(self.model.field_head, graph, tolerance)

    def trace_encoder(self) -> ir.Model | None:
        """The traced graph of the encoder, if the model has one beside its decoder."""
        if self.text_to_text is None or self.kv is None:
            return None
        return encoder_decoder.trace_encoder(self.model, self.kv)

    def trace_draft_head(self) -> ir.Model | None:
        """The traced graph of what drafts by the model's hidden states, if it is exported."""
        return None if self.draft_head is None else self.draft_head.trace()

    def with_draft_head(self, head: DraftHead) -> "Checkpoint":
        """The same with what drafts for it; each layer is traced if that reads some layers'."""
        whole = self.survey.whole or head.of_main.of_layers
        return replace(self, survey=replace(self.survey, whole=whole), draft_head=head)

    def parity(
        self, graph: Graph
    ) -> MaskedParity | CausalParity | EncoderDecoderParity | CanvasParity:
        """The comparison of a graph with this model."""
        if self.denoising is not None:
            return CanvasParity(self.model, graph, self.max_length, self.denoising, self.reach)
        if self.text_to_text is not None and self.kv is not None:
            return EncoderDecoderParity(
                self.model, graph, self.max_length, self.kv, self.text_to_text, self.reach
            )
        if self.kv is not None:
            return CausalParity(self.model, graph, self.max_length, self.kv, self.reach)
        first = int(self.reads_both_ways)  # no token predicts the first one
        return MaskedParity(self.model, self.pooler, graph, self.max_length, first, self.reach)

    def evaluation(self, sample: Sample) -> Evaluation:
        """The quality evaluation of the task on a sample text."""
        text = (self.tokenizer, sample, self.max_length)
        config: Any = self.model.config
        if self.text_to_text is not None and self.kv is not None:
            return GreedyText(
                *text[:2], self.text_to_text, self.max_length, self.kv, self.tokens.eos
            )
        if self.task == "generate" and self.kv is not None:
            return NextTokens(*text, config.vocab_size, self.kv)
        if self.pooler is not None:
            return Cosine(*text)
        if self.task == "fill-mask" and self.tokens.mask is not None:
            return FillMask(*text, config.vocab_size, self.tokens.mask)
        if self.extraction is not None:
            return FindBySchema(*text, self.extraction, self.model)
        if self.entities is not None:
            return FindEntities(*text, self.entities, self.label_vectors)
        if self.task in ("token-classify", "decide"):
            return TokenClassify(*text, self.kv)
        if self.task == "question-answering":
            return QuestionAnswering(*text)
        if self.task == "multiple-choice" or config.num_labels == 1:
            return Order(*text)
        if config.problem_type == "multi_label_classification":
            return ClassifyAll(*text)
        return Classify(*text)


def load_checkpoint(
    source: Source,
    *,
    sample: Sample | None = None,
    strict: bool = True,
    limit: int | None = None,
    console: Console | None = None,
    folder: Path | None = None,
) -> Checkpoint:
    """Loads the model, its tokenizer and its settings.

    Args:
        source: the checkpoint.
        sample: a text that the tokenizer must know; None for the built-in sample.
        strict: whether to refuse missing and unused weights; otherwise the console shows them.
        limit: how many tokens a text may have; None for as many as the model has positions, or
            `maskdial_export.choices.LONGEST` if they are rotary.
        console: where to show findings; None for nowhere.
        folder: where weights in 16 bits or fewer are mapped in float32; None keeps them in memory.

    Raises:
        ExportError: something is missing, damaged or not supported.
        OSError: the weights cannot be written to the folder.
    """
    console = console or Console(quiet=True)
    check_modules(source)
    if source.table is not None:
        return _load_static(source, source.table, limit)
    read = load_model(source, strict=strict, console=console)
    model = read.model
    doubts = [each for each in (source.own_code, read.doubt) if each is not None]
    if folder is not None:
        map_widened(source, model, folder)
    bound_positions(model, limit, console)
    note = prefix_note(source.read_json("config.json"))
    if source.task == "generate" and note is not None:
        finding(console, note)
    if source.task == "generate":
        causal.check(model)
    check_sizes(model)
    config: Any = model.config
    sample = sample or read_sample(None)
    chat_templates(source)  # a damaged one would be called a tokenizer that cannot be loaded
    loaded = load_tokenizer(source, config.vocab_size, sample, console)
    tokenizer = loaded.backend
    tokens = special_tokens(source, config, tokenizer)
    paired = source.family == "masked" and source.task != "block-diffusion"
    show_overruled(loaded, sample, console)
    check_tokenizer(source.name, loaded, tokens, sample, paired=paired)
    positions = max_length(model)
    entities, label_vectors, extraction = None, None, None
    if source.task == "extract":
        extraction = read_extraction(source, model)
    if source.task == "entities":
        entities = read_entities(source, tokenizer, model)
        if entities.encodes_labels:
            label_vectors = _label_vectors(source, sample)
        else:
            model.words.separator = entities.separator[0]
    initial = Snapshot(model)
    if source.family == "encoder-decoder":
        pair = _load_pair(source, model, loaded, tokens, positions, limit, initial)
        return replace(pair, doubt="; ".join(doubts) or None)
    template = None
    if source.task == "rerank":
        template = read_template(source)
        model = make_scorer(source, model, tokenizer, tokens.pad, template)
        initial = Snapshot(model)
        positions = longest_text(source, positions)
    denoising = None
    if source.task == "block-diffusion":
        denoising = read_denoising(model)
        surveyed = Survey((), Tables(positions), causal=False)
    elif two_parts.reads_twice(model):
        two_parts.select_end(model)
        surveyed = Survey((), Tables(positions), causal=False)
    else:
        surveyed = survey(model)
    masked.check(model, surveyed, source.task)
    adapt_head(model, source.task)
    pooler = None
    if source.task == "embed-all":
        pooler = read_multi_vector(source, config.hidden_size, tokenizer, tokens)
        check_expansion(source, pooler, causal=surveyed.causal)
        positions = longest_text(source, positions)
    if source.task == "embed-hybrid":
        pooler = read_hybrid(source, config.hidden_size, tokenizer, tokens)
        positions = longest_text(source, positions)
    if source.task in ("embed", "embed-sparse"):
        columns = _output_width(model) if source.task == "embed" else config.vocab_size
        pooler = read_pooler(source, columns) if source.finder is None else label_pooler(source)
        positions = longest_text(source, positions)
    if source.task == "classify" and is_cross_encoder(source):
        positions = longest_text(source, positions)
    positions = _limited(source, positions, limit)
    kv = None
    if source.family == "causal" or _shares_states(source, model, surveyed):
        kv = causal.kv_layout(surveyed)
    both_ways = source.both_ways
    if both_ways:
        bidirectional.check(config, positions, tokenizer)
        bidirectional.read_both_ways(model)
    return Checkpoint(
        source.task,
        model,
        surveyed,
        tokenizer,
        tokens,
        positions,
        pooler,
        kv,
        both_ways,
        pair_template=template,
        tokenization=loaded.settings,
        sends_token_types=loaded.sends_token_types,
        reach=_reach(model, positions, initial, console),
        doubt="; ".join(doubts) or None,
        left_out=read.left_out,
        media_tokens=read.media_tokens,
        entities=entities,
        label_vectors=label_vectors,
        extraction=extraction,
        denoising=denoising,
    )


def _shares_states(source: Source, model: PreTrainedModel, surveyed: Survey) -> bool:
    """Whether a decision model reads what the prompts of its questions begin with once."""
    if source.task != "decide" or asks_together(source):
        return False
    return causal.can_continue(model, surveyed)


def _output_width(model: PreTrainedModel) -> int:
    """The columns of an encoder's output, which may be a projection of its hidden states."""
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=torch.ones(1, 1, dtype=torch.int64))[0]
    return output.shape[-1]


def _label_vectors(source: Source, sample: Sample) -> Floats:
    """What a GLiNER model's encoder of labels makes of `LABELS`, (num_labels, columns)."""
    encoder = label_source(source)
    assert encoder is not None, "the model encodes its labels"
    checkpoint = load_checkpoint(encoder, sample=sample, strict=False)
    vectors = []
    for label in LABELS:
        inputs = {"input_ids": torch.tensor([checkpoint.tokenizer.encode(label).ids])}
        vectors.append(expected_output(checkpoint.model, checkpoint.pooler, inputs))
    return np.stack(vectors)


def _reach(model: PreTrainedModel, positions: int, initial: Snapshot, console: Console) -> Reach:
    """How far parity reads; settings that it does not pass are shown."""
    reach = find_reach(model, positions, initial)
    if reach.unread:
        finding(
            console,
            f"not compared with torch, as it would take too long: texts beyond "
            f"{' and '.join(reach.unread)}; --max-length {reach.length or 64} excludes them",
        )
    return reach


def _load_static(source: Source, folder: Path, limit: int | None) -> Checkpoint:
    """The checkpoint of a table of static embeddings, which no tokens are added for."""
    static = load_static(source, folder)
    longest = _limited(source, static.longest, limit)
    return Checkpoint(
        source.task,
        static.model,
        Survey((), Tables(longest), causal=False, whole=True),
        static.tokenizer,
        SpecialTokens(),
        longest,
        static.pooler,
        kv=None,
        sends_token_types=False,
    )


def _limited(source: Source, positions: int, limit: int | None) -> int:
    if limit is not None and limit > positions:
        raise ExportError(
            f"{source.name} reads at most {positions} tokens, fewer than --max-length {limit}"
        )
    return limit or positions


def _load_pair(
    source: Source,
    model: PreTrainedModel,
    loaded: LoadedTokenizer,
    tokens: SpecialTokens,
    positions: int,
    limit: int | None,
    initial: Snapshot,
) -> Checkpoint:
    """The checkpoint of a model with an encoder and a decoder, which read as many tokens each."""
    if encoder_decoder.has_relative_positions(model) and limit is not None:
        positions = limit  # there is a bias for every distance
    positions = _limited(source, positions, limit)
    kv, layers = encoder_decoder.kv_layout(model)
    return Checkpoint(
        source.task,
        model,
        Survey(layers, Tables(positions), causal=True),
        loaded.backend,
        tokens,
        positions,
        pooler=None,
        kv=kv,
        text_to_text=read_text_to_text(source, model, loaded.backend, positions),
        tokenization=loaded.settings,
        reach=find_reach(model, positions, initial),
    )
