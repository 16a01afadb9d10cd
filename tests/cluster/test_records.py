"""What was answered as stored is there: on a full disk, after `kill -9`, and whatever other configurations do."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, wait_for

pytestmark = pytest.mark.processes

MODEL = "trunkline-demo"
QUESTION = [{"role": "user", "content": "What does str.split do?"}]


def serve(base: Path, *options: str, size: str = "100MiB") -> Cluster:
    return Cluster("--tp", "1", "--disk-tier", f"{base}:{size}", *options)


def sessions(cluster: Cluster) -> set[str]:
    found: set[str] = set()
    while True:
        after = {"after": max(found)} if found else {}
        page = httpx.get(f"{cluster.url}/v1/sessions", params={"limit": 100, **after}, timeout=60).json()
        found |= {session["id"] for session in page["data"]}
        if not page["has_more"]:
            return found


def send(cluster: Cluster, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return httpx.request(method, f"{cluster.url}{path}", json=body, timeout=60)


def code_of(answer: httpx.Response) -> str:
    """Of an error, or of the one that a stream ends with; "" if it has none."""
    last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.strip()][-1]
    return str(json.loads(last)["error"]["code"]) if "error" in last else ""


def controller_of(cluster: Cluster) -> int:
    """The process that runs now."""
    command = [sys.executable, "-P", "-m", "trunkline.deploy.cli.app", "status", "--json"]
    found = subprocess.run(
        [*command, "--port", cluster.url.rpartition(":")[2]],
        env={**os.environ, **cluster.folders},
        capture_output=True,
        check=True,
    )
    [pid] = [int(p) for p in _pids(json.loads(found.stdout), "controller")]
    return pid


def _pids(status: Any, name: str) -> list[Any]:
    if isinstance(status, dict):
        own = [status["pid"]] if status.get("name") == name and "pid" in status else []
        return own + [pid for value in status.values() for pid in _pids(value, name)]
    return [pid for value in status for pid in _pids(value, name)] if isinstance(status, list) else []


def test_on_a_full_disk_nothing_that_was_answered_is_lost(tmp_path: Path) -> None:
    with serve(tmp_path / "kv") as cluster:
        first = cluster.post("/v1/sessions", {"metadata": {"n": "first"}})["id"]
        turn = {"model": MODEL, "session_id": first, "messages": QUESTION, "max_tokens": 8}
        assert send(cluster, "POST", "/v1/chat/completions", turn).status_code == 200
        before = send(cluster, "GET", f"/v1/sessions/{first}?include=messages").json()
        controller = cluster.pids["controller"]
        hard = resource.prlimit(controller, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(controller, resource.RLIMIT_FSIZE, (400_000, hard))  # to it, the disk is nearly full
        told, refused = {first}, 0
        for number in range(60):
            filler = "word " * 1500
            body = {"messages": [{"role": "system", "content": f"{number} {filler}"}]}
            made = send(cluster, "POST", "/v1/sessions", body)
            if made.status_code == 200:
                told.add(made.json()["id"])
            else:
                refused += 1
                assert (made.status_code, code_of(made)) == (503, "session_not_stored")
        assert len(told) > 1
        assert refused > 1
        resource.prlimit(controller, resource.RLIMIT_FSIZE, (0, hard))  # not a byte more
        changes = [
            send(cluster, "POST", "/v1/sessions", {}),
            send(cluster, "PATCH", f"/v1/sessions/{first}", {"metadata": {"n": "second"}}),
            send(cluster, "POST", f"/v1/sessions/{first}/fork"),
            send(cluster, "POST", f"/v1/sessions/{first}/discard", {"messages": [0]}),
            send(cluster, "DELETE", f"/v1/sessions/{first}"),
            send(cluster, "POST", "/v1/chat/completions", turn),
        ]
        assert [(answer.status_code, code_of(answer)) for answer in changes] == [(503, "session_not_stored")] * 6
        streamed = send(cluster, "POST", "/v1/chat/completions", {**turn, "stream": True})
        assert (streamed.status_code, code_of(streamed)) == (200, "session_not_stored")
        assert "[DONE]" not in streamed.text
        plain = {"model": MODEL, "messages": QUESTION, "max_tokens": 8}
        assert send(cluster, "POST", "/v1/chat/completions", plain).status_code == 200  # nobody else notices
        assert sessions(cluster) == told
        os.kill(controller, signal.SIGKILL)
        wait_for(lambda: cluster.health() == 200 and controller_of(cluster) != controller, 60)
        assert sessions(cluster) == told
        after = send(cluster, "GET", f"/v1/sessions/{first}?include=messages").json()
        times = ("last_used_at", "expires_at")
        assert {k: v for k, v in after.items() if k not in times} == {
            k: v for k, v in before.items() if k not in times
        }
        for session in sorted(told)[:5]:
            assert send(cluster, "GET", f"/v1/sessions/{session}").status_code == 200
        assert send(cluster, "POST", "/v1/chat/completions", turn).status_code == 200  # there is room again


@pytest.mark.area("survival")
def test_sessions_outlive_other_configurations_in_a_small_disk_tier(tmp_path: Path) -> None:
    """Their KV goes, to make room."""
    base = tmp_path / "kv"
    with serve(base, "--groups", "2", size="300MiB") as cluster:
        told = {cluster.post("/v1/sessions", {"messages": QUESTION})["id"] for _ in range(30)}
        for number, session in enumerate(sorted(told)):
            messages = [{"role": "user", "content": f"{number} " + "What does str.split do? " * 60}]
            turn = {"model": MODEL, "session_id": session, "messages": messages, "max_tokens": 8}
            assert send(cluster, "POST", "/v1/chat/completions", turn).status_code == 200
        assert sessions(cluster) == told
        assert cluster.stop() == 0
    slabs = sorted(base.glob("*/group-*/rank-0.slab"))
    assert len(slabs) == 2  # one of which is more than half of both
    size = sum(path.stat().st_blocks * 512 for path in slabs)
    with serve(base, "--dtype", "bfloat16", size=f"{size // 1024}KiB") as other:
        assert "of another configuration's KV were deleted" in other.log
        assert sessions(other) == set()  # a session belongs to one configuration still
        assert other.stop() == 0
    assert not all(path.exists() for path in slabs)
    with serve(base, "--groups", "2", size="300MiB") as cluster:
        assert sessions(cluster) == told
        turn = {"model": MODEL, "session_id": max(told), "messages": QUESTION, "max_tokens": 8}
        assert send(cluster, "POST", "/v1/chat/completions", turn).status_code == 200
        assert cluster.stop() == 0
