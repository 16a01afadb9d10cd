"""What the chart makes of values, by Helm's own engine as a library, and what Kustomize makes of our folders."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this machine")
"""Helm itself, as a library."""
ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "trunkline"
RELEASE: Final = "tl"
NAMESPACE: Final = "llm"

Object = dict[str, Any]


def render(values: Object | None = None, *, name: str = RELEASE) -> list[Object]:
    """The objects of an installation, without a cluster."""
    with helm_python.Chart.load(CHART) as chart:
        return parse(chart.render(copy.deepcopy(values or {}), name=name, namespace=NAMESPACE))


def parse(manifests: dict[str, str]) -> list[Object]:
    """The objects in files as they are rendered; notes are left out."""
    return [
        found for name, text in sorted(manifests.items()) if name.endswith(".yaml") for found in load_all(text)
    ]


def notes(values: Object | None = None) -> str:
    """What a person reads after the installation."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(copy.deepcopy(values or {}), name=RELEASE, namespace=NAMESPACE)
    return str(next(text for name, text in rendered.items() if name.endswith("NOTES.txt")))


def load_all(text: str) -> list[Object]:
    """The objects of a YAML stream."""
    return [found for found in yaml.safe_load_all(text) if found]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """Those of some kinds."""
    return [found for found in objects if found["kind"] in kinds]


def only(objects: list[Object], kind: str, end: str = "") -> Object:
    """The one of a kind whose name ends so."""
    (found,) = (found for found in of_kind(objects, kind) if found["metadata"]["name"].endswith(end))
    return found


def pod_templates(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """All pods that come of them, each with its owner."""
    for owner in objects:
        spec = owner.get("spec", {})
        if "leaderWorkerTemplate" in spec:
            for role in ("leaderTemplate", "workerTemplate"):
                yield owner, spec["leaderWorkerTemplate"][role]
        elif "template" in spec:
            yield owner, spec["template"]


def containers(template: Object) -> list[Object]:
    """A pod's, in the order in which they run."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def option(container: Object, name: str) -> str:
    """An option's value on a container's command line."""
    arguments = container["args"]
    return str(arguments[arguments.index(f"--{name}") + 1])


FOLDER: Final = ROOT / "deploy" / "kustomize"
OVERLAYS: Final = ("cpu-demo", "gpu", "multi-node", "monitoring")
_ENGINES: Final = (("kustomize", "build"), ("kubectl", "kustomize"))
ENGINE: Final = next((command for command in _ENGINES if shutil.which(command[0])), None)
needs_kustomize: Final = pytest.mark.skipif(ENGINE is None, reason="neither kustomize nor kubectl is installed")


@functools.cache
def _built(path: str) -> str:
    assert ENGINE is not None
    done = subprocess.run([*ENGINE, path], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return done.stdout


def build(overlay: str) -> list[Object]:
    """The objects of an overlay."""
    return load_all(_built(f"overlays/{overlay}"))
