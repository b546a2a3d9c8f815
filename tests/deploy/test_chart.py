"""The Helm chart: rendered by Helm's own engine, checked against the schemas of Kubernetes.

`make test-deploy` installs what this needs; the tests of the values need nothing.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from maskdial.config import load_config
from maskdial.dialects.kserve import repository as kserve
from maskdial.http.keys import Keys
from tests.deploy import queries
from tests.deploy.queries import DEPLOY

CHART = DEPLOY / "helm" / "maskdial"
KUBERNETES = "1.37"
CASES = [None, *sorted((CHART / "ci").glob("*.yaml"))]
# Their schemas come with their operators, so they are checked by hand.
CUSTOM = {"ScaledObject", "ServiceMonitor"}

Manifests = dict[str, dict[str, Any]]


def read(path: Path | None) -> dict[str, Any]:
    return {} if path is None else dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def render(values: dict[str, Any]) -> Manifests:
    """What Helm makes of the values, by kind: the release "prod" in the namespace "ml"."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    with helm.Chart.load(str(CHART)) as chart:
        rendered = chart.render(values, name="prod", namespace="ml")
    manifests: Manifests = {}
    for path, text in rendered.items():
        for manifest in yaml.safe_load_all(text) if path.endswith(".yaml") else ():
            if manifest is not None:
                assert manifest["kind"] not in manifests
                manifests[manifest["kind"]] = manifest
    return manifests


@pytest.fixture(scope="module", params=CASES, ids=lambda path: path.stem if path else "default")
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


@pytest.fixture(scope="module")
def manifests(values: dict[str, Any]) -> Manifests:
    return render(values)


def pod(manifests: Manifests) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Deployment"]["spec"]["template"]["spec"]
    return spec


def server(manifests: Manifests) -> dict[str, Any]:
    (container,) = pod(manifests)["containers"]
    return dict(container)


