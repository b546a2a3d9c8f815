"""Head: an adapter's own head, which makes logits of the base's hidden states."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.bundle.adapter import AdapterHead
from maskdial.errors import BundleError, InferenceError

_FATAL_ONLY = 4


class Head:
    """A head that is loaded. It computes one text at a time, so its bits are those of the text
    alone; a pass has the texts of many heads.

    Args:
        name: the adapter's, for messages.
        settings: what the adapter's manifest says of it.
        content: its graph.
        columns: of a hidden state of the base.

    Attributes:
        num_bytes: the size of its weights.

    Raises:
        BundleError: ONNX Runtime cannot load the graph, it has data in other files, or it is not
            for such hidden states or not of so many labels.
    """

    def __init__(self, name: str, settings: AdapterHead, content: bytes, columns: int) -> None:
        self.settings = settings
        self.num_bytes = len(content)
        self._name = name
        from maskdial.kernels.contained import check_contained  # needs onnx, which is optional

        check_contained(content, f"adapter {name!r}: its head")
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1  # it has less to do than threads take to begin
        options.log_severity_level = _FATAL_ONLY  # errors are raised
        # There may be hundreds: one of BERT-base's size would take 7.2 MB, and takes 2.6.
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            self._session = ort.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
            # The session keeps the content, to make itself anew with other providers.
            self._session._model_bytes = None
            num_rows = 2 if settings.rows == "all" else 1
            found = self._run(np.zeros((num_rows, columns), np.float32))
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            reason = " ".join(str(error).split())
            raise BundleError(f"adapter {name!r}: its head cannot be computed: {reason}") from error
        num_labels = len(settings.labels)
        per_token = settings.task == "token-classify"
        if found.shape != ((2, num_labels) if per_token else (num_labels,)):
            raise BundleError(
                f"adapter {name!r}: its head has logits of shape {found.shape}, and its manifest "
                f"{num_labels} labels"
            )

    def __call__(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits of a text's hidden states, (num_rows, hidden_size).

        Raises:
            InferenceError: ONNX Runtime cannot compute them.
        """
        try:
            return self._run(hidden)
        except Exception as error:
            raise InferenceError(f"the head of adapter {self._name!r} failed: {error}") from error

    def rows(self, length: int) -> Sequence[int]:
        """The tokens that a classifier reads of a text."""
        places = {"first": range(1), "last": range(length - 1, length), "all": range(length)}
        return places[self.settings.rows]

    def _run(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        feeds: dict[str, NDArray[Any]] = {"hidden": hidden}
        (logits,) = self._session.run(["logits"], feeds)
        return cast(NDArray[np.float32], logits)
