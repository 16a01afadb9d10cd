"""Keep a group registered in the cluster's record store, beside its controller (`trunkline group --join URL`).

    thread     Registrar.run: registers, renews ──leave──► Registrar.leave: "it has ended by itself" ──► end
    killed     nothing renews the registration, so it ends in its time

The registration is made at the start: routers connect while the group starts, and ask its controller whether it is
ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import msgspec
import structlog

from trunkline.deploy.config.node_settings import NodePlan, is_ip
from trunkline.deploy.supervisor.membership import Membership
from trunkline.kvstore.records import RecordError, open_records
from trunkline.router.membership.member import Member, Part
from trunkline.router.membership.registrar import Registrar

_LEAVE_S: Final = 5.0
"""Longest time in seconds that the end of a group waits for the store."""
_log = structlog.get_logger("trunkline.deploy.joined")


def member_of(node: NodePlan, model: str, fingerprint: str, role: str = "both") -> Member:
    """Return a group as it registers."""
    at = node.reached
    return Member(
        id=node.member_id,
        address=at.endpoint(0),
        events=at.endpoint(1),
        host=socket.gethostname(),
        epoch=secrets.token_hex(8),
        role=msgspec.convert(role, Part),
        model=model,
        fingerprint=fingerprint,
    )


def warning_of(node: NodePlan) -> str:
    """Return why routers of other hosts will not reach a group that registers, as a sentence; "": they may.

    Such a group would be listed, but never used; two of them on different hosts would have the same id.
    """
    if not node.join or node.listen is None:
        return ""
    host, store = node.reached.host, urlsplit(node.join).hostname
    if not _is_loopback(host) or store is None or _is_loopback(store):
        return ""
    return (
        f"The group registers as {node.reached}, where only this machine reaches it; write an address of this "
        "machine that routers reach to --listen."
    )


def _is_loopback(host: str) -> bool:
    return host.partition(".")[0] == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


class Joined(Membership):
    """A group that is registered until it stops."""

    def __init__(self, url: str, member: Member) -> None:
        """`url`: the record store's."""
        self._url = url
        self._member = member
        self._loop = asyncio.new_event_loop()
        self._leave = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="registrar", daemon=True)

    def start(self) -> None:
        """Begin to register."""
        self._thread.start()

    def leave(self) -> None:
        """See `Membership.leave`."""
        with contextlib.suppress(RuntimeError):  # it has left before
            self._loop.call_soon_threadsafe(self._leave.set)

    def close(self) -> None:
        """Leave, and wait until routers can know, but not for long."""
        self.leave()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._register())
        finally:
            self._loop.close()

    async def _register(self) -> None:
        store = open_records(self._url)
        registrar = Registrar(store, self._member)
        running = asyncio.create_task(registrar.run())
        try:
            await self._leave.wait()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            async with asyncio.timeout(_LEAVE_S):
                await registrar.leave()
        except (RecordError, TimeoutError) as error:
            _log.warning("leave_not_registered", member=self._member.id, error=str(error))
        finally:
            await store.close()


@contextlib.contextmanager
def joined(node: NodePlan, model: str, fingerprint: str, role: str = "both") -> Iterator[Membership]:
    """Keep the group of this part registered, if that was asked for, until the end or its `leave`."""
    if not node.join or node.listen is None:
        yield Membership()
        return
    member = Joined(node.join, member_of(node, model, fingerprint, role))
    member.start()
    try:
        yield member
    finally:
        member.close()
