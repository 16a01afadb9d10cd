"""The settings of `trunkline group`, `workers` and `router` that `serve` does not have, and their parsers.

group-{0..3}.group:7400,spare:7400      hosts and ports of groups, with ranges in names
0-1                                     ranks of a group
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from trunkline.deploy.config import models
from trunkline.deploy.config.option_values import check_records_url, parse_names
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.router.config import problem_of_model_name
from trunkline.router.membership.open_source import problem_of_members

GROUP_PORT: Final = 7400
GROUP_PORTS: Final = 5
"""Number of consecutive ports of a group: for requests, KV events, step plans, reports, rendezvous of ranks."""
EXPORTS_AT: Final = 1000
"""Distance of the ports at which a group's ranks export KV from the group's first port, on each of its hosts."""
EXPORT_PORTS: Final = 64
"""Number of ports that ranks may take there: each rank of a host has one, or the next one that is free."""
_PORT_LAST: Final = 65535
ADDRESSES_MAX: Final = 256
ANY_HOST: Final = "0.0.0.0"
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
_RANGE: Final = re.compile(r"\{([^{}]*)\}")
_BOUNDS: Final = re.compile(r"(\d{1,6})\.\.(\d{1,6})")
_RANKS: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


@dataclass(frozen=True)
class Address:
    """The host and the first port of a group."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def endpoint(self, offset: int) -> str:
        """Return the endpoint at the group's first port plus `offset`, for ZeroMQ and torch.distributed."""
        return f"tcp://{self.host}:{self.port + offset}"

    def export_ports(self, here: int) -> str:
        """Return the ports, as FIRST-LAST, of which a rank takes the first free one to export KV.

        "*" is any port, where the group's own is so high that there are none.

        Args:
            here: The rank's number among those of its host.
        """
        first = self.port + EXPORTS_AT
        last = first + EXPORT_PORTS - 1
        return f"{first + here % EXPORT_PORTS}-{last}" if last <= _PORT_LAST else "*"


def parse_address(text: str, option: str) -> Address:
    """Return the address in a text of the form `HOST:PORT`, or `HOST` for the port `GROUP_PORT`.

    Raises:
        UserError: The text has another form.
    """
    text = text.strip()
    if text.startswith("[") or text.count(":") > 1:
        raise UserError(f"{option} is {text!r}; IPv6 addresses cannot be given yet, but a host's name or IPv4 can")
    host, colon, digits = text.partition(":")
    port = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 5 else -1
    if not colon:
        port = GROUP_PORT
    if not _HOST.fullmatch(host):
        raise UserError(f"{option} is {text!r}; write HOST:PORT, such as 10.0.0.1:{GROUP_PORT}")
    last = 65536 - GROUP_PORTS
    if not 1 <= port <= last:
        raise UserError(
            f"{option} is {text!r}; allowed are ports 1 to {last}: a group has {GROUP_PORTS}, one after the other"
        )
    return Address(host, port)


def parse_addresses(text: str, option: str) -> tuple[Address, ...]:
    """Return several addresses, with commas between them and ranges such as `{0..3}` in names.

    Raises:
        UserError: An address is wrong or is named twice, or there are too many or none.
    """
    found: list[Address] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        for name in _expanded(part, option):
            found.append(parse_address(name, option))
            if len(found) > ADDRESSES_MAX:
                raise UserError(f"{option} names more than {ADDRESSES_MAX} groups")
    if not found:
        raise UserError(f"{option} is {text!r}; it names no group, as HOST:PORT,HOST:PORT does")
    twice = next((address for index, address in enumerate(found) if address in found[:index]), None)
    if twice is not None:
        raise UserError(f"{option} names {twice} twice")
    return tuple(found)


def parse_ranks(text: str, tp: int, *, is_leader: bool) -> range:
    """Return the ranks in a text of the form `A-B` (both included) or `A`.

    Args:
        is_leader: Whether the ranks run beside the controller. Then rank 0 must be one of them, and "" means all
            ranks.

    Raises:
        UserError: A group of `tp` ranks has no such ranks.
    """
    text = text.strip()
    if not text and is_leader:
        return range(tp)
    match = _RANKS.fullmatch(text)
    if match is None:
        first, last = (0 if is_leader else 1), max(1, tp - 1)
        raise UserError(f"--ranks is {text!r}; write A-B, such as {first}-{last}, or one rank")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < tp:
        raise UserError(f"--ranks is {text}; with --tp {tp} there are ranks 0 to {tp - 1}")
    if is_leader and first:
        raise UserError(f"--ranks is {text}; rank 0 runs beside the controller, so write 0-{last}")
    if not is_leader and not first:
        raise UserError(f"--ranks is {text}; rank 0 runs beside the controller (`trunkline group`)")
    return range(first, last + 1)


