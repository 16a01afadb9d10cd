"""What must hold for any values, over many that are drawn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes.checks import admits, check_all, sends
from kubernetes.rendering import Object, of_kind, pod_templates, render

CLIENTS = {"role": "frontend"}
"""A pod that has nothing to do with us."""


def _some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values)


@st.composite
def _groups(draw: st.DrawFn) -> Object:
    pods = draw(st.sampled_from([1, 1, 2, 4]))
    per_pod = draw(st.sampled_from([1, 2, 8]))
    return {
        "replicas": draw(st.sampled_from([1, 2, 3, 16])),
        "prefill": draw(st.sampled_from([0, 0, 1])),
        "tp": pods * per_pod,
        "podsPerGroup": pods,
        "gpus": draw(st.sampled_from([0, per_pod])),
        "autoscaling": {"enabled": draw(st.booleans())},
        "dtype": draw(st.sampled_from(["", "bfloat16"])),
        "kvMemory": draw(st.sampled_from(["", "20GiB", "512 MB"])),
        "hostTier": draw(st.sampled_from(["", "8GiB"])),
        "maxContext": draw(_some(st.integers(2, 10**7))),
        "sessionTtlSeconds": draw(_some(st.sampled_from([0, 0.5, 86400]))),
        "drainSeconds": draw(st.integers(0, 3600)),
        "startupSeconds": draw(st.integers(10, 86400)),
        "diskTier": {
            "enabled": draw(st.booleans()),
            "sizeGiB": draw(st.integers(2, 4000)),
            "storageClass": draw(st.sampled_from(["", "fast"])),
        },
        "pdb": {"enabled": draw(st.booleans()), "maxUnavailable": draw(st.sampled_from([1, "25%"]))},
        "spreadOver": draw(st.sampled_from(["", "topology.kubernetes.io/zone"])),
        "nodeSelector": draw(st.sampled_from([{}, {"gpu": "yes"}])),
        "tolerations": draw(st.sampled_from([[], [{"key": "gpu", "operator": "Exists"}]])),
        "runtimeClassName": draw(st.sampled_from(["", "nvidia"])),
        "podLabels": draw(st.sampled_from([{}, {"team": "llm"}])),
        "podAnnotations": draw(st.sampled_from([{}, {"note": 'it\'s: "quoted"'}])),
        "env": draw(st.sampled_from([[], [{"name": "NCCL_DEBUG", "value": "WARN"}]])),
        "extraArgs": draw(st.sampled_from([[], ["--chunk-size", "128"]])),
    }


@st.composite
def _routers(draw: st.DrawFn, mode: str) -> Object:
    """Routers, of which there is one if records are in a file."""
    return {
        "replicas": 1 if mode == "sqlite" else draw(st.integers(1, 9)),
        "resumeSeconds": draw(st.sampled_from([0, 7.5, 60, 86400])),
        "drainSeconds": draw(st.integers(0, 3600)),
        "preStopSeconds": draw(st.integers(0, 300)),
        "tenantHeader": draw(st.sampled_from(["", "X-Tenant"])),
        "autoscaling": {
            "enabled": mode != "sqlite" and draw(st.booleans()),
            "cpuPercent": draw(st.sampled_from([50, 70])),
            "requests": {"enabled": draw(st.booleans())},
        },
        "pdb": {"enabled": draw(st.booleans())},
        "service": {
            "type": draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"])),
            "port": draw(st.sampled_from([80, 8000])),
        },
        "ingress": {
            "enabled": draw(st.booleans()),
            "host": "llm.example.org",
            "className": draw(st.sampled_from(["", "nginx"])),
            "tlsSecret": draw(st.sampled_from(["", "certificate"])),
        },
        "httpRoute": {"enabled": draw(st.booleans()), "parentRefs": [{"name": "gateway", "namespace": "infra"}]},
    }


_MODELS = st.sampled_from(
    [
        {"source": "demo"},
        {"source": "claim", "claim": {"name": "models", "path": "llama/8b"}, "servedName": "llama"},
        {"source": "hostPath", "hostPath": "/models/llama"},
        {"source": "hub", "hub": {"repository": "owner/name", "tokenSecret": {"name": "hub-token"}}},
    ]
)
_PEERS = st.sampled_from([[], [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]])


@st.composite
def _values(draw: st.DrawFn) -> Object:
    own = st.sampled_from(["", "mine"])
    records = draw(st.sampled_from(["valkey", "external", "sqlite"]))
    return {
        "groups": draw(_groups()),
        "routers": draw(_routers(records)),
        "records": {
            "mode": records,
            "maxMiB": draw(_some(st.integers(0, 10**6))),
            "external": {"secret": "mine"},
            "valkey": {"existingSecret": draw(own), "storageClass": draw(st.sampled_from(["", "fast"]))},
        },
        "model": draw(_MODELS),
        "image": {
            "digest": draw(st.sampled_from(["", "sha256:" + "0" * 64])),
            "pullSecrets": [{"name": "registry"}],
        },
        "auth": {"enabled": draw(st.booleans()), "existingSecret": draw(own)},
        "wire": {"existingSecret": draw(own)},
        "remoteTier": {
            "mode": draw(st.sampled_from(["none", "valkey", "external"])),
            "external": {"secret": "mine"},
            "valkey": {"existingSecret": draw(own)},
        },
        "networkPolicy": {
            "enabled": draw(st.booleans()),
            "egress": draw(st.booleans()),
            "clients": draw(_PEERS),
            "scrapers": draw(_PEERS),
        },
        "monitoring": {
            "serviceMonitor": {"enabled": draw(st.booleans()), "keySecret": {"name": "mine"}},
            "rules": {"enabled": draw(st.booleans())},
            "dashboard": {"enabled": draw(st.booleans())},
        },
    }


_VALKEY: Object = {"remoteTier": {"mode": "valkey"}}


def test_every_way_is_closed_at_both_ends() -> None:
    """With the other end's policies taken away, too: each side alone keeps to what is needed."""
    api_server = [{"ipBlock": {"cidr": "10.96.0.1/32"}}]
    objects = render({**_VALKEY, "networkPolicy": {"apiServer": api_server}})
    router, group, valkey, records = (
        _labels(objects, "router"),
        _labels(objects, "group", "group"),
        _labels(objects, "valkey"),
        _labels(objects, "records"),
    )
    stranger = {"role": "stranger"}
    for sender, allowed in (
        (router, {(0, 7400), (0, 7401), (2, 6379)}),
        (group, {(0, 8400), (0, 8463), (1, 6379)}),
        (valkey, set()),
        (records, set()),
    ):
        open_ways = {
            (index, port)
            for index, receiver in enumerate((group, valkey, records))
            for port in (22, 443, 6379, 7400, 7401, 7402, 7404, 7480, 8000, 8399, 8400, 8463, 8464)
            if sends(objects, sender, receiver, port)
        }
        assert open_ways == allowed
        assert not sends(objects, sender, stranger, 443)
    for receiver, port in ((group, 7400), (group, 8400), (valkey, 6379), (records, 6379)):
        assert not admits(objects, stranger, receiver, port)
    assert not admits(objects, router, group, 8400)
    anywhere = render(_VALKEY)
    assert [sends(anywhere, sender, stranger, 443) for sender in (router, group, records)] == [True, False, False]


