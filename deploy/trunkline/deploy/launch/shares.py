"""Divide a host's cores, memory and GPUs among its groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trunkline.deploy.config.sizes import format_bytes, parse_bytes
from trunkline.deploy.errors import UserError
from trunkline.deploy.launch.document import Document
from trunkline.deploy.launch.fileformat import Cluster, Host, Tiers
from trunkline.deploy.launch.groups import GroupPlan
from trunkline.deploy.launch.option_rules import plain

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_FRACTION: Final = "gpu-memory-fraction"


@dataclass(frozen=True)
class Facts:
    """The cores, memory and GPUs of a host."""

    cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    """Its GPUs, as `CUDA_VISIBLE_DEVICES` names them."""


@dataclass
class Shares:
    """What each part of a group gets of its host. A part that is missing here decides for itself."""

    threads: dict[str, int]
    """Threads of each rank, by host, where ranks of several units share its cores."""
    devices: dict[tuple[str, str], dict[str, str]]
    """Environment variables, by group and host."""


def merged(over: Tiers | None, under: Tiers) -> Tiers:
    """Return the fields of `over` that are set, and those of `under` for the rest."""
    if over is None:
        return under
    fields = {name: getattr(over, name) for name in Tiers.__struct_fields__}
    return Tiers(**{name: getattr(under, name) if value == "" else value for name, value in fields.items()})


def share(
    document: Document,
    cluster: Cluster,
    hosts: Mapping[str, Host],
    groups: list[GroupPlan],
    facts: Mapping[str, Facts],
) -> Shares:
    """Return what each part of a group gets of its host.

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
    # What is fixed comes first, so that the rest is known.
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
    """Return the GPUs of a group.

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
    # What cannot be a share is refused with the other options, or by the group itself.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        return None
    return float(value)
