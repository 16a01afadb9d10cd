"""List sessions for the dashboard: stored sessions (records of the controllers), and those that are only labels.

A record's value says how long its session is and which chunks it has; the list of records does not. So a few
values are fetched at each look, and their contents are remembered for as long as the record does not change. The
router knows from the controllers' events where chunks are (`routing/index.py`), except for chunks in the remote
tier only, and for KV behind cuts and modules.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from trunkline.kvstore.chunks import root_name
from trunkline.router.errors import ApiError
from trunkline.router.messages import Record
from trunkline.router.request_context import known
from trunkline.router.routing.names import whole_chunks
from trunkline.router.service import RouterService
from trunkline.router.stores.session_history import SessionState
from trunkline.router.stores.session_store import is_stored
from trunkline.router.tenancy.auth import Identity, current_identity
from trunkline.router.ui.overview import wall_clock

LIMIT_MAX: Final = 1000
RECORDS_MAX: Final = 1000
"""Largest number of records of each controller among which the last used ones are searched."""
FRESH_SECONDS: Final = 1.0
"""Shortest time in seconds between two fetches of the list of records, however many clients ask."""
FRESH_SHARE: Final = 10.0
"""Time between two fetches of the list of records, as a multiple of the time that the fetch took, which is long
with many tenants and groups; between `FRESH_SECONDS` and `FRESH_SECONDS_MAX`."""
FRESH_SECONDS_MAX: Final = 20.0
"""Longest time in seconds between two fetches of the list of records."""
FETCHED_MAX: Final = 16
"""Largest number of records whose values are fetched each time that the sessions are listed."""
FETCH_SECONDS_MAX: Final = 0.1
"""Time in seconds after which no further value of a record is fetched, because values may be long."""
KNOWN_MAX: Final = 4096
NAMES_MAX: Final = 1024
"""Largest number of chunks of a session whose places are looked up. They are the session's first chunks."""
_PORTION: Final = 16
"""Number of sessions that are looked up before streams get their turn."""
_TIERS: Final = ("device", "host", "disk", "device")
"""Name of the tier of each column of the index. The last column is for chunks that are being computed on the
device."""


class Known(NamedTuple):
    """The contents of a session's record, as far as the dashboard shows them."""

    version: int
    turns: int
    tokens: int
    parent: str
    schema: str
    names: Sequence[bytes]
    """Names of the session's full chunks; empty for a session with modules."""
    chunk_size: int


class Listed(NamedTuple):
    """A stored session: its record and the tenant that owns it."""

    owner: str
    record: Record


