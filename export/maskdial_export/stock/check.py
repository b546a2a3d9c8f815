"""Compares a bundle's graph with the stock graph in it, as ONNX Runtime runs that by itself."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from maskdial.bundle.manifest import GoldenCheck, ParityReport, SpecialTokens
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.direct.encoder_check import EncoderCheck, difference
from maskdial_export.errors import ExportError
from maskdial_export.golden_check import SLACK, golden_check, quantized_tolerance
from maskdial_export.session import Loaded, MaskedSession, kernels_here
from maskdial_export.stock.model import StockModel
from maskdial_export.stock.reference import StockReference

_SIZES = (1, 2, 3, 5, 8, 13)
_LONGEST = 96
_BATCHES = 4
"""Of each size: kernels of ONNX Runtime differ by the number of rows, and by lengths."""
_SEED = 20261129


class StockCheck(EncoderCheck):
    """The comparisons of one graph.

    ``rounds``: it computes with integers, whose scales depend on what is in a batch. An activation
    that rounds to the other integer tips more of them in later layers, so that the last bits which
    ONNX Runtime's optimizations change become tenths: such graphs are compared without these.
    """

    def __init__(
        self,
        model: StockModel,
        reference: StockReference,
        tokenizer: Tokenizer,
        tokens: SpecialTokens,
        sample: Sample,
        limit: float,
        *,
        rounds: bool,
    ) -> None:
        super().__init__(model, reference, tokenizer, tokens, model.max_length, sample, limit)
        self._stock = reference
        self._rounds = rounds

    def parity(self, graph: Path, tolerance: float) -> ParityReport:
        """Compares the outputs of a ragged batch, and of its texts alone.

        Raises:
            ExportError: they differ by more than the tolerance, or the graph does not mask padding.
        """
        texts, types = self._texts, self._types
        alone = [self._stock.output(*each) for each in zip(texts, types, strict=True)]
        allowed = self.allowed(alone, tolerance)
        stock = self._stock.as_written() if self._rounds else self._stock
        together = stock.outputs(texts, types)
        if not self._rounds:
            apart = max(float(np.abs(a - b).max()) for a, b in zip(alone, together, strict=True))
            if not apart <= allowed:
                raise ExportError(
                    "the graph gives texts other answers in a batch than alone: outputs differ by "
                    f"up to {apart:.2g}, more than {allowed:.2g}; it does not mask padding, or its "
                    "shapes are those of one text; export it again with optimum-cli"
                )
        served = Loaded(graph, kernels=kernels_here(), optimizes=not self._rounds)
        found = MaskedSession(served).run(texts, types)
        ragged = difference("a ragged batch", together, found, allowed)
        return ParityReport(reference="onnxruntime", tolerance=allowed, ragged_batch=ragged)

    def is_invariant(self, graph: Path, *, quantized: bool) -> bool:
        """Whether many texts of many lengths have the same bits in batches as alone."""
        session = MaskedSession(Loaded(graph, kernels=kernels_here() if quantized else None))
        generator = np.random.default_rng(_SEED)
        longest = min(self._max_length, _LONGEST)
        for size in _SIZES * _BATCHES:
            texts = [
                generator.choice(self._known, length)
                for length in generator.integers(1, longest + 1, size)
            ]
            alone = [session.run([text])[0] for text in texts]
            if not all(map(np.array_equal, session.run(texts), alone)):
                return False
        return True

    def golden(self, tolerance: float, graph: Path | None = None) -> GoldenCheck:
        """The golden check: what the stock graph gives.

        Of integers, another machine may differ by what company and optimizations change here: all
        of them move the activations that round to another integer.
        """
        expected, slack = self._checked(self._expected()), SLACK * tolerance
        if graph is None:
            return golden_check(self._ids, self._row, expected, slack)
        company = self._stock.outputs([np.array(self._ids), self._texts[0]])[0]
        others = self._checked(company), self._computed(Loaded(graph))
        allowed = quantized_tolerance(expected, others, slack)
        return golden_check(self._ids, self._row, expected, allowed)
