"""As much of a Kubernetes API as `lookup` needs: what there is, and Secrets by name."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import yaml
from kubernetes.rendering import CHART, NAMESPACE, RELEASE, Object, helm_python, of_kind, parse

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
