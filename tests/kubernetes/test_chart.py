"""The chart: what it makes of its own values, which values it refuses, and with what words."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.checks import check_all
from kubernetes.rendering import (
    CHART,
    Object,
    containers,
    helm_python,
    notes,
    of_kind,
    only,
    option,
    pod_templates,
    render,
)

from trunkline.deploy.config.options import SERVE_OPTIONS

DEFAULTS: Object = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())


def test_the_defaults_make_a_sound_installation() -> None:
    objects = render()
    check_all(objects)
    assert {found["kind"] for found in objects} == {
        *("Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "Secret"),
        *("ServiceAccount", "Role", "RoleBinding"),
    }


def test_helm_finds_nothing_to_complain_of() -> None:
    report = helm_python.lint(CHART, strict=True)
    assert [found for found in report["messages"] if found["severity"] > 1] == []
    assert report["errors"] == []


def _paths(values: Any, before: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(values, dict) or not values:
        return {before: values}
    return {path: value for key, inner in values.items() for path, value in _paths(inner, (*before, key)).items()}


def _open_objects(schema: Object, path: str = "") -> list[str]:
    found = []
    for key, inner in schema.get("properties", {}).items():
        if "properties" in inner and inner.get("additionalProperties") is not False:
            found.append(f"{path}{key}")
        found += _open_objects(inner, f"{path}{key}.")
    return found


def test_every_value_is_in_the_schema_which_knows_no_others() -> None:
    for path in _paths(DEFAULTS):
        schema = SCHEMA
        for key in path:
            inner = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            assert inner, f"{'.'.join(path)} is not in the schema"
            schema = inner
    assert SCHEMA["additionalProperties"] is False
    assert _open_objects(SCHEMA) == []


def test_every_value_changes_something_or_is_used_by_a_template() -> None:
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    for path in _paths(DEFAULTS):
        used = re.search(rf"\.{path[-1]}\b", templates) or re.search(rf'"{path[-1]}"', templates)
        part = re.search(rf"toYaml \.Values\.{'.'.join(path[:-1])}", templates)
        assert used or part or path[-1] in ("cpu", "memory"), f"{'.'.join(path)} is used nowhere"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        # by the schema, which names the value
        ({"groups": {"replica": 3}}, "replica"),
        ({"groups": {"tp": 0}}, "tp"),
        ({"groups": {"replicas": "two"}}, "replicas"),
        ({"groups": {"kvMemory": "20 gigs"}}, "kvMemory"),
        ({"groups": {"diskTier": {"whenScaled": "Forget"}}}, "whenScaled"),
        ({"groups": {"podLabels": {"app.kubernetes.io/name": "mine"}}}, "app.kubernetes.io/name"),
        ({"groups": {"pdb": {"maxUnavailable": 0}}}, "maxUnavailable"),
        ({"routers": {"policy": "best"}}, "policy"),
        ({"routers": {"autoscaling": {"cpuPercent": -1}}}, "cpuPercent"),
        ({"model": {"source": "magic"}}, "source"),
        ({"model": {"hub": {"repository": "just-a-name"}}}, "repository"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"fullnameOverride": "Capital"}, "fullnameOverride"),
        ({"fullnameOverride": "a" * 41}, "fullnameOverride"),
        ({"auth": {"tenants": {}}}, "tenants"),
        ({"networkPolicy": "off"}, "networkPolicy"),
        ({"network": {"httpPort": 80}}, "httpPort"),
        ({"logLevel": "loud"}, "logLevel"),
        ({"surprise": 1}, "surprise"),
        # by a template, with a remedy
        ({"groups": {"tp": 3, "podsPerGroup": 2}}, "groups.tp is 3 and groups.podsPerGroup 2"),
        ({"groups": {"tp": 4, "podsPerGroup": 2, "gpus": 4}}, "set groups.gpus to 2"),
        ({"groups": {"maxBatch": 64, "tokenBudget": 64}}, "groups.tokenBudget is 64; it must exceed"),
        ({"groups": {"hostTier": "0"}}, "groups.hostTier is 0"),
        (
            {"groups": {"hostTier": "0", "diskTier": {"enabled": False}}, "remoteTier": {"mode": "valkey"}},
            "hostTier is 0",
        ),
        ({"model": {"source": "claim"}}, "model.claim.name is empty"),
        ({"model": {"source": "hostPath"}}, "model.hostPath is empty"),
        ({"model": {"source": "hub"}}, "model.hub.repository is empty"),
        ({"remoteTier": {"mode": "external"}}, "remoteTier.external.secret is empty"),
        ({"records": {"mode": "memory"}}, "mode"),
        ({"records": {"mode": "external"}}, "records.external.secret is empty"),
        (
            {"records": {"mode": "sqlite"}},
            "set routers.replicas to 1 without routers.autoscaling",
        ),
        (
            {"records": {"mode": "sqlite"}, "routers": {"replicas": 1, "autoscaling": {"enabled": True}}},
            "a file that only one router can use",
        ),
        (
            {"auth": {"existingSecret": "mine"}, "monitoring": {"serviceMonitor": {"enabled": True}}},
            "monitoring.serviceMonitor.keySecret.name",
        ),
        ({"routers": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "minReplicas is 9"),
        ({"routers": {"autoscaling": {"enabled": True, "cpuPercent": 0}}}, "looks at nothing"),
        (
            {"routers": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}},
            "routers.resources.requests.cpu is not set",
        ),
        ({"routers": {"ingress": {"enabled": True}}}, "routers.ingress.host is empty"),
        ({"routers": {"httpRoute": {"enabled": True}}}, "routers.httpRoute.parentRefs is empty"),
        (
            {"network": {"groupPort": 7478}},
            "healthPort (7480), the five ports from groupPort on (7478 to 7482) and the 64 for KV (8478 to 8541)",
        ),
        ({"network": {"httpPort": 8463}}, "must differ"),
        ({"network": {"httpPort": 7404}}, "must differ"),
        (
            {"groups": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
            "groups.autoscaling.minReplicas is 9, which is more than maxReplicas (8)",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_and_named(values: Object, says: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert says in str(refused.value)


def test_routers_are_the_same_for_any_number_of_groups() -> None:
    values: Object = {"auth": {"existingSecret": "k"}, "wire": {"existingSecret": "w"}}
    values["records"] = {"valkey": {"existingSecret": "r"}}
    for pods in (1, 2):
        few, more = (render({**values, "groups": {"replicas": count, "podsPerGroup": pods}}) for count in (1, 5))
        assert only(few, "Deployment") == only(more, "Deployment")
    groups = only(render(), "StatefulSet", "-group")
    assert groups["spec"]["serviceName"] == "tl-trunkline-group"
    assert only(render(), "Service", "-group")["spec"]["publishNotReadyAddresses"] is True


def test_routers_may_see_which_groups_there_are_and_nothing_else() -> None:
    objects = render()
    account = only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    assert only(objects, "ServiceAccount")["metadata"]["name"] == account
    (rule,) = only(objects, "Role")["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }
    binding = only(objects, "RoleBinding")
    assert binding["roleRef"]["name"] == only(objects, "Role")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "llm"}]


def test_groups_can_be_scaled_by_what_waits() -> None:
    for pods, kind in ((1, "StatefulSet"), (2, "LeaderWorkerSet")):
        scaling = {"enabled": True, "minReplicas": 1, "maxReplicas": 4}
        objects = render({"groups": {"podsPerGroup": pods, "autoscaling": scaling}})
        check_all(objects)
        scaler = only(objects, "HorizontalPodAutoscaler")["spec"]
        assert scaler["scaleTargetRef"]["kind"] == kind
        assert "replicas" not in only(objects, kind, "-group")["spec"]
        policies = [found["metadata"]["name"] for found in of_kind(objects, "NetworkPolicy")]
        assert sum(name.startswith("tl-trunkline-group-") for name in policies) == (4 if pods > 1 else 0)


@pytest.mark.processes
@pytest.mark.area("kubernetes")
@pytest.mark.parametrize("pods", [1, 2])
def test_the_first_groups_compute_prompts_for_the_others(tmp_path: Path, pods: int) -> None:
    objects = render({"groups": {"replicas": 4, "prefill": 2, "podsPerGroup": pods}})
    check_all(objects)
    owner = only(objects, "StatefulSet", "-group") if pods == 1 else only(objects, "LeaderWorkerSet")
    _, template = next(pod_templates([owner]))
    container = template["spec"]["containers"][0]
    (tmp_path / "trunkline").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "trunkline").chmod(0o755)
    for number in range(12):
        said = subprocess.run(
            [*container["command"], *container["args"]],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": f"tl-trunkline-group-{number}"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        role = "prefill" if number < 2 else "decode"
        assert said == ["group", *container["args"], "--role", role]


def test_a_group_of_several_pods_shares_its_ranks_out() -> None:
    objects = render({"groups": {"tp": 8, "podsPerGroup": 2, "gpus": 4, "replicas": 2}})
    check_all(objects)
    group = only(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[role]["spec"]["containers"][0] for role in ("leaderTemplate", "workerTemplate"))
    assert group["size"] == 2
    assert option(leader, "ranks") == "0-3"
    assert option(worker, "leader") == "$(LWS_LEADER_ADDRESS):7400"
    assert option(leader, "tp") == option(worker, "tp") == "8"
    assert "first=$((LWS_WORKER_INDEX * 4))" in worker["command"][2]
    assert "$((first + 3))" in worker["command"][2], "its last rank"
    for container in (leader, worker):
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4


@pytest.mark.parametrize(
    ("values", "tp"),
    [
        ({}, "1"),
        ({"podsPerGroup": 2}, "2"),
        ({"gpus": 1}, "1"),
        ({"gpus": 2}, "2"),
        ({"gpus": 8, "podsPerGroup": 2}, "16"),
        ({"gpus": 2, "tp": 2}, "2"),
        ({"tp": 4}, "4"),
    ],
)
def test_a_group_has_a_rank_for_each_gpu_unless_it_is_told_otherwise(values: Object, tp: str) -> None:
    templates = [template for _, template in pod_templates(render({"groups": values}))]
    groups = [c for template in templates for c in containers(template) if c["name"] in ("group", "workers")]
    assert {option(container, "tp") for container in groups} == {tp}
    if gpus := values.get("gpus"):
        assert {c["resources"]["limits"]["nvidia.com/gpu"] for c in groups} == {gpus}
    assert f"of {tp} rank(s)" in notes({"groups": values})


def _group(values: Object) -> Object:
    """The container of a group's pods."""
    (container,) = only(render({"groups": values}), "StatefulSet", "-group")["spec"]["template"]["spec"][
        "containers"
    ]
    return dict(container)


