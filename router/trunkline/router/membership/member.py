"""Members: the groups of a cluster as routers know them before they are connected. Pure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

HOLD_SECONDS: Final = 60.0
"""Time in seconds for which members are kept that have vanished together with most others (`Caution`)."""


Part = Literal["both", "prefill", "decode"]
"""Which parts of requests a group computes (`trunkline.router.routing.roles`)."""


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group: a controller with its workers. Only `id` and `address` are always known before a router has
    connected."""

    id: str
    """The group's name. It is unique in the cluster and stays the same when the group is started again."""
    address: str
    """ZeroMQ endpoint of the controller's ROUTER socket, such as "tcp://10.0.0.7:7400"."""
    events: str = ""
    """ZeroMQ endpoint of the controller's PUB socket with KV events; "": it publishes none."""
    host: str = ""
    """The host on which the controller runs; "": not known."""
    epoch: str = ""
    """Differs for each start of the controller; "": not known."""
    role: Part = "both"
    """Which parts of requests the group computes, for people who read a registry: not all sources say it, and
    routers go by what the connected group reports (`State.role`)."""
    model: str = ""
    """The name by which requests ask for the group's model; "": not known."""
    fingerprint: str = ""
    """Fingerprint of the model in hexadecimal; "": not known."""
    capacity: int = 0
    """Number of tokens whose KV fits into the memory of the group's devices; 0: not known."""


Members = Mapping[str, Member]
"""Members by their ids."""


class Present(NamedTuple):
    """What a source knows now."""

    members: Members
    """All members. If the source fails, these are the ones that it has seen last."""
    problem: str = ""
    """Why `members` may be out of date, for people; "": they are not."""


class MemberSource(Protocol):
    """Where a router learns which groups there are."""

    def follow(self) -> AsyncGenerator[Present, None]:
        """Yield the members, first as soon as they are known and then whenever they or the problem have changed.

        The iterator does not end and raises no exception: a source that fails is a problem and is tried again. A
        source without any success so far has no members and a problem."""


class Changes(NamedTuple):
    """The difference between two sets of members. Each list is in the order of its set."""

    added: list[Member]
    removed: list[Member]
    changed: list[Member]
    """Members of both sets that are not equal, as they are now."""


def changes(before: Members, now: Members) -> Changes:
    """Return what has changed from one set of members to another."""
    return Changes(
        [member for each, member in now.items() if each not in before],
        [member for each, member in before.items() if each not in now],
        [member for each, member in now.items() if each in before and member != before[each]],
    )


def by_id(members: Iterable[Member]) -> dict[str, Member]:
    """Return checked members by their ids.

    Raises:
        ValueError: two have the same id, or one is malformed.
    """
    found: dict[str, Member] = {}
    for member in members:
        if not member.id or len(member.id) > 256 or not member.id.isprintable():
            raise ValueError(f"{member.id!r} is no id: it has 1 to 256 printable characters")
        for endpoint in (member.address, member.events or member.address):
            if not endpoint.startswith(("tcp://", "ipc://", "inproc://")):
                raise ValueError(
                    f"member {member.id!r}: {endpoint!r} is no endpoint: it begins with tcp:// or ipc://"
                )
        if member.id in found:
            raise ValueError(f"two members have the id {member.id!r}")
        found[member.id] = member
    return found


class Caution:
    """Keeps members that have vanished together with most others. It is for sources in which members vanish
    without having left, for example registrations that were not renewed because the store was away."""

    def __init__(self, hold_seconds: float = HOLD_SECONDS) -> None:
        self._hold_seconds = hold_seconds
        self._trusted: dict[str, Member] = {}
        self._doubted_since: float | None = None

    def accept(self, found: Members, now: float, left: Iterable[str] = ()) -> Present:
        """Return which members to believe in.

        Args:
            found: those that the source shows.
            now: the time, in seconds.
            left: ids of members that are known to have left.
        """
        known = {each: member for each, member in self._trusted.items() if each not in set(left)}
        missing = {each: member for each, member in known.items() if each not in found}
        if 2 * len(missing) <= len(known):
            self._doubted_since = None
        elif self._doubted_since is None:
            self._doubted_since = now
        if self._doubted_since is None or now - self._doubted_since >= self._hold_seconds:
            self._doubted_since = None
            self._trusted = dict(found)
            return Present(self._trusted)
        self._trusted = missing | dict(found)
        return Present(self._trusted, f"{len(missing)} of {len(known)} members vanished at once: {_some(missing)}")


def _some(ids: Iterable[str]) -> str:
    names = sorted(ids)
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
