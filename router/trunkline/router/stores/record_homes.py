"""Small documents that several routers share: records of the controllers (`controller/storage/records.py`), which
sessions and schemas are made of.

Every record has a home, the controller that keeps it (rendezvous hash of a key over the configured controllers).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from trunkline.controller.messages import RecordCall
from trunkline.router.errors import ApiError, unavailable
from trunkline.router.messages import Record, RecordReply
from trunkline.router.routing.rendezvous import rendezvous
from trunkline.router.streams.link import Answer, Call, ControllerLink

VALUE_BYTES_MAX: Final = 15 << 20
"""A controller takes a little more; what would be larger than this is refused before work is spent on it."""
CALL_SECONDS: Final = 10.0


class RecordHomes:
    """All records of all controllers. Calls that are not answered raise `ApiError` 503."""

    def __init__(self, links: Sequence[ControllerLink]) -> None:
        """`links`: the controllers, by index; they may be added later."""
        self._links = links

    def home_of(self, key: str) -> ControllerLink:
        """The controller that keeps what has this key."""
        return self._links[rendezvous(key, len(self._links))]

    async def page(self, kind: str, after: str, limit: int) -> list[Record]:
        """Records of a kind without their values, `limit` at most, in the order of their ids, behind `after`."""
        if not self._links:
            return []
        pages = await asyncio.gather(*(_page(link, kind, after, limit) for link in self._links))
        return list(heapq.merge(*pages, key=lambda record: record.id))[:limit]


async def _page(link: ControllerLink, kind: str, after: str, limit: int) -> list[Record]:
    reply = await ask(link, record_call("list", kind, after, limit=limit))
    if reply.status != "ok":
        raise unavailable(f"what is stored cannot be listed: {reply.detail}", code="not_listed")
    return reply.records


def record_call(op: str, kind: str, record_id: str, **fields: Any) -> Callable[[int], RecordCall]:
    """A call but for its ticket."""
    return lambda ticket: RecordCall(ticket, op, kind, record_id, **fields)


async def ask(home: ControllerLink, call: Callable[[int], RecordCall]) -> RecordReply:
    """The answer to a call, whatever it is. If the controller dies meanwhile, it is asked again when it is back.

    Raises:
        ApiError: 503, there is none.
    """
    answer, is_second = await call_persistently(home, call, CALL_SECONDS)
    reply = record_reply(answer)
    return await _first_answer(home, call(0), reply) if is_second else reply


async def call_persistently(
    home: ControllerLink,
    make: Callable[[int], Call],
    timeout_seconds: float | None,
    *,
    give_up: Callable[[int], Call] | None = None,
) -> tuple[Answer, bool]:
    """As `ControllerLink.call`, but what is lost with its connection is sent again over the next one.

    Returns:
        the answer, and whether the call may have been carried out before, too.

    Raises:
        ApiError: 503, there is none.
    """
    deadline = asyncio.get_running_loop().time() + home.patience
    is_second = False
    while True:
        connection = home.connections if home.state is not None else -1
        try:
            return await home.call(make, timeout_seconds, give_up=give_up), is_second
        except ApiError:
            lost = home.state is None or home.connections != connection
            if not (lost and await home.again(deadline)):
                raise
        is_second = True


async def _first_answer(home: ControllerLink, call: RecordCall, reply: RecordReply) -> RecordReply:
    """What the first of two equal calls was, or would have been, answered with, from the second's answer: a change
    that is refused may have been made by the first one."""
    if call.op == "delete" and reply.status == "missing":
        return msgspec.structs.replace(reply, status="ok")
    refused = {"create": "exists", "put": "conflict"}
    if refused.get(call.op) != reply.status:
        return reply
    there = record_reply(await home.call(record_call("get", call.kind, call.id), CALL_SECONDS))
    if there.status == "ok" and there.records[0].value == call.value:
        return there
    return reply


def record_reply(answer: Answer) -> RecordReply:
    """An answer that is one to a `RecordCall`.

    Raises:
        ApiError: 503, it is not.
    """
    if not isinstance(answer, RecordReply):
        raise unavailable("the engine gave another answer than the one to the question")
    return answer
