"""Give the groups of a cluster their part of each host: ranks, ports, cores, memory and GPUs. Pure."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from trunkline.deploy.config.node_settings import GROUP_PORTS
from trunkline.deploy.config.option_values import format_bytes, nearest, parse_bytes
from trunkline.deploy.errors import UserError
from trunkline.deploy.launch import fileformat
from trunkline.deploy.launch.document import Document, Path
from trunkline.deploy.launch.fileformat import Cluster, Group, Host, Ssh, Tiers
from trunkline.deploy.launch.unit_options import plain


@dataclass(frozen=True)
class GroupPlan:
    """A group, and the hosts of its ranks."""

    name: str
    record: Group
    path: Path
    """The group's place in the file."""
    ranks: dict[str, range]
    """The group's ranks on each host, in order. The first host runs the controller."""

    @property
    def chooses(self) -> bool:
        """Whether the group itself chooses its number of ranks, if its host has GPUs."""
        return self.record.tp is None and len(self.ranks) == 1

    @property
    def leader(self) -> str:
        """The host of its controller."""
        return next(iter(self.ranks))


def plan_groups(document: Document, cluster: Cluster, hosts: list[str]) -> list[GroupPlan]:
    """Return all groups, in the file's order.

    Raises:
        FileError: The ranks do not fit the hosts.
    """
    groups = []
    records = cluster.groups or [Group()]
    is_alone = len(records) == 1
    for index, record in enumerate(records):
        path: Path = ("groups", index) if cluster.groups else ()
        ranks = _ranks(document, record, path, hosts)
        base = record.name or ("group" if len(records) == 1 else f"group-{index}")
        # With a count of 1, too: a group that gets company later is not renamed, which would replace it.
        is_numbered = record.count is not None or (is_alone and not record.name)
        for number in range(record.count or 1):
            groups.append(GroupPlan(f"{base}-{number}" if is_numbered else base, record, path, ranks))
    return groups


def host_named(document: Document, given: str, hosts: list[str], path: Path) -> str:
    """Return `given` if it is the name of a host, or the only host if `given` is "".

    Raises:
        FileError: There is no such host, or there are several.
    """
    if not given:
        if len(hosts) > 1:
            raise document.error(path, f"does not say where; the hosts are {', '.join(hosts)}")
        return hosts[0]
    if given not in hosts:
        raise document.error(path, f"is {given!r}, which is no host of this file; {nearest(given, hosts)}")
    return given


