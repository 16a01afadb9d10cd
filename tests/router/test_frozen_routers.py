"""A router that is frozen in a turn for longer than its lease, and wakes up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from router.fake_controller import FakeController
from router.harness import JSON, make_answer, shared_records, wait_until
from router.process_calls import router_process
from router.session_calls import chat, create, error_of, get, key_of

from trunkline.kvstore.records import BusyError, open_records
from trunkline.router.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

SHORT_LEASES = """
from trunkline.router.stores import session_lease, session_store
session_lease.LEASE_SECONDS = session_store.LEASE_SECONDS = 2.0
"""


@contextmanager
def frozen(process: subprocess.Popen[bytes]) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def wait_for_the_lease(url: str, session: str) -> None:
    """Until no router has the session's lease any more."""

    async def is_over() -> bool:
        records = open_records(url)
        try:
            await records.acquire(key_of(session), "probe", 60.0)
            await records.release(key_of(session), "probe")
        except BusyError:
            return False
        finally:
            await records.close()
        return True

    wait_until(lambda: asyncio.run(is_over()))


def last_event(stream: httpx.Response) -> dict[str, Any]:
    """The last one that is not `[DONE]`; {} without an event."""
    events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: {")]
    return dict(json.loads(events[-1])) if events else {}


@pytest.fixture
def fake(place: Path, tokenizer: Tokenizer) -> Iterator[FakeController]:
    controller = FakeController(f"ipc://{place}/c", make_answer(tokenizer)).start()
    yield controller
    controller.stop()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_session_that_another_router_has_taken_is_not_overwritten(
    place: Path, fake: FakeController, kind: str
) -> None:
    """The frozen router's client is told; if no other router has taken the session, the turn is stored."""
    options: dict[str, Any] = {"prelude": SHORT_LEASES, "resume_seconds": 30.0}
    with (
        shared_records(kind) as url,
        router_process(place, fake, records=url, **options) as (process, here_url),
        router_process(place, fake, records=url, **options) as (_, there_url),
        httpx.Client(base_url=here_url, timeout=60, headers=JSON) as here,
        httpx.Client(base_url=there_url, timeout=60, headers=JSON) as there,
        ThreadPoolExecutor(1) as pool,
    ):

        def told_to_the_slow_one(session: str, *, is_taken: bool, stream: bool) -> httpx.Response:
            asked = len(fake.behaviour.submits)
            fake.behaviour.hold = True
            turn = pool.submit(chat, here, session, "Slowly?", stream=stream)
            wait_until(lambda: len(fake.behaviour.submits) > asked)
            assert error_of(chat(there, session, "Quickly?"))[:2] == (409, "session_busy")
            with frozen(process):
                fake.behaviour.hold = False
                wait_for_the_lease(url, session)
                if is_taken:
                    assert chat(there, session, "Quickly?").status_code == 200
            return turn.result(60)

        for is_taken, stream in ((True, False), (True, True), (False, True)):
            session = create(here)["id"]
            told = told_to_the_slow_one(session, is_taken=is_taken, stream=stream)
            if not is_taken:
                assert told.status_code == 200
                assert "error" not in last_event(told)
            elif stream:
                assert last_event(told)["error"]["code"] == "session_conflict"
            else:
                assert error_of(told)[:2] == (409, "session_conflict")
            said = get(there, session, include="messages")["messages"]
            assert [message["content"] for message in said[::2]] == ["Quickly?" if is_taken else "Slowly?"]
            assert get(here, session, include="messages")["messages"] == said
            assert chat(here, session, "And now?").status_code == 200, "it is free"
