"""Provider: an execution provider of ONNX Runtime, and what the server needs to know to use it."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import onnxruntime as ort

from maskdial.bundle.bundle import Bundle
from maskdial.runtime.memory import Memory

_log = logging.getLogger(__name__)


class Provider(ABC):
    """An execution provider. The attributes hold for every model that it runs."""

    name: str
    """As in ``--provider``."""
    ort_name: str
    """As ONNX Runtime calls it."""
    disabled_optimizers: ClassVar[frozenset[str]] = frozenset()
    """Graph optimizers of ONNX Runtime that make passes slower here."""
    batch_invariant: ClassVar[bool]
    """Whether kernels compute a row to the same bits in every batch, as measured at export."""
    slots: ClassVar[int]
    """How many slots a causal model has by default, if they fit into memory."""
    context_slots: ClassVar[int]
    """For how many slots a context that the memory limits leaves room."""
    max_batch_tokens: ClassVar[int]
    """The token budget of a masked model's batch by default."""
    prefill_chunk_tokens: ClassVar[int]
    """How many prompt tokens are prefilled between two decode steps by default."""
    free_padding: ClassVar[int] = 16
    """How much padding of a masked batch, in tokens, costs no more than another pass. On two cores,
    a pass of BERT-base in int8 takes 7 ms, and 0.4 ms for each token.
    """
    pad_multiple: ClassVar[int] = 1
    """What the padded length of a masked batch must be a multiple of."""
    batch_sizes: ClassVar[tuple[int, ...]] = ()
    """The sizes that decode steps are padded to, ascending; empty if they are not padded."""
    captures: ClassVar[bool] = False
    """Whether decode steps can be captured as CUDA graphs."""
    turn: ClassVar[AbstractContextManager[Any]] = nullcontext()
    """Held during a pass, and while a session is made or freed: a lock, for example, for a provider
    whose sessions must not run at once.
    """

    def installed(self) -> bool:
        """Whether somebody installed it here, even if it cannot run; ``auto`` skips it if not."""
        return self.in_build()

    def in_build(self) -> bool:
        """Whether this installation's ONNX Runtime was built with it."""
        return self.ort_name in ort.get_available_providers()

    def max_query_tokens(self) -> int | None:
        """How many tokens of a text a causal model may read in one pass; None for any number."""
        return None

    def check_lost(self, error: Exception) -> None:
        """Judges an error of a pass.

        Raises:
            DeviceLostError: the device is gone, and every later pass would fail.
        """
        return

    @abstractmethod
    def check(self, bundle: Bundle) -> None:
        """Checks that it can run a bundle on this machine.

        Raises:
            ConfigError: it cannot; the message says why, and what to do.
        """

    @abstractmethod
    def memory(self) -> Memory:
        """The memory that its kernels work in, for one model.

        Raises:
            ConfigError: its device cannot be used.
        """

    def devices(self) -> list[ort.OrtEpDevice]:
        """The devices of a plug-in; empty for a provider that this build has.

        Raises:
            ConfigError: the plug-in cannot be used.
        """
        return []

    def options(self, *, stream: int, captures: bool, threads: int | None) -> dict[str, str]:
        """The provider options of a session; ONNX Runtime's documentation lists them.

        Args:
            stream: pointer of the stream to run passes in; 0 for one of the session's own.
            captures: whether passes are captured as CUDA graphs.
            threads: number of threads for one pass, for a provider with threads of its own.
        """
        return {}

    def rewrite(self, graph: Path) -> bytes | None:
        """A graph in the operators that the provider has kernels for; None to load it as it is.

        Products of 8-bit integers are none of them.

        Raises:
            BundleError: it cannot be expressed in them.
        """
        return None

    def check_split(self, graph: Path, on_cpu: Sequence[str], total: int) -> None:
        """Says how many of a plug-in's operators are left to the CPU, with copies in between.

        Args:
            graph: that was loaded.
            on_cpu: the kinds of the operators that are.
            total: the number of all operators.

        Raises:
            BundleError: too many.
        """
        if on_cpu:
            _log.warning("%s: the CPU runs %d of %d operators", graph, len(on_cpu), total)
