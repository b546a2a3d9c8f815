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
    "tests/http/test_code_blocks.py": None,
    "tests/kernels/": 3,
    "tests/unit/causal/test_reply_forms.py": 6,
    "tests/unit/test_settings.py": 10,
}
"""None: all of them, as where nothing fits."""

WIDE = (
    "tests/engine/test_engine_copies.py",
    "tests/engine/test_engine_draft_head.py",
    "tests/engine/test_engine_soak.py",
    "tests/engine/test_engine_windows.py",
    "tests/export/test_adapter_heads.py",
    "tests/export/test_adapting.py",
    "tests/export/test_decision_models.py",
    "tests/export/test_direct_gguf_one_pass.py::test_embedding_gemma",
    "tests/export/test_embeddings.py::test_the_export_reads_what_sentence_transformers_does",
    "tests/export/test_embeddings.py::test_vectors_of_a_model_that_does_not_normalize",
    "tests/export/test_encoder_decoder.py::test_int8_of_both_graphs",
    "tests/export/test_export_architectures.py::test_experts_compute_the_tokens_that_chose_them",
    "tests/export/test_export_architectures.py::test_what_is_not_proven_is_refused",
    "tests/export/test_export_cuda_kernels.py",
    "tests/export/test_export_files.py",
    "tests/export/test_export_heads.py",
    "tests/export/test_export_length.py",
    "tests/export/test_export_observe.py",
    "tests/export/test_export_precisions.py",
    "tests/export/test_export_quality",
    "tests/export/test_export_reach.py",
    "tests/export/test_export_refusals.py",
    "tests/export/test_export_repeat.py",
    "tests/export/test_export_table.py",
    "tests/export/test_export_trust.py",
    "tests/export/test_gguf_integers.py",
    "tests/export/test_gliner.py",
    "tests/export/test_gliner2.py",
    "tests/export/test_heads_pipeline.py",
    "tests/export/test_hybrid_embeddings.py",
    "tests/export/test_library_formats.py",
    "tests/export/test_module_settings.py",
    "tests/export/test_multi_vector.py",
    "tests/export/test_question_answering_pipeline.py",
    "tests/export/test_rerankers.py",
    "tests/export/test_starter_generation.py",
    "tests/export/test_text_part.py",
    "tests/export/test_token_classify_pipeline.py",
    "tests/export/test_tokenizer_settings.py",
    "tests/http/test_attacks.py",
    "tests/http/test_batch.py::test_a_run_that_is_killed_goes_on_where_it_was",
    "tests/http/test_batch.py::test_what_cannot_begin_says_why_in_a_sentence",
    "tests/http/test_batch_api.py::test_a_server_that_is_stopped_goes_on_where_it_was",
    "tests/http/test_batch_limits.py",
    "tests/http/test_connection_floods.py",
    "tests/http/test_grpc_attacks.py",
    "tests/http/test_http_defaults.py::test_the_starters_tell",
    "tests/http/test_http_errors_golden.py",
    "tests/http/test_http_memory.py",
    "tests/http/test_http_on_device.py",
    "tests/http/test_http_service.py::test_a_bad_setting_names_itself",
    "tests/http/test_http_service.py::test_a_broken_bundle",
    "tests/http/test_http_service.py::test_a_missing_provider",
    "tests/http/test_openai_tools.py::test_calls_at_once_parse_and_satisfy_their_schemas",
    "tests/http/test_server_process.py",
    "tests/kernels/test_kernels_memory.py",
    "tests/kernels/test_kernels_prune.py",
    "tests/training/",
    "tests/unit/causal/test_chat.py::test_a_template_that_would_not_end_is_stopped",
    "tests/unit/causal/test_chat.py::test_memory_that_no_count_sees_is_limited",
    "tests/unit/causal/test_device_sampler.py::test_rounding_hardly_ever_decides",
    "tests/unit/grammar/test_grammar.py::test_replies_under_a_nested_schema_validate",
    "tests/unit/grammar/test_grammar_memory.py",
    "tests/unit/http/test_lifecycle.py",
    "tests/unit/loadtests/",
    "tests/unit/registry/test_drafts.py::test_a_model_drafts_by_what_its_bundle_has",
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
