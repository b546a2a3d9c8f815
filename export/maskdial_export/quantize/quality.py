"""The quality gate: accepts a lower precision only if it keeps enough of fp32's answers."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import onnx_ir as ir
from rich.console import Console
from torch import Tensor

from maskdial.bundle.manifest import GRAPH, QualityReport, loss_in_words, with_unit
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checkpoint.vocabulary import unknown_ids
from maskdial_export.checks.evaluation import Answers, Comparison, evenly
from maskdial_export.checks.kernels import exact_here
from maskdial_export.errors import ExportError, QualityError
from maskdial_export.model import Checkpoint
from maskdial_export.phase import finding, phase
from maskdial_export.quantize.blocks import Blocks
from maskdial_export.quantize.gate import FILE_LOSS, MIN_POSITIONS, Gate
from maskdial_export.quantize.half_range import LARGEST, peak
from maskdial_export.quantize.observe import observe_moments
from maskdial_export.quantize.quantize import HALF, IntegerPrecision, projections, quantize
from maskdial_export.quantize.sensitivity import layer_errors, rank
from maskdial_export.quantize.stored import StoredIntegers
from maskdial_export.quantize.table import sharing, tied_head, word_embedding
from maskdial_export.quantize.tune import divergence, relative_error, tune
from maskdial_export.session import Ids, Loaded, kernels_here
from maskdial_export.tracing.graph import data_file, optimize, save
from maskdial_export.tracing.rewrite import modules_of

_MIN_CALIBRATION = 64  # tokens
_RANKED_TEXTS = 16
_CALIBRATION_TEXTS = 64
# Of the layers, how many the automatic pass may keep, or raise to int8: more would not be worth the
# name int8 or int4.
_KEPT_PART, _RAISED_PART = 8, 4


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One try: sensitive layers to keep or to raise, and whether int8 has a scale for each row."""

    worst: tuple[str, ...] = ()
    by_row: bool = False


@dataclass(frozen=True, slots=True)
class Graphs:
    """A model's fp32 graph with its modules' names, and others that share weights with it.

    ``others``, by the names of their files: that of its encoder, or of what drafts for it.
    """

    graph: ir.Model
    others: Mapping[str, ir.Model]

    @property
    def files(self) -> list[str]:
        """The names of the files that they are written to."""
        return [file for name in (GRAPH, *self.others) for file in (name, data_file(name))]