def _ranks(document: Document, group: Group, path: Path, hosts: list[str]) -> dict[str, range]:
    where = (*path, "hosts")
    given, tp = group.hosts, group.tp or 1
    if isinstance(given, dict):
        counts = {host_named(document, label, hosts, (*where, label)): n for label, n in given.items()}
        if sum(counts.values()) != tp:
            said = ", ".join(f"{n} on {label}" for label, n in counts.items()) or "none"
            raise document.error(where, f"has {said}; tp is {tp}, and so many ranks must have a host")
    else:
        labels = given if isinstance(given, list) else [given or ""]
        if not labels:
            raise document.error(where, "is empty; name a host at least, or leave it out")
        labels = [
            host_named(document, label, hosts, (*where, index) if isinstance(given, list) else where)
            for index, label in enumerate(labels)
        ]
        if len(set(labels)) < len(labels):
            raise document.error(where, "names a host twice; a host's ranks are one unit")
        if tp % len(labels):
            raise document.error(
                where,
                f"are {len(labels)}, among which tp {tp} cannot be shared equally; say how many ranks each "
                "has, as in {a: 2, b: 1}",
            )
        counts = dict.fromkeys(labels, tp // len(labels))
    ranks, first = {}, 0
    for label, count in counts.items():
        ranks[label] = range(first, first + count)
        first += count
    return ranks


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
            FileError: Another unit has one of the ports, or their numbers are too large.
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


VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_FRACTION: Final = "gpu-memory-fraction"


@dataclass(frozen=True)
class Facts:
    """The cores, memory and GPUs of a host."""

    cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    """The host's GPUs, as `CUDA_VISIBLE_DEVICES` names them."""


@dataclass
class Shares:
    """The share of a host's resources that each part of a group gets. A part that is missing here decides for
    itself."""

    threads: dict[str, int]
    """Threads of each rank, by host, where ranks of several units share its cores."""
    devices: dict[tuple[str, str], dict[str, str]]
    """Environment variables of a group's ranks on a host, by group and host."""


def merged(over: Tiers | None, under: Tiers) -> Tiers:
    """Return the fields of `over` that are set, and those of `under` for the rest."""
    if over is None:
        return under
    given = {name: value for name, value in structs.asdict(over).items() if value not in ("", None)}
    return structs.replace(under, **given)


def peer_hosts(cluster: Cluster, groups: list[GroupPlan]) -> dict[str, set[str]]:
    """Return for each group the hosts of all groups that may pull KV from it: those of its model. A group without
    peers has none."""
    hosts: defaultdict[str, set[str]] = defaultdict(set)
    pulling = [group for group in groups if merged(group.record.tiers, cluster.tiers).peers is not False]
    for group in pulling:
        hosts[group.record.model] |= group.ranks.keys()
    return {group.name: hosts[group.record.model] if group in pulling else set() for group in groups}


def share(
    document: Document,
    cluster: Cluster,
    hosts: Mapping[str, Host],
    groups: list[GroupPlan],
    facts: Mapping[str, Facts],
) -> Shares:
    """Return the share of its host's resources that each part of a group gets.

    Raises:
        FileError: A host has less than its groups need, as far as that is known.
    """
    shares = Shares({}, {})
    for label, host in hosts.items():
        here = [group for group in groups if label in group.ranks]
        if not here:
            continue
        known = facts.get(label)
        ranks = sum(len(group.ranks[label]) for group in here)
        cores = host.cores or (known.cores if known else None)
        if cores is not None and (len(here) > 1 or host.cores):
            shares.threads[label] = max(1, cores // ranks)
        _check_memory(document, cluster, label, here, host, known)
        _give_devices(document, cluster, label, here, host, known, shares)
    return shares


def _check_memory(
    document: Document, cluster: Cluster, label: str, here: list[GroupPlan], host: Host, known: Facts | None
) -> None:
    """Check the memory that the file asks for. The defaults of units are not used before they are needed."""
    memory = parse_bytes(host.memory, "memory") if host.memory else known.memory_bytes if known else None
    if memory is None:
        return
    asked = 0
    for group in here:
        tiers = merged(group.record.tiers, cluster.tiers)
        on_cpu = _device(cluster, group) == "cpu" or not (host.gpus or (known is not None and known.gpus))
        each = _size(document, group, tiers.kv_memory if on_cpu else "", "kv_memory")
        each += _size(document, group, tiers.host, "host")
        asked += each * len(group.ranks[label])
    if asked > memory:
        raise document.error(
            ("hosts", label),
            f"has {format_bytes(memory)} of memory; its groups are given {format_bytes(asked)} for KV "
            f"(tiers.kv_memory and tiers.host of {', '.join(group.name for group in here)})",
        )


def _size(document: Document, group: GroupPlan, given: str | int, name: str) -> int:
    text = str(given).strip()
    if text in ("", "0"):
        return 0
    try:
        return parse_bytes(text, name)
    except UserError as error:
        own = group.record.tiers is not None and getattr(group.record.tiers, name) != ""
        raise document.error((*group.path, "tiers", name) if own else ("tiers", name), str(error)) from error


def _device(cluster: Cluster, group: GroupPlan) -> str:
    options = {**cluster.options, **group.record.options}
    return str(options.get("device", "auto"))


def _give_devices(
    document: Document,
    cluster: Cluster,
    label: str,
    here: list[GroupPlan],
    host: Host,
    known: Facts | None,
    shares: Shares,
) -> None:
    """Give each rank a GPU, on hosts whose GPUs are known, unless a group's environment names its own.

    Groups that say `gpu-memory-fraction` share GPUs once there are no free ones, as far as their shares fit. Those
    that leave their number of ranks open have equal parts of what the others leave.
    """
    names = _names(host, known)
    if not names or VISIBLE in host.environment:
        return
    placed = [g for g in here if VISIBLE not in g.record.environment and _device(cluster, g) != "cpu"]
    load = dict.fromkeys(names, 0.0)
    # Groups with a fixed number of ranks come first, so that it is known what they leave.
    fixed, open_ones = [g for g in placed if not g.chooses], [g for g in placed if g.chooses]
    for group in fixed:
        _take(document, cluster, label, group, len(group.ranks[label]), load, shares)
    free = sum(not used for used in load.values())
    for group in open_ones:
        _take(document, cluster, label, group, max(1, free // len(open_ones)), load, shares)


def _names(host: Host, known: Facts | None) -> tuple[str, ...]:
    """Return the names of a host's GPUs. A number in the file counts more than what the host shows."""
    shown = known.gpus if known is not None else ()
    if host.gpus is None or host.gpus <= len(shown):
        return shown[: host.gpus]
    return tuple(str(index) for index in range(host.gpus))


def _take(
    document: Document,
    cluster: Cluster,
    label: str,
    group: GroupPlan,
    ranks: int,
    load: dict[str, float],
    shares: Shares,
) -> None:
    """Give a group its GPUs on a host.

    Raises:
        FileError: There are too few.
    """
    fraction = _fraction(cluster, group)
    share = 1.0 if fraction is None else fraction
    order = list(load)
    fitting = sorted((name for name in load if load[name] + share <= 1 + 1e-9), key=lambda name: load[name])
    if len(fitting) < ranks:
        taken = sum(used > 0 for used in load.values())
        raise document.error(
            (*group.path, "hosts"),
            f"{group.name} needs a GPU for each of its ranks on host {label}, {ranks} in all; the host has "
            f"{len(load)}, of which {taken} are given to other groups. Give fewer ranks (`tp`), or let groups "
            "share GPUs: each with `options: {gpu-memory-fraction: F}`, their sum at most 1",
        )
    chosen = sorted(fitting[:ranks], key=order.index)
    for name in chosen:
        load[name] += share
    shares.devices[group.name, label] = {VISIBLE: ",".join(chosen)}


def _fraction(cluster: Cluster, group: GroupPlan) -> float | None:
    """Return the part of each of its GPUs that a group asks for; None if it wants them alone."""
    options = {plain(name): value for name, value in {**cluster.options, **group.record.options}.items()}
    value = options.get(_FRACTION)
    # A wrong value is refused with the other options, or by the group itself.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        return None
    return float(value)
