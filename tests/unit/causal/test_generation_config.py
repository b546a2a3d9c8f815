"""A model's own defaults: which values of generation_config.json count."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from maskdial.bundle.bundle import Bundle, load_bundle, load_bundles
from maskdial.causal.generation_config import (
    GenerationDefaults,
    read_generation_defaults,
    tokens_without_text,
)
from maskdial.registry.catalog import STARTER_FOLDER


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return load_bundle("mine", shutil.copytree(STARTER_FOLDER / "hybrid", tmp_path / "bundle"))


def defaults_of(bundle: Bundle, content: object) -> dict[str, Any]:
    """The defaults that differ from those of a model without the file."""
    text = content if isinstance(content, str) else json.dumps(content)
    (bundle.path / "generation_config.json").write_text(text)
    neutral = asdict(GenerationDefaults())
    found = asdict(read_generation_defaults(bundle))
    return {name: value for name, value in found.items() if value != neutral[name]}


def test_all_that_transformers_writes_for_sampling_counts(bundle: Bundle) -> None:
    content = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "max_new_tokens": 64,
    }
    others = {"bos_token_id": 1, "eos_token_id": [1, 2], "num_beams": 4, "transformers_version": ""}
    assert defaults_of(bundle, content | others) == content


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        ({"temperature": None, "do_sample": None}, {}),
        ({"top_k": -1}, {}),
        # transformers would not sample; vLLM, which has no do_sample, does.
        ({"temperature": 0.6}, {"temperature": 0.6, "do_sample": True}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.6}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ([1, 2], {}),
    ],
)
def test_what_a_file_leaves_out(bundle: Bundle, content: object, expected: object) -> None:
    assert defaults_of(bundle, content) == expected


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        ({"top_p": 7, "min_p": 0.1, "do_sample": True}, "top_p in generation_config.json is ig"),
        ({"min_p": 0.1, "max_new_tokens": 0}, "max_new_tokens in generation_config.json"),
        ({"min_p": 0.1, "temperature": "hot"}, "'hot'"),
        ({"min_p": 0.1, "repetition_penalty": float("nan")}, "repetition_penalty"),
    ],
)
def test_what_no_request_could_send_is_left_out(
    bundle: Bundle, caplog: pytest.LogCaptureFixture, content: object, warning: str
) -> None:
    assert defaults_of(bundle, content) == {"min_p": 0.1, "do_sample": True}
    assert warning in caplog.text
    caplog.clear()
    assert defaults_of(bundle, "{") == {}
    assert "generation_config.json is ignored" in caplog.text


def test_a_hybrids_mask_token_is_no_text_but_its_end_is() -> None:
    bundles = load_bundles("hybrid", STARTER_FOLDER / "hybrid")
    causal, full = (each.manifest for each in bundles)
    assert causal.special_tokens.mask is None
    assert full.special_tokens.mask is not None
    assert tokens_without_text([causal, full]) == {full.special_tokens.mask}
    assert causal.special_tokens.pad in causal.special_tokens.eos
