"""Where settings come from: one name for flag, variable and key of the file, and no open door.

Each wrong value is tried for every setting there is, in all three places.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial import cli, settings
from maskdial.config import BRIEF, HEADINGS, SETTINGS, Config, load_config, repeated
from maskdial.errors import ConfigError

NAMES = sorted(SETTINGS)
MANY = [name for name in NAMES if repeated(SETTINGS[name])]
SECRET = "s3cret-value"
Served = list[Config]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """The configurations with which `maskdial serve` would have started a server."""
    found: Served = []

    class Server:
        failure, started = None, True

        def __init__(self, config: Config, *, ends_process: bool) -> None:
            found.append(config)

        def run(self) -> None:
            pass

    monkeypatch.setattr("maskdial.server.Server", Server)
    monkeypatch.setattr("maskdial.logs.configure", lambda *_: None)
    return found


Given = Callable[[str, Any], int]
"""Starts the server with one setting, by its name and its value, and returns the exit code."""


@pytest.fixture(params=["flag", "variable", "file"])
def given(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    def run(*arguments: str) -> int:
        try:
            return cli.main(["serve", *arguments])
        except SystemExit as end:
            return int(str(end.code))

    def start(name: str, value: Any) -> int:
        if request.param == "flag":
            return run(settings.flag(name), value)
        if request.param == "variable":
            with monkeypatch.context() as variables:
                variables.setenv(settings.variable(name), value)
                return run()
        file = tmp_path / "maskdial.toml"
        file.write_text(f'{name} = "{value}"\n')
        return run("--config", str(file))

    return start


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_value_starts_nothing(
    name: str, given: Given, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    for empty in ("", " ", "  "):
        assert given(name, empty) == 1
        assert "is empty; give it a value, or leave it out" in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize("name", MANY)
def test_an_empty_value_of_several_starts_nothing(
    name: str, given: Given, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {
        "model": "m=path",
        "adapter": "a=path@m",
        "api_key": SECRET,
        "cors_allow_origin": "*",
        "allowed_host": "*",
        "allow_pull": "acme/*",
    }[name]
    for several in (",", f"{good},", f",{good}", f"{good},,{good}", f"{good}, "):
        code = given(name, several)
        if code == 0:
            # On the command line, a comma is a part of the one value.
            assert name in ("model", "adapter", "api_key")
            (config,) = served
            assert getattr(config, SETTINGS[name])
            served.clear()
        else:
            assert name in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize("name", MANY)
def test_an_empty_list_in_the_file_starts_nothing(
    name: str, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "maskdial.toml"
    for text in (f"{name} = []", f"{name} = ['']", f"[{name}]", f"[{name}]\nx = ''"):
        file.write_text(text)
        assert cli.main(["serve", "--config", str(file)]) == 1
        assert f"setting {name!r} of {file} is empty" in capsys.readouterr().err
    assert served == []


def misspelled(name: str) -> set[str]:
    """Names that someone may write for a setting's, and that are no other setting."""
    wrong = {f"{name}s", name[:-1], name.replace("_", "") + "x", f"{name[0]}{name}"}
    return wrong - set(NAMES) - {settings.PREFIX, "config"}


@pytest.mark.parametrize("name", NAMES)
def test_a_misspelled_name_starts_nothing_and_shows_no_value(
    name: str, given: Given, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in misspelled(name):
        assert given(wrong, SECRET) in (1, 2)
        printed = capsys.readouterr()
        # MASKDIAL_GGRPC_PORT looks like a variable of Kubernetes, which is said of it.
        assert any(words in printed.err for words in ("no such setting", "no flag", "no setting"))
        assert SECRET not in printed.out + printed.err
    assert served == []


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("api_keys", "api_key"),
        ("apikey", "api_key"),
        ("api-key", "api_key"),
        ("admin_keys", "admin_key"),
        ("metric_key", "metrics_key"),
        ("models", "model"),
        ("cors_allow_origins", "cors_allow_origin"),
        ("model_directory", "model_dir"),
        ("API_KEY", "api_key"),
    ],
)
def test_the_nearest_name_is_told(
    wrong: str, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "maskdial.toml"
    file.write_text(f'{wrong} = "{SECRET}"\n')
    with pytest.raises(ConfigError, match=rf"no such setting; did you mean {right}\?"):
        load_config({}, file)
    if wrong.islower():
        monkeypatch.setenv(f"MASKDIAL_{wrong.upper()}", SECRET)
        with pytest.raises(ConfigError, match=rf"did you mean MASKDIAL_{right.upper()}\?"):
            load_config({})


@pytest.mark.parametrize(
    "name", ["maskdial_api_key", "Maskdial_Api_Key", "MASKDIAL-API-KEY", "MASKDIAL_api_key"]
)
def test_a_variable_in_other_letters_is_not_ignored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRET)
    with pytest.raises(ConfigError, match=rf"{name}: no such setting; did you mean MASKDIAL_API"):
        load_config({})


