"""Device: where torch's models run, and how their time is taken."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from loadtests.checkpoints import random_model
from loadtests.compare.setup import Setup
from loadtests.errors import LoadTestError


class Device:
    """The CPU with the threads of a setup, or the first CUDA device.

    Attributes:
        name: as torch calls it.
        dtype: of weights and activations.
    """

    def __init__(self, setup: Setup) -> None:
        """Raises LoadTestError where torch has no CUDA device and one is wanted."""
        torch.set_num_threads(setup.threads)
        self.name = setup.provider
        self.dtype = torch.float16 if setup.provider == "cuda" else torch.float32
        if setup.provider == "cuda" and not torch.cuda.is_available():
            raise LoadTestError("this torch has no CUDA device")

    def model(self, setup: Setup) -> PreTrainedModel:
        """The shape of a setup with random weights and SDPA."""
        return random_model(setup.model.config, setup.seed, dtype=self.dtype, device=self.name)

    def seconds(self, run: Callable[[], object]) -> float:
        """How long a call takes, until the device has done all of it."""
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def begin_compiling(self, setup: Setup) -> None:
        """Keeps what torch compiles from one run to the next, and allows no compilation in vain.

        Each batch and length is compiled once; where torch would go on to compile without end it
        fails, and does not fall back to what is not compiled.
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(setup.folder) / "torch-compiled")
        torch._dynamo.config.fail_on_recompile_limit_hit = True

    def wait(self) -> None:
        """Until what was asked of the device is done."""
        if self.name == "cuda":
            torch.cuda.synchronize()
