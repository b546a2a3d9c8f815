"""What `make test` leaves to `make test-wide`: `make test` proves each capability once, in minutes.

`CASES` says how many cases of each test `make test` runs, by the folder or file with the longest
name that fits; the tests of `WIDE` run in `make test-wide` only. Others are marked ``wide``.
"""

from collections.abc import Iterable, Mapping

import pytest

CASES: Mapping[str, int | None] = {
    "tests/engine/": 1,
    "tests/export/": 1,
    "tests/export/test_export_architectures.py": None,  # one export a family
    "tests/http/": 3,
    "tests/kernels/": 3,
    "tests/unit/causal/test_reply_forms.py": 12,
    "tests/unit/test_settings.py": 10,
}
"""None: all of them, as where nothing fits."""

WIDE = (
    "tests/engine/test_engine_draft_head.py",
    "tests/engine/test_engine_soak.py",
    "tests/engine/test_engine_windows.py",
    "tests/export/test_adapter_heads.py",
    "tests/export/test_adapting.py",
    "tests/export/test_export_cuda_kernels.py",
    "tests/export/test_export_files.py",
    "tests/export/test_export_quality",
    "tests/export/test_export_reach.py",
    "tests/export/test_export_repeat.py",
    "tests/export/test_export_table.py",
    "tests/export/test_gliner2.py",
    "tests/export/test_heads_pipeline.py",
    "tests/export/test_hybrid_embeddings.py",
    "tests/export/test_library_formats.py",
    "tests/export/test_module_settings.py",
    "tests/export/test_question_answering_pipeline.py",
    "tests/export/test_rerankers.py",
    "tests/export/test_text_part.py",
    "tests/export/test_token_classify_pipeline.py",
    "tests/http/test_attacks.py",
    "tests/http/test_connection_floods.py",
    "tests/http/test_grpc_attacks.py",
    "tests/http/test_http_errors_golden.py",
    "tests/http/test_http_memory.py",
    "tests/http/test_server_process.py",
    "tests/kernels/test_kernels_prune.py",
    "tests/training/",
    "tests/unit/grammar/test_grammar_memory.py",
    "tests/unit/http/test_lifecycle.py",
    "tests/unit/loadtests/",
    "tests/unit/test_install.py",
)
"""Beginnings of paths: minutes of work that no other test waits for, or a thing apart."""


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the further cases of the tests as ``wide``, and all of `WIDE`."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        kept = _kept(name, len(cases))
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker("wide")


def _kept(name: str, num_cases: int) -> frozenset[int]:
    """Which cases of a test `make test` runs. They are spread: neighbours have most in common."""
    if name.startswith(WIDE):
        return frozenset()
    path = max(filter(name.startswith, CASES), key=len, default="")
    num_kept = CASES.get(path)
    if num_kept is None:
        return frozenset(range(num_cases))
    return frozenset(index * num_cases // num_kept for index in range(num_kept))
