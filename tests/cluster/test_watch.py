"""`trunkline top`, `doctor` and `chat` on a real cluster."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from cluster.harness import STOP_SECONDS_MAX, Cluster, wait_for

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    with Cluster("--groups", "2", "--tp", "1", "--threads", "1") as cluster:
        yield cluster
        assert cluster.stop() == 0


def command(cluster: Cluster, *words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "trunkline.deploy.cli.app", *words, "--url", cluster.url]


def environment(cluster: Cluster) -> dict[str, str]:
    return {**os.environ, **cluster.folders, "NO_COLOR": "1", "COLUMNS": "180", "LINES": "50", "TERM": "xterm"}


def run(cluster: Cluster, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        command(cluster, *words), env=environment(cluster), capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_chat_client_talks_to_it(served: Cluster) -> None:
    done = subprocess.run(
        command(served, "chat", "--max-tokens", "12"),
        input="What does len do?\n/system Be brief.\nAnd os.path.split?\n/nonsense\n/quit\nnever sent\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(served),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr.count("prompt tokens cached") == 2
    assert "There is no command /nonsense" in done.stderr


def test_the_doctor_finds_nothing_wrong(served: Cluster) -> None:
    code, said = run(served, "doctor", "--json")
    assert code == 0, said
    findings = json.loads(said)
    assert [finding for finding in findings if finding["level"] == "failure"] == []
    assert {"health", "groups", "request", "access", "tiers", "processes"} <= {f["about"] for f in findings}
    (request,) = (finding for finding in findings if finding["about"] == "request")
    assert request["level"] == "ok", request


def test_top_shows_what_runs(served: Cluster) -> None:
    client = served.client()
    client.chat.completions.create(
        model="trunkline-demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
    )
    code, said = run(served, "top", "--once")
    assert code == 0, said
    for text in ("trunkline-demo", "output tokens/s", "group", "device", "host", "disk", "ready"):
        assert text in said, said


def test_top_follows_the_cluster_on_a_terminal_and_leaves_at_ctrl_c(served: Cluster) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(served, "top", "--interval", "0.2"), stdin=follower, stdout=follower, env=environment(served)
    )
    os.close(follower)
    seen: list[bytes] = []
    # A terminal reads all the time, also while the command leaves: else it would wait for that.
    reader = threading.Thread(target=read_all, args=(leader, seen), daemon=True)
    reader.start()
    try:
        wait_for(lambda: b"".join(seen).count(b"output tokens/s") >= 3 or process.poll() is not None, 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_SECONDS_MAX) == 0, b"".join(seen)
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        os.close(leader)


def read_all(descriptor: int, seen: list[bytes]) -> None:
    """Until nobody writes any more, which is an error for terminals."""
    with contextlib.suppress(OSError):
        while data := os.read(descriptor, 65536):
            seen.append(data)


def test_without_the_key_it_is_said_what_is_missing(served: Cluster) -> None:
    """Somebody else's folders have no key of this cluster."""
    done = subprocess.run(
        command(served, "top", "--once"),
        env={**environment(served), "TMPDIR": str(served.folder), "XDG_CACHE_HOME": str(served.folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "A key of role admin is needed" in done.stderr


def test_the_doctor_says_what_is_wrong(served: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trunkline.deploy.cli.app", "drain", "0"],
        env=environment(served),
        check=False,
    )
    assert done.returncode == 0
    wait_for(lambda: "group 0" in run(served, "doctor", "--no-probe")[1], 20)
    code, said = run(served, "doctor", "--no-probe")
    assert code == 0, said  # the other group serves
    assert "warn" in said
    assert "trunkline undrain" in said
