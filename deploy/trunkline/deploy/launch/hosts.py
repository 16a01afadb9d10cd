"""Talk to the agents on all hosts of a cluster at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from trunkline.deploy.launch.connection import Connection, HostError
from trunkline.deploy.launch.fileformat import Host
from trunkline.deploy.launch.protocol import Forget, Look, Put, Signal, UnitState
from trunkline.deploy.launch.records import socket_folder

_AT_ONCE_MAX: Final = 32
T = TypeVar("T")
Place = tuple[str, str]
"""Host and unit."""


class Hosts:
    """Connections to the agents on all hosts. Each is used by one thread at a time."""

    def __init__(self, cluster: str, hosts: Mapping[str, Host]) -> None:
        self._cluster = cluster
        self._hosts = dict(hosts)
        self._connections: dict[str, Connection] = {}
        self._pool = ThreadPoolExecutor(min(_AT_ONCE_MAX, max(1, len(hosts))))

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def connections(self) -> Mapping[str, Connection]:
        """Connections to the hosts that could be reached, by host."""
        return self._connections

    def connect(self) -> dict[str, HostError]:
        """Connect to the hosts that are not connected yet; return why that failed, by host."""
        sockets = socket_folder()
        missing = [label for label in self._hosts if label not in self._connections]

        def reach(label: str) -> Connection | HostError:
            try:
                return Connection(label, self._hosts[label], self._cluster, sockets)
            except HostError as error:
                return error

        failed: dict[str, HostError] = {}
        for label, found in zip(missing, self._pool.map(reach, missing), strict=True):
            if isinstance(found, HostError):
                failed[label] = found
            else:
                self._connections[label] = found
        return failed

    def each(
        self, action: Callable[[Connection], T], labels: Iterable[str] | None = None
    ) -> dict[str, T | HostError]:
        """Return what an action gives on each of the connected hosts, all at the same time."""
        chosen = [
            label for label in (self._connections if labels is None else labels) if label in self._connections
        ]

        def act(label: str) -> T | HostError:
            try:
                return action(self._connections[label])
            except HostError as error:
                return error

        return dict(zip(chosen, self._pool.map(act, chosen), strict=True))

    def states(self, *, probe: bool = True) -> tuple[dict[Place, UnitState], dict[str, HostError]]:
        """Return the states of all units, by host and name, and why some hosts did not answer."""
        states: dict[Place, UnitState] = {}
        failed: dict[str, HostError] = {}
        for label, found in self.each(lambda connection: connection.ask(Look(probe=probe))).items():
            if isinstance(found, HostError):
                failed[label] = found
                self._connections.pop(label).close()
                continue
            states.update({(label, state.name): state for state in found if isinstance(state, UnitState)})
        return states, failed

    def signal(self, places: Iterable[Place], kind: str) -> None:
        """Send a signal to units.

        Raises:
            HostError: A host could not be told.
        """
        for label, unit in places:
            if label in self._connections:
                self._connections[label].ask(Signal(unit=unit, kind=kind))

    def forget(self, place: Place) -> None:
        """Remove the folder of a unit that does not run.

        Raises:
            HostError: It runs.
        """
        self._connections[place[0]].ask(Forget(unit=place[1]))

    def put(self, files: Mapping[str, Mapping[str, bytes]]) -> None:
        """Copy files to hosts.

        Args:
            files: contents by name, by host.

        Raises:
            HostError: A file could not be written.
        """

        def copy(connection: Connection) -> None:
            for name, content in files.get(connection.label, {}).items():
                connection.ask(Put(name=name, content=content))

        for done in self.each(copy).values():
            if isinstance(done, HostError):
                raise done

    def close(self) -> None:
        """Close all connections, and so end the agents."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