def _router(values: Object | None = None) -> Object:
    """The container of a router's pods."""
    (container,) = only(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_gpus_are_asked_for_and_otherwise_cpus_are_used() -> None:
    group = _group({"tp": 2, "gpus": 2})
    assert group["resources"] == {
        "requests": {"cpu": "500m", "memory": "2Gi", "nvidia.com/gpu": 2},
        "limits": {"memory": "6Gi", "nvidia.com/gpu": 2},
    }
    assert (option(group, "device"), option(_group({}), "device")) == ("cuda", "cpu")
    assert option(_group({"maxContext": 1048576}), "max-context") == "1048576", "large numbers stay whole"


def test_with_autoscaling_nobody_else_sets_the_number_of_routers() -> None:
    objects = render({"routers": {"autoscaling": {"enabled": True, "requests": {"enabled": True}}}})
    check_all(objects)
    assert "replicas" not in only(objects, "Deployment")["spec"]
    metrics = only(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert [metric["type"] for metric in metrics] == ["ContainerResource", "Pods"]


def test_probes() -> None:
    """A router without groups is unready but lives; a group has started when it has generated a token."""
    router = _router()
    assert router["livenessProbe"]["httpGet"]["path"] == "/livez"
    ready = router["readinessProbe"]
    assert ready["httpGet"]["path"] == "/readyz"
    assert ready["periodSeconds"] * ready["failureThreshold"] >= DEFAULTS["routers"]["resumeSeconds"]
    started = _group({"startupSeconds": 61})["startupProbe"]
    assert started["httpGet"]["path"] == "/startupz"
    assert 61 <= started["periodSeconds"] * started["failureThreshold"] <= 66


def test_no_secret_is_on_a_command_line_or_in_a_pod() -> None:
    objects = render({"remoteTier": {"mode": "valkey"}, "monitoring": {"serviceMonitor": {"enabled": True}}})
    rest = json.dumps([found for found in objects if found["kind"] != "Secret"])
    for secret in of_kind(objects, "Secret"):
        for value in secret["data"].values():
            assert value not in rest
    for _, template in pod_templates(objects):
        for container in containers(template):
            hidden = {found["name"] for found in container.get("env", []) if "secretKeyRef" in json.dumps(found)}
            made_of = {
                found["name"]
                for found in container.get("env", [])
                if any(f"$({name})" in found.get("value", "") for name in hidden)
            }
            line = json.dumps([container.get("command", []), container.get("args", [])])
            field = {"group": "remote_tier", "router": "records"}.get(container["name"])
            if field is not None:
                assert next(found.variable for found in SERVE_OPTIONS if found.field == field) in made_of
            # Kubernetes puts values in the place of $(NAME), and everybody on the node may read command lines.
            assert not [name for name in hidden | made_of if f"$({name})" in line]


def test_routers_have_records_in_common_and_those_last() -> None:
    server = only(render(), "StatefulSet", "-records")
    (container,) = server["spec"]["template"]["spec"]["containers"]
    assert option(container, "appendonly") == "yes"
    assert option(container, "maxmemory-policy") == "noeviction"
    (claim,) = server["spec"]["volumeClaimTemplates"]
    (mount,) = container["volumeMounts"]
    assert mount == {"name": claim["metadata"]["name"], "mountPath": option(container, "dir")}
    assert option(_router(), "records-max-bytes") == "768MiB", "three quarters of what the server has"
    assert option(_router({"records": {"maxMiB": 0}}), "records-max-bytes") == "0"
    own = _router({"records": {"mode": "external", "external": {"secret": "mine"}}})
    assert "--records-max-bytes" not in own["args"]
    assert {"name": "TRUNKLINE_RECORDS", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "url"}}} in own[
        "env"
    ]


