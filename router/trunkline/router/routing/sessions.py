"""Where this router has last sent each session."""

from __future__ import annotations

from collections import OrderedDict


class SessionPlaces:
    """The controllers of the sessions that were sent last; bounded in number."""

    def __init__(self, sessions_max: int) -> None:
        self._places: OrderedDict[str, int] = OrderedDict()
        self._sessions_max = sessions_max

    def __len__(self) -> int:
        return len(self._places)

    def find(self, session: str) -> int:
        """Its controller; -1: not known."""
        return self._places.get(session, -1)

    def sent(self, session: str, controller: int) -> None:
        """A request of it was sent there."""
        self._places[session] = controller
        self._places.move_to_end(session)
        if len(self._places) > self._sessions_max:
            self._places.popitem(last=False)