def is_ip(host: str) -> bool:
    """Return whether this is an IPv4 address and not a host name."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _expanded(text: str, option: str) -> list[str]:
    """Return the names with each `{A..B}` replaced by the numbers from A to B, with as many digits as A has."""
    match = _RANGE.search(text)
    if match is None:
        if "{" in text or "}" in text:
            raise UserError(f"{option} is {text!r}; a range is written {{0..3}}")
        return [text]
    bounds = _BOUNDS.fullmatch(match[1])
    if bounds is None or int(bounds[1]) > int(bounds[2]):
        raise UserError(f"{option} has {match[0]!r}; a range is written {{0..3}}, the smaller number first")
    first, last = int(bounds[1]), int(bounds[2])
    if last - first >= ADDRESSES_MAX:
        raise UserError(f"{option} names more than {ADDRESSES_MAX} groups")
    before, after = text[: match.start()], text[match.end() :]
    numbers = [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
    rest = _expanded(after, option)
    if len(numbers) * len(rest) > ADDRESSES_MAX:
        raise UserError(f"{option} names more than {ADDRESSES_MAX} groups")
    return [f"{before}{number}{tail}" for number in numbers for tail in rest]


_NAME: Final = re.compile(r"[\w.:-]{1,255}", re.ASCII)


class Kind(StrEnum):
    """The kind of a part of a cluster: what runs in it."""

    GROUP = "group"
    """A controller, and its workers or some of them."""
    WORKERS = "workers"
    """Further workers of a group whose controller runs elsewhere."""
    ROUTER = "router"


@dataclass(frozen=True)
class NodePlan:
    """The part of a cluster over several hosts that runs on this host."""

    ranks: range = range(0)
    """Ranks of the group that run here."""
    listen: Address | None = None
    """Address of the group whose controller runs here."""
    leader: Address | None = None
    """Address of the group whose controller runs on another host."""
    controllers: tuple[Address, ...] = ()
    """Addresses of the groups that a router here serves, if they never change."""
    members: str = ""
    """URL of the source of the groups that a router here serves; "": `controllers` names them."""
    models: tuple[tuple[str, Path], ...] = ()
    """Names and folders of further models that a router here serves."""
    join: str = ""
    """URL of the record store in which the group registers; "": routers know it by other means."""
    wire_keys: str = ""
    """File with the keys of sockets between hosts."""
    plain_tcp: bool = False
    """Whether sockets between hosts have no keys."""

    @property
    def member_id(self) -> str:
        """Id of a group that registers: its address, so that it is the same after each start. "": it does not."""
        return str(self.reached) if self.join else ""

    @property
    def reached(self) -> Address:
        """The address at which other hosts reach the group whose controller runs here."""
        assert self.listen is not None
        return Address(socket.getfqdn() if self.listen.host == ANY_HOST else self.listen.host, self.listen.port)

    @property
    def is_router(self) -> bool:
        """Whether routers run here."""
        return bool(self.controllers or self.members)

    def is_spread(self, tp: int) -> bool:
        """Return whether the group has ranks on other hosts, too."""
        return bool(self.ranks) and len(self.ranks) < tp


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """The settings of a part of a cluster that is spread over hosts, as texts."""

    listen: str = f"127.0.0.1:{GROUP_PORT}"
    """The address on which a group listens; by default only this machine may connect."""
    leader: str = ""
    """Address of the group that workers belong to; "" for other parts."""
    controllers: str = ""
    """Addresses of the groups that a router serves, if they never change; "" for other parts."""
    members: str = ""
    """URL of the source that names the groups that a router serves; "" for other parts."""
    more_models: str = ""
    """Further models of a router as NAME=MODEL, with commas between; "" for other parts."""
    join: str = ""
    """URL of the record store in which a group registers; "": it does not. May hold a password."""
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
        if kind is Kind.ROUTER and not (self.controllers or self.members):
            raise UserError(
                f"--controllers is missing; write HOST:PORT of each group, such as h1:{GROUP_PORT}, or where the "
                "groups are listed: --members records"
            )
        if self.controllers and self.members:
            raise UserError("--controllers and --members exclude each other; give one of them")
        if self.members and (problem := problem_of_members(self.members)):
            raise UserError(f"--members: {problem}")
        if self.join:
            check_records_url(self.join, "--join")
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
            node = replace(node, models=_further_models(self.more_models))
            if self.members:
                scheme, _, path = self.members.partition(":")
                members = f"{scheme}:{Path(path).absolute()}" if scheme == "static" else self.members
                return settings, replace(node, members=members)
            controllers = parse_addresses(self.controllers, "--controllers")
            return settings, replace(node, controllers=controllers)
        if "," in settings.role:
            raise UserError(f"--role is {settings.role}; this is one group, so write one role")
        ranks = parse_ranks(self.ranks, settings.ranks, is_leader=kind is Kind.GROUP)
        # Of a group's processes only these are this machine's.
        settings = replace(settings, groups=1, routers=1, port=0, ranks_here=len(ranks))
        if kind is Kind.WORKERS:
            leader = parse_address(self.leader, "--leader")
            return settings, replace(node, ranks=ranks, leader=leader)
        listen = _own_address(parse_address(self.listen, "--listen"))
        return settings, replace(node, ranks=ranks, listen=listen, join=self.join)


def _further_models(text: str) -> tuple[tuple[str, Path], ...]:
    """Return names and folders of the models in NAME=MODEL,….

    Raises:
        UserError: A part has another form, or there is no such model.
    """
    found = []
    for part in parse_names(text):
        name, _, model = part.partition("=")
        if not model or problem_of_model_name(name):
            raise UserError(f"--more-models has {part!r}; write NAME=MODEL, with commas between several")
        found.append((name, models.resolve(model, needs_weights=False)))
    return tuple(found)


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
