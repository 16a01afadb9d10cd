"""Routers and workers that say what no right peer says: dropped or answered, and nobody else is harmed.

Seeded, against the service's real sockets and its own checks (`debug_checks`). Peers with the cluster's keys are
trusted for what they mean, not for being right: another version, or a bug, must not take the controller down.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from controller.hostile_peers import VOCAB, Group, requests
from simulation.hostile import altered

from trunkline.controller.messages import Ping, Submit
from trunkline.controller.reports import (
    BLOCKS_MAX,
    BeamStep,
    GrammarReady,
    LoadProgress,
    MoveOutcome,
    MovesDone,
    Probed,
    PromptLogprobs,
    StepResult,
    TopLogprobs,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
    WorkerReport,
)
from trunkline.controller.service.workers import problem_of_report
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

pytestmark = pytest.mark.processes

MESSAGES = 1200
REPORTS = 80


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.fixture
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    group = Group(tmp_path, request.param)
    yield group
    group.close()


@pytest.mark.parametrize("group", range(3), indirect=True)
def test_a_router_that_talks_nonsense_harms_nobody(group: Group) -> None:
    """Between right messages in any order, replayed and altered: the friend's text stays what it was."""
    text = group.ask(1)
    chosen, sent = group.chosen, []
    for number in range(MESSAGES):
        message = chosen.choice(requests(chosen))
        data = altered(chosen, message) if chosen.random() < 0.7 else msgspec.msgpack.encode(message)
        sent.append(data)
        group.hostile.send(chosen.choice(sent) if chosen.random() < 0.1 else data)
        if number % 50 == 0:
            group.hostile.send_multipart([data] * chosen.choice((2, 3)))
        if number % 5 == 0:
            group.turn()
    group.settle()
    assert group.ask(2) == text
    assert group.service.routers.rare.counts["router message cannot be decoded; ignored"] > MESSAGES / 10
    index = group.service.persistence.index
    assert index is not None
    assert index.flush(), index.problem


@pytest.mark.parametrize("group", range(1), indirect=True)
def test_a_router_that_is_given_up_in_a_turn_of_another_one_has_no_requests_behind_it(group: Group) -> None:
    """A turn that has only what routers say plans first, and sees who is gone behind that."""
    service, engine = group.service, group.service.engine
    assert engine is not None
    group.result_of = lambda result: None  # its request runs until it is aborted
    group.send(group.hostile, Submit(1, pack_int32([3, 1, 4]), 3, 8, Sampling(seed=1)))
    for _ in range(1000):
        group.turn(wait_ms=1)
        if engine.requests():
            break
    assert engine.requests()
    service.config = msgspec.structs.replace(service.config, router_silence_seconds_max=1e8)
    for router in service.routers._by_index.values():
        router.last_heard = float("-inf")
    service._deadlines.look = math.inf
    group.send(group.friend, Ping(0))
    assert service.routers.socket.poll(10_000)
    service._turn({service.routers.socket})
    assert not engine.requests()


def reports(group: Group) -> list[msgspec.Struct]:
    """One of each kind that a worker sends."""
    chosen, epoch = group.chosen, group.epoch
    rank = chosen.randrange(2)
    zero = bytes(4)
    stranger = chosen.choice((chosen.choice(group.incarnations), chosen.randbytes(16)))
    return [
        WorkerHello(rank, 1 << 22, "elsewhere", stranger),
        WorkerReady(rank, epoch, 1, 32, 1, "simulated", 4, 1.5, 3),
        LoadProgress(rank, "loading", 0.5),
        GrammarReady(1, "x"),
        MovesDone(rank, epoch, [MoveOutcome(1, 0, 5), MoveOutcome(2, 1, 3, "x")]),
        Probed(rank, epoch, 1, 3),
        WorkerFailed(rank, "no", chosen.randbytes(16)),
        StepResult(
            group.workers.last_step + chosen.randrange(-1, 3),
            epoch,
            zero,
            100,
            {0: TopLogprobs(-1.0, zero, zero)},
            0,
            5,
            {1: BeamStep(zero, zero, zero)},
            {1: PromptLogprobs(1, zero, zero, zero, zero)},
        ),
    ]


