"""The pods of the chart, as processes of this machine: its commands, arguments, Secrets and probes.

Only places change: paths below a temporary folder, free ports of the loopback address.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from deploy.waiting import free_ports, wait_for
from kubernetes.rendering import Object, containers, only, pod_templates, render

from trunkline.router.membership.member import Member
from trunkline.router.membership.static_source import write_members

pytestmark = [pytest.mark.processes, pytest.mark.area("kubernetes")]
_TOGETHER_S_MAX: Final = 90.0
"""Until a pod is ready. Nothing is measured: who takes longer has failed."""
_BIN: Final = Path(sys.executable).parent


class Pods:
    """The pods of one group and one router, and where they are."""

    def __init__(self, folder: Path, groups: Object) -> None:
        self.folder = folder
        self.group_port = free_ports(9)
        self.http_port = self.group_port + 5
        self.health = {
            role: self.group_port + 6 + index for index, role in enumerate(("group", "workers", "router"))
        }
        self.objects = render(
            {"groups": {"replicas": 1, **groups}, "routers": {"replicas": 1}, "records": {"mode": "sqlite"}}
        )
        self.templates = {
            template["spec"]["containers"][0]["name"]: template for _, template in pod_templates(self.objects)
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        requests, events = (f"tcp://127.0.0.1:{self.group_port + offset}" for offset in range(2))
        write_members(folder / "members.json", [Member("tl-trunkline-group-0", requests, events)])

    def secret(self, end: str, key: str) -> bytes:
        return base64.b64decode(only(self.objects, "Secret", end)["data"][key])

    def start(self, role: str) -> None:
        """Run a pod's containers: the first ones to their end, the last one on."""
        pod = self.folder / role
        pod.mkdir()
        for name, data in (
            ("seed", self.secret("-wire", "seed")),
            ("tenants.json", self.secret("-keys", "tenants.json")),
        ):
            (pod / name).write_bytes(data)
        keys, main = containers(self.templates[role])
        subprocess.run(
            self._here(role, keys["command"]), check=True, env=self._environment(role, keys), timeout=60
        )
        command = self._here(role, [*main["command"], *main["args"]])
        with (pod / "log").open("wb") as log:
            self.running[role] = subprocess.Popen(
                command, env=self._environment(role, main), stdout=log, stderr=log
            )

    def _here(self, role: str, command: list[str]) -> list[str]:
        places = {
            "/secrets/wire/seed": f"{self.folder}/{role}/seed",
            "/secrets/keys/tenants.json": f"{self.folder}/{role}/tenants.json",
            "/run/trunkline/wire/wire.keys": f"{self.folder}/{role}/wire.keys",
            "/kv/tier:9GiB": f"{self.folder}/{role}/tier:64MiB",
            "$(LWS_LEADER_ADDRESS):7400": f"127.0.0.1:{self.group_port}",
            "0.0.0.0:7400": f"127.0.0.1:{self.group_port}",
            "0.0.0.0": "127.0.0.1",
            "8000": str(self.http_port),
            "7480": str(self.health[role]),
            "python": sys.executable,
            "trunkline": str(_BIN / "trunkline"),
        }
        # Here no Kubernetes says which groups there are: a file does.
        groups = f"static:{self.folder / 'members.json'}"
        return [groups if word.startswith("kubernetes://") else places.get(word, word) for word in command]

    def _environment(self, role: str, container: Object) -> dict[str, str]:
        given = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
        if "TRUNKLINE_RECORDS" in given:
            given["TRUNKLINE_RECORDS"] = given["TRUNKLINE_RECORDS"].replace("/records/", f"{self.folder}/{role}/")
        home = {"HOME": str(self.folder / role), "XDG_CACHE_HOME": str(self.folder / role / "cache")}
        # A run folder's sockets need a short path.
        operators = {"LWS_WORKER_INDEX": "1"}
        return {"PATH": f"{_BIN}:{os.environ['PATH']}", **operators, **given, **home, "PYTHONSAFEPATH": "1"}

    def get(self, port: int, path: str, key: str = "", body: Any = None) -> tuple[int, bytes]:
        """Status and body; status 0: nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            data = None if body is None else json.dumps(body)
            connection.request("POST" if body is not None else "GET", path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def probe(self, role: str, path: str) -> int:
        return self.get(self.health[role], path)[0]

    def log(self, role: str) -> str:
        return (self.folder / role / "log").read_text(errors="replace")

    def until(self, role: str, path: str, status: int) -> None:
        try:
            wait_for(
                lambda: self.probe(role, path) == status or self.running[role].poll() is not None, _TOGETHER_S_MAX
            )
        except AssertionError:
            logs = "\n".join(f"{name}: {self.log(name)}" for name in self.running)
            raise AssertionError(f"{role}{path} does not become {status}:\n{logs}") from None
        assert self.running[role].poll() is None, self.log(role)


@contextlib.contextmanager
def _pods(folder: Path, **groups: Any) -> Iterator[Pods]:
    made = Pods(folder, groups)
    try:
        yield made
    finally:
        for process in made.running.values():
            process.kill()
        for process in made.running.values():
            process.wait()


def test_they_come_up_serve_by_their_roles_and_leave(tmp_path: Path) -> None:
    with _pods(tmp_path) as pods:
        pods.start("router")
        pods.until("router", "/startupz", 200)
        assert pods.probe("router", "/livez") == 200, "without groups it waits, and must not be killed"
        assert pods.probe("router", "/readyz") == 503

        pods.start("group")
        pods.until("group", "/startupz", 200)
        pods.until("group", "/readyz", 200)
        pods.until("router", "/readyz", 200)

        user, metrics, admin = (
            pods.secret("-clients", f"{role}-key").decode() for role in ("user", "metrics", "admin")
        )
        body = {"model": "trunkline-demo", "prompt": "import os", "max_tokens": 3}
        status, answer = pods.get(pods.http_port, "/v1/completions", user, body)
        assert status == 200, answer
        assert json.loads(answer)["usage"]["completion_tokens"] >= 1
        assert pods.get(pods.http_port, "/v1/completions", "", body)[0] == 401
        assert pods.get(pods.http_port, "/v1/completions", metrics, body)[0] == 403
        assert pods.get(pods.http_port, "/metrics", metrics)[0] == 200
        assert pods.get(pods.http_port, "/flush_cache", user, {})[0] == 403
        assert pods.get(pods.http_port, "/flush_cache", admin, {})[0] == 200

        for role in ("router", "group"):
            pods.running[role].send_signal(signal.SIGTERM)
            assert pods.running[role].wait(_TOGETHER_S_MAX) == 0, pods.log(role)
        logs = pods.log("router") + pods.log("group")
        assert not any(key in logs for key in (user, metrics, admin))


def test_a_group_of_two_pods_forms(tmp_path: Path) -> None:
    with _pods(tmp_path, tp=2, podsPerGroup=2) as pods:
        pods.start("group")
        pods.start("workers")
        pods.until("group", "/startupz", 200)
        for role in ("group", "workers"):
            pods.until(role, "/readyz", 200)
        pods.running["workers"].send_signal(signal.SIGTERM)
        assert pods.running["workers"].wait(_TOGETHER_S_MAX) == 0, pods.log("workers")
        pods.until("group", "/readyz", 503)
        assert pods.probe("group", "/livez") == 200, "what is lost elsewhere is no reason to be killed"