class StoredSessions:
    """All stored sessions that this router has seen."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._listed: list[Listed] = []
        self._fresh_until = float("-inf")
        self._look: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Fetch the list of sessions, unless the present one is still fresh.

        Raises:
            ApiError: 503, no controller answers.
        """
        if asyncio.get_running_loop().time() < self._fresh_until:
            return
        if self._look is None:
            self._look = asyncio.create_task(self._refresh())
            self._look.add_done_callback(self._looked)
        await asyncio.shield(self._look)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._look = None
        if not task.cancelled():
            task.exception()  # callers of `look` get it

    async def _refresh(self) -> None:
        home_of, clock = self._service.sessions.home_of, asyncio.get_running_loop().time
        began = clock()
        listed = await self._list()
        listed.sort(key=lambda each: -each.record.used)
        self._listed = listed = listed[:KNOWN_MAX]
        missing = (
            each
            for each in listed
            if self._known_of(each.record) is None and home_of(each.record.id).state is not None
        )
        fetching = clock()
        for each in islice(missing, FETCHED_MAX):
            await self._fetch(each)
            if clock() - fetching > FETCH_SECONDS_MAX:
                break
        lasts = min(FRESH_SECONDS_MAX, FRESH_SHARE * (clock() - began))
        self._fresh_until = clock() + max(FRESH_SECONDS, lasts)

    async def _list(self) -> list[Listed]:
        """Return the sessions of all controllers; for those that are away, the sessions of the last look.

        Raises:
            ApiError: 503, all controllers are away.
        """
        service = self._service
        asked = [(link, owner) for link in service.links for owner in service.tenants.owners()]
        pages = await asyncio.gather(
            *(service.sessions.page_at(link, owner, RECORDS_MAX) for link, owner in asked), return_exceptions=True
        )
        listed: list[Listed] = []
        missing: set[tuple[int, str]] = set()
        problem: ApiError | None = None
        for (link, owner), page in zip(asked, pages, strict=True):
            if isinstance(page, ApiError):
                missing.add((link.index, owner))
                problem = page
            elif isinstance(page, BaseException):
                raise page
            else:
                listed += [Listed(owner, record) for record in page]
        if problem is not None and len(missing) == len(asked):
            raise problem
        if missing:
            home_of = service.sessions.home_of
            listed += [each for each in self._listed if (home_of(each.record.id).index, each.owner) in missing]
        return listed

    def _known_of(self, record: Record) -> Known | None:
        known = self._known.get(record.id)
        return known if known is not None and known.version == record.version else None

    async def _fetch(self, listed: Listed) -> None:
        identity = Identity()
        try:
            if listed.owner:
                identity = self._service.tenants.acting_for(current_identity(), listed.owner)
            with known(identity=identity):
                stored = await self._service.sessions.peek(listed.record.id)
        except ApiError:
            return  # the record has just been deleted, or cannot be read
        self._known[listed.record.id] = self._read(stored.record.version, stored.session, identity.salt)
        self._known.move_to_end(listed.record.id)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def _read(self, version: int, session: SessionState, salt: bytes) -> Known:
        names: Sequence[bytes] = ()
        size = 0
        state = next((link.state for link in self._service.links if link.state and link.state.chunk_size), None)
        if state is not None:
            size = state.chunk_size
            root = root_name(state.fingerprint, state.dtype, size, salt)
            is_plain = session.modules is None and session.vocabulary == self._service.tokenizer.fingerprint
            names = whole_chunks(root, session.tokens[: 4 * size * NAMES_MAX], size) if is_plain else ()
        schema = "" if session.modules is None else session.modules.schema
        return Known(version, session.turns, session.token_count, session.parent, schema, names, size)

    async def table(self, limit: int) -> list[dict[str, Any]]:
        """Return the sessions that were used last, both stored ones and labels.

        Raises:
            ApiError: as `look`.
        """
        await self.look()
        rows = []
        for count, listed in enumerate(self._listed[:limit]):
            if count % _PORTION == _PORTION - 1:
                await asyncio.sleep(0)
            rows.append(self._row(listed))
        rows += labels(self._service)
        rows.sort(key=lambda row: -row["used"])
        return rows[:limit]

    def _row(self, listed: Listed) -> dict[str, Any]:
        record = listed.record
        known = self._known_of(record)
        row = {
            "id": record.id,
            "stored": True,
            "turns": None,
            "tokens": None,
            "cached_tokens": None,
            "tier": None,
            "group": self._service.sessions.home_of(record.id).index,
            "created": record.created,
            "used": record.used,
            "expires": record.expires or None,
            "tenant": listed.owner,
            "parent": None,
            "schema": None,
        }
        if known is None:
            return row
        told = {
            "turns": known.turns,
            "tokens": known.tokens,
            "parent": known.parent or None,
            "schema": known.schema or None,
        }
        return row | told | self._place(known)

    def _place(self, known: Known) -> dict[str, Any]:
        """Return where a session's KV is: the group that has most of it, how many tokens, and in which tier."""
        if not known.names:
            return {}
        now = asyncio.get_running_loop().time()
        counts = self._service.dispatcher.core.index.match(known.names, now)
        found = counts.sum(axis=1)
        group = int(found.argmax())
        if not found[group]:
            return {"cached_tokens": 0, "tier": "none"}
        slowest = max((tier for tier in range(3) if counts[group][tier]), default=0)
        return {
            "group": group,
            "cached_tokens": int(found[group]) * known.chunk_size,
            "tier": _TIERS[slowest],
        }

    async def by_chunk(self, names: Collection[bytes], sessions_max: int) -> dict[bytes, list[str]]:
        """Return which sessions have each of these chunks, the last used ones first."""
        found: dict[bytes, list[str]] = {}
        for count, listed in enumerate(self._listed[:sessions_max]):
            if count % _PORTION == _PORTION - 1:
                await asyncio.sleep(0)
            known = self._known_of(listed.record)
            for name in () if known is None else known.names:
                if name in names:
                    found.setdefault(name, []).append(listed.record.id)
        return found


def labels(service: RouterService) -> list[dict[str, Any]]:
    """Return the sessions that are not stored but only named by clients, as far back as choices are remembered."""
    offset = wall_clock()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for logged in service.dispatcher.core.log.newest():
        tenant, session = logged.origin.tenant, logged.origin.session
        if not session or is_stored(session):
            continue
        row = rows.setdefault(
            (tenant, session),
            {
                "id": session,
                "stored": False,
                "turns": 0,
                "tokens": logged.prompt_tokens,
                "cached_tokens": None,
                "tier": None,
                "group": logged.controller,
                "created": 0.0,
                "used": logged.at + offset,
                "expires": None,
                "tenant": tenant,
                "parent": None,
                "schema": None,
            },
        )
        row["created"] = logged.at + offset
        row["turns"] += not logged.is_again
    return list(rows.values())
