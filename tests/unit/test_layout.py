"""The folders are the architecture: who may import whom, read from the sources."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from maskdial.config import Config
from tests import wide
from tools import architecture_table, errors_table, metrics_table, settings_table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "maskdial": ROOT / "server" / "maskdial",
    "maskdial_export": ROOT / "export" / "maskdial_export",
    "maskdial_client": ROOT / "clients" / "maskdial_client",
}
# Each folder or module may import those that come after it, and no others.
SERVER = (
    *(
        "__main__",
        "cli",
        "inspection",
        "doctor",
        "prefixes",
        "ps",
        "ray",
        "offline",
        "health",
        "server",
        "fronts",
        "rpc",
        "app",
        "batches",
        "dialects",
    ),
    *(
        "http",
        "local",
        "policy",
        "ask",
        "registry",
        "causal",
        "masked",
        "unmasking",
        "grammar",
        "engine",
        "receipts",
        "responses_store",
        "config",
        "settings",
        "intake",
        "progress",
        "exporting",
        "model_cache",
    ),
    *("runtime", "kernels", "bundle", "metrics", "bounds", "logs", "log_writer"),
    *("folder_lock", "elementary", "extras", "errors"),
)
EXPORT = (
    *(
        "cli",
        "intake",
        "route",
        "export",
        "adapting",
        "writing",
        "join",
        "golden",
        "stock",
        "direct",
        "golden_check",
        "quantize",
        "model",
        "checks",
        "tracing",
    ),
    *("checkpoint", "destination", "session", "phase", "choices", "errors"),
)
EXPORT_ONLY = ("torch", "transformers", "onnx", "onnxscript", "maskdial_export")
# The only modules of the server that need onnx, which is not installed on every platform.
REWRITERS = tuple(
    f"maskdial.kernels.{name}"
    for name in (
        *(
            "adapt",
            "contained",
            "fuse",
            "graph",
            "positions",
            "prune",
            "recurrent",
            "rewrite",
            "varlen",
            "webgpu",
        ),
        "webgpu_attention",
    )
)
# The package module holds the version only, so everything may import it.
VERSIONS = {f"{package}.__version__" for package in PACKAGES}
HTTP = ("fastapi", "starlette", "uvicorn")
HTTP_ROOMS = ("offline", "ray", "server", "fronts", "app", "batches", "dialects", "http")
PURE = (
    *("masked.batcher", "causal.events", "causal.plan", "causal.scheduler", "causal.sequence"),
    *("causal.prefix_cache", "causal.sampling.sampler"),
    *("causal.prefix_disk.record", "causal.prefix_disk.store", "causal.prefix_disk.tier"),
    *("causal.drafts.sources", "causal.drafts.policy", "causal.drafts.speculation"),
    *("causal.sampling.processors", "causal.sampling.candidates"),
    *("runtime.kv_cache", "runtime.logits", "runtime.memory", "runtime.cuda"),
)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, as a full dotted name, and whether a function body defers it."""

    name: str
    line: int
    lazy: bool

    def within(self, *modules: str) -> bool:
        """Whether the import is one of ``modules`` or a part of one."""
        return any(self.name == module or self.name.startswith(module + ".") for module in modules)


def module_path(module: str) -> Path:
    """The file of a dotted module of ours. It has to exist, or a rule about it would hold idly."""
    package, _, rest = module.partition(".")
    path = PACKAGES[package].joinpath(*rest.split(".")) if rest else PACKAGES[package]
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert file.is_file(), f"{module} is named in a rule, but {file} does not exist"
    return file


def modules_of(package: str) -> list[str]:
    """Every module in a package of ours, dotted, the package itself included."""
    folder = module_path(package).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 1, f"{package} holds no modules"
    names = (file.relative_to(folder).with_suffix("").parts for file in files)
    return [".".join((package, *parts)).removesuffix(".__init__") for parts in names]


def imports_in(tree: ast.Module, package: str) -> Iterator[Import]:
    """Yields what a module's source imports, ``from . import x`` resolved against ``package``.

    ``from a import b`` yields ``a.b``: whether b is a module or a name, a rule on ``a`` matches it.
    """
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, lazy = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, lazy)
        deferred = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending.extend((child, deferred) for child in ast.iter_child_nodes(node))


@functools.cache
def imports_of(module: str) -> list[Import]:
    """What a module of ours imports."""
    file = module_path(module)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return list(imports_in(ast.parse(file.read_text(encoding="utf-8")), package))


def broken(module: str, *forbidden: str) -> list[str]:
    """The imports of ``module`` that reach into ``forbidden``, as readable places."""
    found = (use for use in imports_of(module) if use.within(*forbidden))
    return [f"{module}:{use.line} imports {use.name}" for use in found]


def test_imports_are_found_wherever_they_are_written() -> None:
    source = """
import a, b.c
from d import e
from . import f
from ..g import h
if TYPE_CHECKING:
    import i
class C:
    import j
def k():
    try:
        import l
    finally:
        from m.n import o
"""
    found = {(use.name, use.lazy) for use in imports_in(ast.parse(source), "top.sub")}
    eager = {"a", "b.c", "d.e", "top.sub.f", "top.g.h", "i", "j"}
    assert found == {(name, False) for name in eager} | {("l", True), ("m.n.o", True)}


