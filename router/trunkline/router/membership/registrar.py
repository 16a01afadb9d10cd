"""Registers a group in the cluster's record store, so that routers find it (`records_source.py`)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec
import structlog

from trunkline.kvstore.records import (
    Change,
    ConflictError,
    ExistsError,
    MissingError,
    Record,
    RecordKey,
    RecordStore,
    StoreAwayError,
)
from trunkline.router.membership.member import Member, by_id
from trunkline.router.membership.records_source import KIND, Registration

TTL_SECONDS: Final = 30.0
"""Time in seconds after which a registration ends that is not renewed."""
_log = structlog.get_logger("trunkline.router.membership.registrar")


class Registrar:
    """The registration of one group. It belongs beside the controller, into the process that starts and watches
    it: controllers know nothing of records.

    If two groups register under one id, the later one has it, and the earlier one says so in its log.
    """

    def __init__(self, store: RecordStore, member: Member, *, ttl_seconds: float = TTL_SECONDS) -> None:
        """
        Args:
            member: the group, with an `epoch` that no other start of it has.
            ttl_seconds: see `TTL_SECONDS`; the registration is renewed three times in this time.

        Raises:
            ValueError: the member is malformed, or has no epoch.
        """
        by_id([member])
        if not member.epoch:
            raise ValueError(f"member {member.id!r} has no epoch")
        self.is_superseded = False
        """Whether another group has registered under the same id."""
        self._store = store
        self._member = member
        self._ttl = ttl_seconds
        self._key = RecordKey(KIND, "", member.id)
        self._is_registered = False

    async def run(self) -> None:
        """Register the group and keep it registered until this call is cancelled, or another group takes its id.
        Cancelling leaves the registration in the store; see `leave`."""
        while True:
            try:
                await self._renew()
            except StoreAwayError as error:
                _log.warning("registration_not_renewed", member=self._member.id, error=str(error))
            if self.is_superseded:
                _log.error("another_group_has_the_id", member=self._member.id, address=self._member.address)
                return
            await asyncio.sleep(self._ttl / 3)

    async def leave(self) -> None:
        """Tell routers that the group has ended by itself. Call it when `run` has been cancelled, before the
        controller is stopped.

        Raises:
            StoreAwayError: the store does not answer; the registration ends in its time.
        """
        with contextlib.suppress(MissingError):
            there = (await self._store.get(self._key, use=False)).record
            if self._is_mine(there):
                await self._write(there, Registration(self._member, left=True))

    async def _renew(self) -> None:
        try:
            there = (await self._store.get(self._key)).record  # the use renews the record's time to live
        except MissingError:
            await self._write(None, Registration(self._member))
            return
        if self._is_mine(there):
            self._is_registered = True
        elif self._is_registered:
            self.is_superseded = True
        else:
            await self._write(there, Registration(self._member))

    async def _write(self, there: Record | None, registration: Registration) -> None:
        change = Change(msgspec.json.encode(registration), self._ttl)
        # If another registration came in between, the next call sees it.
        with contextlib.suppress(ConflictError, ExistsError, MissingError):
            if there is None:
                await self._store.create(self._key, change)
            else:
                await self._store.put(self._key, there.version, change)
            self._is_registered = True

    def _is_mine(self, there: Record) -> bool:
        try:
            registration = msgspec.json.decode(there.header, type=Registration)
        except ValueError:
            return False
        return registration.member.epoch == self._member.epoch
