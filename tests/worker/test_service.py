"""The worker as a process, with a stand-in for the controller on real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import torch
import zmq
from worker.driver import run_config
from worker.ranks import RankProcess, worker_process

from trunkline.controller.reports import (
    GrammarReady,
    LoadProgress,
    MovesDone,
    Probed,
    StepResult,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
    WorkerReport,
)
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.runtime.process import is_worker, node_id
from trunkline.worker import service
from trunkline.worker.link import Link
from trunkline.worker.messages import (
    LEAVE_TOPIC,
    CompileGrammar,
    ForgetGrammar,
    Join,
    Leave,
    Probe,
    Refused,
    Sampling,
    Shutdown,
    StepPlan,
    TierMove,
    TierMoves,
    Welcome,
    WorkerMessage,
    member_topic,
    plan_topic,
    rank_topic,
)
from trunkline.worker.service import EXIT_CONFIG, EXIT_LEFT, Watchdog

pytestmark = pytest.mark.processes
Report = TypeVar("Report", bound=WorkerReport)
PATIENCE_MS = 120_000
"""How long something is waited for that comes for certain: a rank's start takes as long as the machine needs."""


class FakeController:
    """Binds the two sockets of a controller, and welcomes whoever says hello to epoch 1."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.plans = self.context.socket(zmq.XPUB)
        self.plans.bind(f"ipc://{folder}/plans")
        self.reports = self.context.socket(zmq.PULL)
        self.reports.bind(f"ipc://{folder}/reports")
        self._decoder: msgspec.msgpack.Decoder[WorkerReport] = msgspec.msgpack.Decoder(WorkerReport)
        self.hellos: list[WorkerHello] = []

    def send(self, message: WorkerMessage) -> None:
        self.plans.send_multipart([plan_topic(1), msgspec.msgpack.encode(message)])

    def leave(self, epoch: int) -> None:
        self.plans.send_multipart([LEAVE_TOPIC, msgspec.msgpack.encode(Leave(epoch))])

    def receive(self) -> WorkerReport:
        """The next report that is no hello."""
        while True:
            assert self.reports.poll(PATIENCE_MS), "no report in time"
            report = self._decoder.decode(self.reports.recv())
            if not isinstance(report, WorkerHello):
                return report
            self.hellos.append(report)
            topic = rank_topic(report.rank, report.incarnation)
            self.plans.send_multipart([topic, msgspec.msgpack.encode(Welcome(report.incarnation, 1))])

    def wait_for(self, kind: type[Report], count: int = 1) -> list[Report]:
        found: list[Report] = []
        while len(found) < count:
            report = self.receive()
            if isinstance(report, kind):
                found.append(report)
        return found

    def wait_for_ranks(self, tp: int) -> dict[int, WorkerReady]:
        """Every rank's readiness, then its subscription to the plans: one that is sent before would be lost."""
        ready: dict[int, WorkerReady] = {}
        while len(ready) < tp:
            report = self.wait_for(WorkerReady)[0]
            ready[report.rank] = report
        seen: set[bytes] = set()
        while not seen >= {b"\x01" + member_topic(hello.incarnation) for hello in self.hellos}:
            assert self.plans.poll(PATIENCE_MS)
            seen.add(self.plans.recv())
        return ready

    def close(self) -> None:
        self.context.destroy(linger=0)


