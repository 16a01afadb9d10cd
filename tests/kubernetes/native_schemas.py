"""Kubernetes' own schemas, as the package `kubernetes-validate` brings them. Its own `validate` reads megabytes
for every object; here each schema is prepared once. Fields that nobody knows are refused."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jsonschema_rs

VERSIONS: Final = ("1.29", "1.34")
"""Of Kubernetes: an old and a new one."""
_FOLDER: Final = Path(str(files("kubernetes_validate"))) / "kubernetes-json-schema"


_DEFINITIONS: Final = "https://kubernetes.io/api/_definitions.json"
"""What the schemas call the file that has all the rest."""


@functools.cache
def _validator(version: str, name: str) -> Any:
    folder = _FOLDER / f"v{version}.0-local-strict"
    definitions = jsonschema_rs.Registry([(_DEFINITIONS, json.loads((folder / "_definitions.json").read_text()))])
    return jsonschema_rs.Draft202012Validator(
        json.loads((folder / f"{name}.json").read_text()), registry=definitions
    )


def problems(found: dict[str, Any], version: str) -> list[str]:
    """What is wrong with an object, and where.

    Raises:
        FileNotFoundError: this version of Kubernetes knows no such kind.
    """
    group, _, api = found["apiVersion"].rpartition("/")
    name = "-".join(filter(None, [found["kind"].lower(), group.partition(".")[0], api]))
    return [
        f"{'.'.join(map(str, error.instance_path))}: {error.message[:300]}"
        for error in _validator(version, name).iter_errors(found)
    ]
