"""A controller that stops waits until its routers have read how their streams end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from controller.service_harness import group_config

from trunkline.controller.messages import Submit
from trunkline.controller.service import service as controller_service
from trunkline.controller.service.service import ControllerService
from trunkline.controller.service.turns import Status
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.membership.member import Member
from trunkline.router.messages import Finished, FinishReason, Outputs
from trunkline.router.streams import link as router_link
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.streams import Event
from trunkline.worker.messages import Sampling


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerService]:
    """A controller without workers, which drains, and has all the time to do so."""
    monkeypatch.setattr(controller_service, "READ_SECONDS_MAX", 20.0)
    monkeypatch.setattr(router_link, "PING_SECONDS", 600.0)  # a router that waits for its timer comes too late
    service = ControllerService(group_config(tmp_path))
    service._set_status(Status.DRAINING, "it stops")
    yield service
    service.close()


class Receiver:
    """What a stream of the router hears."""

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def receive(self, event: Event) -> None:
        self.heard.append(event)


async def until_read(service: ControllerService) -> Receiver:
    """Let a controller end a router's stream, and leave while the router's loop stands still."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link, receiver = ControllerLink(0, Member("0", service.config.router_endpoint), context, 600.0), Receiver()
    link.open()

    async def turn_until(is_so: object) -> None:
        assert callable(is_so)
        async with asyncio.timeout(60):
            while not is_so():
                service._turn({service.group.plans, service.group.reports, service.routers.socket})
                await asyncio.sleep(0.002)

    def is_connected() -> bool:
        """On a busy machine the first ping comes before the connection and is lost; no timer sends another."""
        if link.state is None:
            link.ping()
        return link.state is not None

    await turn_until(is_connected)
    link.submit(lambda number: Submit(number, pack_int32([1]), 1, 1, Sampling(seed=1)), receiver)  # type: ignore[arg-type]
    (index,) = service.routers.indices()
    known = service.routers._by_index[index]
    await turn_until(lambda: 0 < known.last_outputs <= known.last_read)  # the refusal; it is told at once
    receiver.heard.clear()
    number = link.submit(lambda number: Submit(number, pack_int32([1]), 1, 1, Sampling(seed=1)), receiver)  # type: ignore[arg-type]
    service.routers.send(index, Outputs(0, finished=[Finished(number, FinishReason.LENGTH)]))
    assert service.routers.behind(0.0, 600.0) == [index]
    leaving = threading.Thread(target=service._let_routers_read)
    leaving.start()
    leaving.join(0.05)  # this router's loop stands still
    assert leaving.is_alive()
    while leaving.is_alive():
        await asyncio.sleep(0.002)
    assert not service.routers.behind(0.0, 600.0)
    link.close()
    context.term()
    return receiver


def test_a_router_whose_loop_stands_still_loses_nothing(service: ControllerService) -> None:
    heard = asyncio.run(until_read(service)).heard
    assert [type(event) for event in heard[:1]] == [Finished]
    assert heard[0] == Finished(2, FinishReason.LENGTH)


def test_routers_that_say_nothing_or_are_gone_are_not_waited_for(service: ControllerService) -> None:
    index = service.routers._heard(b"another", time.monotonic())
    router = service.routers._by_index[index]
    router.last_outputs = 3
    assert service.routers.behind(0.0, 600.0) == []
    service._let_routers_read()
    router.last_read = 2
    assert service.routers.behind(time.monotonic(), 600.0) == [index]
    service._let_routers_read()  # the first message to it shows that it is not connected
    assert service.routers.behind(time.monotonic(), 600.0) == []
