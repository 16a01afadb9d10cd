"""Make the plan of a cluster from its file: units with their hosts, command lines and ports. Pure.

    cluster.yaml ──document.py──► lines and values ──fileformat.py──► Cluster ──here──► Plan

A *unit* is one `trunkline group`, `workers` or `router`: what runs, stops and is looked after as a whole on one
host. A group over several hosts is a unit `NAME` where its controller is and units `NAME.HOST` elsewhere.

Where a command line needs a path below the host's folder of this cluster, which only that host knows, it says
`{state}/…`.

`changes.py` compares the plan with what runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

from msgspec import structs

from trunkline.deploy.config.node_settings import GROUP_PORTS
from trunkline.deploy.config.option_values import API_KEY_VARIABLE, SQLITE, check_records_url
from trunkline.deploy.config.record_files import records_beside
from trunkline.deploy.errors import UserError
from trunkline.deploy.launch.document import Document, Path
from trunkline.deploy.launch.fileformat import Cluster, Environment, Host, Router, Security
from trunkline.deploy.launch.folders import STATE
from trunkline.deploy.launch.resources import (
    LOOPBACK,
    Facts,
    GroupPlan,
    Ports,
    Shares,
    address_of,
    group_ports,
    host_named,
    is_any,
    is_loopback,
    joined,
    merged,
    peer_hosts,
    plan_groups,
    share,
)
from trunkline.deploy.launch.unit_options import OptionWords, Rules, plain
from trunkline.router.membership.member import Member

WIRE_KEYS: Final = {"group": "wire-group.key", "workers": "wire-workers.key", "router": "wire-router.key"}
"""Name of the file of wire keys for each kind of unit, which has only the secrets that the kind needs."""
_HERE: Final = PurePath(".")
API_KEYS: Final = "api-keys.json"
MEMBERS: Final = "members.json"
"""Name of the file that lists the groups for routers, which read it again when it changes."""


@dataclass(frozen=True)
class Unit:
    """A `trunkline group`, `workers` or `router` that runs on a host."""

    name: str
    host: str
    kind: str
    """`group`, `workers` or `router`."""
    group: str
    """The group that the unit is a part of; "" for a router."""
    argv: tuple[str, ...]
    """The words of the unit's command line after `trunkline`."""
    environment: Mapping[str, str]
    ports: tuple[int, ...]
    """Ports that the unit listens on, besides the one for its health."""
    health_port: int
    """Port for the unit's health, on the loopback address."""
    ranks: tuple[int, ...] = ()
    """Ranks that run in it; empty for a router, or a group that chooses its number of ranks."""
    files: tuple[str, ...] = ()
    """Files that must be in the host's folder before it starts."""
    cores: str = ""
    """The word of `argv` that gives it a part of the host's cores, if that follows from the groups of the host.
    When groups come and go, a unit that runs keeps the part that it has."""

    def digest(self, contents: Mapping[str, bytes]) -> str:
        """Return a digest of all that a unit would have to be restarted for; not of API keys and of the list of
        groups, which it reads again."""
        name = WIRE_KEYS[self.kind]
        wire = hashlib.sha256(contents.get(name, b"")).hexdigest() if name in self.files else ""
        argv = [word for word in self.argv if word != self.cores]
        said = [argv, sorted(self.environment.items()), wire]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


