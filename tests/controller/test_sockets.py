"""The controller's two ends of the wire by themselves: what a flood and a frozen host can do to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import msgspec
import pytest
import zmq

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import Ping
from trunkline.controller.reports import WorkerHello, WorkerReady
from trunkline.controller.service.membership import GroupLostError
from trunkline.controller.service.routers import MESSAGES_PER_TURN_MAX, Routers
from trunkline.controller.service.workers import WorkerGroup
from trunkline.runtime import wire_keys
from trunkline.runtime.wire_gate import Gate

pytestmark = pytest.mark.processes
Context = zmq.Context[zmq.Socket[bytes]]

SUBSCRIBER = """
import msgspec, sys, time, zmq
from trunkline.worker import messages
from trunkline.runtime.wire_keys import Role
from trunkline.runtime.wire_peer import WirePeer

socket = zmq.Context().socket(zmq.SUB)
WirePeer(sys.argv[3], Role.WORKER).connect(socket, sys.argv[1])
incarnation = bytes.fromhex(sys.argv[2])
socket.subscribe(messages.rank_topic(0, incarnation))
welcome = msgspec.msgpack.decode(socket.recv_multipart()[-1], type=messages.Welcome)
socket.subscribe(messages.plan_topic(welcome.epoch))
socket.subscribe(messages.member_topic(incarnation))
time.sleep(600)
"""


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)  # `term` would wait for ever for sockets that a failed test left open


def test_flood_is_taken_in_portions(context: Context, tmp_path: Path) -> None:
    """The loop must come to plan steps although a router sends faster than we read."""
    routers = Routers(Gate(context), f"ipc://{tmp_path}/router")
    router = context.socket(zmq.DEALER)
    router.connect(f"ipc://{tmp_path}/router")
    router.set(zmq.SNDHWM, 0)
    total = 3 * MESSAGES_PER_TURN_MAX
    for number in range(total):
        router.send(msgspec.msgpack.encode(Ping(number)))
    portions: list[int] = []
    while sum(portions) < total:
        assert routers.socket.poll(60_000)
        portions.append(sum(1 for _ in routers.receive(0.0)))
    router.close(linger=0)
    routers.close()
    assert max(portions) <= MESSAGES_PER_TURN_MAX


def test_frozen_rank_over_tcp_is_noticed(context: Context, tmp_path: Path) -> None:
    """Nothing closes the connection of a host that lost its power; a stopped process looks the same."""
    config = ControllerConfig(
        epoch=17,
        plan_endpoint="tcp://127.0.0.1:*",
        report_endpoint=f"ipc://{tmp_path}/report",
        router_endpoint="ipc://unused",
        wire_keys=str(tmp_path / "keys"),
    )
    wire_keys.write(wire_keys.generate(), config.wire_keys)
    config.validate()
    gate = Gate(context, config.wire_keys)
    group = WorkerGroup(gate, config)
    gate.open()
    endpoint = group.plans.getsockopt_string(zmq.LAST_ENDPOINT)
    incarnation = os.urandom(16)
    rank = subprocess.Popen([sys.executable, "-c", SUBSCRIBER, endpoint, incarnation.hex(), config.wire_keys])
    report = context.socket(zmq.PUSH)
    report.connect(config.report_endpoint)
    report.send(msgspec.msgpack.encode(WorkerHello(0, rank.pid, "elsewhere", incarnation)))
    report.send(msgspec.msgpack.encode(WorkerReady(0, 17, rank.pid, 8, 1, "too early")))
    try:
        deadline = time.monotonic() + 60
        while not group.is_complete and time.monotonic() < deadline:
            group.plans.poll(50)
            group.membership_events(time.monotonic())
            group.receive(time.monotonic())
            group.reform(time.monotonic())
            if group.is_formed:
                report.send(msgspec.msgpack.encode(WorkerReady(0, 17, rank.pid, 8, 1, "simulated")))
        assert group.is_complete
        time.sleep(1.5)  # a rank that lives answers heartbeats
        group.membership_events(0.0)
        group.check_loss(inf)
        os.kill(rank.pid, signal.SIGSTOP)
        assert group.plans.poll(60_000)
        group.membership_events(0.0)
        with pytest.raises(GroupLostError, match="rank 0"):
            group.check_loss(inf)
    finally:
        rank.kill()
        rank.wait()
        report.close(linger=0)
        gate.close()
        group.close()
