"""The source `records`: groups that have registered in the cluster's record store (`registrar.py`).

A registration is a record with a time to live. If it is not renewed, it ends, and the group is no member any more.
A group that ends by itself says so in its registration. Any group that reaches the store can join, wherever and by
whatever it was started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from trunkline.kvstore.records import PAGE_MAX, RecordError, RecordStore
from trunkline.router.membership.member import Caution, Member, Present, by_id
from trunkline.runtime.process import RareLog

KIND: Final = "member"
"""Kind of the records. Their owner is "", and their id is the member's."""
CHECK_SECONDS: Final = 2.0
"""Time between two looks into the store."""


_rare = RareLog("trunkline.router.membership.records_source")


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """The header of a member's record."""

    member: Member
    left: bool = False
    """Whether the group has ended by itself."""


class RecordsSource:
    """See `MemberSource`."""

    def __init__(
        self, store: RecordStore, *, check_seconds: float = CHECK_SECONDS, caution: Caution | None = None
    ) -> None:
        self._store = store
        self._check_seconds = check_seconds
        self._caution = caution or Caution()

    async def follow(self) -> AsyncGenerator[Present, None]:
        """See `MemberSource.follow`."""
        present = Present({}, "the record store was not asked yet")
        while True:
            now = await self._look(present)
            if now != present:
                present = now
                yield present
            await asyncio.sleep(self._check_seconds)

    async def _look(self, before: Present) -> Present:
        try:
            found = await registrations(self._store)
        except RecordError as error:
            return Present(before.members, f"registrations cannot be read: {error}")
        members = {each: registration.member for each, registration in found.items() if not registration.left}
        return self._caution.accept(members, asyncio.get_running_loop().time(), found.keys() - members.keys())


async def registrations(store: RecordStore) -> dict[str, Registration]:
    """Return all registrations by the ids of their members. Malformed ones are left out: they must not hide the
    others.

    Raises:
        RecordError: the store does not answer.
    """
    found: dict[str, Registration] = {}
    after = ""
    while True:
        page = await store.page(KIND, "", after, PAGE_MAX, headers=True)
        for record in page:
            try:
                registration = msgspec.json.decode(record.header, type=Registration)
                if registration.member.id != record.key.id:
                    raise ValueError(f"it is a registration of {registration.member.id!r}")
                by_id([registration.member])
                found[record.key.id] = registration
            except ValueError as error:
                now = asyncio.get_running_loop().time()
                _rare.warning("malformed_registration", now, member=record.key.id, error=str(error))
        if len(page) < PAGE_MAX:
            return found
        after = page[-1].key.id