@pytest.mark.parametrize("group", range(2), indirect=True)
def test_workers_that_report_nonsense_end_their_epoch_at_most(group: Group) -> None:
    """Requests go on with the next workers; the friend's text stays what it was."""
    text, chosen, lost = group.ask(1), group.chosen, 0

    def report(result: Any) -> None:
        if chosen.random() < 0.1:
            group.altered_result(result)
        else:
            group.right_result(result)

    group.result_of = report
    for number in range(REPORTS):
        if chosen.random() < 0.5:
            group.report.send(altered(chosen, chosen.choice(reports(group))))
        message = chosen.choice(requests(chosen)[:8])
        numbered = msgspec.structs.replace(message, request=number) if isinstance(message, Submit) else message
        group.send(group.hostile, numbered)
        group.service.group.reports.poll(10)  # nonsense arrives a little later
        group.turn()
        group.turn()
        if group.service.status != "ready":
            lost += 1
            group.form()
    group.result_of = group.right_result
    group.form()  # nonsense may still be on its way
    assert 0 < lost < REPORTS
    group.settle()
    assert group.ask(2) == text


READY = WorkerReady(0, 1, 2, 32, 1, "cpu")
RESULT = StepResult(1, 1, b"", 5)
SCORES = PromptLogprobs(1, bytes(4), bytes(4), bytes(8), bytes(8))


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (READY, ""),
        (WorkerReady(2, 1, 2, 32, 1, "cpu"), "rank 2 reports; the group has 2"),
        (RESULT, ""),
        (StepResult(1, 1, pack_int32([-1, 0, VOCAB - 1]), 5), ""),
        (StepResult(1, 1, pack_int32([0, VOCAB]), 5), f"draws tokens 0 to {VOCAB} of {VOCAB}"),
        (StepResult(1, 1, pack_int32([-2]), 5), "draws tokens -2 to -2"),
        (StepResult(1, 1, b"", 5, beams={1: BeamStep(b"", pack_int32([VOCAB]), b"")}), "draws tokens"),
        (StepResult(1, 1, b"", 5, forced={1: pack_int32([VOCAB])}), "draws tokens"),
        (StepResult(1, 1, b"", 5, {0: TopLogprobs(0.0, bytes(4), bytes(8))}), "do not go with"),
        (StepResult(1, 1, b"", 5, {0: TopLogprobs(0.0, b"", b"", bytes(8))}), ""),
        (StepResult(1, 1, b"", 5, {0: TopLogprobs(0.0, b"", b"", bytes(7))}), "7 bytes, which are no float32"),
        (StepResult(1, 1, b"", 5, prompt_logprobs={1: SCORES}), ""),
        (StepResult(1, 1, b"", 5, prompt_logprobs={1: msgspec.structs.replace(SCORES, ranks=b"")}), "do not go"),
        (StepResult(1, 1, b"", 5, prompt_logprobs={1: PromptLogprobs(1, b"", b"", b"", b"")}), "do not go"),
        (LoadProgress(0, "x", float("inf")), "no number"),
        (LoadProgress(-1, "x", 0.5), "rank -1"),
        (LoadProgress(0, "x" * 5000, 0.5), "5000 characters"),
        (WorkerHello(0, os.getpid(), "n" * 5000, b""), "5000 characters"),
        (MovesDone(7, 1, []), "rank 7"),
        (Probed(-1, 1, 1, 1), "rank -1"),
        (GrammarReady(-1), ""),
        (WorkerFailed(9, "x", b""), ""),
    ],
)
def test_reports_that_cannot_be(report: WorkerReport, text: str) -> None:
    problem = problem_of_report(report, 2, VOCAB)
    assert (text in problem) if text else not problem


@pytest.mark.parametrize(
    "report",
    [
        WorkerReady(0, 1, 2, BLOCKS_MAX + 1, 1, "cpu"),
        WorkerReady(0, 1, 2, 32, 1, "cpu", swap_us_per_block=float("nan")),
        StepResult(1, 1, b"", -1),
        StepResult(1, 1, b"", 5, plan_copies=2),
        StepResult(1, 1, b"", 5, kv_bytes_read=1 << 63),
        MovesDone(0, 1, [MoveOutcome(1, 0, -5)]),
    ],
)
def test_numbers_that_cannot_be(report: WorkerReport) -> None:
    decoder = msgspec.msgpack.Decoder(WorkerReport)
    with pytest.raises(msgspec.ValidationError, match="Expected"):
        decoder.decode(msgspec.msgpack.encode(report))


def test_altered_messages_are_altered_and_the_same_for_a_seed() -> None:
    right = msgspec.msgpack.encode(READY)
    found = [altered(random.Random(seed), READY) for seed in range(300)]
    assert found == [altered(random.Random(seed), READY) for seed in range(300)]
    assert sum(data != right for data in found) > 250
    decoder = msgspec.msgpack.Decoder(WorkerReady)
    readable = 0
    for data in found:
        try:
            decoder.decode(data)
            readable += 1
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    assert 60 < readable < 250, "most should come past the decoder, and many should not"
