"""Life and death: a killed process is noticed, a stopped cluster drains, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from cluster.chaos import frozen
from cluster.harness import Cluster, wait_for

from trunkline.deploy.supervisor.run_folder import remove_stale

pytestmark = pytest.mark.processes

NOTICED_SECONDS_MAX = 2.0
ENDED_SECONDS_MAX = 20.0
"""A stream may wait for workers to come back, until the cluster has stopped."""


class Reader(threading.Thread):
    """A client in the middle of a long answer."""

    def __init__(self, cluster: Cluster, tokens: int) -> None:
        super().__init__(daemon=True)
        self.chunks = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.ended_at = float("inf")
        self._cluster = cluster
        self._tokens = tokens

    def run(self) -> None:
        try:
            with self._cluster.client() as client:
                stream = client.completions.create(
                    model="trunkline-demo",
                    prompt="Once",
                    max_tokens=self._tokens,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for chunk in stream:
                    self.chunks += 1
                    self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
        except (openai.OpenAIError, httpx.HTTPError) as error:
            self.error = error
        finally:
            self.ended_at = time.monotonic()


@contextmanager
def reading(cluster: Cluster, tokens: int) -> Iterator[Reader]:
    reader = Reader(cluster, tokens)
    reader.start()
    wait_for(lambda: reader.chunks > 2, 20)
    yield reader
    reader.join(100)
    assert not reader.is_alive()


@pytest.mark.parametrize("victim", ["worker-1", "controller", "router"])
def test_a_killed_process_is_noticed_and_ends_a_cluster_without_restarts(victim: str) -> None:
    with Cluster("--tp", "2", "--no-restart") as cluster:
        with reading(cluster, 1800) as reader:
            os.kill(cluster.pids[victim], signal.SIGKILL)
            wait_for(lambda: reader.ended_at < float("inf"), ENDED_SECONDS_MAX)
        assert reader.error is not None
        assert reader.finish_reason is None
        assert cluster.wait() == 1
        assert cluster.alive() == []
        assert f"{victim} was killed by SIGKILL." in cluster.log
        assert list(cluster.temporary.iterdir()) == []


@pytest.fixture(scope="module")
def doomed() -> Iterator[Cluster]:
    """A cluster whose parts die, the supervisor last."""
    with Cluster("--tp", "2") as cluster:
        yield cluster


def test_killed_workers_are_replaced_and_streams_go_on(doomed: Cluster) -> None:
    for victim in ("worker-0", "worker-1"):
        with reading(doomed, 800) as reader:
            os.kill(doomed.pids[victim], signal.SIGKILL)
            reader.join(100)
            assert reader.error is None
            assert reader.finish_reason == "length"
        # At once, unless the answer was complete before the worker died.
        wait_for(lambda victim=victim: f"{victim} was killed by SIGKILL" in doomed.log, 10)  # type: ignore[misc]
        doomed.wait_healthy()
        wait_for(doomed.is_idle, 10)


def test_children_die_with_a_killed_supervisor_and_the_next_start_cleans_up(doomed: Cluster) -> None:
    os.kill(doomed.pids["supervisor"], signal.SIGKILL)
    doomed.wait()
    wait_for(lambda: doomed.alive() == [], NOTICED_SECONDS_MAX)
    left = list(doomed.temporary.iterdir())
    assert remove_stale(Path(doomed.temporary)) == left


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with Cluster("--tp", "2", "--drain-seconds", "100") as cluster:

        def stop_meanwhile() -> None:
            cluster.process.send_signal(signal.SIGTERM)
            wait_for(cluster.is_draining, NOTICED_SECONDS_MAX)
            with cluster.client() as client, pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(model="trunkline-demo", prompt="x", max_tokens=1)
            assert refused.value.status_code == 503

        with reading(cluster, 1800) as reader:
            frozen([cluster.pids["worker-0"]], stop_meanwhile)
            assert reader.is_alive(), "it ended before its worker was frozen"
        assert reader.error is None
        assert reader.finish_reason == "length"
        assert cluster.wait() == 0
        assert cluster.alive() == []
        assert list(cluster.temporary.iterdir()) == []


def test_a_drain_is_bounded() -> None:
    with Cluster("--tp", "1", "--drain-seconds", "0.5") as cluster, reading(cluster, 2000) as reader:
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.wait() == 0
        assert "while stopping" not in cluster.log  # nobody stumbles, even with a step under way
        assert reader.finish_reason is None
