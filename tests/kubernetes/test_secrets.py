"""Keys that the chart makes: once, and never again."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest
import yaml
from kubernetes.rendering import CHART, NAMESPACE, RELEASE, Object, helm_python, of_kind, only, parse, render

from trunkline.router.config import NO_LIMITS
from trunkline.router.tenancy.auth import KeyRole
from trunkline.router.tenancy.tenant_file import parse_rules
from trunkline.runtime.wire_keys import keys_from_seed

_VERSIONS: Final = {"kind": "APIVersions", "versions": ["v1"]}
_GROUPS: Final = {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
_RESOURCES: Final = {
    "kind": "APIResourceList",
    "groupVersion": "v1",
    "resources": [
        {
            "name": "secrets",
            "singularName": "secret",
            "namespaced": True,
            "kind": "Secret",
            "verbs": ["get", "list"],
        }
    ],
}
_INFO: Final = {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}


class FakeCluster:
    """Secrets that outlive renderings, as a cluster keeps them."""

    def __init__(self, url: str, secrets: dict[str, Object]) -> None:
        self._url = url
        self.secrets = secrets

    def apply(self, values: Object | None = None, *, upgrade: bool = False) -> list[Object]:
        """Render with what is there in sight, and keep the Secrets that come out."""
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self._url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "current-context": "x",
        }
        with (
            helm_python.Config(kubeconfig_content=yaml.safe_dump(kubeconfig), namespace=NAMESPACE) as config,
            helm_python.Chart.load(CHART) as chart,
        ):
            objects = parse(
                config.render(
                    chart,
                    values or {},
                    name=RELEASE,
                    namespace=NAMESPACE,
                    is_install=not upgrade,
                    is_upgrade=upgrade,
                )
            )
        self.secrets.update({secret["metadata"]["name"]: secret for secret in of_kind(objects, "Secret")})
        return objects


@contextlib.contextmanager
def fake_cluster() -> Iterator[FakeCluster]:
    """A cluster without anything in it, on a free port of this machine."""
    secrets: dict[str, Object] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, answer = self._answer(self.path.partition("?")[0].strip("/").split("/"))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self, path: list[str]) -> tuple[int, Object]:
            match path:
                case ["version"]:
                    return 200, dict(_INFO)
                case ["api"]:
                    return 200, dict(_VERSIONS)
                case ["apis"]:
                    return 200, dict(_GROUPS)
                case ["api", "v1"]:
                    return 200, dict(_RESOURCES)
                case ["api", "v1", "namespaces", namespace, "secrets", name] if (
                    namespace == NAMESPACE and name in secrets
                ):
                    return 200, secrets[name]
            return 404, {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "NotFound",
                "code": 404,
            }

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: pytest's output is for results."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield FakeCluster(f"http://127.0.0.1:{server.server_port}", secrets)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


pytestmark = pytest.mark.area("kubernetes")
VALKEY: Object = {"remoteTier": {"mode": "valkey"}}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster() as made:
        yield made


def _text(secret: Object, key: str) -> str:
    return base64.b64decode(secret["data"][key]).decode()


def _data(objects: list[Object]) -> dict[str, Object]:
    return {secret["metadata"]["name"]: secret["data"] for secret in of_kind(objects, "Secret")}


def test_upgrades_keep_them_and_restart_nothing(cluster: FakeCluster) -> None:
    before = cluster.apply(VALKEY)
    after = cluster.apply(VALKEY, upgrade=True)
    assert _data(after) == _data(before)
    assert set(_data(before)) == {
        f"tl-trunkline-{name}" for name in ("wire", "keys", "clients", "valkey", "records")
    }
    for kind in ("Deployment", "StatefulSet"):
        assert of_kind(after, kind) == of_kind(before, kind)


def test_every_installation_has_its_own() -> None:
    first, second = (_data(render(VALKEY)) for _ in range(2))
    for name in first:
        assert first[name] != second[name]


def test_they_survive_an_uninstallation() -> None:
    for secret in of_kind(render(VALKEY), "Secret"):
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_router_takes_the_file_and_the_keys_have_their_roles() -> None:
    objects = render()
    rules = parse_rules(_text(only(objects, "Secret", "-keys"), "tenants.json").encode(), NO_LIMITS)
    clients = only(objects, "Secret", "-clients")
    assert rules.has_keys
    for role in KeyRole:
        key = _text(clients, f"{role.value}-key")
        assert key.startswith("tl-")
        assert rules.keys[hashlib.sha256(key.encode()).hexdigest()].role is role
    assert len(rules.keys) == len(KeyRole)


def test_keys_that_were_added_by_hand_stay(cluster: FakeCluster) -> None:
    cluster.apply()
    secret = cluster.secrets["tl-trunkline-keys"]
    file = json.loads(_text(secret, "tenants.json"))
    file["tenants"]["batch"] = {"keys": ["0" * 64]}
    secret["data"]["tenants.json"] = base64.b64encode(json.dumps(file).encode()).decode()
    after = cluster.apply(upgrade=True)
    assert "batch" in json.loads(_text(only(after, "Secret", "-keys"), "tenants.json"))["tenants"]


def test_plain_keys_that_were_deleted_do_not_come_back_wrong(cluster: FakeCluster) -> None:
    cluster.apply()
    del cluster.secrets["tl-trunkline-clients"]
    assert "tl-trunkline-clients" not in _data(cluster.apply(upgrade=True))


def test_a_tier_that_is_added_later_gets_its_password(cluster: FakeCluster) -> None:
    before = cluster.apply()
    after = cluster.apply(VALKEY, upgrade=True)
    assert len(_text(only(after, "Secret", "-valkey"), "password")) == 43
    assert _text(only(after, "Secret", "-wire"), "seed") == _text(only(before, "Secret", "-wire"), "seed")


def test_the_seed_makes_wire_keys() -> None:
    assert len(keys_from_seed(_text(only(render(), "Secret", "-wire"), "seed")).generations) == 1


def test_own_secrets_are_used_and_none_is_made() -> None:
    objects = render(
        {
            "auth": {"existingSecret": "my-keys"},
            "wire": {"existingSecret": "my-wire"},
            "remoteTier": {"mode": "valkey", "valkey": {"existingSecret": "my-valkey"}},
            "records": {"valkey": {"existingSecret": "my-records"}},
        }
    )
    assert of_kind(objects, "Secret") == []
    text = json.dumps(objects)
    assert all(f'"{name}"' in text for name in ("my-keys", "my-wire", "my-valkey", "my-records"))
