"""The settings of `trunkline group`, `workers` and `router` that `serve` does not have."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from trunkline.deploy.config.node_addresses import (
    GROUP_PORT,
    Address,
    is_ip,
    parse_address,
    parse_addresses,
    parse_ranks,
)
from trunkline.deploy.config.plans import NodePlan
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError

_NAME: Final = re.compile(r"[\w.:-]{1,255}", re.ASCII)


class Kind(StrEnum):
    """The kind of a part of a cluster: what runs in it."""

    GROUP = "group"
    """A controller, and its workers or some of them."""
    WORKERS = "workers"
    """Further workers of a group whose controller runs elsewhere."""
    ROUTER = "router"


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """The settings of a part of a cluster that is spread over hosts, as texts."""

    listen: str = f"127.0.0.1:{GROUP_PORT}"
    """Where a group listens; by default only this machine may connect."""
    leader: str = ""
    """For workers: where their group listens."""
    controllers: str = ""
    """For a router: where the groups listen."""
    ranks: str = ""
    wire_keys: str = ""
    plain_tcp: bool = False
    health_host: str = "127.0.0.1"
    health_port: int = 0

    def validate(self, kind: Kind) -> None:
        """Raise `UserError` for the first setting that is wrong by itself."""
        if not 0 <= self.health_port <= 65535:
            raise UserError(f"--health-port is {self.health_port}; allowed are 0 (none) to 65535")
        if not _NAME.fullmatch(self.health_host):
            raise UserError(f"--health-host is {self.health_host!r}; write an address of this machine, or 0.0.0.0")
        if self.wire_keys and self.plain_tcp:
            raise UserError("--wire-keys and --plain-tcp exclude each other; give one of them")
        if kind is Kind.ROUTER and not self.controllers:
            raise UserError(f"--controllers is missing; write HOST:PORT of each group, such as h1:{GROUP_PORT}")
        if kind is Kind.WORKERS and not self.leader:
            raise UserError(f"--leader is missing; write HOST:PORT of the group, such as h1:{GROUP_PORT}")

    def plan(self, kind: Kind, settings: ServeSettings) -> tuple[ServeSettings, NodePlan]:
        """Return the plan of what is to run here, and the settings without what runs elsewhere.

        Args:
            settings: The settings, with a number of ranks unless this is a router.

        Raises:
            UserError: A setting is wrong, or the address to listen on is not this machine's.
        """
        self.validate(kind)
        node = NodePlan(
            wire_keys=str(Path(self.wire_keys).absolute()) if self.wire_keys else "", plain_tcp=self.plain_tcp
        )
        if kind is Kind.ROUTER:
            controllers = parse_addresses(self.controllers, "--controllers")
            return settings, replace(node, controllers=controllers)
        ranks = parse_ranks(self.ranks, settings.ranks, is_leader=kind is Kind.GROUP)
        # Of a group's processes only these are this machine's.
        settings = replace(settings, groups=1, routers=1, port=0, ranks_here=len(ranks))
        if kind is Kind.WORKERS:
            leader = parse_address(self.leader, "--leader")
            return settings, replace(node, ranks=ranks, leader=leader)
        listen = _own_address(parse_address(self.listen, "--listen"))
        return settings, replace(node, ranks=ranks, listen=listen)


def _own_address(address: Address) -> Address:
    """Return the address with an IPv4 address in place of a host name, as ZeroMQ needs it to listen.

    Raises:
        UserError: The name cannot be resolved.
    """
    if is_ip(address.host):
        return address
    try:
        found = socket.getaddrinfo(address.host, address.port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"--listen is {address}; the name cannot be resolved ({error.strerror}); write an address of this "
            "machine, or 0.0.0.0 for all of them"
        ) from error
    return Address(str(found[0][4][0]), address.port)
