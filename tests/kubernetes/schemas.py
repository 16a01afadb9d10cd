"""Schemas of objects: Kubernetes' own, and the shapes of objects that no Kubernetes has by itself.

The former come with the package `kubernetes-validate`, whose own `validate` reads megabytes for every object; here
each schema is prepared once. Of the latter a field that is not here is a mistake until it was looked up and added.
Pods in them are checked against Kubernetes' own schemas. Unknown fields are refused.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jsonschema_rs

Shape = dict[str, Any]


def _record(required: str = "", **properties: Shape) -> Shape:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required.split(),
    }


def _list(items: Shape) -> Shape:
    return {"type": "array", "items": items, "minItems": 1}


TEXT: Final[Shape] = {"type": "string", "minLength": 1}
COUNT: Final[Shape] = {"type": "integer", "minimum": 0}
TEXTS: Final[Shape] = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: Final[Shape] = {"type": "string", "pattern": r"^(0|([0-9]+(ms|s|m|h))+)$"}
PROMETHEUS_DURATION: Final[Shape] = {
    "type": "string",
    "pattern": r"^(0|([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$",
}
METADATA: Final = _record("name labels", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
SELECTOR: Final = _record("matchLabels", matchLabels=TEXTS)


def _custom(api: str, kind: str, spec: Shape) -> Shape:
    return _record(
        "apiVersion kind metadata spec",
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )


_POD: Final = _record(
    "metadata spec", metadata=_record("labels", labels=TEXTS, annotations=TEXTS), spec={"type": "object"}
)
_CLAIM: Final = _record(
    "metadata spec",
    metadata=_record("name", name=TEXT),
    spec=_record(
        "accessModes resources", accessModes=_list(TEXT), resources={"type": "object"}, storageClassName=TEXT
    ),
)
_KEEP: Final[Shape] = {"enum": ["Retain", "Delete"]}

LEADER_WORKER_SET: Final = _custom(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    _record(
        "leaderWorkerTemplate",
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=_record("subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        rolloutStrategy=_record(
            "type",
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=_record(
                partition=COUNT,
                maxUnavailable={"type": ["integer", "string"]},
                maxSurge={"type": ["integer", "string"]},
            ),
        ),
        leaderWorkerTemplate=_record(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate=_POD,
            workerTemplate=_POD,
            volumeClaimTemplates=_list(_CLAIM),
            persistentVolumeClaimRetentionPolicy=_record(whenScaled=_KEEP, whenDeleted=_KEEP),
        ),
    ),
)

SERVICE_MONITOR: Final = _custom(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    _record(
        "selector endpoints",
        namespaceSelector=_record(matchNames=_list(TEXT)),
        selector=SELECTOR,
        endpoints=_list(
            _record(
                "port",
                port=TEXT,
                path={"type": "string", "pattern": "^/"},
                interval=PROMETHEUS_DURATION,
                authorization=_record(
                    "credentials", type={"const": "Bearer"}, credentials=_record("name key", name=TEXT, key=TEXT)
                ),
            )
        ),
    ),
)

_RULE: Final = _record(
    "expr labels annotations",
    alert={"type": "string", "pattern": "^[A-Z][A-Za-z0-9]+$"},
    record={"type": "string", "pattern": "^[a-z_:]+$"},
    expr=TEXT,
    labels=TEXTS,
    annotations=TEXTS,
    **{"for": PROMETHEUS_DURATION},
)
RULE_GROUPS: Final = _record(
    "groups", groups=_list(_record("name rules", name=TEXT, interval=PROMETHEUS_DURATION, rules=_list(_RULE)))
)
"""Of a file of rules, too."""
PROMETHEUS_RULE: Final = _custom("monitoring.coreos.com/v1", "PrometheusRule", RULE_GROUPS)

HTTP_ROUTE: Final = _custom(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    _record(
        "parentRefs rules",
        parentRefs=_list(_record("name", name=TEXT, namespace=TEXT, sectionName=TEXT, port=COUNT)),
        hostnames=_list(TEXT),
        rules=_list(
            _record(
                "backendRefs",
                matches=_list(_record(path=_record(type={"const": "PathPrefix"}, value=TEXT))),
                timeouts=_record(request=DURATION, backendRequest=DURATION),
                backendRefs=_list(_record("name port", name=TEXT, port=COUNT)),
            )
        ),
    ),
)

CUSTOM: Final[dict[str, dict[str, Shape]]] = {
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet": LEADER_WORKER_SET},
    "monitoring.coreos.com/v1": {"ServiceMonitor": SERVICE_MONITOR, "PrometheusRule": PROMETHEUS_RULE},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": HTTP_ROUTE},
}


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