class Setup:
    """A folder, a model, a controller and processes that are all gone at the end."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.model = model
        self._stack = stack

    def controller(self) -> FakeController:
        controller = FakeController(self.folder)
        self._stack.callback(controller.close)
        return controller

    def start(self, rank: int = 0, tp: int = 1, **fields: Any) -> RankProcess:
        config = run_config(
            self.model,
            rank=rank,
            tp=tp,
            plan_endpoint=f"ipc://{self.folder}/plans",
            report_endpoint=f"ipc://{self.folder}/reports",
            rendezvous=f"file://{self.folder}/rendezvous" if tp > 1 else "",
            **fields,
        )
        path = self.folder / f"rank-{rank}.json"
        path.write_bytes(msgspec.json.encode(config))
        process = worker_process(path)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def serve(self, tp: int = 1, **fields: Any) -> tuple[FakeController, list[RankProcess]]:
        """A controller, and ranks that have computed a step."""
        controller = self.controller()
        ranks = [self.start(rank, tp, **fields) for rank in range(tp)]
        controller.wait_for_ranks(tp)
        controller.send(first_plan())
        controller.wait_for(StepResult)
        return controller, ranks


@pytest.fixture
def setup(tmp_path: Path, folder: Path) -> Iterator[Setup]:
    with ExitStack() as stack:
        yield Setup(tmp_path, folder, stack)


def first_plan() -> StepPlan:
    tokens = list(range(1, 12))
    join = Join(1, pack_int32(tokens), 0, len(tokens), pack_int32([3, 1]), Sampling(temperature=0))
    return StepPlan(1, 1, joins=[join], prefill=pack_int32([1, 0, len(tokens), 0, 1]))


def test_late_controller_steps_and_shutdown(setup: Setup) -> None:
    process = setup.start()
    time.sleep(1.0)  # the worker's connections fail and are retried
    controller = setup.controller()
    assert isinstance(controller.receive(), LoadProgress)
    controller.wait_for_ranks(1)
    ready = controller.wait_for(WorkerReady)[0]  # repeated until the first plan
    assert (ready.rank, ready.epoch, ready.pid, ready.num_blocks) == (0, 1, process.pid, 64)
    assert ready.block_bytes == 2 * 2 * 2 * 8 * 8 * 4
    controller.send(first_plan())
    controller.send(StepPlan(2, 1, rows=pack_int32([1]), runs=b""))
    controller.send(StepPlan(3, 1))
    controller.send(StepPlan(4, 1, leaves=pack_int32([1]), rows=b"", runs=b""))
    results = controller.wait_for(StepResult, 4)
    assert [result.step for result in results] == [1, 2, 3, 4]
    assert [len(unpack_int32(result.tokens)) for result in results] == [1, 1, 1, 0]
    controller.send(Shutdown())
    assert process.wait(timeout=60) == 0


def test_host_pool_is_announced_and_used(setup: Setup) -> None:
    controller = setup.controller()
    setup.start(host_memory_bytes=50_000)
    ready = controller.wait_for_ranks(1)[0]
    assert ready.host_slots == 50_000 // ready.block_bytes
    assert ready.swap_us_per_block > 0
    controller.send(first_plan())
    saves, loads = pack_int32([3, 0, 1, 1, 1, 1]), pack_int32([5, 0, 1])
    controller.send(StepPlan(2, 1, saves=saves, loads=loads, save_fence=2, load_fence=2))
    results = controller.wait_for(StepResult, 2)
    assert (results[0].moved_us, results[0].moved_blocks) == (0, 0)
    assert results[1].moved_us > 0
    assert results[1].moved_blocks == 3


def start_with_disk(setup: Setup, rank: int, tp: int, **fields: Any) -> RankProcess:
    """A rank with a host pool and room for 20 slots and more on a disk of its own."""
    slab = str(setup.folder / f"slab-{rank}")
    settings = {"disk_path": slab, "disk_bytes": 1 << 20, "tier_fingerprint": "17", "host_memory_bytes": 50_000}
    return setup.start(rank, tp, **{**settings, **fields})


def test_every_rank_answers_every_move(setup: Setup) -> None:
    """Also while no step comes; a later plan may then load what was read."""
    controller = setup.controller()
    processes = [start_with_disk(setup, rank, 2) for rank in range(2)]
    ready = controller.wait_for_ranks(2)
    assert {report.disk_slots > 20 for report in ready.values()} == {True}
    assert {(report.tier_problem, report.has_remote) for report in ready.values()} == {("", False)}
    controller.send(first_plan())
    controller.send(StepPlan(2, 1, saves=pack_int32([3, 0, 1, 1, 1, 1])))
    name = bytes(16)
    disk, remote = TierKind.DISK, TierKind.REMOTE
    writes = [TierMove(1, disk, True, 0, 1, 7, 1, name), TierMove(2, remote, True, 1, 1, -1, 0, name)]
    reads = [TierMove(3, disk, False, 5, 2, 7, 1, name), TierMove(4, disk, False, 6, 2, 8, 1, name)]
    for moves, expected in ((writes, {1: 0, 2: 2}), (reads, {3: 0, 4: 1})):
        controller.send(TierMoves(2, moves))
        found: dict[int, dict[int, int]] = {0: {}, 1: {}}
        while any(len(statuses) < 2 for statuses in found.values()):
            done = controller.wait_for(MovesDone)[0]
            assert done.epoch == 1
            found[done.rank] |= {outcome.id: outcome.status for outcome in done.outcomes}
        assert found == {0: expected, 1: expected}
    controller.send(Probe(9, name))
    probed = controller.wait_for(Probed, 2)
    assert {(report.rank, report.probe, report.present) for report in probed} == {(0, 9, -1), (1, 9, -1)}
    controller.send(StepPlan(3, 1, loads=pack_int32([5, 5, 2]), load_fence=3))
    assert controller.wait_for(StepResult)[0].step == 3
    controller.send(Shutdown())
    assert [process.wait(timeout=60) for process in processes] == [0, 0]


def test_a_rank_leaves_with_moves_under_way(setup: Setup) -> None:
    """Also when the controller dies: nobody waits for a disk."""
    controller = setup.controller()
    process = start_with_disk(setup, 0, 1)
    controller.wait_for_ranks(1)
    controller.send(first_plan())
    controller.send(StepPlan(2, 1, saves=pack_int32([3, 0, 1])))
    moves = [TierMove(index, TierKind.DISK, True, 0, 1, index % 20, index, bytes(16)) for index in range(2000)]
    controller.send(TierMoves(2, moves))
    controller.wait_for(MovesDone)
    controller.close()
    assert process.wait(timeout=60) == EXIT_LEFT


def test_a_rank_with_tiers_sleeps_while_nothing_comes(setup: Setup) -> None:
    controller = setup.controller()
    process = start_with_disk(setup, 0, 1, remote_url="redis://127.0.0.1:1/0")
    controller.wait_for_ranks(1)
    controller.send(first_plan())
    controller.wait_for(StepResult)
    rank = psutil.Process(process.pid)

    def is_quiet() -> bool:
        before = rank.cpu_times()
        time.sleep(2.0)
        after = rank.cpu_times()
        return bool(sum(after[:2]) - sum(before[:2]) <= 0.04)  # 2 % of a core, in ticks of 10 ms

    # Given time: on a loaded machine, what follows the start (the remote tier's trial, the first KV) takes longer.
    assert any(is_quiet() for _ in range(10))


def test_only_sigterm_ends_a_rank(setup: Setup) -> None:
    """Ctrl-C is its supervisor's business."""
    _, (process,) = setup.serve()
    assert is_worker(process.pid)
    assert not is_worker(os.getpid())
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_grammars_are_reported_by_rank_0_at_once(setup: Setup) -> None:
    """A problem that shows without compiling is reported within a poll of a compiling rank, not of an idle one."""
    controller, _ = setup.serve(tp=2)
    for grammar in range(7, 107):  # a busy machine may let it wait
        started = time.monotonic()
        controller.send(CompileGrammar(grammar, "json_schema", "{not json"))
        report = controller.wait_for(GrammarReady)[0]
        waited_s = time.monotonic() - started
        assert report.grammar == grammar
        assert report.problem
        controller.send(ForgetGrammar(grammar))
        if waited_s < 0.2:
            break
    assert waited_s < 0.2
    # The steps go on.
    controller.send(StepPlan(2, 1, rows=pack_int32([1]), runs=b""))
    assert len(unpack_int32(controller.wait_for(StepResult)[0].tokens)) == 1


