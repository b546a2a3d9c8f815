"""The CPU provider, which every build of ONNX Runtime has."""

from maskdial.bundle.bundle import UNWANTED_FUSIONS, Bundle
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.providers.provider import Provider


class CpuProvider(Provider):
    """Runs every bundle, in main memory."""

    name = "cpu"
    ort_name = "CPUExecutionProvider"
    disabled_optimizers = UNWANTED_FUSIONS
    batch_invariant = True
    slots = 8
    context_slots = 4
    max_batch_tokens = 512
    prefill_chunk_tokens = 256

    def check(self, bundle: Bundle) -> None:
        pass

    def memory(self) -> HostMemory:
        return HostMemory()


PROVIDER = CpuProvider()
