"""Fixtures shared by several folders: a real server on a free port, tiny checkpoints, a fake GPU.

``--no-torch`` runs what needs no torch: see `NoTorch`.
"""

import asyncio
import ctypes
import functools
import gc
import importlib
import math
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from filelock import FileLock
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, processors

from maskdial.bundle.bundle import hash_files, load_bundles, write_manifest
from maskdial.bundle.manifest import GRAPH
from maskdial.config import Config
from maskdial.errors import ConfigError
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime.memory import Buffer
from maskdial.server import Server
from tests import wide
from tests.documented import DocumentCheck

# The collector goes through all objects of the tests and of torch: a fifth of the time that finding
# the tests takes.
gc.set_threshold(50_000, 20, 20)

# httpx drops connections that were idle for five seconds. By default so does the server, perhaps
# while the next request is on its way.
SETTINGS: dict[str, Any] = {"keep_alive_timeout": 600}
if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes of tests share the machine, and tiny models gain nothing from more threads.
    SETTINGS["threads"] = 1

# An example may take its time on a busy machine, and so may drawing it.
hypothesis_settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("untimed")


class NoTorch:
    """Leaves out every test that needs torch, and fails those that import it nevertheless.

    A test needs torch when its module imports it at the top, or when one of its fixtures asks for
    the fixture ``torch``. The folder ``export`` needs it throughout.
    """

    PACKAGES = ("torch", "transformers", "sentence_transformers", "maskdial_export")
    IMPORT = re.compile(
        rf"^(from|import) ({'|'.join(PACKAGES)}|safetensors\.torch)\b", re.MULTILINE
    )

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by every import, as this object is the first in ``sys.meta_path``."""
        if name.partition(".")[0] in self.PACKAGES:
            raise ModuleNotFoundError(f"--no-torch forbids the import of {name}", name=name)
        return None

    @pytest.hookimpl
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.is_dir():
            return collection_path.name == "export" or None
        return self.IMPORT.search(collection_path.read_text(encoding="utf-8")) is not None or None

    @pytest.hookimpl
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        needing = [item for item in items if "torch" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-torch", action="store_true", help="leave out the tests that need torch, and forbid it"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("no_torch"):
        plugin = NoTorch()
        config.pluginmanager.register(plugin)
        sys.meta_path.insert(0, plugin)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what its option -m does not choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wide.mark(items)


def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The traces of this run: see `tests.traces`."""
    from tests.traces import quick_traces  # most tests do without torch

    with quick_traces(folder_of_run(tmp_path_factory) / "traces") as traces:
        yield traces


@pytest.fixture(scope="session")
def torch(traces: Any) -> ModuleType:
    """torch, on one thread and with quick exports: for tiny models, and others run beside these."""
    return importlib.import_module("torch")


@pytest.fixture(scope="session", autouse=True)
def quick_clients() -> Iterator[None]:
    """Reads the certificates of the authorities once, not for each client: 22 ms of CPU time."""
    with pytest.MonkeyPatch.context() as patch:
        make = functools.cache(httpx.create_ssl_context)
        patch.setattr("httpx._transports.default.create_ssl_context", make)
        yield


class RunningServer:
    """A server in its own thread, on a free port. Its replies are as its document says."""

    def __init__(self, **settings: Any) -> None:
        self.server = Server(Config(port=0, log_level="warning", **(SETTINGS | settings)))
        self._undocumented: list[str] = []
        app: Any = self.server.config.app
        app.state.context.metrics_page.seconds = 0.0  # tests read what they have just done
        app.add_middleware(DocumentCheck, main=app, faults=self._undocumented)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not (self.server.started and self.server.servers):
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        config = self.server.config
        address = self.server.servers[0].sockets[0].getsockname()
        self.url = "http://unix" if config.uds else f"{self.server.scheme}://127.0.0.1:{address[1]}"
        transport = httpx.HTTPTransport(uds=config.uds, verify=False)
        self._http = httpx.Client(base_url=self.url, transport=transport, timeout=60)

    def _run(self) -> None:
        # On the event loop that serves, whose transports are not those of asyncio.
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            runner.run(self.server.serve())

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while self._http.get("/health/ready").status_code != 200:
            assert self.server.failure is None, self.server.failure
            assert time.monotonic() < deadline, "the models did not load"
            time.sleep(0.02)

    def stop(self) -> None:
        self._http.close()
        self.server.should_exit = True
        # A second at a time: a machine that stands still for a minute takes one of them.
        for _ in range(60):
            self._thread.join(1)
            if not self._thread.is_alive():
                break
        else:
            raise AssertionError(f"the server did not stop\n{stacks(self.server._loop)}")
        assert not self._undocumented, "\n".join(dict.fromkeys(self._undocumented))


def stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Where all threads are, and what the tasks of an event loop wait for."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = (
        f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
    tasks = () if loop is None else map(repr, asyncio.all_tasks(loop))
    return "\n".join((*threads, *tasks))


@pytest.fixture(scope="session")
def start_server() -> Callable[..., RunningServer]:
    """Starts a ready server with the given settings; stop it when done.

    Requests say how they sample, or get greedy texts: tests of a model's own defaults turn them on.
    """

    def start(**settings: object) -> RunningServer:
        running = RunningServer(**{"generation_config": "off", **settings})
        running.wait_until_ready()
        return running

    return start


@pytest.fixture(scope="session")
def masked_starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid starter's graph under the full mask, as a bundle of its own for short texts."""
    folder = tmp_path_factory.mktemp("starters") / "masked"
    folder.mkdir()
    _, full = load_bundles("hybrid", STARTER_FOLDER / "hybrid")
    copies = {name: name for name in full.manifest.files} | {full.manifest.graph: GRAPH}
    for name, copy in copies.items():
        shutil.copyfile(full.path / name, folder / copy)
    files = hash_files(folder, copies.values())
    changes = {"graph": GRAPH, "files": files, "max_length": 128}
    write_manifest(folder, full.manifest.model_copy(update=changes))
    return folder


def make_byte_tokenizer(*, begins: bool = True, masks: bool = True) -> tokenizers.Tokenizer:
    """A byte-level tokenizer: <bos> (0) begins every text, 1 is the mask, <eos> is 2."""
    special = ["<bos>", "[MASK]" if masks else "<unused>", "<eos>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    tokenizer.add_special_tokens(special)
    return tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., tokenizers.Tokenizer]:
    return make_byte_tokenizer


MakeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MakeOnce:
    """The folder of a name, made by the given function in the first process that asks for it."""
    root = folder_of_run(tmp_path_factory)

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, partial = root / name, root / f"{name}.partial"
        folder.parent.mkdir(exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                make(partial)
                partial.rename(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def hybrid(torch: ModuleType, made_once: MakeOnce) -> Path:
    """A tiny Llama with random weights and a tokenizer that suits both masks."""
    return made_once("checkpoints/hybrid", lambda folder: make_hybrid(torch, folder))


def make_hybrid(torch: ModuleType, folder: Path, *, num_layers: int = 1) -> None:
    import transformers  # most tests do without

    torch.manual_seed(0)
    tokenizer = make_byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def circling(torch: ModuleType, made_once: MakeOnce) -> Path:
    """A tiny checkpoint with a layer for multi-token prediction, and its ``bundle`` in int8."""

    def make(folder: Path) -> None:
        from maskdial_export.export import export
        from maskdial_export.quantize.gate import Gate
        from tests.mtp import make_circling

        make_circling(folder, make_byte_tokenizer(), max_length=512)
        export(str(folder), folder / "bundle", precision="int8", gate=Gate(max_loss=math.inf))

    return made_once("checkpoints/circling", make)


@pytest.fixture(scope="session")
def circling_experts(torch: ModuleType, made_once: MakeOnce) -> Path:
    """`circling` with mixtures of experts."""

    def make(folder: Path) -> None:
        from maskdial_export.export import export
        from maskdial_export.quantize.gate import Gate
        from tests.mtp import make_circling

        make_circling(folder, make_byte_tokenizer(), 512, "Qwen3_5MoeForCausalLM")
        export(str(folder), folder / "bundle", precision="int8", gate=Gate(max_loss=math.inf))

    return made_once("checkpoints/circling_experts", make)


@pytest.fixture(scope="session")
def circling_eagle(torch: ModuleType, made_once: MakeOnce) -> Path:
    """A tiny checkpoint, an EAGLE-3 ``head`` for it, and their ``bundle`` in int8."""

    def make(folder: Path) -> None:
        from maskdial_export.export import export
        from maskdial_export.quantize.gate import Gate
        from tests.eagle import make_circling

        folder.mkdir()
        make_circling(folder, make_byte_tokenizer(), max_length=512)
        gate, draft = Gate(max_loss=math.inf), str(folder / "head")
        export(str(folder), folder / "bundle", precision="int8", gate=gate, draft=draft)

    return made_once("checkpoints/circling_eagle", make)


@pytest.fixture(scope="session")
def hybrid_bundle(hybrid: Path, made_once: MakeOnce) -> Path:
    """The bundle of `hybrid`, exported under both masks."""
    from maskdial_export.export import export

    return made_once("bundles/dial", lambda folder: export(str(hybrid), folder, mask="both"))


@pytest.fixture(scope="session")
def deep_hybrid(torch: ModuleType, made_once: MakeOnce) -> Path:
    """`hybrid` with three layers: in a single one, what a token's keys are does not depend on the
    mask.
    """
    return made_once(
        "checkpoints/deep_hybrid", lambda folder: make_hybrid(torch, folder, num_layers=3)
    )


@pytest.fixture(scope="session")
def deep_hybrid_bundle(deep_hybrid: Path, made_once: MakeOnce) -> Path:
    """The bundle of `deep_hybrid`, exported under both masks."""
    from maskdial_export.export import export

    return made_once("bundles/deep", lambda folder: export(str(deep_hybrid), folder, mask="both"))


class FakeDeviceMemory:
    """Main memory in the place of a GPU's, of so many bytes; every copy's bounds are checked.

    The host must not look into it, except for tests with `peek`. With it, the code for GPUs runs on
    the CPU provider.
    """

    device = "cpu"
    on_host = False
    max_buffer_bytes = None
    stream = 0

    def __init__(self, num_bytes: int = 2**30, *, binds_views: bool = True) -> None:
        self.num_bytes = num_bytes
        self.binds_views = binds_views
        self.num_synchronized = 0
        self._arrays: list[NDArray[np.uint8]] = []  # on the device
        self._pinned: list[NDArray[Any]] = []

    @property
    def of_passes(self) -> "FakeDeviceMemory":
        return self

    def bound(self, buffer: Buffer) -> int:
        begins = any(buffer.pointer == array.ctypes.data for array in self._arrays)
        assert begins or self.binds_views, "a binding begins within an allocation"
        return buffer.pointer

    def view(self, buffer: Buffer) -> None:
        return None

    def free_bytes(self) -> int:
        return self.num_bytes - sum(array.nbytes for array in self._arrays)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        size = int(np.prod(shape)) * dtype.itemsize
        if size > self.free_bytes():
            raise ConfigError(f"no memory for {size} bytes")
        self._arrays.append(np.zeros(max(size, 1), np.uint8))
        return Buffer(self._arrays[-1].ctypes.data, shape, dtype)

    def decommit(self, buffer: Buffer) -> None:
        assert self._holds(buffer.pointer, buffer.num_bytes), "memory of another device"

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        self._pinned.append(np.zeros(shape, dtype))
        return self._pinned[-1]

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
    ) -> None:
        assert width <= min(target_pitch, source_pitch) or height == 1
        ends = [(target, target_pitch), (source, source_pitch)]
        on_device = [self._holds(start, (height - 1) * pitch + width) for start, pitch in ends]
        assert any(on_device), "neither end of the copy is on the device"
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def synchronize(self) -> None:
        self.num_synchronized += 1

    def peek(self, buffer: Buffer) -> NDArray[Any]:
        """What lies in a buffer, to be read and written by a test."""
        assert self._holds(buffer.pointer, buffer.num_bytes)
        memory = memoryview((ctypes.c_byte * buffer.num_bytes).from_address(buffer.pointer))
        values: NDArray[Any] = np.frombuffer(memory, buffer.dtype)
        return values.reshape(buffer.shape)

    def _holds(self, start: int, num_bytes: int) -> bool:
        for array in self._arrays:
            first = array.ctypes.data
            if first <= start < first + array.nbytes:
                assert start + num_bytes <= first + array.nbytes, "beyond the end of a buffer"
                return True
        return False


@pytest.fixture(scope="session")
def device_memory() -> Callable[..., FakeDeviceMemory]:
    """Makes memory that stands in for a GPU's."""
    return FakeDeviceMemory
