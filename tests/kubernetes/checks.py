"""What must be true of any set of our objects, whoever made them: the chart or Kustomize."""

from __future__ import annotations

from typing import Any, Final

import jsonschema_rs
from kubernetes.rendering import Object, containers, of_kind, pod_templates
from kubernetes.schemas import CUSTOM, VERSIONS, problems

WRITABLE: Final = (
    "/tmp",
    "/var/lib/trunkline",
    "/run/trunkline/wire",
    "/model",
    "/kv",
    "/data",
    "/records",
    "/dev/shm",
)
"""Where pods may write, or what they only read."""


def check_schemas(objects: list[Object]) -> None:
    """Every object is what its API says it is, without fields that nobody knows."""
    for found in objects:
        where = f"{found['kind']} {found['metadata']['name']}"
        if found["apiVersion"] not in CUSTOM:
            _check_native(found, where)
            continue
        shape = CUSTOM[found["apiVersion"]][found["kind"]]
        wrong = [error.message[:300] for error in jsonschema_rs.Draft202012Validator(shape).iter_errors(found)]
        assert wrong == [], where
        for _, template in pod_templates([found]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}}
            _check_native({**pod, "spec": template["spec"]}, where)


def _check_native(found: Object, where: str) -> None:
    for version in VERSIONS:
        assert problems(found, version) == [], f"{where} (Kubernetes {version})"


def check_pods_are_restricted(objects: list[Object]) -> None:
    """Pod security standard `restricted`, a read-only root, and a token of Kubernetes for routers only."""
    for owner, template in pod_templates(objects):
        pod, where = template["spec"], owner["metadata"]["name"]
        security = pod["securityContext"]
        is_router = template["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
        assert pod["automountServiceAccountToken"] is is_router, where
        assert ("serviceAccountName" in pod) is is_router, where
        assert security["runAsNonRoot"] is True, where
        assert security["runAsUser"] > 0, where
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), where
        for container in containers(template):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, where
            assert own["readOnlyRootFilesystem"] is True, where
            assert own["capabilities"] == {"drop": ["ALL"]}, where
            assert "memory" in container["resources"]["limits"], f"{where}: {container['name']}"


def check_volumes(objects: list[Object]) -> None:
    """What is mounted exists, what exists is mounted, and no two things are mounted at one place."""
    for owner, template in pod_templates(objects):
        where = owner["metadata"]["name"]
        spec = owner["spec"].get("leaderWorkerTemplate", owner["spec"])
        known = [volume["name"] for volume in template["spec"].get("volumes", [])]
        known += [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
        assert len(known) == len(set(known)), where
        used = {mount["name"] for container in containers(template) for mount in container.get("volumeMounts", [])}
        assert used == set(known), where
        for container in containers(template):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths)), where
            for mount in container.get("volumeMounts", []):
                assert mount.get("readOnly") or mount["mountPath"] in WRITABLE, f"{where}: {mount}"


def check_ports_and_probes(objects: list[Object]) -> None:
    """Names are unique and short enough, and probes ask at ports that are open."""
    for owner, template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            where = f"{owner['metadata']['name']}: {container['name']}"
            ports = container["ports"]
            names = [port["name"] for port in ports]
            assert len(names) == len(set(names)), where
            assert len({port["containerPort"] for port in ports}) == len(ports), where
            assert all(len(name) <= 15 for name in names), where
            assert "livenessProbe" in container, where
            assert "readinessProbe" in container, where
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container.get(kind, {})
                action = probe.get("httpGet") or probe.get("tcpSocket") or {}
                assert not action or action["port"] in names, f"{where}: {kind}"
            if "startupProbe" in container:
                assert container["livenessProbe"]["httpGet"]["path"] == "/livez", where


def check_selectors(objects: list[Object]) -> None:
    """Whoever selects pods selects some of ours, and owners select exactly their own."""
    pods = [(owner, template) for owner, template in pod_templates(objects)]
    for owner, template in pods:
        if owner["kind"] != "LeaderWorkerSet":
            selector = owner["spec"]["selector"]["matchLabels"]
            chosen = [other for other, pod in pods if matches(selector, pod)]
            assert [other["metadata"]["name"] for other in chosen] == [owner["metadata"]["name"]]
        for spread in template["spec"].get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"]["matchLabels"], template), owner["metadata"]["name"]
    for found in of_kind(objects, "Service"):
        chosen = [template for _, template in pods if matches(found["spec"]["selector"], template)]
        assert chosen, found["metadata"]["name"]
        for port in found["spec"]["ports"]:
            names = [
                each["name"]
                for pod in chosen
                for container in pod["spec"]["containers"]
                for each in container["ports"]
            ]
            assert port["targetPort"] in names, f"{found['metadata']['name']}: {port}"
    for found in of_kind(objects, "PodDisruptionBudget"):
        assert any(matches(found["spec"]["selector"]["matchLabels"], pod) for _, pod in pods), found["metadata"][
            "name"
        ]
    services = of_kind(objects, "Service")
    for found in of_kind(objects, "ServiceMonitor"):
        wanted = found["spec"]["selector"]["matchLabels"]
        chosen = [service for service in services if wanted.items() <= service["metadata"]["labels"].items()]
        assert chosen, "the ServiceMonitor finds no service"
        for endpoint in found["spec"]["endpoints"]:
            for service in chosen:
                assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    for found in of_kind(objects, "HorizontalPodAutoscaler"):
        target = found["spec"]["scaleTargetRef"]
        assert any(
            (other["kind"], other["metadata"]["name"]) == (target["kind"], target["name"]) for other in objects
        ), target


