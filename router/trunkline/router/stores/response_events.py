"""The events of a response that is made in the background and streamed, as they are kept in its record. Pure.

    run of the request ─► take ─► events that are new ─► flush: the record's next segment ─► any router's readers
         └─ its router ends: another run ─► take: what was told before is left out

A run that is made again writes the same texts with the same ids, but cuts them into deltas otherwise. So an event
is known by its place, and of a text what counts is how far it was told. Numbers go on where they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

Event = dict[str, Any]
_PLACES: Final = ("type", "output_index", "content_index", "summary_index")
_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")


class EventLog:
    """All that was told of a response, and what a run adds."""

    def __init__(self, chunks: Sequence[bytes] = ()) -> None:
        """`chunks`: what `flush` has returned so far, in order."""
        self._told: dict[tuple[Any, ...], _Told] = {}
        """What was told so far in all runs together, by place."""
        self._run: dict[tuple[Any, ...], _Told] = {}
        """What the present run has told, by place."""
        self._new: list[Event] = []
        self._number = 0
        self.end: Event | None = None
        """The last event there will be; None: it is not known yet."""
        for chunk in chunks:
            for event in events_of(chunk):
                self._note(event)

    def begin(self) -> None:
        """Say that a run of the request begins, from its beginning."""
        self._run = {}

    def take(self, part: bytes) -> None:
        """Take some of a run's events, as it sends them to clients: whole server-sent events."""
        for sent in part.split(b"\n\n"):
            _, found, data = sent.partition(b"data: ")
            if found:
                event: Event = msgspec.json.decode(data)
                new = self._untold(event)
                if new is not None:
                    self._append(new)

    def add(self, kind: str, **fields: Any) -> None:
        """Add an event that no run tells."""
        self._append({"type": kind, "sequence_number": 0, **fields})

    def flush(self) -> list[bytes]:
        """Return the events since the last call as a chunk to be kept; none if there are none."""
        new, self._new = self._new, []
        return [msgspec.json.encode(new)] if new else []

    def _untold(self, event: Event) -> Event | None:
        """Return what of a run's event was not told before; None: nothing."""
        place = _place(event)
        told, run = self._told.get(place, _NOTHING), self._run.get(place, _NOTHING)
        self._run[place] = run.behind(event)
        if "delta" not in event:
            return event if run.events >= told.events else None
        logprobs = event.get("logprobs", [])
        text = event["delta"][max(0, told.characters - run.characters) :]
        if not text:
            return None
        if logprobs:
            event["logprobs"] = logprobs[max(0, told.logprobs - run.logprobs) :]
        return {**event, "delta": text}

    def _append(self, event: Event) -> None:
        last = self._new[-1] if self._new else None
        if last is not None and "delta" in event and _place(last) == _place(event):
            self._told[_place(event)] = self._told[_place(event)].behind(event)
            last["delta"] += event["delta"]
            if "logprobs" in event:
                last["logprobs"] = [*last["logprobs"], *event["logprobs"]]
            return
        event["sequence_number"] = self._number
        self._note(event)
        self._new.append(event)

    def _note(self, event: Event) -> None:
        place = _place(event)
        self._told[place] = self._told.get(place, _NOTHING).behind(event)
        self._number = event["sequence_number"] + 1
        if event["type"] in _ENDS:
            self.end = event


class _Told(msgspec.Struct, frozen=True):
    """How far something was told that stands at one place."""

    events: int = 0
    characters: int = 0
    logprobs: int = 0

    def behind(self, event: Event) -> _Told:
        """Return how far it is told after another event."""
        characters, logprobs = len(event.get("delta", "")), len(event.get("logprobs") or ())
        return _Told(self.events + 1, self.characters + characters, self.logprobs + logprobs)


_NOTHING: Final = _Told()


def _place(event: Event) -> tuple[Any, ...]:
    return tuple(event.get(name) for name in _PLACES)


def events_of(chunk: bytes, after: int = -1) -> Iterator[Event]:
    """Yield the events in a chunk whose numbers are above `after`."""
    for event in msgspec.json.decode(chunk, type=list[Event]):
        if event["sequence_number"] > after:
            yield event