def test_import_matches_whole_names_only() -> None:
    use = Import("torch.nn", 1, False)
    assert use.within("onnx", "torch")
    assert not use.within("tor", "torch.nn.functional")


@pytest.mark.parametrize(("package", "rooms"), [("maskdial", SERVER), ("maskdial_export", EXPORT)])
def test_every_room_imports_only_those_below_it(package: str, rooms: tuple[str, ...]) -> None:
    found = {module.split(".")[1] for module in modules_of(package) if "." in module}
    assert found == set(rooms)
    above = {room: tuple(f"{package}.{name}" for name in rooms[:i]) for i, room in enumerate(rooms)}
    modules = [module for module in modules_of(package) if "." in module]
    assert [fault for m in modules for fault in broken(m, *above[m.split(".")[1]])] == []


def test_the_families_do_not_know_each_other() -> None:
    faults = [broken(m, "maskdial.masked") for m in modules_of("maskdial.causal")]
    assert [fault for found in faults for fault in found] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other(package: str) -> None:
    """Neither directly nor in a circle, type checking included."""
    modules = set(modules_of(package))
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for module in modules:
        for use in imports_of(module):
            target = use.name if use.name in modules else use.name.rpartition(".")[0]
            if target in modules - {module} and not use.lazy and use.name not in VERSIONS:
                edges[module].add(target)
    while True:
        leaves = {module for module, uses in edges.items() if not uses}
        if not leaves:
            break
        edges = {m: uses - leaves for m, uses in edges.items() if m not in leaves}
    assert not edges, f"these import each other in a circle: {sorted(edges)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_needs_its_own_modules_and_the_standard_library(package: str) -> None:
    """And the exporter needs ``maskdial``, whose import turns ONNX Runtime's telemetry off."""
    allowed = (package, "maskdial") if package == "maskdial_export" else (package,)
    assert [
        use.name
        for use in imports_of(package)
        if not use.within(*allowed, *sys.stdlib_module_names)
    ] == []


def test_the_servers_package_module_needs_the_standard_library_only() -> None:
    names = {use.name.partition(".")[0] for use in imports_of("maskdial")}
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize("module", PURE)
def test_pure_parts_know_no_event_loop_server_or_session(module: str) -> None:
    assert not broken(f"maskdial.{module}", "asyncio", *HTTP, "onnxruntime")


def test_only_http_and_the_dialects_know_http() -> None:
    knows = tuple(f"maskdial.{room}" for room in HTTP_ROOMS)
    modules = [m for m in modules_of("maskdial") if not Import(m, 0, False).within(*knows)]
    assert [fault for m in modules for fault in broken(m, *HTTP)] == []


def test_dialects_know_no_engine() -> None:
    """They parse and render; the families' requests speak to the engines."""
    engines = ("maskdial.masked.engine", "maskdial.causal.engine", "maskdial.causal.scheduler")
    modules = modules_of("maskdial.dialects")
    faults = [broken(m, *engines, "maskdial.runtime", "onnxruntime") for m in modules]
    assert [fault for found in faults for fault in found] == []


OF_OTHERS = {
    # KServe's tensors and instances are another spelling of the native bodies.
    ("kserve", "native"),
    # llama.cpp renders OpenAI's messages.
    ("llamacpp", "openai"),
}


def test_dialects_do_not_know_each_other() -> None:
    """What several share lies beside them, in ``dialects/`` or below."""
    folder = module_path("maskdial.dialects").parent
    dialects = {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}
    assert {"native", "openai"} < dialects
    found = set()
    for dialect in dialects:
        others = [f"maskdial.dialects.{other}" for other in dialects - {dialect}]
        for module in modules_of("maskdial.dialects"):
            if Import(module, 0, False).within(f"maskdial.dialects.{dialect}"):
                uses = [use for use in imports_of(module) if use.within(*others)]
                found |= {(dialect, use.name.split(".")[2]) for use in uses}
    assert found == OF_OTHERS


def _lines(folder: str) -> int:
    files = module_path(folder).parent.rglob("*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def _sources() -> Iterator[tuple[str, str]]:
    for module in modules_of("maskdial"):
        yield module, module_path(module).read_text(encoding="utf-8")


def test_the_dialects_do_not_grow_back() -> None:
    """A way to write or a task is one arm of the flow, not one more module in each dialect."""
    assert _lines("maskdial.dialects") <= 16_400


def test_a_parameter_of_sampling_stands_in_few_files() -> None:
    """Type, bounds and default; field; sampler; the types of `Model` (the client has its own)."""
    files = {module for module, source in _sources() if re.search(r"\bxtc_threshold\b", source)}
    assert len(files) <= 4, files


def test_protocols_are_few() -> None:
    """One describes what two implementations have in common; most need none."""
    protocols = [
        f"{module}.{name}"
        for module, source in _sources()
        for name in re.findall(r"^class (\w+)\(.*\bProtocol\b.*\):", source, re.MULTILINE)
    ]
    assert len(protocols) <= 44, protocols


def test_settings_are_few() -> None:
    """Each one is a question to the operator; a default that is right needs no setting."""
    assert len(Config.model_fields) <= 74


def test_what_make_test_leaves_out_exists() -> None:
    files = [f"tests/{path.relative_to(ROOT / 'tests')}" for path in (ROOT / "tests").rglob("*.py")]
    for beginning in (*wide.CASES, *wide.WIDE):
        path, _, name = beginning.partition("::")
        found = [file for file in files if file.startswith(path)]
        assert found, beginning
        assert not name or f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), beginning


