"""At which addresses and ports units listen: what the file says, and the next free ports for the rest. Pure."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from typing import Final

from trunkline.deploy.config.node_addresses import GROUP_PORTS
from trunkline.deploy.launch import fileformat
from trunkline.deploy.launch.document import Document, Path
from trunkline.deploy.launch.fileformat import Host, Ssh
from trunkline.deploy.launch.groups import GroupPlan

LOOPBACK: Final = "127.0.0.1"
_PORT_MAX: Final = 65535


class Ports:
    """The ports that are taken, by host."""

    def __init__(self, document: Document, first: fileformat.Ports) -> None:
        self._document = document
        self._first = first
        self._taken: dict[str, dict[int, str]] = defaultdict(dict)

    def take(self, host: str, port: int, path: Path, who: str, count: int = 1) -> None:
        """Take ports that the file gives.

        Raises:
            FileError: Another unit has them, or they do not exist.
        """
        if port + count - 1 > _PORT_MAX:
            raise self._document.error(path, f"is {port}, the first of {count}; the last one would be too large")
        for each in range(port, port + count):
            if each in self._taken[host]:
                given = f"{port}" if count == 1 else f"{port} to {port + count - 1}"
                raise self._document.error(
                    path, f"{who} needs port {given} of host {host}, where {self._taken[host][each]} has {each}"
                )
        self._taken[host].update(dict.fromkeys(range(port, port + count), who))

    def group(self, host: str, who: str) -> int:
        """Return the first of five ports in a row that are free."""
        return self._next(host, self._first.groups, GROUP_PORTS, ("ports", "groups"), who)

    def health(self, host: str, who: str) -> int:
        """Return a port that is free."""
        return self._next(host, self._first.health, 1, ("ports", "health"), who)

    def _next(self, host: str, first: int, count: int, path: Path, who: str) -> int:
        port = first
        while any(each in self._taken[host] for each in range(port, port + count)):
            port += count
        if port + count - 1 > _PORT_MAX:
            raise self._document.error(path, f"leaves no ports on host {host} for {who}; give a smaller number")
        self._taken[host].update(dict.fromkeys(range(port, port + count), who))
        return port


def group_ports(ports: Ports, groups: list[GroupPlan]) -> dict[str, int]:
    """Return the first port of each group; those that the file gives are taken first."""
    found = {}
    for group in groups:
        if group.record.port is not None:
            ports.take(group.leader, group.record.port, (*group.path, "port"), group.name, GROUP_PORTS)
            found[group.name] = group.record.port
    for group in groups:
        if group.name not in found:
            found[group.name] = ports.group(group.leader, group.name)
    return found


def joined(address: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets where they are needed."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether only the machine itself can connect to this address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost" or address.endswith(".localhost")


def is_any(address: str) -> bool:
    """Return whether this stands for all addresses of a machine."""
    return address in ("0.0.0.0", "::")


def address_of(host: Host) -> str:
    """Return the address at which the cluster's other hosts reach a host."""
    if host.address or host.ssh is None:
        return host.address or LOOPBACK
    target = host.ssh.host if isinstance(host.ssh, Ssh) else host.ssh
    return target.rpartition("@")[2].strip("[]")
