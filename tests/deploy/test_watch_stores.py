"""`trunkline doctor` tries out the store of the remote tier: a real server of the Redis protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deploy.test_watch import HEALTHY
from worker.redis_server import RedisServer

from trunkline.deploy.watch.checks import Finding, Level, examine
from trunkline.deploy.watch.stores import Trial, remote_urls, trial

pytestmark = pytest.mark.processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


def about_stores(*trials: Trial) -> list[Finding]:
    return [one for one in examine(replace(HEALTHY, trials=trials)) if one.about == "remote tier"]


def test_a_store_that_works_is_said(server: RedisServer) -> None:
    [finding] = about_stores(trial(server.url))
    assert finding.level is Level.OK
    assert "written, read and deleted in" in finding.text
    assert not server.client().keys("*")
    bucket = about_stores(Trial("s3://kv", "", 0.1, keeps=True))
    assert "lifecycle rule" in bucket[0].text


def test_what_is_wrong_with_a_store_is_said(server: RedisServer) -> None:
    server.client().config_set("requirepass", "secret")
    wrong = trial(server.url.replace("redis://", "redis://:hunter2@"))
    assert "hunter2" not in str(wrong)
    [finding] = about_stores(wrong)
    assert finding.level is Level.WARNING
    assert "nothing can be written: " in finding.text
    server.kill()
    assert "nothing can be written" in trial(server.url).problem
    assert "allowed are" in trial("carrier-pigeon://x").problem


def test_the_urls_of_a_running_cluster_are_found(tmp_path: Path) -> None:
    for name, text in (
        ("worker-0.0", '{"remote_url": "redis://h/0", "rank": 0}'),
        ("worker-1.0", '{"remote_url": "redis://h/0"}'),
        ("worker-2.0", '{"remote_url": ""}'),
        ("worker-3.0", "{"),
        ("controller-0", '{"remote_url": "redis://other/0"}'),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    assert remote_urls(tmp_path) == ["redis://h/0"]