RUN_GENERATIONS = {
    "flow",
    # Replies without a stream, and with texts only
    "kserve.answers",
    "native.seq2seq",
}


def test_one_flow_runs_generations() -> None:
    """A dialect renders tokens; it does not choose between a stream and a whole reply again."""
    running = {
        module.removeprefix("maskdial.dialects.")
        for module in modules_of("maskdial.dialects")
        if re.search(
            r"generation\.(complete|stream)\(", module_path(module).read_text(encoding="utf-8")
        )
    }
    assert running == RUN_GENERATIONS


@pytest.mark.parametrize("module", modules_of("maskdial"))
def test_server_runs_without_the_export_packages(module: str) -> None:
    if module in REWRITERS:
        forbidden = [name for name in EXPORT_ONLY if name != "onnx"]
        assert not broken(module, *forbidden)
        return
    allowed_lazily = module == "maskdial.cli"
    uses = [use for use in imports_of(module) if use.within(*EXPORT_ONLY)]
    assert [use for use in uses if not (allowed_lazily and use.lazy)] == []
    assert [use for use in imports_of(module) if use.within(*REWRITERS) and not use.lazy] == []


@pytest.mark.parametrize("module", modules_of("maskdial"))
def test_only_its_own_package_needs_ray(module: str) -> None:
    if not Import(module, 0, False).within("maskdial.ray"):
        assert not broken(module, "ray")
        uses = [use for use in imports_of(module) if use.within("maskdial.ray")]
        assert all(module == "maskdial.cli" and use.lazy for use in uses)


@pytest.mark.parametrize("module", modules_of("maskdial_export"))
def test_export_takes_only_bundles_and_errors_from_the_server(module: str) -> None:
    ours = [use for use in imports_of(module) if use.within("maskdial", "maskdial_client")]
    allowed = ["maskdial.bundle", "maskdial.errors", "maskdial.extras"]
    if module in ("maskdial_export.adapting", "maskdial_export.session"):  # run what it runs
        allowed += ["maskdial.kernels", "maskdial.runtime"]
    if module == "maskdial_export.checkpoint.reranking":  # renders templates as it does
        allowed += ["maskdial.causal.chat.renderer"]
    outside = {use.name for use in ours if not use.within(*allowed)}
    assert outside <= {"maskdial", *VERSIONS}


@pytest.mark.parametrize("module", modules_of("maskdial_client"))
def test_client_needs_httpx_only(module: str) -> None:
    assert not broken(module, "maskdial", "maskdial_export")
    third_party = {use.name.partition(".")[0] for use in imports_of(module)}
    assert third_party - sys.stdlib_module_names <= {"httpx", "maskdial_client"}


def test_packages_whose_inside_is_used_have_an_upper_bound() -> None:
    """A subclass of what is no public interface breaks with any version of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    written = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        written += extra
    bounded = {
        Requirement(each).name
        for each in written
        if any(bound.operator in ("<", "~=", "==") for bound in Requirement(each).specifier)
    }
    inside = {"uvicorn"}  # of which `http.connection` overrides the protocol, as a whole
    for module in modules_of("maskdial"):
        for use in imports_of(module):
            if any(part.startswith("_") and part != "__future__" for part in use.name.split(".")):
                inside.add(use.name.partition(".")[0])
    assert inside - sys.stdlib_module_names - {*PACKAGES} <= bounded


def test_the_page_of_architectures_is_current() -> None:
    """`make format` writes it from the tests' zoo."""
    assert architecture_table.named() <= architecture_table.proven()
    assert architecture_table.PAGE.read_text(encoding="utf-8") == architecture_table.page()


def test_the_page_of_settings_is_current() -> None:
    """`make format` writes it from the settings themselves."""
    assert settings_table.PAGE.read_text(encoding="utf-8") == settings_table.page()


def test_the_page_of_metrics_is_current() -> None:
    """`make format` writes it from the metrics themselves."""
    assert metrics_table.PAGE.read_text(encoding="utf-8") == metrics_table.page()


def test_the_page_of_errors_is_current() -> None:
    """`make format` writes it from the tree, all of which it has."""
    assert errors_table.known() == set(errors_table.all_errors())
    assert errors_table.PAGE.read_text(encoding="utf-8") == errors_table.page()
