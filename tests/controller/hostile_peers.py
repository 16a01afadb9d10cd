"""A controller's service in this process, with peers on its real sockets who say what no right peer says."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import msgspec
import zmq
from controller.service_harness import BLOCKS, CHUNK, group_config
from msgspec.structs import replace
from simulation.hostile import altered
from simulation.layout import Layout
from simulation.worker import SimulatedWorkers

from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.messages import (
    ENDED_CHARACTERS_MAX,
    WENT_ON_NAMES,
    Abort,
    BeamSearch,
    DescribeTree,
    EventsCall,
    FlushCache,
    Grammar,
    ModulesCall,
    ModuleText,
    Ping,
    Prefetch,
    PromptLayout,
    Submit,
    Told,
    WentOn,
)
from trunkline.controller.reports import GrammarReady, StepResult, WorkerFailed, WorkerHello, WorkerReady
from trunkline.controller.service.service import ControllerService
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.messages import Outputs, RouterMessage
from trunkline.worker.messages import (
    CompileGrammar,
    Leave,
    Sampling,
    StepPlan,
    Welcome,
    WorkerMessage,
    member_topic,
    plan_topic,
    rank_topic,
)

VOCAB = 500
NO_REACH: dict[int, int] = {}
LAYOUT = PromptLayout(
    [ModuleText(pack_int32([5, 6, 7]), 0, -1, pack_int32([0, 3])), ModuleText(pack_int32([8, 9]), 3, 0)],
    pack_int32([6, 4]),
)


def requests(chosen: random.Random) -> list[msgspec.Struct]:
    """One of each kind of message that a router sends, and of each kind of `Submit`."""
    prompt = pack_int32([chosen.randrange(50) for _ in range(chosen.randrange(4, 20))])
    count, number = len(prompt) // 4, chosen.randrange(1, 40)
    sampling = Sampling(temperature=1.0, seed=3, logit_bias={3: 1.0}, bad_words=[[4, 5]], logprobs=2)

    def submit(**fields: Any) -> Submit:
        return Submit(number, prompt, count, chosen.randrange(1, 8), **{"sampling": sampling, **fields})

    return [
        submit(stop_token_ids=[1, 2], salt=b"salt", priority=1, ttl=1.0),
        submit(n=3),
        submit(beam=BeamSearch(2), n=2, sampling=Sampling()),
        submit(drops=pack_int32([0, 2])),
        submit(grammar=Grammar("regex", "a*")),
        submit(sampling=Sampling(prompt_logprobs=2)),
        submit(sampling=Sampling(pooling=chosen.choice((1, 2)))),
        Submit(number, pack_int32([1, 2, 3, 4]), 4, 3, Sampling(), layout=LAYOUT),
        Abort(number, chosen.choice((-1, 0, 1))),
        Told(number, chosen.choice(("calls add", "\0" * ENDED_CHARACTERS_MAX, "x" * 1000))),
        WentOn(bytes(16 * chosen.choice((1, WENT_ON_NAMES, 1000))), chosen.choice((-1, 0, 1 << 60))),
        WentOn(b"no names", 9),
        Ping(number),
        FlushCache(number),
        Prefetch(number, prompt, b"", pack_int32([0, 2])),
        Prefetch(number, b"", layout=LAYOUT),
        ModulesCall(
            number, chosen.choice(("encode", "look", "unpin", "cancel")), LAYOUT.texts, b"", "schema/a", 1.0
        ),
        EventsCall(number, b"12345678", 3, 1, 2),
        DescribeTree(number, 100, 4),
    ]


class Group:
    """The service, its simulated ranks and a router that does everything right. Nothing runs by itself."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.config = replace(
            group_config(folder),
            events_endpoint=f"ipc://{folder}/events",
            index_path=str(folder / "index.sqlite"),
            tier_fingerprint="00",
            vocab_size=VOCAB,
            router_silence_seconds_max=1e9,
            epoch=7,
        )
        self.chosen = random.Random(seed)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.service = ControllerService(self.config)
        self.poller = zmq.Poller()
        for readable in (self.service.group.plans, self.service.group.reports, self.service.routers.socket):
            self.poller.register(readable, zmq.POLLIN)
        self.report = self.socket(zmq.PUSH, self.config.report_endpoint)
        self.hostile = self.socket(zmq.DEALER, self.config.router_endpoint)
        self.friend = self.socket(zmq.DEALER, self.config.router_endpoint)
        self.said: list[Any] = []
        """What the friend has been told."""
        self.ranks: list[zmq.Socket[bytes]] = []
        self.result_of = self.right_result
        """What becomes of a step's result before it is sent."""
        self.has_lied = False
        """Whether these workers said other tokens or beams than they drew, in a form that a right worker uses."""
        self.form()

    def socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.connect(endpoint)
        return socket

    def form(self) -> None:
        """New ranks, until the group is ready with them: by then all that was reported before has been read."""
        for left in self.ranks:
            left.close()
        self.workers = SimulatedWorkers(BLOCKS, CHUNK)
        self.has_lied = False
        self.incarnations = [os.urandom(16) for _ in range(2)]
        self.ranks = [self.context.socket(zmq.SUB) for _ in range(2)]
        self.epoch = 0
        for rank, socket in enumerate(self.ranks):
            socket.set(zmq.LINGER, 0)
            socket.subscribe(rank_topic(rank, self.incarnations[rank]))
            socket.connect(self.config.plan_endpoint)
            self.send(self.report, WorkerHello(rank, os.getpid(), "elsewhere", self.incarnations[rank]))
        for _ in range(500):
            self.turn(wait_ms=20)
            if self.epoch and self.service.status == "ready":
                return
        raise AssertionError(f"the group does not get ready: {self.service.detail}")

    @staticmethod
    def send(socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
        socket.send(msgspec.msgpack.encode(message))

    def turn(self, wait_ms: int = 0) -> None:
        """One of the service's, and what the peers answer to it."""
        if wait_ms:
            self.service.group.plans.poll(wait_ms // 2)
            self.service.group.reports.poll(wait_ms // 2)
        self.service._turn({readable for readable, _ in self.poller.poll(0)})
        for rank, socket in enumerate(self.ranks):
            while socket.poll(wait_ms):
                self._obey(rank, msgspec.msgpack.decode(socket.recv_multipart()[-1], type=WorkerMessage | Leave))
        while self.hostile.poll(0):
            self.hostile.recv()
        while self.friend.poll(0):
            self.said.append(msgspec.msgpack.decode(self.friend.recv(), type=RouterMessage))

    def _obey(self, rank: int, message: Any) -> None:
        socket = self.ranks[rank]
        match message:
            case Welcome():
                self.epoch = message.epoch
                socket.subscribe(plan_topic(message.epoch))
                socket.subscribe(member_topic(self.incarnations[rank]))
                self.send(self.report, WorkerReady(rank, message.epoch, os.getpid(), BLOCKS, 1, "simulated"))
            case CompileGrammar() if rank == 0:
                self.send(self.report, GrammarReady(message.grammar, "not here"))
            case StepPlan() if rank == 0:
                self._execute(message)

    def _execute(self, plan: StepPlan) -> None:
        """Where workers lied, a plan may not go with what they drew; elsewhere all is as it must be."""
        try:
            result = self.workers.execute(plan, _with_modules(plan))
        except AssertionError as error:
            if not self.has_lied:
                raise
            self.send(self.report, WorkerFailed(0, str(error), self.incarnations[0]))
            return
        self.result_of(result)

    def altered_result(self, result: StepResult) -> None:
        """Is sent with something wrong in it."""
        data = altered(self.chosen, result)
        try:
            said = msgspec.msgpack.decode(data, type=StepResult)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            said = result
        self.has_lied |= (said.tokens, said.beams) != (result.tokens, result.beams)
        self.report.send(data)

    def right_result(self, result: Any) -> None:
        """Is sent as it is."""
        self.send(self.report, result)

    def ask(self, number: int, tokens: int = 6) -> list[int]:
        """The friend's request, to its end; its tokens."""
        self.said.clear()
        self.send(self.friend, Submit(number, pack_int32([3, 1, 4, 1, 5, 9, 2, 6]), 8, tokens, Sampling(seed=1)))
        got: list[int] = []
        for _ in range(3000):
            self.turn(wait_ms=2)
            for message in self.said:
                if isinstance(message, Outputs):
                    got += list(memoryview(message.tokens).cast("i"))
                    for finished in message.finished:
                        assert (finished.request, finished.reason) == (number, "length"), finished
                        return got
            self.said.clear()
        raise AssertionError("the friend's request does not end")

    def settle(self) -> None:
        """The hostile router goes, and nothing of it is left."""
        service = self.service
        assert service.engine is not None
        service.config = replace(service.config, router_silence_seconds_max=1e8)
        for _ in range(1000):
            for router in service.routers._by_index.values():  # again: messages may still be on their way
                router.last_heard = float("-inf")
            self.turn(wait_ms=1)
            if service.engine.is_idle and not service.engine.open_calls():
                break
        else:
            raise AssertionError("something of the hostile router goes on")
        assert not service.engine.requests()
        check_integrity(service.engine.scheduler)

    def close(self) -> None:
        for socket in (*self.ranks, self.report, self.hostile, self.friend):
            socket.close(linger=0)
        self.context.term()
        self.service.close()


def _with_modules(plan: StepPlan) -> dict[int, dict[int, int]]:
    """Those who join with extents that act in another order than they stand: their prompts have modules."""
    found = {}
    for join in plan.joins:
        try:
            Layout(join.extents, CHUNK)
        except AssertionError:
            found[join.sequence] = NO_REACH
    return found