@dataclass(frozen=True)
class Plan:
    """The units of a cluster, and where they run."""

    name: str
    hosts: Mapping[str, Host]
    """All hosts that have units, by name."""
    units: tuple[Unit, ...]
    urls: tuple[str, ...]
    """The addresses at which clients connect."""
    model: str
    security: Security
    stop_s: float
    source: str
    """The name of the cluster's file."""
    warnings: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Units by group, the leader first."""
    members: tuple[Member, ...] = ()
    """The groups as routers know them."""

    @property
    def by_name(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    def stages(self) -> list[tuple[str, ...]]:
        """Return the units that are restarted together: each group, then each router."""
        routers = [(unit.name,) for unit in self.units if unit.kind == "router"]
        return [*self.groups.values(), *routers]


@dataclass(frozen=True)
class _Parts:
    """The values from which the command lines of all units are made."""

    document: Document
    cluster: Cluster
    hosts: Mapping[str, Host]
    words: OptionWords
    ports: Ports
    shares: Shares
    listens: Mapping[str, str]
    """`HOST:PORT` of each group's controller."""
    records: str
    """URL of the store of records; "": routers choose it."""

    def wire(self, kind: str) -> tuple[list[str], tuple[str, ...]]:
        """Return options and files for connections between processes."""
        if self.cluster.security.plain_tcp:
            return ["--plain-tcp"], ()
        return [f"--wire-keys={STATE}/{WIRE_KEYS[kind]}"], (WIRE_KEYS[kind],)


def make_plan(
    document: Document,
    cluster: Cluster,
    rules: Rules,
    facts: Mapping[str, Facts] | None = None,
    name: str = "",
    base: PurePath = _HERE,
) -> Plan:
    """Return the plan for a file.

    Args:
        document: The file with its line numbers, which errors name.
        rules: The options of the commands.
        facts: What hosts report of themselves, as far as it is known; what the file says counts more.
        name: The cluster's name if the file gives none.
        base: The file's folder.

    Raises:
        FileError: The plan cannot work.
    """
    hosts = dict(cluster.hosts) or {"local": Host()}
    models = {name: _located(model, base) for name, model in cluster.models.items()}
    cluster = structs.replace(cluster, model=_located(cluster.model, base), models=models)
    _check_machines(document, hosts)
    groups = plan_groups(document, cluster, list(hosts))
    routers = _routers(document, cluster, hosts)
    _check_names(document, groups, routers)
    ports = Ports(document, cluster.ports)
    for router, path in routers:
        ports.take(router.host, router.port, (*path, "port"), router.name)
    first = group_ports(ports, groups)
    peers = peer_hosts(cluster, groups)
    listens = {
        group.name: joined(_address(document, hosts, group, routers, peers[group.name]), first[group.name])
        for group in groups
    }
    shares = share(document, cluster, hosts, groups, facts or {})
    words, records = OptionWords(document, cluster, rules), _records(document, cluster, routers)
    parts = _Parts(document, cluster, hosts, words, ports, shares, listens, records)
    # Routers get their ports first, so that these stay the same when groups come and go.
    router_units = [_router_unit(parts, router, path) for router, path in routers]
    units = [unit for group in groups for unit in _group_units(parts, group, first[group.name])]
    units += router_units
    used = {unit.host for unit in units}
    return Plan(
        name=cluster.name or name,
        hosts={label: host for label, host in hosts.items() if label in used},
        units=tuple(units),
        urls=tuple(_url(hosts[router.host], router) for router, _ in routers),
        model=cluster.model,
        security=cluster.security,
        stop_s=cluster.stop_seconds,
        source=os.path.abspath(document.source),
        warnings=tuple(f"nothing runs on host {label}" for label in hosts if label not in used),
        groups={group.name: tuple(u.name for u in units if u.group == group.name) for group in groups},
        members=tuple(_member(group, listens[group.name]) for group in groups),
    )