def test_a_missing_tokenizer_ends_the_request_not_the_rank(setup: Setup) -> None:
    """Compiling happens beside the steps, whatever comes of it; which of both is ready first is open."""
    controller = setup.controller()
    setup.start()
    controller.wait_for_ranks(1)
    controller.send(CompileGrammar(3, "regex", "[a-z]+"))
    controller.send(first_plan())
    reports: dict[type, WorkerReport] = {}
    while not reports.keys() >= {StepResult, GrammarReady}:
        report = controller.receive()
        reports[type(report)] = report
    assert reports.keys() <= {StepResult, GrammarReady, WorkerReady}  # readiness is told until the first plan
    ready = reports[GrammarReady]
    assert isinstance(ready, GrammarReady)
    assert "on this server" in ready.problem


@pytest.mark.parametrize(("plan", "reason"), [(StepPlan(3, 1), "lost"), (b"\xc1 not msgpack", "undecodable")])
def test_bad_plan_is_reported_and_ends_the_rank(plan: StepPlan | bytes, reason: str, setup: Setup) -> None:
    controller, (process,) = setup.serve()
    payload = plan if isinstance(plan, bytes) else msgspec.msgpack.encode(plan)
    controller.plans.send_multipart([plan_topic(1), payload])
    failed = controller.wait_for(WorkerFailed)[0]
    assert failed.rank == 0
    assert reason in failed.reason
    assert process.wait() == 1


