"""Turns of stored sessions without HTTP and controllers, for tests of the store of sessions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.records import RecordStore, open_records
from trunkline.router.errors import ApiError
from trunkline.router.request_context import RequestRandom, known
from trunkline.router.stores.session_history import History, HistoryMark
from trunkline.router.stores.session_lease import Lease
from trunkline.router.stores.session_memory import StoredSession
from trunkline.router.stores.session_state import SessionState
from trunkline.router.stores.session_store import SessionStore
from trunkline.router.text.truncation import TokenSpan

Test = Callable[[RecordStore], Coroutine[Any, Any, None]]


def on(test: Test, records: RecordStore | None = None) -> None:
    """Run a test on a store of records; without one, on one in memory."""

    async def whole() -> None:
        store = open_records("sqlite::memory:") if records is None else records
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(whole())


@contextmanager
def refused(status: int, code: str) -> Iterator[None]:
    with pytest.raises(ApiError) as caught:
        yield
    assert (caught.value.status, caught.value.code) == (status, code), caught.value.message


def after_turn(history: History, rng: random.Random, size: int = 30) -> History:
    """A history with one more turn, which may have rewritten the end of what was shown before."""
    keep = max(0, history.token_count - rng.choice([0, 0, 1, 5]))
    tokens = history.ids()[:keep] + [rng.randint(2, 60_000) for _ in range(rng.randint(1, size))]
    text = history.text[: len(history.text) - rng.choice([0, 0, 3])] + "".join(rng.choices("ab é", k=size))
    return History(
        form="chat",
        messages=[*history.messages, {"role": "user", "content": text[-size:]}],
        text=text,
        tokens=pack_int32(tokens),
        vocabulary="v",
        marks=[*(mark for mark in history.marks if mark.tokens <= keep), HistoryMark(len(text), len(tokens))],
        discards=[span for span in history.discards if span.stop <= keep],
    )


async def turn(store: SessionStore, session: str, rng: random.Random, name: bytes = b"") -> StoredSession:
    """A request of a session, as `api/turn.py` makes it."""
    with known(random=RequestRandom(name, 0) if name else None):
        lease = await store.acquire(session, extends=True)
        try:
            await lease.undo(name)
            lease.session.history = after_turn(lease.session.history, rng)
            return await lease.put(name)
        finally:
            lease.close()


async def discard(store: SessionStore, session: str) -> StoredSession:
    lease = await store.acquire(session)
    try:
        lease.session.history = replace(lease.session.history, discards=[TokenSpan(0, 1)])
        return await lease.put()
    finally:
        lease.close()


async def acquired(store: SessionStore, session: str) -> Lease:
    """The lease, as soon as the one before is over."""
    while True:
        try:
            return await store.acquire(session)
        except ApiError as error:
            if error.code != "session_busy":
                raise
            await asyncio.sleep(0.002)


def content(session: SessionState) -> Any:
    """What clients can see of a session."""
    return session.model, session.ttl, session.metadata, session.turns, session.parent, session.history