class Quantizer:
    """Quantizes a graph, keeping more and more layers until the gate accepts it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: IntegerPrecision | Literal["fp16"],
        gate: Gate,
        sample: Sample,
        calibration: Sample,
        console: Console,
        made: dict[str, Blocks],
        stored: StoredIntegers,
    ) -> None:
        """``made`` has the int4 matrices that another graph of the model shares.

        Integers that the checkpoint's file has are kept, and its other layers are int8.

        Raises:
            ExportError: a pattern of the gate matches no layer, or there are integers to be kept
                and scales to be tuned.
        """
        self.checkpoint = checkpoint
        self.precision = precision
        self.gate = gate
        self.sample = sample
        self.calibration = calibration
        self.console = console
        self.made = made
        self.stored = stored
        self.projections = [] if precision == "fp16" else projections(checkpoint.model)
        # CUDA looks up float16 rows as they are
        self.embedding = None if precision in HALF else word_embedding(checkpoint.model)
        self.names = [*filter(None, [self.embedding]), *self.projections]
        self.named = gate.kept(self.names)
        self.raised = gate.raised(self.projections)
        kept = set(stored.names(self.projections))
        self.keeps_integers = bool(kept)
        if kept and gate.tune is not None:
            raise ExportError(
                "the integers of the file are kept as they are, so --tune has nothing to tune"
            )
        if kept and precision == "int4":
            kept |= {*self.named, *self.raised}
            self.raised += [each for each in self.projections if each not in kept]
        tied = tied_head(checkpoint.model)
        if precision == "int4" and not kept and tied is not None and tied[0] not in self.named:
            # Its table is looked up as well, which 4 bits would harm more than the product
            self.raised = [*dict.fromkeys([*self.raised, tied[0]])]
        self.kernels = None if precision in HALF else kernels_here()
        self.kept_as = "fp16" if precision in HALF else "int8" if precision == "int4" else "fp32"
        self.reduce_range = gate.reduce_range
        self.evaluation = checkpoint.evaluation(sample)
        self._half: ir.Model | None = None
        self._errors: Mapping[str, float] | None = None
        self._moments: Mapping[str, Tensor] | None = None

    def replace(self, graphs: Graphs, path: Path, fp32: Loaded) -> tuple[QualityReport, Loaded]:
        """Replaces the fp32 graph at ``path`` by a quantized one, and the others next to it.

        ``fp32`` is the graph at ``path``, which is freed. Returns the quality of the new one, and
        that graph.

        Raises:
            ExportError: the loss exceeds ``max_loss``, or the sample is too short to measure it.
            OSError: a file cannot be written.
        """
        with phase(self.console, "Evaluating fp32") as show:
            reference = self.evaluation.answers(fp32, show)
        fp32.free()
        if len(reference) < MIN_POSITIONS:
            raise QualityError(
                f"the quality text {self.sample.name} is too short: it gives {len(reference)} "
                f"decisions, and at least {MIN_POSITIONS} are needed",
                f"what {self.precision} loses cannot be measured",
            )
        folder = path.parent
        self._check_range()
        weakness = self.evaluation.weakness(reference)
        if weakness is not None:
            finding(self.console, f"fp32 itself does no better than chance: {weakness}")
        if self.gate.tune is not None:
            self._tune(graphs, self.gate.tune)
        tried: list[tuple[int, Comparison]] = []
        for attempt in self._attempts(graphs.graph):
            quantized = self._save(graphs, attempt, folder)
            comparison = self._compared(quantized, reference)
            finding(self.console, _describe(comparison, attempt, self.kept_as))
            limit = self.gate.limit
            accepted = self._accepts(attempt, comparison, [each for _, each in tried])
            if not accepted and not tried:
                accepted = self._is_the_files(graphs, attempt, folder, comparison, reference)
                limit = FILE_LOSS
            if accepted:
                exact = self._by_weights_alone(graphs, attempt, folder, reference)
                portable = self._portable(folder, reference)
                return self._report(comparison, attempt, limit, exact, portable), quantized
            quantized.free()
            if not attempt.by_row:
                tried.append((len(attempt.worst), comparison))
        raise self._refusal(tried, weakness)

    def _save(self, graphs: Graphs, attempt: _Attempt, folder: Path, **how: Any) -> Loaded:
        """Writes the graphs of an attempt; returns the main one as it is served."""
        with phase(self.console, "Quantizing"):
            save(self._lowered(graphs.graph, attempt, **how), folder / GRAPH)
            for name, graph in graphs.others.items():
                save(self._lowered(graph, attempt, **how), folder / name)
        if self.keeps_integers and not how:
            count, total = len(self.stored.kept), len(self.projections)
            text = f"{count} of {total} layers keep the integers of the file; others are int8"
            finding(self.console, text)
        return Loaded(folder / GRAPH, kernels=self.kernels)

    def _compared(self, graph: Loaded, reference: Answers) -> Comparison:
        with phase(self.console, "Checking quality") as show:
            answers = self.evaluation.answers(graph, show)
            comparison = self.evaluation.compare(reference, answers)
        if math.isnan(comparison.loss):
            raise QualityError(
                f"in {self.precision} the model computes NaN on {self.sample.name}: its "
                "activations overflow; choose another precision"
                + (
                    ""
                    if self.precision in HALF
                    else f", or keep the layers that do in {self.kept_as} with --keep"
                ),
                f"in {self.precision} it computes NaN",
            )
        return comparison

    def _accepts(
        self, attempt: _Attempt, comparison: Comparison, before: Sequence[Comparison]
    ) -> bool:
        """Whether an attempt loses little enough: a faster form nothing to speak of, and one that
        keeps more layers also less than the first one did, beyond what is chance.
        """
        most = self.gate.limit
        if attempt.by_row:
            most = min(most, self.evaluation.negligible)
        lowers = not before or comparison.improves(before[0])
        return comparison.loss <= most and lowers

    def _is_the_files(
        self,
        graphs: Graphs,
        attempt: _Attempt,
        folder: Path,
        comparison: Comparison,
        reference: Answers,
    ) -> bool:
        """Whether more than the default limit is lost by the layers with integers of the file, and
        not too much.

        Their weights are exact, and they only round what they read, as every engine that multiplies
        integers does. The layers that have none have to keep the limit by themselves. A limit that
        was asked for holds for all.
        """
        if not self.keeps_integers or attempt.worst or self.gate.max_loss is not None:
            return False
        if comparison.loss > FILE_LOSS:
            return False
        own = comparison
        if not self.stored.kept.issuperset(self.projections):
            with TemporaryDirectory(prefix=".own.", dir=folder) as temporary:
                exact = tuple(self.stored.kept)
                own = self._compared(
                    self._save(graphs, attempt, Path(temporary), exact=exact), reference
                )
            if own.loss > self.gate.limit:
                return False
        finding(self.console, "that is the rounding of what the file's integers are multiplied by")
        return True

    def _portable(self, folder: Path, reference: Answers) -> Comparison | None:
        """What the accepted graph loses without the kernels; None if nothing else was measured."""
        if self.kernels is None:
            return None
        comparison = self._compared(Loaded(folder / GRAPH), reference)
        finding(
            self.console,
            f"without the kernels, {_describe(comparison, _Attempt(), self.kept_as)}",
        )
        return comparison

    def _tune(self, graphs: Graphs, minutes: float) -> None:
        """Trains the scales of the 4-bit matrices, once for all graphs that share them."""
        known = set(self.made)
        with phase(self.console, "Quantizing"):
            for graph in (graphs.graph, *graphs.others.values()):
                self._lowered(graph, _Attempt())
        new = {name: blocks for name, blocks in self.made.items() if name not in known}
        if not new:
            return
        parts = self.calibration.parts()
        texts = [text for part in parts for text in self.checkpoint.evaluation(part).texts]
        of_tokens = self.checkpoint.predicts_tokens
        with phase(self.console, "Tuning") as show:
            tuned = tune(
                self.checkpoint.model,
                new,
                texts,
                self.checkpoint.answer,
                divergence if of_tokens else relative_error,
                minutes,
                show,
            )
        self.made.update(tuned.blocks)
        what = "divergence" if of_tokens else "relative error"
        where = f"{tuned.steps} steps, on the part of {self.calibration.name} that is held out"
        if not tuned.blocks:
            finding(self.console, f"new scales do not lower the {what} after {where}: not used")
            return
        finding(
            self.console,
            f"new scales of {len(tuned.blocks)} of {len(new)} matrices: {what} {tuned.before:.4g} "
            f"before and {tuned.after:.4g} after {where}",
        )

    def _by_weights_alone(
        self, graphs: Graphs, attempt: _Attempt, folder: Path, reference: Answers
    ) -> Comparison | None:
        """What int4 loses without rounding activations; None for other precisions."""
        if self.precision != "int4":
            return None
        with (
            TemporaryDirectory(prefix=".weights.", dir=folder) as temporary,
            phase(self.console, "Checking weights alone") as show,
        ):
            path = Path(temporary) / GRAPH
            save(self._lowered(graphs.graph, attempt, weights_only=True), path)
            for name, graph in graphs.others.items():
                save(self._lowered(graph, attempt, weights_only=True), path.parent / name)
            exact = Loaded(path, prepack=False)
            comparison = self.evaluation.compare(reference, self.evaluation.answers(exact, show))
        finding(
            self.console,
            f"with activations in fp32, {_describe(comparison, _Attempt(), self.kept_as)}",
        )
        return comparison

    def _lowered(
        self,
        graph: ir.Model,
        attempt: _Attempt,
        *,
        weights_only: bool = False,
        exact: Collection[str] = (),
    ) -> ir.Model:
        """A quantized graph; layers that are ``exact`` stay products of floats."""
        if self.precision in HALF:
            if self._half is None:
                self._half = optimize(self.checkpoint.half().trace(), self.checkpoint.packs)
            graph = self._half
        if self.precision == "fp16":
            return graph
        kept, raised = self._parts(attempt)
        return quantize(
            graph.clone(),
            self.precision,
            {*kept, *exact},
            by_row=attempt.by_row,
            embedding=self._table(graph, kept),
            reduce_range=self.reduce_range,
            raised=raised,
            moments=self._moments_read(),
            made=self.made,
            stored=self.stored.find if self.keeps_integers else None,
            weights_only=weights_only,
        )

    def _parts(self, attempt: _Attempt) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The layers that an attempt keeps, and those that are int8 with int4."""
        if self.precision == "int4":
            return (*self.named,), (*dict.fromkeys([*self.raised, *attempt.worst]),)
        return (*self.named, *attempt.worst), ()

    def _table(self, graph: ir.Model, kept: Collection[str]) -> str | None:
        """The module by which a graph looks up tokens, if its table is to be quantized."""
        if self.embedding is None or self.embedding in kept:
            return None
        present = {name for node in graph.graph for name in modules_of(node)}
        names = sharing(self.checkpoint.model, self.embedding)
        return next((name for name in names if name in present), self.embedding)

    def _attempts(self, graph: ir.Model) -> Iterator[_Attempt]:
        """Tries in order of speed.

        First a scale for each row, where texts are read whole and that may lose nothing, then
        blocks, then with the worst layer kept, the worst two, four...
        """
        worst = tuple(self._worst(graph)[: self.gate.keep_worst]) if self.gate.keep_worst else ()
        if (
            self.precision == "int8"
            and not self.keeps_integers
            and not self.checkpoint.reads_forward
        ):
            if not self.reduce_range and not exact_here():
                self.reduce_range = True
                finding(
                    self.console,
                    "8-bit products saturate on this processor (no VNNI), so weights with a scale "
                    "for each row get 7 bits",
                )
            yield _Attempt(worst, by_row=True)
        yield _Attempt(worst)
        if self.gate.keep_worst is not None:
            return
        ranked = tuple(self._worst(graph)) if self.names else ()
        part = _RAISED_PART if self.precision == "int4" else _KEPT_PART
        count, max_count = 1, -(-len(self.names) // part)
        while count <= min(max_count, len(ranked)):
            yield _Attempt(ranked[:count])
            count *= 2

    def _layer_errors(self) -> Mapping[str, float]:
        """What quantizing does to each layer, for some of the texts; computed once."""
        if self._errors is None:
            precision: IntegerPrecision = "int8" if self.precision == "fp16" else self.precision
            texts = evenly(self._calibration_texts(), _RANKED_TEXTS)
            with phase(self.console, "Comparing the layers") as show:
                self._errors = layer_errors(
                    self.checkpoint.model, self.names, texts, precision, show
                )
            self._check_finite(self._errors)
        return self._errors

    def _check_range(self) -> None:
        """Refuses half precision to a model whose activations are too large for it."""
        if self.precision not in HALF:
            return
        texts = evenly(self.evaluation.texts, _RANKED_TEXTS)
        with phase(self.console, "Checking the range of float16") as show:
            name, largest = peak(self.checkpoint.model, texts, show)
        finding(self.console, f"activations reach {largest:,.0f} (in {name})")
        if largest > LARGEST:
            raise QualityError(
                f"what {name} computes of {self.sample.name} reaches {largest:,.0f}, and float16 "
                f"ends at {LARGEST:,.0f}, so the model would give NaN on a GPU; export it with "
                "--precision int8, int4 or fp32 and serve it on the CPU",
                f"in {self.precision} its activations overflow",
            )

    def _check_finite(self, figures: Mapping[str, float]) -> None:
        """Refuses a text on which layers read NaN or infinities."""
        damaged = [name for name, figure in figures.items() if not math.isfinite(figure)]
        if damaged:
            raise ExportError(
                f"what {damaged[0]} reads of {self.calibration.name} overflows or is NaN, so "
                "nothing can be chosen by it; pass another text with --calibration-text"
            )

    def _calibration_texts(self) -> list[Ids]:
        texts = self.checkpoint.evaluation(self.calibration).texts
        count = sum(map(len, texts))
        if count < _MIN_CALIBRATION:
            raise ExportError(
                f"the calibration text {self.calibration.name} is too short: it has {count} "
                f"tokens, and at least {_MIN_CALIBRATION} are needed; pass a longer one with "
                "--calibration-text, or --no-calibrate"
            )
        tokenizer = self.checkpoint.tokenizer
        unknown = unknown_ids(tokenizer)
        ids = tokenizer.encode(self.calibration.text, add_special_tokens=False).ids
        known = sum(each not in unknown for each in ids)
        if known < _MIN_CALIBRATION:
            raise ExportError(
                f"the tokenizer knows {known} of the {len(ids)} tokens of the calibration text "
                f"{self.calibration.name}, and at least {_MIN_CALIBRATION} are needed; pass one of "
                "the kind that the model reads with --calibration-text, or --no-calibrate"
            )
        return texts

    def _moments_read(self) -> Mapping[str, Tensor]:
        """What int4 layers read of the calibration text; computed once."""
        if self.precision != "int4" or self.keeps_integers or not self.gate.calibrate:
            return {}
        if self._moments is None:
            texts = evenly(self._calibration_texts(), _CALIBRATION_TEXTS)
            with phase(self.console, "Reading for calibration") as show:
                self._moments = observe_moments(
                    self.checkpoint.model,
                    self.projections,
                    texts,
                    self.checkpoint.answer,
                    self.checkpoint.predicts_tokens,
                    show,
                )
            self._check_finite({name: float(each.sum()) for name, each in self._moments.items()})
        return self._moments

    def _worst(self, graph: ir.Model) -> list[str]:
        """The layers to quantize, most sensitive first."""
        present = {name for node in graph.graph for name in modules_of(node)}
        if self.precision == "int4":
            present -= {*filter(None, [self.embedding])}  # it is int8 as it is
        named = {*self.named, *self.raised, *self.stored.kept}
        return [name for name in rank(self._layer_errors()) if name in present - named]

    def _refusal(
        self, tried: Sequence[tuple[int, Comparison]], weakness: str | None
    ) -> QualityError:
        kept, best = min(tried, key=lambda each: each[1].loss)
        layers = (
            f" with the worst {kept} of {len(self.names)} layers in {self.kept_as}" if kept else ""
        )
        advice = f"keep layers in {self.kept_as} with --keep"
        if self.precision == "int4":
            advice = "store layers as int8 with --int8"
        other_text = (
            f"fp32 itself does no better than chance there ({weakness}), so pass a text of the "
            "kind that the model reads with --quality-text; otherwise "
            if weakness
            else ""
        )
        said = f"{self.precision} {loss_in_words(best.loss, best.figures, 'fp32')}"
        limit = with_unit(self.gate.limit, best.figures)
        return QualityError(
            f"{said} on {self.sample.name}{layers} ({_figures(best)}), and the maximum is {limit}; "
            f"{other_text}{advice}, choose another precision, or raise --max-loss",
            f"{said}, more than {limit}",
        )

    def _report(
        self,
        comparison: Comparison,
        attempt: _Attempt,
        limit: float,
        exact: Comparison | None,
        portable: Comparison | None,
    ) -> QualityReport:
        kept, raised = self._parts(attempt)
        if (
            self.keeps_integers and self.precision == "int4"
        ):  # also those whose product is one with a layer that is int8
            fits = self.stored.names(self.projections)
            more = (name for name in fits if name not in {*kept, *raised, *self.stored.kept})
            raised = (*raised, *more)
        return QualityReport(
            text=self.sample.name,
            text_sha256=self.sample.sha256,
            positions=comparison.positions,
            figures=comparison.figures,
            loss=comparison.loss,
            max_loss=None if math.isinf(limit) else limit,
            kept=kept,
            raised=raised,
            by_row=attempt.by_row,
            calibration_text=self.calibration.name,
            weights_only=None if exact is None else {"loss": exact.loss, **exact.figures},
            measured_with="onnxruntime" if self.kernels is None else "kernels",
            portable=None if portable is None else {"loss": portable.loss, **portable.figures},
        )


def _figures(comparison: Comparison) -> str:
    figures = [f"{name.replace('_', ' ')} {each:.5g}" for name, each in comparison.figures.items()]
    return f"{', '.join(figures)} over {comparison.positions:,} decisions"


def _describe(comparison: Comparison, attempt: _Attempt, kept_as: str) -> str:
    scales = "; a scale for each row" if attempt.by_row else ""
    how = "raised to" if kept_as == "int8" else "kept in"
    kept = f"; {how} {kept_as}: {', '.join(attempt.worst)}" if attempt.worst else ""
    loss = loss_in_words(comparison.loss, comparison.figures)
    return f"{loss}: {_figures(comparison)}{scales}{kept}"
