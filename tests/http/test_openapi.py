"""The OpenAPI document, tried: generated requests get no reply that it does not name.

The tests' servers compare all their replies with it (`tests.documented`); here, schemathesis makes
up the requests. ``TESTS_FUZZ_EXAMPLES`` says how many for each route.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from maskdial.app import create_app
from maskdial.config import Config
from maskdial.dialects import ROUTES
from maskdial.dialects.native import page
from maskdial.http.route import Route
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.choice import WrittenMask
from tests.documented import strict

EXAMPLES = int(os.environ.get("TESTS_FUZZ_EXAMPLES", "4"))
KEY = "root"
SEVERAL = ("/score", "/tokenize", "/detokenize", "/v1/decisions", "/v1/systemone")
"""Paths of what all models can do."""
SETTINGS = settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES < 100,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def document() -> Any:
    return create_app(Config()).openapi()


def test_it_is_a_document_whose_references_exist(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    text = str(document)
    references = {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}
    assert references == set(schemas)


def test_every_route_says_what_it_takes_and_replies(document: Any) -> None:
    for route in ROUTES:
        if route in page.ROUTES:  # for people
            continue
        assert isinstance(route, Route), route
        if not route.include_in_schema:
            continue
        for method in route.methods or ():
            operation = document["paths"][route.path_format][method.lower()]
            ok = operation["responses"]["200"]["content"]
            assert all(content["schema"] for content in ok.values()), route.path
            assert "401" in operation["responses"]
            if method == "POST":
                assert operation["requestBody"]["content"]["application/json"]["schema"]
                named = {"404", "408", "413", "429", "500", "503", "504"}
                assert named <= operation["responses"].keys()
            in_path = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
            assert in_path == {part.split("}")[0] for part in route.path_format.split("{")[1:]}


def test_other_content_types_are_named(document: Any) -> None:
    for path in ("/generate", "/generate_stream", "/v1/chat/completions", "/v1/messages"):
        assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]
    (content,) = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert content.startswith("text/plain")


@pytest.fixture(scope="module")
def url(start_server: Callable[..., Any], chat_bundle: Path, masked_starter: Path) -> Iterator[str]:
    """A server with one model for each of three tasks."""
    models = {
        "chat": chat_bundle,
        "masked": masked_starter,
        "sentiment": STARTER_FOLDER / "sentiment",
    }
    server = start_server(models=models, admin_key=KEY, max_context=128, request_timeout=20)
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def api(url: str) -> Any:
    """The document, whose objects have no other fields."""
    return schemathesis.openapi.from_dict(strict(httpx.get(f"{url}/openapi.json").json()))


OPERATIONS = [
    (method, route.path_format)
    for route in ROUTES
    if isinstance(route, Route) and route.include_in_schema
    for method in route.methods or ()
]


def suffix(name: Any) -> str:
    """The mask behind a name that was made up, with its colon."""
    mask = str(name).rpartition(":")[2]
    return f":{mask}" if mask in get_args(WrittenMask) else ""


def test_names_of_models_may_end_in_any_mask(document: Any) -> None:
    parameters = document["paths"]["/models/{name}"]["post"]["parameters"]
    (pattern,) = (each["schema"]["pattern"] for each in parameters)
    for mask in get_args(WrittenMask):
        assert re.search(pattern, f"owner/chat:{mask}"), mask
    assert not re.search(pattern, "chat:none")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_requests_as_documented(api: Any, url: str, method: str, path: str) -> None:
    def send(case: Case[Any]) -> None:
        # Names that are made up belong to no model.
        if isinstance(case.body, dict):
            case.body.pop("model", None)
            if path in SEVERAL:
                case.body["model"] = "chat"
        if "name" in case.path_parameters:
            case.path_parameters["name"] = "chat" + suffix(case.path_parameters["name"])
        response = case.call(base_url=url, timeout=60)
        case.validate_response(response, checks=CHECKS)
        if response.status_code != 504:  # which is the request's own timeout
            case.validate_response(response, checks=[not_a_server_error])

    SETTINGS(given(case=api[path][method].as_strategy())(send))()


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for method, path in OPERATIONS if method == "POST"])
def test_requests_that_break_the_document_are_refused(api: Any, url: str, path: str) -> None:
    def send(case: Case[Any]) -> None:
        response = case.call(base_url=url, timeout=60)
        checks = [*CHECKS, negative_data_rejection, not_a_server_error]
        case.validate_response(response, checks=checks)

    broken = api[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE)
    SETTINGS(given(case=broken)(send))()