@pytest.mark.parametrize("name", NAMES)
def test_a_flag_for_one_value_is_given_once(
    name: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = settings.flag(name)
    if name in MANY:
        return
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", flag, SECRET, flag, "none"])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert f"{flag} is given twice" in printed.err
    assert SECRET not in printed.out + printed.err
    assert served == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-keys", SECRET],
        [f"--api-keys={SECRET}"],
        [f"--api-k={SECRET}"],
        ["--admin", SECRET],
        [SECRET],
        [f"-{SECRET}"],
        ["--", SECRET],
        ["--api-key", "a", "--api_key", SECRET],
    ],
    ids=str,
)
def test_an_unknown_argument_is_not_shown(
    arguments: list[str], served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", *arguments])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert served == []


def test_every_setting_has_one_name_in_all_three_places(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those with several values as well."""
    expected = Config(
        api_keys=["one", "two"],
        models={"a": Path("x"), "b": Path("y/z")},
        cors_allow_origins=["https://a.org", "*"],
        admin_key="root",
        port=1,
    )
    flags = ["--api-key", "one", "--api-key", "two", "--model", "a=x", "--model", "b=y/z"]
    flags += ["--cors-allow-origin", "https://a.org", "--cors-allow-origin", "*"]
    assert cli.main(["serve", *flags, "--admin-key", "root", "--port", "1"]) == 0
    with monkeypatch.context() as variables:
        variables.setenv("MASKDIAL_API_KEY", "one, two")
        variables.setenv("MASKDIAL_MODEL", "a=x,b=y/z")
        variables.setenv("MASKDIAL_CORS_ALLOW_ORIGIN", "https://a.org,*")
        variables.setenv("MASKDIAL_ADMIN_KEY", "root")
        variables.setenv("MASKDIAL_PORT", "1")
        assert cli.main(["serve"]) == 0
    file = tmp_path / "maskdial.toml"
    file.write_text(
        'api_key = ["one", "two"]\ncors_allow_origin = ["https://a.org", "*"]\nport = 1\n'
        'admin_key = "root"\n[model]\na = "x"\nb = "y/z"\n'
    )
    assert cli.main(["serve", "--config", str(file)]) == 0
    monkeypatch.setenv("MASKDIAL_CONFIG", str(file))
    assert cli.main(["serve"]) == 0
    assert served == [expected] * 4


def test_no_variable_takes_the_files_keys_away_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "maskdial.toml"
    file.write_text('api_key = ["of the file"]\nadmin_key = "root"\n')
    for name in ("MASKDIAL_API_KEY", "MASKDIAL_ADMIN_KEY"):
        for value in ("", " ", "\t"):
            with monkeypatch.context() as variables:
                variables.setenv(name, value)
                with pytest.raises(ConfigError, match=f"{name} is empty"):
                    load_config({}, file)
    monkeypatch.setenv("MASKDIAL_API_KEY", "of the variable")
    (key,) = load_config({}, file).api_keys
    assert key.get_secret_value() == "of the variable"


@pytest.mark.parametrize("word", ["none", "None", "NULL", "off", "false", "no"])
@pytest.mark.parametrize("name", ["api_key", "admin_key", "metrics_key"])
def test_a_word_for_none_is_no_key(name: str, word: str) -> None:
    """Not one that opens a door to all who guess it."""
    if word == "none" and name != "api_key":
        assert getattr(load_config({name: word}), name) is None
        return
    with pytest.raises(ConfigError, match="anybody would guess"):
        load_config({name: word})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASKDIAL_PORT", "tcp://10.0.0.1:8000"),
        ("MASKDIAL_SERVICE_HOST", "10.0.0.1"),
        ("MASKDIAL_SERVICE_PORT", "8000"),
        ("MASKDIAL_SERVICE_PORT_HTTP", "8000"),
        ("MASKDIAL_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("MASKDIAL_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("MASKDIAL_TEXT_SERVICE_HOST", "10.0.0.1"),
    ],
)
def test_variables_of_kubernetes_are_explained(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is one that Kubernetes .*enableServiceLinks"):
        load_config({})


def test_the_kernels_have_a_variable_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKDIAL_KERNELS_ISA", "avx2")
    assert load_config({}) == Config()


NUMBERS = [
    (name, part)
    for name, field in SETTINGS.items()
    for part in [Config.model_json_schema()["properties"][field]]
    for part in part.get("anyOf", [part])
    if part.get("type") in ("integer", "number")
]


def test_every_number_is_found() -> None:
    assert len(NUMBERS) == 37, "a new number? its limits are tried below"


@pytest.mark.parametrize(("name", "limits"), NUMBERS, ids=[name for name, _ in NUMBERS])
def test_every_number_has_limits(name: str, limits: dict[str, Any], tmp_path: Path) -> None:
    assert "maximum" in limits
    assert {"minimum", "exclusiveMinimum"} & set(limits)
    highest = limits["maximum"]
    config = load_config({name: str(highest)})
    assert getattr(config, SETTINGS[name]) == highest
    file = tmp_path / "maskdial.toml"
    for wrong in ("1" + "0" * 25, "1" + "0" * 5000, str(highest + 1), "-1e400", "1e400", "nan"):
        with pytest.raises(ConfigError, match=f"setting {name!r}"):
            load_config({name: wrong})
    for wrong in ("1" + "0" * 25, "inf", "nan", "-inf"):
        file.write_text(f"{name} = {wrong}\n")
        with pytest.raises(ConfigError, match=f"setting {name!r}"):
            load_config({}, file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"port = " + b"[" * 100_000, "nested too deeply|not valid TOML"),
        (b"port = " + b"{a=" * 100_000, "nested too deeply|not valid TOML"),
        (b"port = " + b"1" * 5000, "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"port = 1\nport = 2\n", "not valid TOML"),
        (b"[model]\na = [[1]]\n", "setting 'model.a'"),
        (b"host = []\n", "setting 'host' of"),
        (b"host = {a = 1}\n", "setting 'host'"),
        (b"api_key = 1\n", "setting 'api_key'"),
        (b'[server]\napi_key = "a"\n', "'server' of .*no such setting"),
        (b'config = "other"\n', "'config' of .*no such setting"),
    ],
    ids=range(11),
)
def test_a_wrong_file_is_a_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "maskdial.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_config({}, file)


def test_a_file_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is a folder; name the file in it"):
        load_config({}, tmp_path)
    with pytest.raises(ConfigError, match=r"other\.toml does not exist"):
        load_config({}, tmp_path / "other.toml")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    file = tmp_path / "maskdial.toml"
    file.write_text("port = 1\n")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=f"{file} cannot be read: Permission denied"):
        load_config({}, file)


def test_models_of_a_deeply_nested_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKDIAL_MODEL", '{"a":' * 10_000)
    with pytest.raises(ConfigError, match="is neither NAME=PATH"):
        load_config({})


def test_the_documents_name_no_variable_that_is_none() -> None:
    root = Path(__file__).resolve().parents[2]
    files = [
        *(root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Dockerfile")),
        *(each for each in root.glob("docs/*.md") if each.stem != "reliability"),
        *root.glob("loadtests/**/*.py"),
        *(each for each in root.glob("deploy/**/*") if each.is_file()),
    ]
    known = {settings.variable(name) for name in (*NAMES, "config")}
    known |= {"MASKDIAL_CACHE", "MASKDIAL_KERNELS_ISA", "MASKDIAL_SERVICE_HOST"}
    assert len(files) > 50
    for file in files:
        found = set(re.findall(r"\bMASKDIAL_[A-Z_]*[A-Z]\b", file.read_text(encoding="utf-8")))
        refused = (
            {f"MASKDIAL_{name}_KEYS" for name in ("API", "ADMIN", "METRICS")}
            if "compose" in file.name
            else set()
        )
        assert found - known - refused == set(), file


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_no_text_are_a_sentence(
    name: str, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such paths cannot be opened by ONNX Runtime, nor be written into a reply."""
    value = "m=a\udcff" if name == "model" else "a\udcff"
    assert cli.main(["serve", settings.flag(name), value]) == 1
    monkeypatch.setenv(settings.variable(name), value)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err.count("is not UTF-8; use names") == 2
    assert served == []


def test_the_highest_numbers_serve(start_server: Callable[..., Any]) -> None:
    """Nothing that is computed from them overflows."""
    # These are limits of the machine.
    own = {"port", "threads", "slots", "kv_cache_fraction", "front_ends"}
    running = start_server(**{name: part["maximum"] for name, part in NUMBERS if name not in own})
    try:
        for path, text in (("fill-mask", "A [MASK]."), ("classify", "Fine."), ("generate", "Once")):
            reply = httpx.post(f"{running.url}/{path}", json={"inputs": text}, timeout=60)
            assert reply.status_code == 200, reply.text
    finally:
        running.stop()


@pytest.mark.parametrize("command", ["serve", "health"])
def test_the_short_help_has_what_matters_first(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    flags = set(re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE))
    own = {"--pid"} if command == "health" else set()
    assert flags == {*map(settings.flag, BRIEF), "--help-all", "--config", *own}
    assert "\nrequests:\n" not in shown  # none of that group is
    assert f"all {len(SETTINGS)} settings" in shown
    assert len(BRIEF) == 10


def test_the_help_has_each_setting_below_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help-all"])
    shown = capsys.readouterr().out
    assert next(iter(HEADINGS)) == next(iter(Config.model_fields))
    places = [shown.index(f"\n{heading}:\n") for heading in HEADINGS.values()]
    assert places == sorted(places)
    for heading, name in zip(places, HEADINGS, strict=True):
        (setting,) = (flag for flag, field in SETTINGS.items() if field == name)
        first = re.compile(r"\n[a-z ]+:\n  (--[a-z-]+)").match(shown, heading)
        assert first is not None
        assert first[1] == settings.flag(setting)
