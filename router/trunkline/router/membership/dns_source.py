"""The source `dns://NAME:PORT?events=PORT`: each address of a name is a member, as with a headless Service.

A member's id is its address, so a group that is started again under another address counts as a new one. A look-up
that fails, also because the name has no address at all, is a problem and changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from trunkline.router.membership.member import Caution, Member, Present

CHECK_SECONDS: Final = 5.0
"""Time between two look-ups."""
Resolve = Callable[[str], Awaitable[list[str]]]
"""Returns the addresses of a name. Raises `OSError`."""


async def resolve(name: str) -> list[str]:
    """Return the addresses of a name as the system's resolver finds them.

    Raises:
        OSError: the look-up has failed.
    """
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsSource:
    """See `MemberSource`."""

    def __init__(
        self,
        name: str,
        port: int,
        events_port: int = 0,
        *,
        resolve: Resolve = resolve,
        check_seconds: float = CHECK_SECONDS,
        caution: Caution | None = None,
    ) -> None:
        """`events_port`: port of the members' PUB sockets; 0: they have none."""
        self._name, self._port, self._events_port = name, port, events_port
        self._resolve = resolve
        self._check_seconds = check_seconds
        self._caution = caution or Caution()

    async def follow(self) -> AsyncGenerator[Present, None]:
        """See `MemberSource.follow`."""
        present = Present({}, f"{self._name} was not looked up yet")
        while True:
            try:
                members = [self._member(address) for address in sorted(set(await self._resolve(self._name)))]
                now = self._caution.accept(
                    {member.id: member for member in members}, asyncio.get_running_loop().time()
                )
            except (OSError, UnicodeError) as error:
                now = Present(present.members, f"{self._name} cannot be looked up: {error}")
            if now != present:
                present = now
                yield present
            await asyncio.sleep(self._check_seconds)

    def _member(self, address: str) -> Member:
        host = f"[{address}]" if ":" in address else address
        events = f"tcp://{host}:{self._events_port}" if self._events_port else ""
        return Member(f"{host}:{self._port}", f"tcp://{host}:{self._port}", events, host=address)
