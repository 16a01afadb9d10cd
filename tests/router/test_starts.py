"""That a controller has begun a request is noted once, and before its end; why it has it, behind its message."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.jobs.job import Job
from trunkline.router.membership.member import Member
from trunkline.router.messages import FinishReason, Started
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.request import Decision, RouteRequest
from trunkline.router.streams.dispatch import Dispatcher
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.links import Links
from trunkline.router.streams.streams import Attempt, End, RoutedRequest, Stream
from trunkline.worker.messages import Sampling


class Desk:
    """A dispatcher, and a request of two samples that go on alone, each at a controller that is not connected."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.core = RoutingCore()
        self.dispatcher = Dispatcher(Links(), self.core, resume_seconds=600.0, max_context=lambda model: 2048)
        self.link = ControllerLink(self.core.add("a"), Member("a", "tcp://a:1"), context, 10.0)
        job = Job(prompt=[7], max_tokens=100, sampling=Sampling(), eos_ids=frozenset({1}))
        self.routed = RoutedRequest(1, job, RouteRequest(b""), Stream(1, lambda *_: None, samples=2))

    def attempt(self, sample: int) -> Attempt:
        made = Attempt(self.dispatcher, self.routed, self.link, sample + 1, sample)
        self.routed.attempts[sample + 1] = made
        return made


def test_the_end_of_one_sample_leaves_the_wait_of_another() -> None:
    async def run() -> None:
        desk = Desk(context)
        first, _ = desk.attempt(0), desk.attempt(1)
        first.receive(Started(1, 0, [0]))
        await asyncio.sleep(0)
        timer = desk.routed.timer = asyncio.get_running_loop().call_later(600.0, print)  # of the other sample
        desk.dispatcher.finished(first, End(FinishReason.STOP))
        assert desk.routed.timer is timer
        assert not timer.cancelled()

    with zmq.Context() as context:
        asyncio.run(run())


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ENGINE_FAILED])
def test_what_a_lost_controller_began_is_not_noted_behind_its_loss(reason: FinishReason) -> None:
    """Its chunks have been forgotten by then. Of an answer that comes along with its start, the start counts."""

    async def run() -> None:
        desk = Desk(context)
        attempt, noted = desk.attempt(0), list[bytes]()
        desk.core.index.on_device = lambda controller, names: noted.extend(names)  # type: ignore[method-assign]
        attempt.names = [bytes(16)]
        attempt.receive(Started(1, 0, [0]))
        desk.routed.waiting.add(1)
        desk.dispatcher.finished(attempt, End(reason))
        await asyncio.sleep(0)
        assert noted == ([bytes(16)] if reason == FinishReason.STOP else [])

    with zmq.Context() as context:
        asyncio.run(run())


def test_what_is_decided_behind_a_request_is_noted_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one controller: the message leaves before its chunks are looked up. Metrics and what is learnt wait."""

    async def run() -> None:
        core, links, told = RoutingCore(), Links(), list[Decision]()
        link = ControllerLink(core.add("a"), Member("a", "tcp://a:1"), context, 10.0)
        links.add(link)
        core.traits.set_identity(link.index, KvIdentity(b"model", "float32", 4))
        core.set_available(link.index, True)
        monkeypatch.setattr(link, "submit", lambda make, attempt: make(1).request)
        dispatcher = Dispatcher(
            links, core, resume_seconds=0.0, max_context=lambda model: 2048, learns=True, on_route=told.append
        )
        job = Job(prompt=list(range(9)), max_tokens=1, sampling=Sampling(), eos_ids=frozenset({1}))
        stream = dispatcher.submit(job, RouteRequest(pack_int32(job.prompt)))
        (attempt,) = dispatcher._routed[stream.request].attempts.values()
        (decision,) = told
        assert (decision.new_tokens, decision.blocks, len(decision.names)) == (9, 3, 2)
        assert attempt.names == decision.names

    with zmq.Context() as context:
        asyncio.run(run())
