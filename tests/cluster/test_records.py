"""What was answered as stored is there: on a full disk, after `kill -9` of all processes, with other options."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.chaos import View
from cluster.conversations import QUESTIONS, body_of, sessions_of
from cluster.harness import Cluster, wait_for

pytestmark = pytest.mark.processes


def serve(base: Path, *options: str, size: str = "100MiB") -> Cluster:
    return Cluster("--tp", "1", "--disk-tier", f"{base}:{size}", *options)


def send(cluster: Cluster, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return httpx.request(method, f"{cluster.url}{path}", json=body, timeout=60)


def turn(cluster: Cluster, session: str, **more: object) -> httpx.Response:
    return send(cluster, "POST", "/v1/chat/completions", body_of(session, QUESTIONS[0], **more))


def session_of(cluster: Cluster, session: str) -> dict[str, Any]:
    """A session as it is stored, without the times of its use."""
    found = send(cluster, "GET", f"/v1/sessions/{session}?include=messages")
    assert found.status_code == 200, found.text
    return {name: value for name, value in found.json().items() if name not in ("last_used_at", "expires_at")}


def code_of(answer: httpx.Response) -> str:
    """Of an error, or of the one that a stream ends with; "" if it has none."""
    last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.strip()][-1]
    return str(json.loads(last)["error"]["code"]) if "error" in last else ""


def limit_files(pid: int, size: int) -> None:
    """No file of the process may grow beyond so many bytes: to it, the disk is full."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))


def test_on_a_full_disk_nothing_that_was_answered_is_lost(tmp_path: Path) -> None:
    with serve(tmp_path / "kv") as cluster:
        first = cluster.post("/v1/sessions", {"metadata": {"n": "first"}})["id"]
        assert turn(cluster, first).status_code == 200
        before = session_of(cluster, first)
        router = cluster.pids["router"]
        limit_files(router, 800_000)  # nearly full
        told, refused = {first}, 0
        for number in range(120):
            body = {"messages": [{"role": "system", "content": f"{number} {'word ' * 3000}"}]}
            made = send(cluster, "POST", "/v1/sessions", body)
            if made.status_code == 200:
                told.add(made.json()["id"])
            else:
                refused += 1
                assert (made.status_code, code_of(made)) == (503, "records_unavailable")
        assert len(told) > 1
        assert refused > 1
        limit_files(router, 0)  # not a byte more
        changes = [
            send(cluster, "POST", "/v1/sessions", {}),
            send(cluster, "PATCH", f"/v1/sessions/{first}", {"metadata": {"n": "second"}}),
            send(cluster, "POST", f"/v1/sessions/{first}/fork"),
            send(cluster, "POST", f"/v1/sessions/{first}/discard", {"messages": [0]}),
            send(cluster, "DELETE", f"/v1/sessions/{first}"),
            turn(cluster, first),
        ]
        assert [(answer.status_code, code_of(answer)) for answer in changes] == [(503, "records_unavailable")] * 6
        plain = {"model": "trunkline-demo", "prompt": QUESTIONS[0], "max_tokens": 8}
        assert send(cluster, "POST", "/v1/completions", plain).status_code == 200  # no other client notices
        assert sessions_of(cluster) == told
        os.kill(router, signal.SIGKILL)
        View(cluster).wait_replaced("router", router)
        assert sessions_of(cluster) == told
        assert session_of(cluster, first) == before
        wait_for(lambda: turn(cluster, first).status_code == 200, 30)  # there is room again


@pytest.mark.area("survival")
def test_sessions_outlive_the_death_of_every_process(tmp_path: Path) -> None:
    """Killed all at once, while they are changed: what was answered is there, and nothing is half there."""
    base = tmp_path / "kv"
    with serve(base, "--groups", "2", "--routers", "2") as cluster:
        ids = [str(cluster.post("/v1/sessions", {})["id"]) for _ in range(8)]
        for session in ids[:4]:
            assert turn(cluster, session).status_code == 200
        told = {session: session_of(cluster, session) for session in ids}
        cluster.kill()
    with serve(base) as cluster:  # another number of groups
        assert sessions_of(cluster) == set(ids)
        assert {session: session_of(cluster, session) for session in ids} == told
        for session in ids:
            wait_for(lambda session=session: turn(cluster, session).status_code == 200, 30)  # type: ignore[misc]
            assert len(session_of(cluster, session)["messages"]) == len(told[session]["messages"]) + 2
        assert cluster.stop() == 0


@pytest.mark.area("survival")
def test_servers_of_other_configurations_have_the_same_sessions(tmp_path: Path) -> None:
    """KV of other configurations is deleted to make room in a small disk tier, sessions are not."""
    base = tmp_path / "kv"
    with serve(base, "--groups", "2", size="300MiB") as cluster:
        told = {str(cluster.post("/v1/sessions", {})["id"]) for _ in range(12)}
        for number, session in enumerate(sorted(told)):
            messages = [{"role": "user", "content": f"{number} " + "What does str.split do? " * 60}]
            assert turn(cluster, session, messages=messages).status_code == 200
        assert cluster.stop() == 0
    slabs = sorted(base.glob("*/group-*/rank-0.slab"))
    assert len(slabs) == 2  # one of which is more than half of both
    size = sum(path.stat().st_blocks * 512 for path in slabs)
    with serve(base, "--dtype", "bfloat16", "--quantization", "int8", size=f"{size // 1024}KiB") as other:
        assert "of another configuration's KV were deleted" in other.log
        assert sessions_of(other) == told
        assert turn(other, max(told)).status_code == 200
        assert other.stop() == 0
    assert not all(path.exists() for path in slabs)