def test_peer_death_is_reported(setup: Setup) -> None:
    controller, ranks = setup.serve(tp=2)
    ranks[1].kill()
    controller.send(StepPlan(2, 1, rows=pack_int32([1]), runs=b""))
    failed = controller.wait_for(WorkerFailed)[0]
    assert (failed.rank, failed.reason, failed.is_consequence) == (0, "rank 1 has died", True)
    assert ranks[0].wait() == EXIT_LEFT


def block_in_a_collective(setup: Setup) -> tuple[FakeController, list[RankProcess]]:
    """Rank 0 waits for rank 1, which is frozen but alive."""
    controller, ranks = setup.serve(tp=2)
    ranks[1].send_signal(signal.SIGSTOP)
    controller.send(StepPlan(2, 1, rows=pack_int32([1]), runs=b""))
    time.sleep(0.3)
    return controller, ranks


def test_controller_death_ends_a_rank_blocked_in_a_collective(setup: Setup) -> None:
    controller, ranks = block_in_a_collective(setup)
    controller.close()
    assert ranks[0].wait() == EXIT_LEFT


def test_an_ended_epoch_is_left_from_within_a_collective(setup: Setup) -> None:
    controller, ranks = block_in_a_collective(setup)
    controller.leave(0)  # an older epoch
    time.sleep(0.2)
    assert ranks[0].poll() is None
    for rank in ranks:
        rank.send_signal(signal.SIGCONT)  # the second one stood still
        while rank.poll() is None:  # a rank's watchdog may subscribe late
            controller.leave(1)
            time.sleep(0.05)
        assert rank.wait() == EXIT_LEFT


def test_nothing_is_loaded_before_the_welcome(setup: Setup) -> None:
    """Who comes early waits for the other ranks; it says so again and again, always as the same process."""
    controller = setup.controller()
    process = setup.start()
    hellos = []
    for _ in range(2):
        assert controller.reports.poll(PATIENCE_MS)
        hellos.append(msgspec.msgpack.decode(controller.reports.recv(), type=WorkerReport))
    hello = hellos[0]
    assert isinstance(hello, WorkerHello)
    assert hellos == [hello] * 2
    assert (hello.rank, hello.pid, hello.node) == (0, process.pid, node_id())
    assert hello.node
    assert {name: hello.terms[name] for name in ("tp", "dtype")} == {"tp": "1", "dtype": "float32"}
    controller.leave(1_000_000)  # that is for those who belong to an epoch
    controller.wait_for_ranks(1)
    topic = rank_topic(0, hello.incarnation)
    controller.plans.send_multipart([topic, msgspec.msgpack.encode(Shutdown())])
    assert process.wait() == 0