def check_references(objects: list[Object], outside: frozenset[str] = frozenset()) -> None:
    """Secrets, ConfigMaps and claims that pods name are made here, or known to be somebody else's (`outside`)."""
    made = {(found["kind"], found["metadata"]["name"]): found for found in objects}
    for _, template in pod_templates(objects):
        for kind, name, keys in _references(template):
            if name in outside:
                continue
            assert (kind, name) in made, f"{kind} {name} is nowhere"
            data = made[kind, name].get("data", {}) | made[kind, name].get("stringData", {})
            assert keys <= data.keys(), f"{kind} {name} has no {keys - data.keys()}"


def _references(template: Object) -> list[tuple[str, str, set[str]]]:
    found: list[tuple[str, str, set[str]]] = []
    for volume in template["spec"].get("volumes", []):
        if "secret" in volume:
            found.append(
                ("Secret", volume["secret"]["secretName"], {item["key"] for item in volume["secret"]["items"]})
            )
        if "persistentVolumeClaim" in volume:
            found.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], set()))
    for container in containers(template):
        for variable in container.get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                found.append(("Secret", reference["name"], {reference["key"]}))
    return found


def check_time_to_stop(objects: list[Object]) -> None:
    """Kubernetes kills later than a pod is done: after its preStop and its drain."""
    for owner, template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            if "--drain-seconds" not in container.get("args", []):
                continue
            arguments = container["args"]
            drain = int(arguments[arguments.index("--drain-seconds") + 1])
            sleep = (
                container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            )
            grace = template["spec"]["terminationGracePeriodSeconds"]
            assert grace >= drain + int(sleep[1]) + 15, f"{owner['metadata']['name']}: {grace} s"


def matches(selector: dict[str, str], template: Object) -> bool:
    """Whether a pod has these labels."""
    labels: dict[str, str] = template["metadata"]["labels"]
    return selector.items() <= labels.items()


def check_all(objects: list[Object], outside: frozenset[str] = frozenset()) -> None:
    """All of the above."""
    identities = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(identities) == len(set(identities))
    assert all(len(name) <= 52 for _, name in identities), "pods and their labels would get too long names"
    check_schemas(objects)
    check_pods_are_restricted(objects)
    check_volumes(objects)
    check_ports_and_probes(objects)
    check_selectors(objects)
    check_references(objects, outside)
    check_time_to_stop(objects)


def admits(objects: list[Object], sender: Any, receiver: Any, port: int, protocol: str = "TCP") -> bool:
    """Whether the network policies let one pod talk to another, by their labels; both are in our namespace."""
    policies = of_kind(objects, "NetworkPolicy")
    return _allowed(policies, sender, receiver, port, protocol, "Egress") and _allowed(
        policies, receiver, sender, port, protocol, "Ingress"
    )


def sends(objects: list[Object], sender: Any, receiver: Any, port: int) -> bool:
    """Whether the policies of the sender alone would let it."""
    return _allowed(of_kind(objects, "NetworkPolicy"), sender, receiver, port, "TCP", "Egress")


def _allowed(policies: list[Object], subject: Any, other: Any, port: int, protocol: str, way: str) -> bool:
    ours = [
        policy["spec"]
        for policy in policies
        if subject is not None
        and way in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], subject)
    ]
    if not ours:
        return True  # no policy: nothing is held back
    rules = [rule for spec in ours for rule in spec.get(way.lower(), [])]
    peers = "to" if way == "Egress" else "from"
    return any(_port_fits(rule, port, protocol) and _peer_fits(rule.get(peers), other) for rule in rules)


def _selects(selector: Object, labels: Any) -> bool:
    wanted = selector.get("matchExpressions", [])
    assert all(each["operator"] == "Exists" for each in wanted)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        each["key"] in labels for each in wanted
    )


def _port_fits(rule: Object, port: int, protocol: str) -> bool:
    if "ports" not in rule:
        return True
    return any(
        each.get("protocol", "TCP") == protocol and each["port"] <= port <= each.get("endPort", each["port"])
        for each in rule["ports"]
    )


def _peer_fits(peers: list[Object] | None, other: Any) -> bool:
    if not peers:
        return True
    return other is not None and any(
        "podSelector" in peer and "namespaceSelector" not in peer and _selects(peer["podSelector"], other)
        for peer in peers
    )
