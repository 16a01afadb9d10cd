"""A change of a record that was answered outlives a kill; one that cannot be stored is refused and taken back."""

from __future__ import annotations

import resource
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from controller.service_harness import group_config, run_controller

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import RecordCall
from trunkline.controller.storage.database import Database
from trunkline.controller.storage.records import RECORDS
from trunkline.router.messages import RecordReply, RouterMessage


def with_records(folder: Path) -> ControllerConfig:
    return msgspec.structs.replace(group_config(folder), records_path=str(folder / "records.sqlite"))


@pytest.mark.processes
def test_answers_keep_their_order(tmp_path: Path) -> None:
    with run_controller(with_records(tmp_path), tmp_path) as (_, router):
        for ticket in range(50):
            router.send(RecordCall(ticket, "create", "session", f"s{ticket}", value=bytes(1000)))
        for ticket in range(50):
            reply = msgspec.msgpack.decode(router.socket.recv(), type=RouterMessage)
            assert isinstance(reply, RecordReply)
            assert (reply.seq, reply.ticket, reply.status) == (ticket + 1, ticket, "ok")


def test_hurried_rounds_are_counted_whether_they_succeed_or_not(tmp_path: Path) -> None:
    database = Database(tmp_path / "records.sqlite", b"", RECORDS)
    woken: list[int] = []
    database.on_round = lambda: woken.append(database.rounds)
    for statement in ("DELETE FROM records", "DELETE FROM nothing"):
        database.write("x", statement, ())
        target = database.hurry()
        deadline = time.monotonic() + 20
        while database.rounds < target:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert bool(database.problem) == (statement == "DELETE FROM nothing")
    deadline = time.monotonic() + 20
    while woken[-1:] != [target]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    database.close()


def limit_files(process: subprocess.Popen[bytes], size: int) -> None:
    """No file of the process may grow beyond so many bytes: to it, the disk is full."""
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))


@pytest.mark.processes
def test_on_a_full_disk_what_was_answered_outlives_a_kill_and_the_rest_was_refused(tmp_path: Path) -> None:
    """`kill -9` at once, and a start on the disk that is still full."""
    config = with_records(tmp_path)
    told: dict[str, bytes] = {}
    statuses = set()
    for run in range(3):
        with run_controller(config, tmp_path) as (process, router):
            held = {record.id for record in router.call(RecordCall(0, "list", "session", "", limit=1000)).records}
            assert held == set(told)
            for id_, value in told.items():
                assert router.call(RecordCall(1, "get", "session", id_)).records[0].value == value
            limit_files(process, 400_000 + 300_000 * run)
            for number in range(60):
                id_, value = f"s{run}.{number}", bytes([number]) * 20_000
                made = router.call(RecordCall(2, "create", "session", id_, value=value))
                statuses.add(made.status)
                if made.status == "ok":
                    told[id_] = value
                else:
                    assert "disk" in made.detail
                    assert router.call(RecordCall(3, "get", "session", id_)).status == "missing"
            limit_files(process, 0)  # not a byte more
            some = min(told)
            changed = router.call(RecordCall(4, "put", "session", some, version=1, value=b"lost"))
            assert (changed.status, changed.records) == ("failed", [])
            assert router.call(RecordCall(5, "delete", "session", some)).status == "failed"
            assert router.call(RecordCall(6, "get", "session", some)).records[0].value == told[some]
            process.kill()
            process.wait()
    assert statuses == {"ok", "failed"}


@pytest.mark.processes
def test_calls_wait_for_a_change_of_the_same_record(tmp_path: Path) -> None:
    """Sent at once: nobody sees what may yet be taken back, and each finds what the one before has left."""
    with run_controller(with_records(tmp_path), tmp_path) as (process, router):
        router.call(RecordCall(0, "create", "session", "a", value=b"0"))
        for full in (False, True):
            if full:
                limit_files(process, 0)
            version = 1 if not full else 4
            calls = [
                RecordCall(10, "put", "session", "a", value=b"1", version=version),
                RecordCall(11, "get", "session", "a"),
                RecordCall(12, "put", "session", "a", value=b"2", version=version + 1),
                RecordCall(13, "put", "session", "a", value=b"3", version=version + 2),
                RecordCall(14, "peek", "session", "a"),
            ]
            for call in calls:
                router.send(call)
            replies = {}
            for _ in calls:
                assert router.socket.poll(20_000)
                reply = msgspec.msgpack.decode(router.socket.recv(), type=RouterMessage)
                assert isinstance(reply, RecordReply)
                router.seq += 1
                replies[reply.ticket] = reply
            found = [replies[ticket].status for ticket in range(10, 15)]
            values = [replies[ticket].records[0].value for ticket in (11, 14)]
            if full:
                assert (found, values) == (["failed", "ok", "conflict", "conflict", "ok"], [b"3", b"3"])
            else:
                assert (found, values) == (["ok"] * 5, [b"1", b"3"])