def test_a_rank_that_is_refused_ends(setup: Setup) -> None:
    controller = setup.controller()
    process = setup.start()
    assert controller.reports.poll(PATIENCE_MS)
    hello = msgspec.msgpack.decode(controller.reports.recv(), type=WorkerReport)
    assert isinstance(hello, WorkerHello)
    topic = rank_topic(0, hello.incarnation)
    while controller.plans.poll(PATIENCE_MS) and controller.plans.recv() != b"\x01" + topic:
        pass  # what is sent before the subscription has come is lost
    refused = Refused(hello.incarnation, "rank 0 has another dtype")
    controller.plans.send_multipart([topic, msgspec.msgpack.encode(refused)])
    assert process.wait() == 1


def test_what_can_never_work_has_an_exit_code_of_its_own(setup: Setup, tmp_path: Path) -> None:
    """But a model whose files are away may be back at the next start.

    The code stays if the order to leave comes before the process has ended: so the controller answers.
    """
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    controller = setup.controller()

    def failure(code: int, **fields: Any) -> str:
        process = setup.start(**fields)
        failed = controller.wait_for(WorkerFailed)[0]
        controller.leave(1)
        assert not failed.is_consequence
        assert process.wait() == code
        return failed.reason

    assert failure(EXIT_CONFIG, device="cuda", gpu=0) == "device is 'cuda', but torch finds no CUDA device"
    setup.model = tmp_path / "away"
    assert "is not a model folder" in failure(1)
    setup.model.mkdir()
    (setup.model / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    assert "NoSuchModel" in failure(EXIT_CONFIG)


def test_a_rank_that_gives_up_keeps_its_exit_code(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog ends the process if the main thread does not, but with the code of what has happened."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(service, "_LEAVE_WITHIN_S", 0.01)
    link = Link(run_config(setup.model, plan_endpoint="ipc://unused", report_endpoint="ipc://unused"))
    watchdog = Watchdog(link)
    watchdog.epoch = 4
    watchdog._obey(msgspec.msgpack.encode(Leave(3)))
    assert codes == []
    watchdog._obey(msgspec.msgpack.encode(Leave(4)))
    watchdog.give_up(EXIT_CONFIG)
    watchdog._obey(msgspec.msgpack.encode(Leave(4)))
    watchdog._left.set()
    watchdog._obey(msgspec.msgpack.encode(Leave(4)))
    assert codes == [EXIT_LEFT, EXIT_CONFIG]
    link.stop_monitor()
    link.monitor.close(linger=0)
    link.close()


def test_a_controller_that_leaves_as_the_rank_does_keeps_no_rank_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog may end before the main thread has ended the monitoring that it watches. With a closed monitor,
    that call would never return, and no other thread would run any more."""
    monkeypatch.setattr(service, "_LEAVE_WITHIN_S", PATIENCE_MS / 1000)
    link = Link(run_config(Path("unused"), plan_endpoint="ipc://unused", report_endpoint="ipc://unused"))
    watchdog = Watchdog(link)
    stop_monitor = link.stop_monitor

    class Left(threading.Event):
        """Lets the watchdog end before the main thread goes on."""

        def set(self) -> None:
            super().set()
            watchdog._thread.join(PATIENCE_MS / 1000)
            assert not watchdog._thread.is_alive()

    def stop_open_monitor() -> None:
        assert not link.monitor.closed
        stop_monitor()

    monkeypatch.setattr(watchdog, "_left", Left())
    monkeypatch.setattr(watchdog, "_controller_leaves", lambda *_: True)
    monkeypatch.setattr(link, "stop_monitor", stop_open_monitor)
    watchdog.start()
    watchdog.stop()
    link.close()
    assert watchdog.controller_gone.is_set()


def test_a_controller_says_how_large_its_steps_are() -> None:
    """A rank on another host need not be told so by its own configuration."""
    config = run_config(Path("unused"))
    told = service._welcomed(config, Welcome(b"", 7, 300, 9))
    assert (told.epoch, told.token_budget, told.max_rows) == (7, 300, 9)
    told = service._welcomed(config, Welcome(b"", 7))  # an older controller
    assert (told.epoch, told.token_budget, told.max_rows) == (7, config.token_budget, config.max_rows)


def test_a_bad_configuration_is_said_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"model": "x", "plan_endpoint": "", "report_endpoint": "", "tp": 0}))
    command = [sys.executable, "-m", "trunkline.worker", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"tp is 0" in done.stderr
