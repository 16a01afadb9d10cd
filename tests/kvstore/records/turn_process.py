"""A process that works on records as a router does, until it is killed: started by test_sqlite_processes.py.

It prints a line for each turn that is stored: the session and the version. Each turn's segment holds what follows
from these, so the reader can tell whether a session is whole.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from trunkline.kvstore.records import (
    BusyError,
    Change,
    ConflictError,
    ExistsError,
    MissingError,
    RecordKey,
    RecordStore,
    StoreAwayError,
    open_records,
)

SESSIONS = 12
CALLERS = 4


def content_of(number: int, version: int) -> bytes:
    """Return the segment of a turn: of another length for each."""
    return f"{number}/{version} ".encode() * (1 + (number * 7 + version * 13) % 90)


async def turn(store: RecordStore, rng: random.Random, token: str) -> str:
    """Take a turn in some session, as a router does; return what was stored."""
    number = rng.randrange(SESSIONS)
    key = RecordKey("session", "", str(number))
    try:
        if rng.random() < 0.5:
            found = await store.acquire(key, token, 0.2)
        else:
            found = await store.get(key)
    except MissingError:
        await store.create(key, Change(b"", segments=[content_of(number, 1)]))
        return f"turn {number} 1"
    version = found.record.version
    change = Change(b"%d" % version, base=found.record.head, segments=[content_of(number, version + 1)])
    record = await store.put(key, version, change, lease=token, release=True)
    return f"turn {number} {record.version}"


async def take_turns(store: RecordStore, rng: random.Random, token: str) -> None:
    while True:
        try:
            stored = await turn(store, rng, token)
        except (BusyError, ConflictError, ExistsError):
            await asyncio.sleep(0.01)
            continue
        except StoreAwayError as error:
            stored = f"away {error}"
        os.write(1, f"{stored}\n".encode())


async def main(url: str, seed: int) -> None:
    store = open_records(url)
    callers = (take_turns(store, random.Random(seed + i), f"{seed}-{i}") for i in range(CALLERS))
    await asyncio.gather(*callers)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
