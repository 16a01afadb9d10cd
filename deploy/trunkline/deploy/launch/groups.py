"""Place the ranks of groups on hosts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.deploy.launch.document import Document, Path
from trunkline.deploy.launch.fileformat import Cluster, Group, nearest


@dataclass(frozen=True)
class GroupPlan:
    """A group, and the hosts of its ranks."""

    name: str
    record: Group
    path: Path
    """Where it stands in the file."""
    ranks: dict[str, range]
    """Ranks by host, in order; the first host runs the controller."""

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
    alone = len(records) == 1 and records[0].count == 1
    for index, record in enumerate(records):
        path: Path = ("groups", index) if cluster.groups else ()
        ranks = _ranks(document, record, path, hosts)
        base = record.name or ("group" if len(records) == 1 else f"group-{index}")
        for number in range(record.count):
            name = f"{base}-{number}" if record.count > 1 else "group-0" if alone and not record.name else base
            groups.append(GroupPlan(name, record, path, ranks))
    return groups


def host_named(document: Document, given: str, hosts: list[str], path: Path) -> str:
    """Return `given` if it is a host; the only host if it is "".

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