@pytest.mark.area("kubernetes")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_values())
def test_any_values_make_a_sound_installation(values: Object) -> None:
    objects = render(values)
    check_all(objects, outside=frozenset({"mine", "models", "hub-token"}))
    if values["networkPolicy"]["enabled"]:
        _check_network(objects, values)


def _labels(objects: list[Object], component: str, role: str = "") -> Object:
    for _, template in pod_templates(objects):
        labels = dict(template["metadata"]["labels"])
        if labels["app.kubernetes.io/component"] == component and labels.get("trunkline/role", "") == role:
            return labels
    raise AssertionError(f"no pod of {component} {role}")


def _in_group(labels: Object, index: int) -> Object:
    """As the operator labels the pods of a group."""
    return {**labels, "leaderworkerset.sigs.k8s.io/group-index": str(index)}


def _check_network(objects: list[Object], values: Object) -> None:
    router, group = _labels(objects, "router"), _labels(objects, "group", "group")
    if values["groups"]["podsPerGroup"] > 1:
        group = _in_group(group, 0)
        _check_ranks(objects, group, values)
    for port in (7400, 7401):
        assert admits(objects, router, group, port)
        assert not admits(objects, CLIENTS, group, port)
    for port in (8400, 8463):  # KV, from group to group
        assert admits(objects, _in_group(group, 1), group, port)
        assert not admits(objects, router, group, port)
        assert not admits(objects, CLIENTS, group, port)
    for port in (7402, 7404, 7480, 22):
        assert not admits(objects, router, group, port)
    assert not admits(objects, group, router, 8000) or not values["networkPolicy"]["egress"]
    assert admits(objects, router, None, 53, "UDP")
    assert admits(objects, group, None, 53, "UDP")
    assert admits(objects, CLIENTS, router, 8000) is (not values["networkPolicy"]["clients"])
    assert not admits(objects, CLIENTS, router, 7480)
    if values["networkPolicy"]["egress"]:
        assert not admits(objects, group, None, 80)
        assert admits(objects, group, None, 443) is (values["model"]["source"] == "hub")
        assert admits(objects, router, None, 443), "the API server, wherever it is"
    if values["records"]["mode"] == "valkey":
        records = _labels(objects, "records")
        assert admits(objects, router, records, 6379)
        assert not admits(objects, group, records, 6379)
        assert not admits(objects, CLIENTS, records, 6379)
        assert not admits(objects, records, None, 443)
    elif values["records"]["mode"] == "external":
        assert admits(objects, router, None, 6379)
    if values["remoteTier"]["mode"] == "valkey":
        valkey = _labels(objects, "valkey")
        assert admits(objects, group, valkey, 6379)
        assert not admits(objects, router, valkey, 6379) or values["records"]["mode"] == "external"
        assert not admits(objects, CLIENTS, valkey, 6379)
        assert not admits(objects, valkey, None, 443)
    elif values["remoteTier"]["mode"] == "external":
        assert admits(objects, group, None, 6379)


def _check_ranks(objects: list[Object], leader: Object, values: Object) -> None:
    """Ranks of one group reach each other at any port, those of another group do not."""
    worker = _in_group(_labels(objects, "group", "workers"), 0)
    for port in (7402, 7403, 7404, 45678):
        assert admits(objects, worker, leader, port)
        assert admits(objects, leader, worker, port)
        if values["groups"]["replicas"] > 1:
            assert not admits(objects, _in_group(worker, 1), leader, port)
    assert admits(objects, leader, _in_group(worker, 1), 8400)
    assert admits(objects, _in_group(worker, 1), worker, 8401)
    groups = 8 if values["groups"]["autoscaling"]["enabled"] else values["groups"]["replicas"]
    assert len(of_kind(objects, "NetworkPolicy")) >= 2 + groups
