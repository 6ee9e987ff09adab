"""The chart: rendered by Helm, held against the schemas of Kubernetes, hardened, complete."""

import copy
from functools import cache
from typing import Any

import pytest
from tests.deploy.charts import (
    CHART,
    CUSTOM_KINDS,
    KEYS,
    NEWEST,
    OLDEST,
    SECRETS,
    Object,
    Refused,
    check,
    containers,
    helm,
    of,
    pods,
    refusal,
    render,
)
from tests.deploy.tree import COMMAND_TIMEOUT_S, VARIABLES, VERSION, load, misunderstood

EXISTING: Object = {"secret": {"existing": "mine"}}
POOLED = SECRETS | {
    "runtimeDatabase": "postgresql://run@pooler/tenuto",
    "directDatabase": "postgresql://app@db/tenuto",
}
RESOURCES = {
    "requests": {"cpu": "1", "memory": "1Gi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
REMOTE = {
    "name": "remote",
    "agent": "claude",
    "url": "https://tenuto.example",
    "tokenSecret": "claude-token",
    "image": "agents:1.2.3",
    "args": ["--task-tag", "python", "--no-accept-commands"],
    "resources": RESOURCES,
}
SETS: dict[str, Object] = {
    "plain": {"secret": SECRETS},
    "existing": EXISTING,
    "ingress": EXISTING
    | {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "tenuto.example",
            "tlsSecret": "tls",
            "annotations": {"a": "b"},
        },
        "service": {"type": "NodePort", "port": 8080},
    },
    "autoscaling": EXISTING | {"api": {"autoscaling": {"enabled": True, "min": 3, "max": 9}}},
    "workers": EXISTING
    | {
        "drainSeconds": 600,
        "workers": [{"name": "one", "agent": "one", "resources": RESOURCES}, REMOTE],
    },
    "pooler": EXISTING | {"pooler": "transaction"},
    "pooler with secrets": {"secret": POOLED, "pooler": "transaction"},
    "no workers": EXISTING | {"workers": [], "migrate": {"enabled": False}},
    "everything": {
        "secret": SECRETS,
        "settings": {"TENUTO_LEASE_S": 60, "TENUTO_LEADER": True},
        "image": {"tag": "1.0.0", "pullSecrets": [{"name": "registry"}]},
        "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "serviceAccount": {"annotations": {"a": "b"}},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
    },
}


@cache
def rendered(name: str) -> list[Object]:
    return render(SETS[name])


@pytest.fixture(params=SETS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """Returns the rendered objects for each set of values in turn."""
    return rendered(request.param)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_for_kubernetes(objects: list[Object], version: str) -> None:
    for item in objects:
        if item["kind"] not in CUSTOM_KINDS:
            check(item, version)


def test_invalid_object_is_detected() -> None:
    right = of(render(EXISTING), "Deployment", "tenuto-api")
    check(right, OLDEST)
    misspelled, mistyped = copy.deepcopy(right), copy.deepcopy(right)
    misspelled["spec"]["template"]["spec"]["enableServiceLink"] = False
    mistyped["spec"]["replicas"] = "two"
    for wrong in (misspelled, mistyped):
        with pytest.raises(Refused):
            check(wrong, OLDEST)


def test_helm_lint_passes() -> None:
    done = helm("lint", str(CHART), "--strict", values=SETS["everything"])
    assert done.returncode == 0, done.stdout


def test_chart_and_project_versions_agree() -> None:
    chart = load("helm/tenuto/Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_every_container_is_hardened(objects: list[Object]) -> None:
    for _, template in pods(objects):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        # A Service named tenuto would otherwise set TENUTO_PORT, which is a setting.
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(objects):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_every_image_has_a_fixed_tag(objects: list[Object]) -> None:
    for container in containers(objects):
        name, _, tag = container["image"].rpartition(":")
        assert name
        assert tag not in {"", "latest"}


def test_long_running_container_has_probes(objects: list[Object]) -> None:
    for owner, template in pods(objects):
        if owner["kind"] == "Job":
            continue
        for container in template["spec"]["containers"]:
            assert "readinessProbe" in container
            # A worker that is restarted because the database is away loses its tasks for nothing.
            assert ("livenessProbe" in container) == (container["name"] == "api")


def test_api_probes_use_its_health_routes() -> None:
    [container] = [c for c in containers(render(EXISTING)) if c["name"] == "api"]
    paths = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness")}
    live = {"path": "/health/live", "port": "http"}
    assert paths == {"startup": live, "liveness": live}
    assert container["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": "http"}
    assert [port["name"] for port in container["ports"]] == ["http"]


def test_chart_commands_are_valid(objects: list[Object]) -> None:
    for container in containers(objects):
        assert misunderstood(container["command"]) is None
        probe = container.get("readinessProbe", {}).get("exec")
        assert probe is None or misunderstood(probe["command"]) is None


def test_chart_variables_are_settings_of_the_program(objects: list[Object]) -> None:
    named = {item["name"] for container in containers(objects) for item in container["env"]}
    assert named | set(of(objects, "ConfigMap")["data"]) <= VARIABLES


def test_selectors_match_their_pods(objects: list[Object]) -> None:
    labels = [template["metadata"]["labels"] for _, template in pods(objects)]
    chosen = []
    for item in objects:
        spec = item.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if selector is None or item["kind"] in CUSTOM_KINDS:
            continue
        expected = selector.get("matchLabels", selector)
        matches = [label for label in labels if expected.items() <= label.items()]
        assert matches, item["metadata"]["name"]
        if item["kind"] in {"Deployment", "Service"}:
            assert len(matches) == 1
        chosen.append(item["kind"])
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= set(chosen)


def names(items: list[Object], kind: str) -> set[str]:
    return {item["metadata"]["name"] for item in items if item["kind"] == kind}


def secrets_of(template: Object) -> set[str]:
    variables = [item for c in template["spec"]["containers"] for item in c["env"]]
    return {v["valueFrom"]["secretKeyRef"]["name"] for v in variables if "valueFrom" in v}


def hooked(item: Object) -> bool:
    return "helm.sh/hook" in item["metadata"].get("annotations", {})


def test_objects_named_by_a_pod_exist(objects: list[Object]) -> None:
    """And for a hook, which runs before the rest is made, among the hooks."""
    for owner, template in pods(objects):
        there = [item for item in objects if hooked(item)] if hooked(owner) else objects
        assert secrets_of(template) <= names(there, "Secret") | {"mine", "claude-token"}
        account = template["spec"].get("serviceAccountName")
        assert account is None or account in names(there, "ServiceAccount")
        for container in template["spec"]["containers"]:
            maps = {item["configMapRef"]["name"] for item in container.get("envFrom", [])}
            assert maps <= names(there, "ConfigMap")


def test_only_the_migration_sees_the_owner() -> None:
    for values in (SETS["plain"], EXISTING):
        items = render(values)
        assert hooked(of(items, "Job"))
        for container in containers(items):
            keys = {v["valueFrom"]["secretKeyRef"]["key"] for v in container["env"]}
            migrates = container["name"] == "migrate"
            assert keys == ({"owner-database"} if migrates else {"database", "keys"})
    owner = [t for t in render(SETS["plain"]) if SECRETS["ownerDatabase"] in str(t)]
    assert [(t["kind"], hooked(t)) for t in owner] == [("Secret", True)]


@pytest.mark.parametrize("name", ["pooler", "pooler with secrets"])
def test_pooler_has_a_login_per_role_except_for_the_migration(name: str) -> None:
    for container in containers(rendered(name)):
        keys = {v["valueFrom"]["secretKeyRef"]["key"] for v in container["env"] if "valueFrom" in v}
        plain = {v["name"]: v["value"] for v in container["env"] if "value" in v}
        if container["name"] == "migrate":
            assert (keys, plain) == ({"owner-database"}, {})
        else:
            assert keys == {"database", "runtime-database", "direct-database", "keys"}
            assert plain == {"TENUTO_POOLER": "transaction"}


def test_remote_worker_gets_neither_database_nor_keys() -> None:
    worker = of(render(SETS["workers"]), "Deployment", "tenuto-worker-remote")
    [container] = worker["spec"]["template"]["spec"]["containers"]
    assert [item["name"] for item in container["env"]] == ["TENUTO_URL", "TENUTO_TOKEN"]
    assert container["image"] == "agents:1.2.3"
    assert container["command"][-3:] == ["--task-tag", "python", "--no-accept-commands"]


def test_chart_worker_has_time_to_drain(objects: list[Object]) -> None:
    data = of(objects, "ConfigMap")["data"]
    needed = int(data["TENUTO_DRAIN_S"]) + int(data["TENUTO_GRACE_S"]) + COMMAND_TIMEOUT_S
    for owner, template in pods(objects):
        if "worker" in owner["metadata"]["name"]:
            assert template["spec"]["terminationGracePeriodSeconds"] > needed


def test_autoscaler_owns_the_number_of_replicas() -> None:
    assert of(render(EXISTING), "Deployment", "tenuto-api")["spec"]["replicas"] == 2
    items = render(SETS["autoscaling"])
    assert "replicas" not in of(items, "Deployment", "tenuto-api")["spec"]
    scaler = of(items, "HorizontalPodAutoscaler")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 9)
    assert scaler["scaleTargetRef"]["name"] == "tenuto-api"


def test_two_coordinators_run() -> None:
    deployment = of(render(EXISTING), "Deployment", "tenuto-coordinator")
    assert deployment["spec"]["replicas"] == 2


def test_only_the_api_is_reachable() -> None:
    items = render(EXISTING)
    assert "ingress" not in of(items, "NetworkPolicy", "tenuto")["spec"]
    opened = of(items, "NetworkPolicy", "tenuto-api")["spec"]
    assert opened["ingress"] == [{"ports": [{"port": "http"}]}]
    assert opened["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "api"


def test_monitor_scrapes_the_service() -> None:
    items = render(SETS["everything"])
    monitor, service = of(items, "ServiceMonitor"), of(items, "Service")
    expected = monitor["spec"]["selector"]["matchLabels"]
    assert expected.items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [endpoint] = monitor["spec"]["endpoints"]
    assert (endpoint["path"], endpoint["port"]) == ("/metrics", service["spec"]["ports"][0]["name"])


def test_new_settings_and_secrets_replace_the_pods() -> None:
    def sums(values: Object) -> set[str]:
        pod = of(render(values), "Deployment", "tenuto-api")["spec"]["template"]
        return {value for name, value in pod["metadata"]["annotations"].items() if "sum/" in name}

    before = sums({"secret": SECRETS})
    assert len(before) == 2
    assert len(sums({"secret": SECRETS, "drainSeconds": 61}) & before) == 1
    assert len(sums({"secret": SECRETS | {"keys": KEYS.replace("k1", "k2")}}) & before) == 1


def test_object_names_are_short_enough() -> None:
    items = render(EXISTING | {"workers": [REMOTE | {"name": "w" * 12}]}, "r" * 53)
    assert {n for t in items if len(n := t["metadata"]["name"]) > 63} == set()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "secret.database or secret.existing must be set"),
        ({"secret": {**SECRETS, "ownerDatabase": ""}}, "secret.ownerDatabase"),
        ({"secret": {**SECRETS, "keys": "k1:short"}}, "secret.keys"),
        ({"secret": SECRETS, "pooler": "transaction"}, "secret.runtimeDatabase"),
        ({"secret": SECRETS, "pooler": "session"}, "pooler"),
        ({"secret": {**SECRETS, "database": "sqlite:///t.db"}}, "secret.database"),
        (EXISTING | {"image": {"tag": "latest"}}, "image.tag"),
        (EXISTING | {"workers": [{**REMOTE, "image": "agents:latest"}]}, "workers.0.image"),
        (EXISTING | {"workers": [{**REMOTE, "image": "agents"}]}, "workers.0.image"),
        (EXISTING | {"workers": [{**REMOTE, "tokenSecret": ""}]}, "needs a tokenSecret"),
        (EXISTING | {"workers": [{"name": "a", "agent": "a"}]}, "resources is required"),
        (EXISTING | {"settings": {"TENUTO_KEYS": "k1:x"}}, "TENUTO_KEYS"),
        (EXISTING | {"settings": {"PATH": "/x"}}, "PATH"),
        (EXISTING | {"ingress": {"enabled": True}}, "ingress.host must be set"),
        (EXISTING | {"replicas": 3}, "replicas is not allowed"),
    ],
)
def test_invalid_values_are_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(values)