def _group_units(parts: _Parts, group: GroupPlan, port: int) -> list[Unit]:
    """Return the units of a group, the leader first."""
    units = []
    cluster, record = parts.cluster, group.record
    tiers = merged(record.tiers, cluster.tiers)
    path = group.path if record.tiers is not None else ()
    for label, ranks in group.ranks.items():
        leads = label == group.leader
        kind = "group" if leads else "workers"
        name = group.name if leads else f"{group.name}.{label}"
        health = parts.ports.health(label, name)
        where = "--listen" if leads else "--leader"
        argv = [kind, cluster.models[record.model] if record.model else cluster.model]
        chooses = group.chooses and (group.name, label) in parts.shares.devices
        if not chooses:
            argv += [f"--tp={record.tp or 1}", f"--ranks={ranks[0]}-{ranks[-1]}"]
        argv.append(f"{where}={parts.listens[group.name]}")
        own = {**record.options, "served_model_name": record.model} if record.model else record.options
        words, variables = parts.words.for_options(kind, own, group.path)
        more, secrets = parts.words.for_tiers(kind, tiers, path, group.name)
        if leads and cluster.members:
            secrets = {**secrets, **parts.words.for_joining(kind, parts.records)[1]}
        wire, files = parts.wire(kind)
        is_shared = label in parts.shares.threads and not any(word.startswith("--threads=") for word in words)
        cores = f"--threads={parts.shares.threads[label]}" if is_shared else ""
        words += [cores] if cores else []
        units.append(
            Unit(
                name=name,
                host=label,
                kind=kind,
                group=group.name,
                argv=(*argv, *words, *more, *wire, f"--health-port={health}"),
                environment={
                    **_texts(parts.hosts[label].environment),
                    **parts.shares.devices.get((group.name, label), {}),
                    **_texts(record.environment),
                    **variables,
                    **secrets,
                },
                ports=tuple(range(port, port + GROUP_PORTS)) if leads else (),
                health_port=health,
                ranks=() if chooses else tuple(ranks),
                files=files,
                cores=cores,
            )
        )
    return units


def _router_unit(parts: _Parts, router: Router, path: Path) -> Unit:
    cluster = parts.cluster
    health = parts.ports.health(router.host, router.name)
    argv = ["router", cluster.model]
    if cluster.models:
        argv.append("--more-models=" + ",".join(f"{name}={model}" for name, model in cluster.models.items()))
    argv.append("--members=records" if cluster.members else f"--members=static:{STATE}/{MEMBERS}")
    argv += [f"--host={router.listen}", f"--port={router.port}", f"--routers={router.processes}"]
    words, variables = parts.words.for_options("router", router.options, path)
    where, secrets = parts.words.for_records("router", parts.records)
    wire, files = parts.wire("router")
    files = files if cluster.members else (*files, MEMBERS)
    if cluster.security.api_keys:
        words.append(f"--tenants={STATE}/{API_KEYS}")
        files = (*files, API_KEYS)
    return Unit(
        name=router.name,
        host=router.host,
        kind="router",
        group="",
        argv=(*argv, *words, *where, *wire, f"--health-port={health}"),
        environment={
            **_texts(parts.hosts[router.host].environment),
            **_texts(router.environment),
            **variables,
            **secrets,
        },
        ports=(router.port,),
        health_port=health,
        files=files,
    )


def _located(model: str, base: PurePath) -> str:
    """Return a model as units are told it; a path that is relative to the file becomes one that is not."""
    return os.path.normpath(base / model) if model.startswith(("./", "../")) else model


def _member(group: GroupPlan, listen: str) -> Member:
    """Return a group as routers know it, from `HOST:PORT` of its controller."""
    host, _, port = listen.rpartition(":")
    return Member(group.name, f"tcp://{listen}", f"tcp://{host}:{int(port) + 1}", group.leader)


def _routers(document: Document, cluster: Cluster, hosts_by_name: Mapping[str, Host]) -> list[tuple[Router, Path]]:
    """Return the routers with names and hosts, and where they stand in the file."""
    hosts = list(hosts_by_name)
    if not cluster.routers:
        return [(Router(name="router", host=hosts[0]), ())]
    found: list[tuple[Router, Path]] = []
    for index, router in enumerate(cluster.routers):
        path: Path = ("routers", index)
        host = host_named(document, router.host, hosts, (*path, "host"))
        name = router.name or ("router" if len(cluster.routers) == 1 else f"router-{host}")
        _check_exposure(document, cluster, hosts_by_name[host], router, path)
        found.append((structs.replace(router, name=name, host=host), path))
    return found


