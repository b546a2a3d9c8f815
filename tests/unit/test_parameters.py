"""The parameters of sampling are declared where their types have to be, and nowhere else.

`SamplingParams` has their names, bounds and defaults, from which the bodies take theirs. Types of
keyword arguments cannot be derived: `maskdial.Model` and the client, a distribution of its own,
name them once more.
"""

from typing import get_type_hints

import pytest

from maskdial.causal.sampling.params import DEFAULTS, SamplingParams
from maskdial.dialects.native.generate_bodies import GenerateParameters
from maskdial.dialects.sampling import SamplingFields, Scheduling
from maskdial.local.generation import Sampling
from maskdial_client._async import generate
from maskdial_client.call import TaskOptions

# What requests say in other ways, and what only the engine knows.
INTERNAL = {
    *("max_new_tokens", "penalty_last_n", "no_source_ngram_size", "no_repeat_ngram_size"),
    *("banned", "forced_first", "forced_last", "dry_breakers", "text_bias", "top_n_tokens"),
    *("scored_tokens", "prompt_logprobs"),
}


def test_a_model_in_this_process_takes_every_parameter() -> None:
    assert set(get_type_hints(Sampling)) == {*DEFAULTS} - INTERNAL


def test_a_body_takes_every_parameter_under_its_name() -> None:
    own = {"include_stop", "do_sample", "min_new_tokens"}  # which some routes have
    assert {*SamplingFields.model_fields} - {"seed"} == {*DEFAULTS} - INTERNAL - own


def test_the_client_sends_every_parameter_of_generate() -> None:
    apart = {"details", "watermark", "stream_unmasking"}  # arguments of the methods
    parameters = {*GenerateParameters.model_fields, *Scheduling.model_fields} - apart
    assert {*get_type_hints(generate.GenerateParameters)} - {*get_type_hints(TaskOptions)} == (
        parameters - {*get_type_hints(TaskOptions)}
    )


@pytest.mark.parametrize("name", sorted({*DEFAULTS} - INTERNAL))
def test_types_agree(name: str) -> None:
    declared = get_type_hints(SamplingParams)[name]
    for others in (Sampling, generate.GenerateParameters):
        found = get_type_hints(others).get(name, declared)
        if declared in (bool, int, float):
            assert found in (declared, declared | None)
        else:  # a sequence of the engine is a list in JSON, a pair of it an item of a mapping
            assert found not in (bool, int, float)
