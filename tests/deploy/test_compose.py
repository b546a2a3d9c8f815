"""compose.yaml: its files exist, and its services find each other."""

import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from maskdial.config import SETTINGS, Config
from maskdial.settings import variable
from tests.deploy.queries import DEPLOY


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = read(DEPLOY / "compose.yaml")["services"]
    return found


def mounts(service: dict[str, Any]) -> dict[PurePosixPath, Path]:
    """The files and folders of ours that a service sees."""
    found = {}
    for volume in service["volumes"]:
        source, target = volume.removeprefix("${BUNDLES:-").replace("}", "").split(":")[:2]
        if source.startswith("."):
            found[PurePosixPath(target)] = Path(os.path.normpath(DEPLOY / source))
    return found


def test_mounted_files_exist(services: dict[str, Any]) -> None:
    found = [path for service in services.values() for path in mounts(service).values()]
    assert len(found) == 4
    assert [path for path in found if not path.exists()] == []


def test_ports_are_open_to_this_machine_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service["ports"]]
    assert len(ports) == len(services)
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_server_has_its_settings_and_time_to_drain(services: dict[str, Any]) -> None:
    server = services["maskdial"]
    names = server["environment"]
    # A variable that is set where compose runs must not be left out: the server would be open.
    refused = {"MASKDIAL_API_KEYS", "MASKDIAL_ADMIN_KEYS", "MASKDIAL_METRICS_KEYS"}
    fixed = {variable(name) for name in ("host", "port", "uds")}
    settings = {variable(name) for name in (*SETTINGS, "config")}
    assert set(names) == (settings | refused) - fixed
    assert not refused & settings
    assert len(names) == len(set(names))
    assert not any("=" in name for name in names)  # none is set to nothing where it is not set
    assert server["read_only"]
    seconds = int(server["stop_grace_period"].removesuffix("s"))
    assert seconds > Config.model_fields["grace_period"].default


def test_prometheus_scrapes_the_server(services: dict[str, Any]) -> None:
    config = read(DEPLOY / "prometheus" / "prometheus.yml")
    (job,) = config["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert job["job_name"] == "maskdial"
    assert discovery["names"] == ["maskdial"]
    assert services["maskdial"]["ports"][0].endswith(f":{discovery['port']}")
    assert [(DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"]] == [True]


def test_grafana_has_the_source_and_the_dashboard(services: dict[str, Any]) -> None:
    seen = mounts(services["grafana"])
    folder = seen[PurePosixPath("/etc/grafana/provisioning")]
    (source,) = read(folder / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == f"http://prometheus:{services['prometheus']['ports'][0][-4:]}"
    (provider,) = read(folder / "dashboards" / "maskdial.yaml")["providers"]
    dashboard = PurePosixPath(provider["options"]["path"]) / "maskdial.json"
    assert seen[dashboard] == DEPLOY / "grafana" / "maskdial.json"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == str(dashboard)
