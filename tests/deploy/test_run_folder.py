"""The folder of a running cluster: how it is made, cleaned and found, and how processes are heard there."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.control import Report, StatusSocket, parse_report
from trunkline.deploy.supervisor.run_folder import (
    STATUS_SOCKET,
    ClusterNotFoundError,
    Running,
    announced,
    base_folder,
    find_cluster,
    remove_stale,
    run_folder,
    running_clusters,
)
from trunkline.runtime.process import report_status


def running(port: int) -> Running:
    return Running(port, f"http://127.0.0.1:{port}", "a model", os.getpid())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the run folders of the user who runs the tests."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("trunkline.deploy.supervisor.run_folder.base_folder", lambda: tmp_path / "tmp")


def test_a_cluster_is_found_by_its_port_wherever_its_folder_is(tmp_path: Path) -> None:
    with pytest.raises(ClusterNotFoundError, match="no cluster of yours runs"):
        find_cluster(None)
    with run_folder(tmp_path) as first, announced(first, running(8000)):
        assert find_cluster(None) == (first, running(8000))
        with pytest.raises(ClusterNotFoundError, match=r"no cluster of yours serves on port 9; .* on 8000"):
            find_cluster(9)
        with run_folder(tmp_path) as second, announced(second, running(8001)):
            with pytest.raises(ClusterNotFoundError, match=r"on ports .*say which with --port"):
                find_cluster(None)
            assert find_cluster(8001)[0] == second
        assert find_cluster(None)[0] == first
    assert running_clusters() == {}


def test_without_a_cache_folder_the_usual_place_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.deploy.supervisor.run_folder.cache_folder", lambda: None)
    with run_folder(tmp_path / "tmp") as folder, announced(folder, running(8000)):
        assert find_cluster(8000)[0] == folder


def test_pointers_to_the_dead_go_away(tmp_path: Path, cache_home: Path) -> None:
    dead = tmp_path / "trunkline-deadbeef"
    dead.mkdir()
    (dead / "lock").touch()
    pointers = cache_home / "trunkline" / "running"
    pointers.mkdir(parents=True)
    for name, text in (("a", str(dead)), ("b", "/"), ("c", "\0"), ("d", str(tmp_path / "trunkline-xxxxxxxx"))):
        (pointers / name).write_text(text)
    assert running_clusters() == {}
    assert [path.name for path in pointers.iterdir()] in ([], ["c"])  # a pointer that is no path stays


def test_reports_arrive(tmp_path: Path) -> None:
    statuses = StatusSocket(tmp_path)
    path = str(tmp_path / STATUS_SOCKET)
    assert report_status(path, "starting", "x" * 10_000)
    assert report_status(path, "ready", epoch=7)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.sendto(b"nonsense", path)
        other.sendto(json.dumps({"pid": 1, "status": "excellent"}).encode(), path)
    first, second = statuses.receive()
    assert (first.pid, first.status, len(first.detail)) == (os.getpid(), "starting", 500)
    assert second == Report(os.getpid(), "ready", "", 7)
    assert list(statuses.receive()) == []
    statuses.close()


def test_a_missing_supervisor_is_no_error(tmp_path: Path) -> None:
    assert not report_status("", "ready")
    assert not report_status(str(tmp_path / "missing"), "ready")
    assert not report_status(str(tmp_path / ("x" * 200)), "ready")
    assert parse_report(b"[" * 100_000) is None


def test_run_folders_are_private_short_lived_and_cleaned_after_a_kill(tmp_path: Path) -> None:
    with run_folder(tmp_path) as living:
        assert living.stat().st_mode & 0o777 == 0o700
        dead = tmp_path / "trunkline-deadbeef"
        dead.mkdir()
        (dead / "lock").touch()
        unrelated = tmp_path / "trunkline-unrelated-folder"
        unrelated.mkdir()
        assert remove_stale(tmp_path) == [dead]
        assert living.exists()
        assert unrelated.exists()
    assert not living.exists()


def test_run_folders_are_where_sockets_paths_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set TMPDIR"), run_folder(tmp_path / "missing"):
        pass
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(deep))
    assert base_folder() == Path("/tmp")
