"""The file of policies: what is taken, and the line of what is not."""

from pathlib import Path

import pytest

from maskdial.errors import ConfigError
from maskdial.policy.file import check_routes, read_policies
from maskdial.policy.rules import Policy

RULE = """
[policies.p]
models = ["*"]

[[policies.p.rules]]
name = "pii"
on = "input"
model = "tagger"
action = "redact"
"""


def read(tmp_path: Path, text: str) -> tuple[Policy, ...]:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return read_policies(path)


def fault(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return caught.value.message.removeprefix(str(tmp_path / "policy.toml") + ", ")


def test_a_rule_has_the_defaults_of_its_side(tmp_path: Path) -> None:
    (policy,) = read(tmp_path, RULE)
    (rule,) = policy.rules
    assert (rule.parts, rule.thresholds, rule.line) == (("user", "tool", "document"), {}, 5)
    assert rule.holds
    assert not rule.lets_pass
    assert policy.binds({"any"}, "")
    assert policy.binds({"any"}, None)


def test_labels_may_have_thresholds_of_their_own(tmp_path: Path) -> None:
    labels = 'labels = {EMAIL = 0.3, CARD = 1}\non = "input"'
    (policy,) = read(tmp_path, RULE.replace('on = "input"', labels))
    assert policy.rules[0].thresholds == {"EMAIL": 0.3, "CARD": 1}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (("redact", "eat"), "line 9: policies.p.rules[0].action: "),
        (('"input"', '"both"'), "line 7: policies.p.rules[0].on: "),
        (("name =", "nam ="), "line 5: policies.p.rules[0].name: Field required"),
        (('"tagger"', '"tagger"\nthreshold = 1.5'), "line 9: policies.p.rules[0].threshold: "),
        (('"tagger"', '"tagger"\nlabels = {X = -1}'), "line 9: policies.p.rules[0].labels"),
        (('"tagger"', '"tagger"\nreads = ["content"]'), "line 9: rule 'pii': 'content' is no part"),
        (('"tagger"', '"tagger"\nreads = []'), "line 9: rule 'pii': it reads nothing"),
        (('"redact"', '"stop"'), "line 9: rule 'pii': 'stop' is for rules on the output"),
        (('"redact"', '"route"'), "line 5: rule 'pii': to names the model"),
        (('"tagger"', '"tagger"\nto = "x"'), "line 9: rule 'pii': to names the model"),
        (('"pii"', '"p i"'), "line 6: rule 'p i': its name"),
        (('"tagger"', '"tagger"\nhue = 1'), "line 9: policies.p.rules[0].hue: "),
        (('models = ["*"]', "models = 5"), "line 3: policies.p.models: "),
    ],
)
def test_a_fault_is_told_with_its_line(tmp_path: Path, changed: tuple[str, str], told: str) -> None:
    assert fault(tmp_path, RULE.replace(*changed)).startswith(told)


def test_other_faults(tmp_path: Path) -> None:
    assert "is no TOML" in fault(tmp_path, "[policies")
    assert "line 1: policies: Field required" in fault(tmp_path, "")
    assert fault(
        tmp_path, '[policies."a b"]\nrules = [{name="x",on="input",model="m",action="flag"}]'
    )
    with pytest.raises(ConfigError, match="cannot be read: no such file"):
        read_policies(tmp_path / "absent.toml")


def test_two_rules_may_not_contradict_each_other(tmp_path: Path) -> None:
    first = RULE.replace('"redact"', '"redact"\nlabels = ["EMAIL"]')
    second = first[first.index("[[") :].replace("pii", "other").replace("redact", "flag")
    told = fault(tmp_path, first + second)
    assert "line 11: rules 'pii' and 'other' contradict each other" in told
    assert "line 11: two rules are called 'pii'" in fault(
        tmp_path, first + second.replace("other", "pii")
    )
    read(tmp_path, first + second.replace("EMAIL", "CARD"))
    read(tmp_path, first + second.replace('"EMAIL"', '"EMAIL"]\nthreshold = 0.9\nreads = ["user"'))


def route(name: str, models: str, to: str) -> str:
    return f"""
[policies.{name}]
models = ["{models}"]
[[policies.{name}.rules]]
name = "r"
on = "input"
model = "judge"
labels = ["X"]
action = "route"
to = "{to}"
"""


def test_routes_do_not_lead_in_a_circle(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(route("a", "one", "two") + route("b", "two", "one"))
    with pytest.raises(ConfigError, match="line 4: rule 'r' routes in a circle: from two to one"):
        check_routes(path, read_policies(path))
    path.write_text(route("a", "*", "two"))  # two is there already
    check_routes(path, read_policies(path))
    path.write_text(route("a", "one", "two") + route("b", "two", "three"))
    check_routes(path, read_policies(path))
