"""Keys, without a server: which of them open what, under which names, and how they are sent."""

import re
from typing import Any

import pytest

from maskdial.config import Config
from maskdial.errors import ForbiddenError, UnauthorizedError
from maskdial.http.keys import Keys, key_name

FIRST, SECOND = key_name("first"), key_name("second")
HOW = "send it as 'Authorization: Bearer KEY' or as 'x-api-key'"
SETTINGS: dict[str, Any] = {
    "api_keys": ["first", "second"],
    "admin_key": "root",
    "metrics_key": "scraper",
}


def keys_of(**settings: Any) -> Keys:
    return Keys(Config(**settings))


def sent(**headers: str) -> dict[str, Any]:
    """The scope of a request with these headers."""
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "GET", "headers": pairs}


@pytest.mark.parametrize(
    ("path", "key", "name"),
    [
        ("/classify", "first", FIRST),
        ("/classify", "second", SECOND),
        ("/classify", "root", "admin"),
        ("/classify", "scraper", None),
        ("/metrics", "scraper", "metrics"),
        ("/metrics", "root", "admin"),
        ("/metrics", "first", None),
    ],
)
def test_a_key_opens_what_it_is_for(path: str, key: str, name: str | None) -> None:
    keys = keys_of(**SETTINGS)
    for scope in (sent(authorization=f"Bearer {key}"), sent(x_api_key=key)):
        if name is None:
            with pytest.raises(UnauthorizedError) as refused:
                keys.check(scope, path)
            assert refused.value.message == f"the key is wrong; {HOW}"
        else:
            assert keys.check(scope, path) == name


@pytest.mark.parametrize("value", ["bearer first", "BEARER  first ", "Bearer first"])
def test_the_scheme_is_bearer_in_any_case(value: str) -> None:
    assert keys_of(**SETTINGS).check(sent(authorization=value), "/classify") == FIRST


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic first", "first", "Token first"])
def test_another_scheme_sends_no_key(value: str) -> None:
    with pytest.raises(UnauthorizedError) as refused:
        keys_of(**SETTINGS).check(sent(authorization=value), "/classify")
    assert refused.value.message == f"the key is missing; {HOW}"


def test_either_header_may_have_the_key() -> None:
    keys = keys_of(**SETTINGS)
    assert keys.check(sent(authorization="Bearer wrong", x_api_key="second"), "/x") == SECOND
    assert keys.check(sent(authorization="Bearer second", x_api_key="wrong"), "/x") == SECOND


def test_only_the_admin_key_changes_the_server() -> None:
    keys = keys_of(**SETTINGS)
    keys.check_admin(sent(x_api_key="root"))
    for scope, words in ((sent(x_api_key="first"), "is wrong"), (sent(), "is missing")):
        with pytest.raises(UnauthorizedError) as refused:
            keys.check_admin(scope)
        assert refused.value.message == f"the admin key {words}; {HOW}"
    with pytest.raises(ForbiddenError, match=r"start it with --admin-key or MASKDIAL_ADMIN_KEY$"):
        keys_of(api_keys=["first"]).check_admin(sent(x_api_key="first"))


def test_names_are_those_of_clients_and_of_the_admin() -> None:
    assert keys_of(**SETTINGS).names == (FIRST, SECOND, "admin")
    assert keys_of(admin_key="root", metrics_key="scraper").names == ()


def test_the_name_of_a_key_is_its_own_wherever_it_is_given() -> None:
    """What belongs to a name is on the disk, and must not become another key's."""
    assert re.fullmatch(r"key-[0-9a-f]{12}", FIRST)
    before, after = keys_of(api_keys=["first", "second"]), keys_of(api_keys=["second"])
    scope = sent(x_api_key="second")
    assert before.check(scope, "/x") == after.check(scope, "/x") == SECOND != FIRST


def test_without_keys_of_clients_only_the_metrics_may_be_closed() -> None:
    assert keys_of(admin_key="root").check(sent(), "/metrics") is None
    closed = keys_of(metrics_key="scraper")
    assert closed.check(sent(), "/classify") is None
    with pytest.raises(UnauthorizedError):
        closed.check(sent(), "/metrics")
