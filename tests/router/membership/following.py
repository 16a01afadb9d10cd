"""Follows a source of members, and waits for what it should tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from trunkline.router.membership.member import MemberSource, Present

PATIENCE_SECONDS = 60.0


class Follower:
    """What a source has told so far."""

    def __init__(self) -> None:
        self.told: list[Present] = []
        self._news = asyncio.Condition()

    @property
    def ids(self) -> list[str]:
        """The members that were told last."""
        return sorted(self.told[-1].members) if self.told else []

    async def until(self, holds: Callable[[Present], bool]) -> Present:
        """Wait until the last that was told fulfils a condition."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._news:
            await self._news.wait_for(lambda: bool(self.told) and holds(self.told[-1]))
            return self.told[-1]

    async def until_ids(self, *ids: str) -> Present:
        """Wait until these are the members, and there is no problem."""
        return await self.until(lambda present: sorted(present.members) == sorted(ids) and not present.problem)

    async def follow(self, source: MemberSource) -> None:
        """Note all that the source tells."""
        async for present in source.follow():
            async with self._news:
                self.told.append(present)
                self._news.notify_all()
        raise AssertionError("a source does not end")


@asynccontextmanager
async def following(source: MemberSource) -> AsyncIterator[Follower]:
    """Follow a source for a while."""
    follower = Follower()
    task = asyncio.create_task(follower.follow(source))
    try:
        yield follower
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.002)
