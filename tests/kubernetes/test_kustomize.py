"""Plain manifests: as sound as the chart's, and the same where they mean the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.checks import admits, check_all, check_schemas
from kubernetes.rendering import (
    FOLDER,
    OVERLAYS,
    ROOT,
    Object,
    build,
    containers,
    load_all,
    needs_kustomize,
    of_kind,
    only,
    pod_templates,
    render,
)

pytestmark = [pytest.mark.processes, pytest.mark.area("kubernetes")]
SECRETS = frozenset({"trunkline-wire", "trunkline-keys", "trunkline-clients", "trunkline-records", "models"})
"""What an operator makes beforehand."""
OWN: Object = {
    "auth": {"existingSecret": "trunkline-keys"},
    "wire": {"existingSecret": "trunkline-wire"},
    "records": {"valkey": {"existingSecret": "trunkline-records"}},
}


def _files() -> list[Path]:
    return sorted([*FOLDER.rglob("*.yaml"), *(ROOT / "deploy" / "grafana").glob("*.yaml")])


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_sound(overlay: str) -> None:
    objects = build(overlay)
    check_all(objects, outside=SECRETS)
    assert {found["metadata"]["namespace"] for found in objects} == {"trunkline"}
    router = _labels(objects, "router")
    group = {**_labels(objects, "group"), "leaderworkerset.sigs.k8s.io/group-index": "0"}
    assert admits(objects, router, group, 7400)
    assert not admits(objects, router, group, 7402)
    other = {**group, "leaderworkerset.sigs.k8s.io/group-index": "1"}
    assert admits(objects, other, group, 8400)
    assert not admits(objects, router, group, 8400)
    assert not admits(objects, {"role": "frontend"}, group, 7400)


def _labels(objects: list[Object], component: str) -> dict[str, Any]:
    found = (template["metadata"]["labels"] for _, template in pod_templates(objects))
    return dict(next(labels for labels in found if labels["app.kubernetes.io/component"] == component))


def _comparable(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Without what only Helm adds: its labels, the namespace, checksums, long names."""
    found = {}
    for each in copy.deepcopy(objects):
        metadata = each["metadata"]
        metadata.pop("namespace", None)
        metadata["labels"] = {
            key: value
            for key, value in metadata["labels"].items()
            if key not in ("helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by")
        }
        for _, template in pod_templates([each]):
            template["metadata"].pop("annotations", None)
        for subject in each.get("subjects", []):
            subject.pop("namespace")
        found[each["kind"], metadata["name"]] = each
    return found


def _base() -> list[Object]:
    kustomization = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())
    return [
        found for name in kustomization["resources"] for found in load_all((FOLDER / "base" / name).read_text())
    ]


def test_the_base_is_what_the_chart_makes_of_its_defaults() -> None:
    objects = _base()
    check_all(objects, outside=SECRETS)
    assert _comparable(objects) == _comparable(render(OWN, name="trunkline"))


def test_groups_of_several_pods_are_what_the_chart_makes() -> None:
    folder = FOLDER / "overlays" / "multi-node"
    ours = [
        found
        for name in ("groups", "networkpolicies")
        for found in load_all((folder / f"{name}.yaml").read_text())
    ]
    check_schemas(ours)
    values = {
        **OWN,
        "model": {"source": "claim", "claim": {"name": "models"}},
        "groups": {
            "tp": 16,
            "podsPerGroup": 2,
            "gpus": 8,
            "hostTier": "16GiB",
            "shmMiB": 8192,
            "diskTier": {"sizeGiB": 1000},
            "resources": {"requests": {"cpu": "16", "memory": "192Gi"}, "limits": {"memory": "256Gi"}},
        },
    }
    theirs = _comparable(render(values, name="trunkline"))
    for identity, found in _comparable(ours).items():
        assert found == theirs[identity]
    assert ("LeaderWorkerSet", "trunkline-group") in _comparable(ours)


def test_the_alerts_are_those_of_the_file() -> None:
    rules = only(load_all((FOLDER / "components" / "monitoring" / "rules.yaml").read_text()), "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())


def test_every_file_is_named_and_every_named_file_exists() -> None:
    """Also where there is no engine: nothing is missing, and nothing lies about."""
    named = set()
    kustomizations = [path for path in _files() if path.name == "kustomization.yaml"]
    assert len(kustomizations) == len(OVERLAYS) + 3
    for path in kustomizations:
        content = yaml.safe_load(path.read_text())
        patches = [patch["path"] for patch in content.get("patches", []) if "path" in patch]
        for name in [*content.get("resources", []), *content.get("components", []), *patches]:
            target = (path.parent / name).resolve()
            assert target.exists(), f"{path}: {name}"
            named.add(target)
    unnamed = [path for path in _files() if path.resolve() not in named and path.name != "kustomization.yaml"]
    assert unnamed == []


@needs_kustomize
def test_the_gpu_overlay_differs_from_the_base_only_where_it_says() -> None:
    before, after = _comparable(_base()), _comparable(build("gpu"))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {("Deployment", "trunkline-router"), ("StatefulSet", "trunkline-group")}
    group = only(build("gpu"), "StatefulSet", "-group")["spec"]["template"]["spec"]["containers"][0]
    base = only(_base(), "StatefulSet", "-group")["spec"]["template"]["spec"]["containers"][0]
    missing = [each for each in base["args"] if each.startswith("--") and each not in group["args"]]
    assert missing == []


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_pods_of_ours_have_the_same_image(overlay: str) -> None:
    images = {
        container["image"]
        for owner, template in pod_templates(build(overlay))
        for container in containers(template)
        if owner["metadata"]["name"] != "trunkline-records"
    }
    assert len(images) == 1


@needs_kustomize
def test_the_dashboard_is_found_by_its_label() -> None:
    board = only(of_kind(build("monitoring"), "ConfigMap"), "ConfigMap")
    assert board["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(board["data"]["trunkline.json"])["uid"] == "trunkline"
