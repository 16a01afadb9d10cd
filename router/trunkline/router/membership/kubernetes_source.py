"""The source `kubernetes://NAMESPACE/SERVICE?port=NAME&events=NAME`: the pods behind a Service.

    list ──► watch ──ends──► watch from there ──► …          every 10 minutes: list
      ▲        ├─ 410 Gone ──► list
      │        └─ lost ──► wait, twice as long each time ──► watch from there
      └──────────── a list that fails: wait ───────────┘

Pods are members also while they are not ready: whether a group takes requests is told by its controller. A pod
that is about to end is no member any more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from trunkline.router.membership.kubernetes_api import (
    ApiFailedError,
    Endpoint,
    GoneError,
    Listing,
    Slice,
    SlicesApi,
)
from trunkline.router.membership.member import Member, Present

RESYNC_SECONDS: Final = 600.0
"""Time between two lists, in case that a change was missed."""
WAIT_SECONDS: Final = 0.5
"""Wait after a failure, about. It doubles with each further failure in a row."""
WAIT_SECONDS_MAX: Final = 30.0


class KubernetesSource:
    """See `MemberSource`."""

    def __init__(
        self,
        api: SlicesApi,
        port: str,
        events: str = "",
        *,
        resync_seconds: float = RESYNC_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """
        Args:
            port: name of the port of the pods' ROUTER sockets.
            events: name of the port of their PUB sockets; "": they have none.
        """
        self._api = api
        self._port, self._events = port, events
        self._resync_seconds = resync_seconds
        self._wait_seconds = wait_seconds
        self._known: Listing | None = None
        self._listed_at = float("-inf")
        self._failures = 0

    async def follow(self) -> AsyncGenerator[Present, None]:
        """See `MemberSource.follow`."""
        loop = asyncio.get_running_loop()
        present = Present({}, "the Kubernetes API was not asked yet")
        try:
            while True:
                began, problem = loop.time(), ""
                try:
                    async with aclosing(self._news()) as news:
                        async for slices in news:
                            self._failures = 0
                            now = Present(members_of(slices, self._port, self._events))
                            if now != present:
                                present = now
                                yield present
                except GoneError:
                    self._known = None
                except ApiFailedError as error:
                    self._failures += 1
                    problem = f"the Kubernetes API cannot be used: {error}"
                    await self._api.close()
                if problem and problem != present.problem:
                    present = Present(present.members, problem)
                    yield present
                if problem or loop.time() - began < self._wait_seconds:
                    await asyncio.sleep(self._wait())
        finally:
            await self._api.close()

    async def _news(self) -> AsyncGenerator[dict[str, Slice], None]:
        """Yield all slices whenever the server has shown that they are right, until a watch ends."""
        now = asyncio.get_running_loop().time()
        if self._known is None or now - self._listed_at > self._resync_seconds:
            self._known = await self._api.list()
            self._listed_at = now
            yield self._known.slices
        slices, version = self._known
        async with aclosing(self._api.watch(version)) as changes:
            async for change in changes:
                if change.slice is not None:
                    slices[change.name] = change.slice
                else:
                    slices.pop(change.name, None)
                self._known = Listing(slices, change.version or self._known.version)
                yield slices

    def _wait(self) -> float:
        """Return how long to wait after a failure, drawn at random so that routers do not ask all at once."""
        longest = min(WAIT_SECONDS_MAX, self._wait_seconds * 2.0 ** min(max(self._failures - 1, 0), 10))
        return longest * random.uniform(0.5, 1.0)


def members_of(slices: dict[str, Slice], port: str, events: str) -> dict[str, Member]:
    """Return the members behind a Service by their ids, which are the names of their pods.

    Args:
        port: name of the port of the ROUTER sockets.
        events: name of the port of the PUB sockets; "": there are none.
    """
    found: dict[str, Member] = {}
    # IPv4 first: a pod with addresses of both families is in slices of both.
    for each in sorted(slices.values(), key=lambda each: (each.address_type, each.metadata.name)):
        ports = {named.name or "": named.port for named in each.ports or [] if named.port}
        if port not in ports or each.address_type not in ("IPv4", "IPv6"):
            continue
        for endpoint in each.endpoints or []:
            is_ending = endpoint.conditions is not None and endpoint.conditions.terminating
            if endpoint.addresses and not is_ending:
                member = _member(endpoint, ports, port, events)
                found.setdefault(member.id, member)
    return found


def _member(endpoint: Endpoint, ports: dict[str, int], port: str, events: str) -> Member:
    address = endpoint.addresses[0]
    host = f"[{address}]" if ":" in address else address
    name = endpoint.target_ref.name if endpoint.target_ref else ""
    events_port = ports.get(events) if events else None
    return Member(
        name or endpoint.hostname or address,
        f"tcp://{host}:{ports[port]}",
        f"tcp://{host}:{events_port}" if events_port else "",
        host=endpoint.node_name or "",
    )
