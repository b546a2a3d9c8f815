"""Config: the order of the three sources, and what a wrong value says."""

from pathlib import Path

import pydantic
import pytest

from maskdial.config import Config, load_config
from maskdial.errors import ConfigError
from maskdial.registry.catalog import find_bundles


def test_flags_win_over_variables_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "maskdial.toml"
    file.write_text('port = 1\nslots = 2\nmax_queue = 3\n[model]\nmine = "bundles/mine"\n')
    monkeypatch.setenv("MASKDIAL_PORT", "10")
    monkeypatch.setenv("MASKDIAL_SLOTS", "20")
    config = load_config({"port": "100"}, file)
    assert (config.port, config.slots, config.max_queue) == (100, 20, 3)
    assert config.models == {"mine": Path("bundles/mine")}
    assert config.host == Config().host


def test_models_from_flags() -> None:
    assert load_config({"model": ["a=x", "b=y=z"]}).models == {"a": Path("x"), "b": Path("y=z")}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "http"}, "'port'"),
        ({"port": 70000}, "'port'"),
        ({"prefix_cache_dir": "/x", "prefix_cache_bytes": 0}, "some prefix_cache_bytes"),
        ({"slots": -1}, "'slots'"),
        ({"provider": "tpu"}, "'provider'"),
        ({"model": ["just-a-path"]}, "is neither NAME=PATH"),
        ({"model": ["a=x", "a=y"]}, "given twice"),
        ({"model": ["a b=x"]}, "use letters"),
        ({"model": ["a/b/c=x"]}, "one '/' at most"),
        ({"model": ["../b=x"]}, "use letters"),
        ({"model": ["load=x"]}, "/models/load is a route"),
        ({"model": '{"a"'}, "is neither NAME=PATH"),
    ],
)
def test_a_wrong_setting_names_itself(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags)
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["prot = 1\n", "port = \n", 'port = "x"\n'])
def test_a_wrong_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "maskdial.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_config({}, file)
    with pytest.raises(ConfigError, match="does not exist"):
        load_config({}, tmp_path / "other.toml")


def test_it_cannot_change() -> None:
    with pytest.raises(pydantic.ValidationError):
        Config().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spinning", "alone", "spins"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("on", False, True),
        ("off", True, False),
    ],
)
def test_threads_spin_where_one_model_is_served(spinning: str, alone: bool, spins: bool) -> None:
    assert load_config({"spinning": spinning}).spins(alone=alone) is spins
    assert load_config({}).spins(alone=alone) is alone


def test_the_admin_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKDIAL_ADMIN_KEY", "open sesame")
    config = load_config({})
    assert config.admin_key is not None
    assert config.admin_key.get_secret_value() == "open sesame"
    assert "sesame" not in repr(config)
    monkeypatch.setenv("MASKDIAL_ADMIN_KEY", "none")
    assert load_config({}).admin_key is None
    with pytest.raises(ConfigError, match="--admin-key is empty"):
        load_config({"admin_key": ""})


def test_models_at_run_time(tmp_path: Path) -> None:
    flags: dict[str, object] = {"model_dir": str(tmp_path), "models_max": "3"}
    config = load_config(flags | {"models_memory": "off", "models_keep_alive": "0.5"})
    assert (config.model_dir, config.models_max) == (tmp_path, 3)
    assert (config.models_memory, config.models_keep_alive) == (None, 0.5)
    assert find_bundles(config).scan() == {}
    with pytest.raises(ConfigError, match="set --admin-key as well"):
        find_bundles(load_config(flags | {"models_autoload": "off"}))
    with pytest.raises(ConfigError, match="cannot be read"):
        find_bundles(load_config({"model_dir": str(tmp_path / "missing")})).scan()
    with pytest.raises(ConfigError, match="'models_max'"):
        load_config(flags | {"models_max": "0"})


def test_texts_are_cut_for_all_models_or_some() -> None:
    assert Config(auto_truncate="on").truncates("a")
    assert not Config().truncates("off")
    some = Config(auto_truncate="a, org/b")
    assert [some.truncates(name) for name in ("a", "org/b", "c")] == [True, True, False]
    with pytest.raises(ConfigError, match=r"auto_truncate.*use letters"):
        load_config({"auto_truncate": "a,,b"})
