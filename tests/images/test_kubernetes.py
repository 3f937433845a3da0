"""The manifests of examples/kubernetes by the rules of Pod Security's `restricted`, and stricter ones."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.command import ROOT

HEALTH = ["python", "/opt/extremis/health.py"]
FLINK = "flink-main-container"  # its operator gives it memory, probes and a configuration that is written at its start


def pods() -> Iterator[Any]:
    """Yield each pod's spec: a FlinkDeployment's is its own with the TaskManagers' containers beside."""
    for manifest in sorted((ROOT / "examples" / "kubernetes").glob("*.yaml")):
        for each in yaml.safe_load_all(manifest.read_text()):
            spec = each["spec"]
            if each["kind"] == "FlinkDeployment":
                pod, beside = spec["podTemplate"]["spec"], spec["taskManager"]["podTemplate"]["spec"]
                assert [each for each in beside["containers"] if each["name"] == FLINK] == [{"name": FLINK}]
                pod = {**beside, **pod, "containers": [*pod["containers"], *beside["containers"][1:]]}
            elif each["kind"] == "Service":
                continue
            else:
                pod = spec["template"]["spec"]
                assert pod["automountServiceAccountToken"] is False
            yield pytest.param(pod, id=each["metadata"]["name"])


PODS = list(pods())


def containers() -> Iterator[Any]:
    for pod in PODS:
        for container in pod.values[0]["containers"]:
            yield pytest.param(pod.values[0], container, id=f"{pod.id}-{container['name']}")


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_asks_for_nothing_of_its_node(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all(set(volume) == {"name", "emptyDir"} for volume in pod["volumes"])


@pytest.mark.parametrize(("pod", "container"), containers())
def test_a_container_has_no_privileges_and_bounds(pod: dict[str, Any], container: dict[str, Any]) -> None:
    rights, resources = container["securityContext"], container["resources"]
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert {**pod["securityContext"], **rights}["runAsUser"] >= 1000
    assert resources["limits"].items() <= resources["requests"].items()  # who uses more than it asked for goes first
    if container["name"] == FLINK:
        assert set(resources["limits"]) == {"ephemeral-storage"}
        return
    assert {"cpu", "memory", "ephemeral-storage"} == set(resources["requests"])
    assert {"memory", "ephemeral-storage"} == set(resources["limits"])
    assert rights["readOnlyRootFilesystem"]
    (scratch,) = pod["volumes"]
    assert container["volumeMounts"] == [{"name": scratch["name"], "mountPath": "/tmp"}]
    assert scratch["emptyDir"]["sizeLimit"] == resources["limits"]["ephemeral-storage"]


@pytest.mark.parametrize(("pod", "container"), containers())
def test_a_container_tells_whether_it_is_well(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """By the health check of the image, with time for Python to start, or by the port that it answers at."""
    if container["name"] == FLINK:
        return
    probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}
    assert "livenessProbe" in probes
    for probe in probes.values():
        if "exec" in probe:
            assert probe["exec"]["command"] == HEALTH
            assert probe["timeoutSeconds"] > 10  # seconds that the check itself waits for an answer
        else:
            (where,) = {"httpGet", "tcpSocket"} & set(probe)
            ports = {port.get("name", port["containerPort"]) for port in container["ports"]}
            assert probe[where]["port"] in ports
    (line,) = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("HEALTHCHECK"))
    assert all(f'"{word}"' in line for word in HEALTH)
