"""List sessions for the dashboard: stored sessions (records), and those that are only labels.

A record's header says how long its session is. Which chunks it has follows from its history. So a few histories
are read at each look, and the names of their chunks are remembered for as long as the record does not change. The
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
from trunkline.kvstore.records import Record, RecordKey
from trunkline.router.api.requests import of_session
from trunkline.router.errors import ApiError
from trunkline.router.request_context import AdapterChoice, known
from trunkline.router.routing.names import whole_chunks
from trunkline.router.service import RouterService
from trunkline.router.stores.session_memory import StoredSession
from trunkline.router.stores.session_state import HeaderSummary, summary_of
from trunkline.router.stores.session_store import is_stored
from trunkline.router.tenancy.auth import Identity, cache_salt, current_identity
from trunkline.router.ui.overview import wall_clock

LIMIT_MAX: Final = 1000
RECORDS_MAX: Final = 1000
"""Largest number of records of each tenant among which the last used ones are searched."""
_PAGE: Final = 100
"""Number of records that are fetched at once. The headers of earlier versions are long."""
FRESH_SECONDS: Final = 1.0
"""Shortest time in seconds between two fetches of the list of records, however many clients ask."""
FRESH_SHARE: Final = 10.0
"""Time between two fetches of the list of records, as a multiple of the time that the fetch took, which is long
with many tenants; between `FRESH_SECONDS` and `FRESH_SECONDS_MAX`."""
FRESH_SECONDS_MAX: Final = 20.0
"""Longest time in seconds between two fetches of the list of records."""
FETCHED_MAX: Final = 16
"""Largest number of sessions whose histories are read each time that the sessions are listed."""
FETCH_SECONDS_MAX: Final = 0.1
"""Time in seconds after which no further history is read, because histories may be long."""
KNOWN_MAX: Final = 4096
NAMES_MAX: Final = 1024
"""Largest number of chunks of a session whose places are looked up. They are the session's first chunks."""
_PORTION: Final = 16
"""Number of sessions that are looked up before streams get their turn."""
_TIERS: Final = ("device", "host", "disk", "device")
"""Name of the tier of each column of the index. The last column is for chunks that are being computed on the
device."""


class Known(NamedTuple):
    """The chunks of a session, as of one version of its record."""

    version: int
    names: Sequence[bytes]
    """Names of the session's full chunks; empty for a session with modules."""
    chunk_size: int


class Listed(NamedTuple):
    """A stored session: its record without the header, and what the header says."""

    record: Record
    summary: HeaderSummary | None
    """None: the header cannot be read."""


class StoredSessions:
    """The stored sessions of all tenants."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._known: OrderedDict[RecordKey, Known] = OrderedDict()
        self._listed: list[Listed] = []
        self._fresh_until = float("-inf")
        self._look: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Fetch the list of sessions, unless the present one is still fresh.

        Raises:
            ApiError: 503, the store of records does not answer.
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
        clock = asyncio.get_running_loop().time
        began = clock()
        pages = await asyncio.gather(*(self._list(owner) for owner in self._service.tenants.owners()))
        listed = [each for page in pages for each in page]
        listed.sort(key=lambda each: -each.record.used)
        self._listed = listed = listed[:KNOWN_MAX]
        missing = (each.record for each in listed if self._known_of(each.record) is None)
        fetching = clock()
        for record in islice(missing, FETCHED_MAX):
            await self._fetch(record)
            if clock() - fetching > FETCH_SECONDS_MAX:
                break
        lasts = min(FRESH_SECONDS_MAX, FRESH_SHARE * (clock() - began))
        self._fresh_until = clock() + max(FRESH_SECONDS, lasts)

    async def _list(self, owner: str) -> list[Listed]:
        """Return an owner's sessions."""
        listed: list[Listed] = []
        after = ""
        while len(listed) < RECORDS_MAX:
            page = await self._service.sessions.page([owner], after, _PAGE, headers=True)
            listed += [Listed(record._replace(header=b""), _summary(record.header)) for record in page]
            if len(page) < _PAGE:
                break
            after = page[-1].key.id
        return listed

    def _known_of(self, record: Record) -> Known | None:
        known = self._known.get(record.key)
        return known if known is not None and known.version == record.version else None

    async def _fetch(self, record: Record) -> None:
        identity = Identity()
        try:
            if record.key.owner:
                identity = self._service.tenants.acting_for(current_identity(), record.key.owner)
            with known(identity=identity, choice=AdapterChoice()):
                self._known[record.key] = self._read(await self._service.sessions.peek(record.key.id))
        except ApiError:
            return  # the record has just been deleted, or cannot be read
        self._known.move_to_end(record.key)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def _read(self, stored: StoredSession) -> Known:
        version, session = stored.record.version, stored.session
        try:
            service = of_session(self._service, session)
        except ApiError:
            return Known(version, (), 0)  # its adapter is not loaded any more
        states = (link.state for link in service.links_of(service.model_name))
        state = next((state for state in states if state is not None and state.chunk_size), None)
        is_plain = session.modules is None and session.history.vocabulary == service.tokenizer.fingerprint
        if state is None or not is_plain:
            return Known(version, (), 0)
        size = state.chunk_size
        root = root_name(state.fingerprint, state.dtype, size, cache_salt(None))
        return Known(version, whole_chunks(root, session.history.tokens[: 4 * size * NAMES_MAX], size), size)

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
        record, summary = listed.record, listed.summary or HeaderSummary()
        is_read = listed.summary is not None
        row = {
            "id": record.key.id,
            "stored": True,
            "turns": summary.turns if is_read else None,
            "tokens": (summary.token_count or len(summary.tokens) // 4) if is_read else None,
            "cached_tokens": None,
            "tier": None,
            "group": None,
            "created": record.created,
            "used": record.used,
            "expires": record.used + record.ttl if record.ttl else None,
            "tenant": record.key.owner,
            "parent": summary.parent or None,
            "schema": None if summary.modules is None else summary.modules.schema or None,
        }
        known = self._known_of(record)
        return row if known is None else row | self._place(known)

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
                    found.setdefault(name, []).append(listed.record.key.id)
        return found


def _summary(header: bytes) -> HeaderSummary | None:
    try:
        return summary_of(header)
    except ValueError:
        return None


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
