"""A change of a record that was answered outlives a kill; one that cannot be stored is answered all the same."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from controller.service_harness import Router, group_config, run_controller

from trunkline.controller.config import ControllerConfig
from trunkline.controller.database import Database
from trunkline.controller.messages import RecordCall
from trunkline.router.messages import RecordReply, RouterMessage

FINGERPRINT = "17"


def with_index(folder: Path) -> ControllerConfig:
    index = str(folder / "index.sqlite")
    return msgspec.structs.replace(group_config(folder), index_path=index, tier_fingerprint=FINGERPRINT)


def ask(router: Router, call: RecordCall) -> RecordReply:
    """Its answer, which is the next message."""
    router.send(call)
    assert router.socket.poll(20_000), "the controller said nothing"
    reply = msgspec.msgpack.decode(router.socket.recv(), type=RouterMessage)
    router.seq += 1
    assert isinstance(reply, RecordReply)
    assert (reply.seq, reply.ticket) == (router.seq, call.ticket)
    return reply


def test_what_was_answered_outlives_a_kill(tmp_path: Path) -> None:
    config = with_index(tmp_path)
    for run in range(3):
        with run_controller(config, tmp_path) as (process, router):
            for past in range(run):
                found = ask(router, RecordCall(1, "get", "session", f"s{past}"))
                assert (found.status, found.records[0].value) == ("ok", b"second"), past
            made = ask(router, RecordCall(2, "create", "session", f"s{run}", value=b"first"))
            changed = RecordCall(3, "put", "session", f"s{run}", version=made.records[0].version, value=b"second")
            assert ask(router, changed).status == "ok"
            process.kill()  # at once
            process.wait()


def test_answers_keep_their_order(tmp_path: Path) -> None:
    with run_controller(with_index(tmp_path), tmp_path) as (_, router):
        for ticket in range(50):
            router.send(RecordCall(ticket, "create", "session", f"s{ticket}", value=bytes(1000)))
        for ticket in range(50):
            reply = msgspec.msgpack.decode(router.socket.recv(), type=RouterMessage)
            assert isinstance(reply, RecordReply)
            assert (reply.seq, reply.ticket, reply.status) == (ticket + 1, ticket, "ok")


def test_hurried_rounds_are_counted_whether_they_succeed_or_not(tmp_path: Path) -> None:
    database = Database(tmp_path / "index.sqlite", bytes.fromhex(FINGERPRINT))
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