def test_one_router_can_have_a_file() -> None:
    objects = render({"records": {"mode": "sqlite"}, "routers": {"replicas": 1}})
    check_all(objects)
    deployment = only(objects, "Deployment")["spec"]
    assert deployment["strategy"] == {"type": "Recreate"}, "two pods on two nodes cannot have the volume"
    (router,) = deployment["template"]["spec"]["containers"]
    (mount,) = (mount for mount in router["volumeMounts"] if mount["name"] == "records")
    url = next(each["value"] for each in router["env"] if each["name"] == "TRUNKLINE_RECORDS")
    assert url.startswith(f"sqlite:{mount['mountPath']}/")
    claim = only(objects, "PersistentVolumeClaim", "-records")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_only_the_step_that_makes_the_keys_sees_the_seed() -> None:
    for _, template in pod_templates(render({"groups": {"tp": 2, "podsPerGroup": 2}})):
        mounted = {c["name"]: [mount["name"] for mount in c["volumeMounts"]] for c in containers(template)}
        if "valkey" not in mounted:
            assert [name for name, volumes in mounted.items() if "wire-seed" in volumes] == ["wire-keys"]


def test_notes_tell_what_is_open() -> None:
    assert "get secret tl-trunkline-clients" in notes()
    assert "auth.enabled is false" in notes({"auth": {"enabled": False}})
    assert "in the clear" in notes({"routers": {"ingress": {"enabled": True, "host": "llm.example.org"}}})
    assert "a key of Secret mine" in notes({"auth": {"existingSecret": "mine"}})


def test_without_keys_the_router_knows_its_names() -> None:
    route = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
    route["hostnames"] = ["chat.example.org", "*.example.net"]
    ingress = {"enabled": True, "host": "llm.example.org"}
    router = _router({"auth": {"enabled": False}, "routers": {"ingress": ingress, "httpRoute": route}})
    assert "--allow-anonymous" in router["args"]
    assert "--tenants" not in router["args"]
    assert option(router, "allowed-host").split(",") == [
        *("tl-trunkline", "tl-trunkline.llm", "tl-trunkline.llm.svc", "tl-trunkline.llm.svc.cluster.local"),
        *("llm.example.org", "chat.example.org"),
    ]


def test_nodes_can_be_drained_of_what_serves_no_requests() -> None:
    budgets = of_kind(render(), "PodDisruptionBudget")
    assert [budget["spec"]["unhealthyPodEvictionPolicy"] for budget in budgets] == ["AlwaysAllow"] * 2
