"""A controller process over real sockets: simulated ranks on one side, a router by hand on the other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from simulation.worker import SimulatedWorkers

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import Ping, Submit
from trunkline.controller.reports import AdapterReady, WorkerFailed, WorkerHello, WorkerReady
from trunkline.kvstore.adapters import adapter_key
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.messages import Flushed, Outputs, RouterMessage, State
from trunkline.worker.messages import (
    LoadAdapter,
    Sampling,
    Shutdown,
    Welcome,
    WorkerMessage,
    member_topic,
    plan_topic,
    rank_topic,
)

BLOCKS, CHUNK = 32, 4
NO_LIMIT = 1 << 30


class Failure(NamedTuple):
    """Of rank 1."""

    reason: str
    comes_last: bool
    """It is reported when the connection of rank 0 has been closed, not before."""


class StepQueue:
    """Steps that came, in order; those above a limit wait for it to be raised."""

    def __init__(self) -> None:
        self.last = NO_LIMIT
        """The last step that may be answered."""
        self.waiting: deque[Any] = deque()

    def take(self) -> Iterator[Any]:
        """Yield the steps that may be answered."""
        while self.waiting and self.waiting[0].step <= self.last:
            yield self.waiting.popleft()


class Ranks(threading.Thread):
    """Both ranks of a group in one thread; rank 0 answers with what the simulated workers compute."""

    def __init__(self, config: ControllerConfig, *, blocks: int = BLOCKS) -> None:
        super().__init__(daemon=True)
        self.config = config
        self.steps = StepQueue()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.plans = [self.context.socket(zmq.SUB) for _ in range(config.tp)]
        self.report = self.context.socket(zmq.PUSH)
        self.report.connect(config.report_endpoint)
        self.workers = SimulatedWorkers(BLOCKS, CHUNK)
        self.steps_seen = [0] * config.tp
        self.shut_down = threading.Event()
        self.leave = threading.Event()
        self.failure: Failure | None = None
        """What rank 1 fails with."""
        self.blocks = blocks
        self.incarnations = [os.urandom(16) for _ in range(config.tp)]
        self.epoch = 0
        self.welcomed: set[int] = set()
        """Ranks that are to subscribe to the plans, …"""
        self.holds_back: set[int] = set()
        """… but these not yet."""
        _started.append(self)

    @property
    def answer(self) -> bool:
        """Whether steps are answered."""
        return self.steps.last > 0

    @answer.setter
    def answer(self, answer: bool) -> None:
        self.steps.last = NO_LIMIT if answer else 0

    def end(self) -> None:
        """Close the sockets, as when the processes are killed."""
        self.leave.set()
        self.join()

    def say_hello(self, rank: int) -> None:
        self.plans[rank].connect(self.config.plan_endpoint)
        self.plans[rank].subscribe(rank_topic(rank, self.incarnations[rank]))
        # Nobody may kill this process for a rank that does not leave.
        self.send(WorkerHello(rank, os.getpid(), "elsewhere", self.incarnations[rank]))

    def enter(self, rank: int) -> None:
        self.plans[rank].subscribe(plan_topic(self.epoch))
        self.plans[rank].subscribe(member_topic(self.incarnations[rank]))

    def say_ready(self, rank: int) -> None:
        self.send(WorkerReady(rank, self.epoch, os.getpid(), self.blocks + rank, 1, "simulated"))

    def send(self, message: Any) -> None:
        self.report.send(msgspec.msgpack.encode(message))

    def run(self) -> None:
        poller = zmq.Poller()
        for plan in self.plans:
            poller.register(plan, zmq.POLLIN)
        while not self.leave.is_set():
            if self.failure is not None:
                if self.failure.comes_last:
                    self.plans[0].close(linger=0)
                self.send(WorkerFailed(1, self.failure.reason, self.incarnations[1]))
                break
            for ready, _ in poller.poll(20):
                self.receive(self.plans.index(ready))
            self.answer_steps()
            for rank in self.welcomed - self.holds_back:
                self.welcomed.discard(rank)
                self.enter(rank)
        for socket in [*self.plans, self.report]:
            socket.close(linger=200)
        self.context.term()

    def receive(self, rank: int) -> None:
        topic, payload = self.plans[rank].recv_multipart()
        message = msgspec.msgpack.decode(payload, type=WorkerMessage)
        if isinstance(message, Welcome):
            assert topic == rank_topic(rank, message.incarnation)
            assert message.incarnation == self.incarnations[rank]
            assert self.epoch in (0, message.epoch)
            self.epoch = message.epoch
            self.steps.waiting.clear()
            self.welcomed.add(rank)
            self.say_ready(rank)
            return
        if isinstance(message, Shutdown):
            self.shut_down.set()
            self.leave.set()
            return
        assert topic == plan_topic(self.epoch)
        if isinstance(message, LoadAdapter):
            is_there = Path(message.path).is_dir()
            key, problem = (adapter_key(message.name, b""), "") if is_there else (b"", "no such folder")
            self.send(AdapterReady(rank, message.ticket, key, problem))
            return
        self.steps_seen[rank] += 1
        assert message.step == self.steps_seen[rank], "a rank missed a step"
        if rank == 0:
            self.steps.waiting.append(message)
            self.answer_steps()

    def answer_steps(self) -> None:
        for step in self.steps.take():
            self.send(self.workers.execute(step))


_started: list[Ranks] = []


def end_ranks() -> None:
    """End all ranks, also those that a test that failed has left."""
    while _started:
        ranks = _started.pop()
        ranks.leave.set()
        if ranks.ident is not None:  # it was started
            ranks.join(timeout=10)
        else:
            ranks.context.destroy(linger=0)


class Router:
    """A router by hand: checks sequence numbers, collects streams."""

    def __init__(self, config: ControllerConfig) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(config.router_endpoint)
        self.seq = 0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, tuple[str, str]] = {}
        self.cached: dict[int, int] = {}
        self.state: State | None = None
        self.flushed: Flushed | None = None

    def send(self, message: Any) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def submit(self, request: int, prompt: list[int], max_tokens: int, seed: int = 0, salt: bytes = b"") -> None:
        sampling = Sampling(seed=seed)
        self.send(Submit(request, pack_int32(prompt), len(prompt), max_tokens, sampling, salt=salt))

    def call(self, message: Any) -> Any:
        """Send a call; return its answer, which is the next message."""
        self.send(message)
        assert self.socket.poll(60_000), "the controller said nothing"
        reply = msgspec.msgpack.decode(self.socket.recv(), type=RouterMessage)
        self.seq += 1
        assert (reply.seq, reply.ticket) == (self.seq, message.ticket)
        return reply

    def receive(self, seconds: float = 60.0) -> None:
        if not self.socket.poll(int(seconds * 1000)):
            raise TimeoutError("the controller said nothing")
        message = msgspec.msgpack.decode(self.socket.recv(), type=RouterMessage)
        self.seq += 1
        assert message.seq == self.seq, "a message of the stream was lost"
        match message:
            case State():
                self.state = message
            case Flushed():
                self.flushed = message
            case Outputs():
                self.take(message)

    def take(self, outputs: Outputs) -> None:
        for started in outputs.started:
            self.cached[started.request] = started.cached_tokens
        requests = np.frombuffer(outputs.requests, "<u4").tolist()
        for request, token in zip(requests, np.frombuffer(outputs.tokens, "<i4").tolist(), strict=True):
            assert request in self.cached, "a token before the start"
            self.tokens.setdefault(request, []).append(token)
        for finished in outputs.finished:
            self.finished[finished.request] = (finished.reason, finished.detail)

    def wait_state(self, status: str, seconds: float = 60.0) -> State:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.send(Ping(0))
            self.receive()
            if self.state is not None and self.state.status == status:
                return self.state
            time.sleep(0.02)
        raise TimeoutError(f"the controller is not {status}: {self.state}")

    def wait_running(self, count: int) -> None:
        """Until the controller has admitted so many requests (a `State` may be older than our last message)."""
        while self.wait_state("ready").running != count:
            time.sleep(0.02)

    def wait_finished(self, *requests: int) -> None:
        while not set(requests) <= set(self.finished):
            self.receive()

    def close(self) -> None:
        """Also of sockets that a test has made in this context: an open one would be waited for without end."""
        self.context.destroy(linger=0)


def group_config(folder: Path) -> ControllerConfig:
    """Of a group of two small ranks, which gives routers and requests more time than any machine needs."""
    return ControllerConfig(
        tp=2,
        plan_endpoint=f"ipc://{folder}/plan",
        report_endpoint=f"ipc://{folder}/report",
        router_endpoint=f"ipc://{folder}/router",
        chunk_size=CHUNK,
        max_context=96,
        token_budget=24,
        max_rows=8,
        max_waiting=16,
        debug_checks=True,
        router_silence_seconds_max=600.0,
        drain_seconds=600.0,
    )


@contextmanager
def run_controller(
    config: ControllerConfig, folder: Path, *, prelude: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], Router]]:
    """One with a configuration of its own. At the end it is gone, and all ranks with it. `prelude`: Python that it
    runs first."""
    path = folder / "own.json"
    path.write_bytes(msgspec.json.encode(config))
    script = f"import sys\n{prelude}\nfrom trunkline.controller.__main__ import main\nsys.exit(main())"
    start = ["-c", script] if prelude else ["-m", "trunkline.controller"]
    process = subprocess.Popen([sys.executable, *start, "--config", str(path)])
    try:
        router = Router(config)
        try:
            yield process, router
        finally:
            end_ranks()
            router.close()
    finally:
        process.kill()
        process.wait()


def start_ranks(config: ControllerConfig, *, answer: bool = True, steps_max: int = NO_LIMIT) -> Ranks:
    """All ranks of a group, who have said hello."""
    ranks = Ranks(config)
    ranks.steps.last = steps_max if answer else 0
    for rank in range(config.tp):
        ranks.say_hello(rank)
    ranks.start()
    return ranks