def test_the_schema_knows_exactly_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    defaults = read(CHART / "values.yaml")
    jsonschema.validate(defaults, schema)

    def compare(part: dict[str, Any], given: dict[str, Any], where: str) -> None:
        known = part.get("properties", {})
        if part.get("additionalProperties") is not False:
            return
        assert set(known) - {"global", "claims"} >= set(given), where
        for name, value in given.items():
            if isinstance(value, dict):
                compare(known[name], value, f"{where}.{name}")

    compare(schema, defaults, "values")
    missing = set(schema["properties"]) - set(defaults)
    assert missing == {"global"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 3},
        {"replicaCount": 0},
        {"config": {"port": 80}},
        {"config": {"admin_key": "in a ConfigMap"}},
        {"config": {"api_key": ["in a ConfigMap"]}},
        {"config": {"forwarded_allow_ips": ""}},
        {"config": {"cors_allow_origin": []}},
        {"keys": {"clients": {"a": "two\nlines"}}},
        {"autoscaling": {"kind": "cpu"}},
        {"image": {"digest": "latest"}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_helm_lint(values: dict[str, Any]) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    report = helm.lint(str(CHART), values, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


def test_kubernetes_takes_the_manifests(manifests: Manifests) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="it is not installed")
    for kind, manifest in manifests.items():
        if kind not in CUSTOM:
            validator.validate(manifest, KUBERNETES, strict=True)


def test_the_server_takes_its_settings(
    manifests: Manifests, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = manifests["ConfigMap"]["data"]["maskdial.toml"]
    file = tmp_path / "maskdial.toml"
    file.write_text(text)
    given = read(CHART / "values.yaml")["config"] | values.get("config", {})
    written = tomllib.loads(text)
    assert {name: written[name] for name in given} == given
    config = load_config({}, file)
    assert (config.host, config.port) == ("0.0.0.0", 8000)
    assert config.threads == int(server(manifests)["resources"]["requests"]["cpu"])
    mounts = {mount["mountPath"] for mount in server(manifests)["volumeMounts"]}
    for path in (config.model_dir, *config.models.values()):
        assert path is None or any(str(path).startswith(mount) for mount in mounts)
    assert args(manifests) == "/etc/maskdial/config/maskdial.toml"
    assert all(mount["readOnly"] for mount in server(manifests)["volumeMounts"])


def args(manifests: Manifests) -> str:
    """The file of the settings, which is in the mounted ConfigMap."""
    serve, flag, file = server(manifests)["args"]
    assert (serve, flag) == ("serve", "--config")
    return str(file)


def test_the_server_takes_its_keys(tmp_path: Path) -> None:
    values = read(CHART / "ci" / "gpu.yaml")
    manifests = render(values)
    secret = manifests["Secret"]["stringData"]
    file = tmp_path / "api-keys"
    file.write_text(secret["api-keys"])
    config = load_config({"api_key_file": file})
    assert set(Keys(config).names) == {"search", "shop"}
    settings = tomllib.loads(manifests["ConfigMap"]["data"]["maskdial.toml"])
    (mount,) = [each for each in server(manifests)["volumeMounts"] if each["name"] == "keys"]
    assert settings["api_key_file"] == f"{mount['mountPath']}/api-keys"
    variables = {
        each["name"]: each["valueFrom"]["secretKeyRef"]["key"] for each in server(manifests)["env"]
    }
    assert {name: secret[key] for name, key in variables.items()} == {
        "MASKDIAL_ADMIN_KEY": "five",
        "MASKDIAL_METRICS_KEY": "six",
    }
    (endpoint,) = manifests["ServiceMonitor"]["spec"]["endpoints"]
    assert secret[endpoint["authorization"]["credentials"]["key"]] == "six"


def test_pods_drain_before_they_are_killed(manifests: Manifests) -> None:
    settings = tomllib.loads(manifests["ConfigMap"]["data"]["maskdial.toml"])
    wait = server(manifests)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait >= 5
    assert pod(manifests)["terminationGracePeriodSeconds"] > wait + settings["grace_period"]


def test_probes(manifests: Manifests) -> None:
    container = server(manifests)
    startup, ready, live = (
        container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")
    )
    assert [probe["httpGet"]["path"] for probe in (startup, ready, live)] == [
        "/health/ready",
        "/health/ready",
        "/health/live",
    ]
    assert (startup["periodSeconds"], startup["failureThreshold"]) == (10, 60)
    assert ready["periodSeconds"] == 5
    assert (live["periodSeconds"], live["failureThreshold"]) == (10, 3)
    assert {probe["httpGet"]["port"] for probe in (startup, ready, live)} == {"http"}


def test_pods_may_do_nothing_that_they_need_not(manifests: Manifests) -> None:
    spec = pod(manifests)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_everything_selects_the_pods(manifests: Manifests) -> None:
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    spread = pod(manifests)["topologySpreadConstraints"]
    selectors = [
        manifests["Deployment"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        *(each["labelSelector"]["matchLabels"] for each in spread),
    ]
    if "PodDisruptionBudget" in manifests:
        selectors.append(manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
    if "NetworkPolicy" in manifests:
        selectors.append(manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])
    assert len(spread) == 2
    assert all(selector.items() <= labels for selector in selectors)
    if "ServiceMonitor" in manifests:
        monitor = manifests["ServiceMonitor"]["spec"]
        service = manifests["Service"]["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= service.items()
        # The rules and the dashboard know the job by this name.
        assert service[monitor["jobLabel"]] == "maskdial"
        assert monitor["endpoints"][0]["port"] == manifests["Service"]["spec"]["ports"][0]["name"]


def test_keda_asks_for_waiting_and_running() -> None:
    manifests = render(read(CHART / "ci" / "keda.yaml"))
    spec = manifests["ScaledObject"]["spec"]
    assert spec["scaleTargetRef"]["name"] == manifests["Deployment"]["metadata"]["name"]
    assert "replicas" not in manifests["Deployment"]["spec"]
    read_metrics = []
    for trigger in spec["triggers"]:
        assert trigger["metricType"] == "AverageValue"
        (selector,) = queries.selectors(trigger["metadata"]["query"])
        read_metrics.append(selector.metric)
        assert dict(selector.matchers) == {
            "job": "maskdial",
            "namespace": "ml",
            "service": manifests["Service"]["metadata"]["name"],
        }
    assert read_metrics == ["maskdial_queue_size", "maskdial_requests_running"]


def test_hpa_asks_for_waiting_only_if_told_so() -> None:
    manifests = render(read(CHART / "ci" / "hpa.yaml"))
    metrics = manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert [metric["pods"]["metric"]["name"] for metric in metrics] == ["maskdial_queue_size"]


def test_a_gpu() -> None:
    manifests = render({"gpu": {"enabled": True}})
    assert server(manifests)["resources"]["limits"] == {"memory": "2Gi", "nvidia.com/gpu": 1}
    assert tomllib.loads(manifests["ConfigMap"]["data"]["maskdial.toml"])["provider"] == "cuda"
    assert server(manifests)["image"].endswith("-cuda")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bundles": {"volume": {"emptyDir": {}}, "init": {"image": "a"}}}, "set one of them"),
        ({"keys": {"existingSecret": "a", "admin": "b"}}, "either existingSecret or"),
    ],
)
def test_what_contradicts_itself_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        render(values)


def test_examples_for_kserve_and_the_inference_gateway() -> None:
    pool, route, picker = yaml.safe_load_all(
        (DEPLOY / "kubernetes" / "inferencepool.yaml").read_text()
    )
    assert pool["spec"]["endpointPickerRef"]["name"] == picker["metadata"]["name"]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    config = yaml.safe_load(picker["data"]["config.yaml"])
    parameters = {each["type"]: each.get("parameters", {}) for each in config["plugins"]}
    (engine,) = parameters["core-metrics-extractor"]["engineConfigs"]
    specs = [engine[name] for name in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")]
    # The picker's own notation: no quotes.
    assert specs == [
        "maskdial_queue_size{model=mine}",
        "maskdial_requests_running{model=mine}",
        "maskdial_kv_cache_usage_ratio{model=mine}",
    ]
    names = {each.get("name", each["type"]) for each in config["plugins"]}
    assert {each["pluginRef"] for each in config["schedulingProfiles"][0]["plugins"]} <= names


def test_a_serving_runtime_for_kserve() -> None:
    """Its container is one of Kubernetes, its command ours, and a model can use it."""
    runtime, service = yaml.safe_load_all(
        (DEPLOY / "kubernetes" / "inferenceservice.yaml").read_text()
    )
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    (container,) = runtime["spec"]["containers"]
    name = service["metadata"]["name"]
    command, flag, value = (each.replace("{{.Name}}", name) for each in container["args"])
    assert (command, flag) == ("serve", "--model")
    assert load_config({"model": [value]}).models == {name: Path("/mnt/models")}
    for probe in ("startup", "readiness", "liveness"):
        path = container[f"{probe}Probe"]["httpGet"]["path"]
        assert path in {route.path for route in kserve.ROUTES}
    validator = pytest.importorskip("kubernetes_validate", reason="it is not installed")
    container["env"] = model["env"]
    template = {key: predictor[key] for key in predictor if not key.endswith("Replicas")}
    template.pop("model")
    template["containers"] = [container]
    metadata = {"name": "predictor"}
    validator.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template},
        KUBERNETES,
        strict=True,
    )