def _records(document: Document, cluster: Cluster, routers: list[tuple[Router, Path]]) -> str:
    """Return the URL of the store of records; "": the routers choose it.

    Raises:
        FileError: The URL is wrong, or routers on several hosts would have records of their own.
    """
    url = cluster.records or records_beside(cluster.tiers.remote)
    if cluster.records:
        try:
            check_records_url(url)
        except UserError as error:
            raise document.error(("records",), str(error)) from error
    hosts = sorted({router.host for router, _ in routers})
    if len(hosts) > 1 and (not url or url.startswith(SQLITE)):
        raise document.error(
            ("records",) if url else ("routers",),
            f"there are routers on {' and '.join(hosts)}, which need common sessions and schemas; say `records: "
            "redis://HOST:PORT/DB`, with a Redis or Valkey server that all of them reach",
        )
    if cluster.members and (not url or url.startswith(SQLITE)):
        raise document.error(
            ("members",),
            "is records, but there is no server for records that groups could reach; say `records: "
            "redis://HOST:PORT/DB`",
        )
    return url


def _check_exposure(document: Document, cluster: Cluster, host: Host, router: Router, path: Path) -> None:
    """Refuse a router that listens for others without keys, as it would itself, but before anything starts."""
    options = {plain(name): value for name, value in {**cluster.options, **router.options}.items()}
    environment = {**host.environment, **router.environment}
    has_keys = cluster.security.api_keys or options.get("api-key-file") or environment.get(API_KEY_VARIABLE)
    if not (has_keys or options.get("allow-anonymous") is True or is_loopback(router.listen)):
        raise document.error(
            (*path, "listen"),
            f"is {router.listen}, which others reach, and there are no API keys; say `security: {{api_keys: "
            "keys.json}}`, which is made if it is not there, or `options: {allow-anonymous: true}`",
        )


def _check_names(document: Document, groups: list[GroupPlan], routers: list[tuple[Router, Path]]) -> None:
    seen: set[str] = set()
    named = [(group.name, group.path) for group in groups]
    for name, path in [*named, *((router.name, path) for router, path in routers)]:
        if name in seen:
            raise document.error(path, f"there are two units {name!r}; give them names that differ")
        seen.add(name)


def _check_machines(document: Document, hosts: Mapping[str, Host]) -> None:
    """Refuse two hosts that are one machine: its ports and memory would be given out twice."""
    seen: dict[object, str] = {}
    for label, host in hosts.items():
        way: object = tuple(host.command) if host.command else repr(host.ssh) if host.ssh else "here"
        if way in seen:
            raise document.error(
                ("hosts", label), f"is the same machine as {seen[way]}; one host has as many groups as you like"
            )
        seen[way] = label
    places: dict[str, str] = {}
    for label, host in hosts.items():
        address = address_of(host)
        if not is_loopback(address) and address in places:
            raise document.error(
                ("hosts", label), f"has the address {address}, as {places[address]} has; each host has its own"
            )
        places[address] = label


def _address(
    document: Document,
    hosts: Mapping[str, Host],
    group: GroupPlan,
    routers: list[tuple[Router, Path]],
    peers: set[str],
) -> str:
    """Return where a group's controller listens: on the loopback address if all that talk to it are on its host.

    Args:
        peers: The hosts of the groups that may pull KV from it.
    """
    others = sorted({*group.ranks, *(router.host for router, _ in routers)} - {group.leader})
    address = address_of(hosts[group.leader])
    if not others:
        # Without an address that others reach, its peers elsewhere compute what they lack.
        reached = peers > {group.leader} and not (is_loopback(address) or is_any(address) or ":" in address)
        return address if reached else LOOPBACK
    if is_loopback(address) or is_any(address):
        raise document.error(
            ("hosts", group.leader),
            f"its address is {address}, at which {' and '.join(others)} cannot reach {group.name} there; say "
            "`address:`",
        )
    return address


def _url(host: Host, router: Router) -> str:
    """Return the address at which clients reach a router."""
    return f"http://{joined(address_of(host) if is_any(router.listen) else router.listen, router.port)}"


def _texts(environment: Environment) -> dict[str, str]:
    return {name: str(value) for name, value in environment.items()}
