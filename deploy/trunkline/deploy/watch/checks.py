"""Find what is wrong with a deployment, and what to do about it. Pure: from `Facts` to findings.

Each check is a generator that looks at one thing. It always yields a finding, so that a reader sees what was
checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from trunkline.deploy.config.option_values import format_bytes
from trunkline.deploy.watch.facts import PROBE_TOKENS, Facts
from trunkline.kvstore.tier import TierKind

OPEN_FILES_MIN: Final = 4096
"""Smallest limit of open files that passes the check. A router has a descriptor per connection, and holds 4,096
requests by default."""
FREE_MEMORY_SHARE_MIN: Final = 0.05
FREE_DISK_MIN: Final = 2 << 30
SHARED_MEMORY_MIN: Final = 64 << 20
"""Smallest free size of /dev/shm in bytes that passes the check. Collectives between ranks of a host go through
it, and containers get 64 MiB unless told otherwise."""
SLOW_PROBE_S: Final = 10.0
EVICTED_SHARE_MAX: Final = 0.2
"""Part of the missing prefixes that were evicted before, above which more memory would pay."""
FULL_RECORDS_SHARE: Final = 0.9
"""Part of the size that records may take above which it is worth a word that old ones are deleted."""
MISSES_MIN: Final = 50
PULLS_MIN: Final = 10
"""Number of chunks that were given up from which on it is worth a word."""
RESTARTS_MAX: Final = 3


_OTHER_GROUP: Final = "start it with what the routers serve; docs/routing.md, is it the right group?"


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """The cluster works, but not as well or as safely as it could."""
    FAILURE = "failure"
    """Clients notice the fault, or strangers can use the cluster."""


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    level: Level
    about: str
    text: str
    remedy: str = ""


Findings = Iterator[Finding]


def examine(facts: Facts) -> list[Finding]:
    """Return all findings, in the order in which an operator would look for them."""
    if facts.unreachable:
        return [*_unreachable(facts), *processes(facts), *machine(facts)]
    return [finding for check in CHECKS for finding in check(facts)]


def _unreachable(facts: Facts) -> Findings:
    remedy = "start it with `trunkline serve`, or say where it is with --url"
    if facts.status is not None:
        remedy = "its supervisor runs: see `trunkline status` and the log of `trunkline serve`"
    yield Finding(Level.FAILURE, "server", facts.unreachable, remedy)


def health(facts: Facts) -> Findings:
    """Check that a token can be generated."""
    said = (facts.health or {}).get("reason", f"/health answers {facts.health_status}")
    if facts.health_status == 200:
        yield Finding(Level.OK, "health", f"{facts.url}: {said}")
    else:
        yield Finding(Level.FAILURE, "health", str(said), "the groups below say why")
    if facts.version and facts.own_version and facts.version != facts.own_version:
        text = f"the server is Trunkline {facts.version}, this command {facts.own_version}"
        yield Finding(Level.WARNING, "version", text, "use the command of the same version")


def groups(facts: Facts) -> Findings:
    """Check that all groups serve, and that routers know what they have cached."""
    found = (facts.health or {}).get("controllers", [])
    ready = [group for group in found if group.get("ready")]
    if found and len(ready) == len(found):
        yield Finding(Level.OK, "groups", f"all {len(found)} ready" if len(found) > 1 else "the group is ready")
    for group in found:
        name = f"group {group.get('name', group.get('index'))}"
        if not group.get("ready"):
            level = Level.WARNING if ready else Level.FAILURE
            problem = group.get("problem")
            text = "it is not used" if problem else f"it is {group.get('status', 'not known')}"
            detail = problem or _overview_group(facts, group.get("index")).get("detail")
            remedy = _OTHER_GROUP if problem else _remedy(facts, group.get("index"))
            yield Finding(level, name, f"{text}: {detail}" if detail else text, remedy)
        elif group.get("events") in ("stale", "catching up"):
            text = f"the router's picture of its chunks is {group['events']}"
            remedy = "requests may miss their KV; if it lasts, look at the network between router and controller"
            yield Finding(Level.WARNING, name, text, remedy)


def _remedy(facts: Facts, group: object) -> str:
    """Return what to do about a group that does not serve."""
    for row in (facts.status or {}).get("groups", []):
        if row["group"] == group and row["state"] == "down":
            return f"it was drained; `trunkline undrain {group}` starts it"
        if row["group"] == group and row["state"] == "lost":
            why = f" ({row['why']})" if row.get("why") else ""
            return f"it was given up{why}; mend that, then `trunkline undrain {group}` starts it"
    return "see the logs of its controller and workers"


def processes(facts: Facts) -> Findings:
    """Check the processes of a cluster on this machine, by its supervisor's status."""
    if facts.status is None:
        return
    rows = facts.status.get("processes", [])
    restarted = [row for row in rows if row.get("restarts", 0) > RESTARTS_MAX]
    lost = [row for row in rows if not row.get("pid")]
    for row in lost:
        text = f"{row['name']} does not run ({row['state']})"
        remedy = "`trunkline undrain GROUP` starts a group that was stopped"
        if str(row["state"]).startswith("starts in"):
            remedy = "it is started again for ever, at most 30 s after each end; its log says why it ended"
        yield Finding(Level.WARNING, "processes", text, remedy)
    for row in restarted:
        text = f"{row['name']} was started again {row['restarts']} times"
        yield Finding(Level.WARNING, "processes", text, "its log says why it ended; memory is the usual reason")
    if not lost and not restarted:
        yield Finding(Level.OK, "processes", f"{len(rows)} run")


def tiers(facts: Facts) -> Findings:
    """Check that every tier is used, and that nothing was damaged."""
    problems, failures, names = [], defaultdict[str, int](int), set()
    for group in (facts.overview or {}).get("groups", []):
        for tier in group.get("tiers", []):
            names.add(tier["name"])
            failures[tier["name"]] += tier["failures"]
            if tier["problem"]:
                problems.append((f"group {group['group']}, {tier['name']} tier", str(tier["problem"])))
    for about, text in problems:
        yield Finding(
            Level.WARNING, about, text, "it is left out until it works again; docs/survival.md has the cases"
        )
    for name, count in failures.items():
        if count and not any(name in about for about, _ in problems):
            text = f"{count} moves to or from it failed since the start"
            yield Finding(
                Level.WARNING, f"{name} tier", text, "answers are right all the same; look at the device"
            )
    if names and not problems and not any(failures.values()):
        yield Finding(Level.OK, "tiers", f"{', '.join(sorted(names))}: no problem, no failed move")


def stores(facts: Facts) -> Findings:
    """Check that the remote tier of a cluster on this machine can be reached, and has the rights that it needs."""
    for one in facts.trials:
        if one.problem:
            remedy = "what is stored there is computed again; docs/remote-stores.md says what a store needs"
            if one.keeps:
                remedy += " (tried with the credentials of this shell)"
            yield Finding(Level.WARNING, "remote tier", f"{one.at}: {one.problem}", remedy)
            continue
        text = f"{one.at}: a few bytes were written, read and deleted in {one.seconds * 1000:.0f} ms"
        if one.keeps:
            text += "; what is stored stays until a lifecycle rule of the bucket ends it (docs/remote-stores.md)"
        yield Finding(Level.OK, "remote tier", text)


def peers(facts: Facts) -> Findings:
    """Check that groups can pull KV from each other, and that it is worth it."""
    found = [group for group in (facts.overview or {}).get("groups", []) if group.get("pulls")]
    if len(found) < 2:
        return
    well = True
    for group in found:
        for text, remedy in _pull_problems(group):
            well = False
            yield Finding(Level.WARNING, f"peers, group {group['group']}", text, remedy)
    if well:
        chunks = sum(group["pulls"]["chunks"] for group in found)
        text = f"{len(found)} groups may pull KV from each other; {chunks:,} chunks were pulled so far"
        yield Finding(Level.OK, "peers", text)


def _pull_problems(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what keeps a group from pulling, and what to do about it."""
    pulls, load_us, compute_us = group["pulls"], group["load_us"], group["prefill_us"]
    pull_us = load_us[TierKind.PEER] if len(load_us) > TierKind.PEER else 0.0
    gone, slow = (pulls["given_up"].get(reason, 0) for reason in ("gone", "slow"))
    if group["ready"] and not pulls["exports"]:
        yield "it gives no KV to other groups: not all of its workers can export it", "their log says why"
    if gone >= PULLS_MIN and gone > pulls["chunks"]:
        text = (
            f"{gone:,} chunks could not be pulled, because other groups did not answer ({pulls['chunks']:,} could)"
        )
        remedy = "between hosts, open their ports for KV, from 1000 above a group's own on (docs/nodes.md, ports)"
        yield text, remedy
    if 0.0 < compute_us <= pull_us:
        text = f"pulling a token takes {pull_us:.0f} µs, computing it {compute_us:.0f} µs: it computes instead"
        yield text, "a faster network between the groups; or --peers off, which saves the rest of the attempts"
    elif slow >= PULLS_MIN and slow > pulls["chunks"]:
        text = f"requests did not wait for {slow:,} chunks that came too slowly ({pulls['chunks']:,} came in time)"
        yield text, "the network between the groups, or the groups that give KV, are busy"


def records(facts: Facts) -> Findings:
    """Check that sessions and schemas can be read and changed, and that they last."""
    found = facts.records
    if found is None:
        return
    away, problem, size, limit = found["away"], found["problem"], found["bytes"], found["bytes_max"]
    if away:
        remedy = "requests of stored sessions and schemas fail until it can be used; others go on"
        yield Finding(Level.FAILURE, "records", str(away), remedy)
    if problem:
        yield Finding(Level.WARNING, "records", str(problem), "docs/operating.md, where sessions and schemas are")
    if limit and size is not None and size > FULL_RECORDS_SHARE * limit:
        text = f"sessions and schemas take {format_bytes(size)} of {format_bytes(limit)}"
        remedy = "the least recently used ones are deleted; a larger --records-max-bytes keeps them"
        yield Finding(Level.WARNING, "records", text, remedy)
    if not away and not problem:
        text = f"{found['records']} stored ({format_bytes(size)} in {found['store']})"
        if found["store"] == "sqlite" and facts.kind == "router":
            text += "; routers on other hosts would need a common server (--records)"
        yield Finding(Level.OK, "records", text)


def cache(facts: Facts) -> Findings:
    """Check whether more memory for KV would pay."""
    reasons: defaultdict[str, int] = defaultdict(int)
    prompt = cached = preempted = 0
    for group in (facts.overview or {}).get("groups", []):
        prompt += group.get("prompt_tokens", 0)
        cached += group.get("cached_tokens", 0)
        preempted += group.get("preemptions", 0)
        for reason, count in group.get("misses", {}).items():
            reasons[reason] += count
    missed = sum(reasons.values())
    if missed >= MISSES_MIN:
        for reason, remedy in (
            ("evicted", "give the tiers more room (--host-tier, --disk-tier); `trunkline size` has the rule"),
            ("ttl", "--session-ttl keeps KV for longer"),
            ("slow", "the tier that holds it is slower than computing: a faster disk, or more --host-tier"),
            ("lost", "a tier does not give back what it got: look at its device"),
        ):
            if reasons[reason] > EVICTED_SHARE_MAX * missed:
                text = f"{reasons[reason] / missed:.0%} of requests missed KV because of `{reason}`"
                yield Finding(Level.WARNING, "cache", text, remedy)
    if prompt:
        yield Finding(Level.OK, "cache", f"{cached / prompt:.0%} of {prompt:,} prompt tokens were cached so far")
    if preempted and prompt and preempted * 100 > missed:
        text = f"{preempted} requests were interrupted because KV did not fit the device"
        yield Finding(Level.WARNING, "memory", text, "more --kv-memory, or a smaller --max-batch")


def probe(facts: Facts) -> Findings:
    """Check that a request is answered, and that a second one finds the KV of the first."""
    found = facts.probe
    if found is None:
        return
    if found.status != 200:
        text = f"a completion of {PROBE_TOKENS} tokens failed: {found.said}"
        yield Finding(
            Level.FAILURE, "request", text, "the router's log has a line about it, with the request's id"
        )
        return
    first, second = found.seconds
    took = f"{PROBE_TOKENS} tokens in {first:.2f} s, again in {second:.2f} s"
    text = f"{took}, {found.cached} of {found.prompt} prompt tokens cached"
    if found.cached == 0:
        yield Finding(Level.WARNING, "request", text, "nothing was found again: is --no-prefix-cache on?")
    elif first > SLOW_PROBE_S:
        yield Finding(Level.WARNING, "request", text, "the cluster is very busy, or the machine is")
    else:
        yield Finding(Level.OK, "request", text)


def access(facts: Facts) -> Findings:
    """Check who may use the server."""
    dashboard_open = "/ui/api/overview" in facts.open_paths
    if dashboard_open:
        yield Finding(
            Level.FAILURE, "access", "admin endpoints answer without a key", "this should never be: update"
        )
    if facts.is_loopback:
        if not dashboard_open:
            yield Finding(Level.OK, "access", "connects over loopback")
    elif "/v1/models" in facts.open_paths:
        text = f"{facts.url} answers every client that can connect, without a key"
        yield Finding(
            Level.FAILURE, "access", text, "give it keys: `trunkline key new`, --tenants FILE; docs/security.md"
        )
    else:
        yield Finding(Level.OK, "access", "a key is needed")
    if not facts.is_loopback and facts.url.startswith("http:"):
        text = "keys and prompts travel unencrypted"
        yield Finding(Level.WARNING, "access", text, "put a proxy with TLS in front; docs/security.md")
    if "/metrics" in facts.open_paths and not facts.is_loopback:
        yield Finding(Level.WARNING, "access", "/metrics answers without a key", "docs/security.md, roles")
    if facts.no_overview:
        yield Finding(
            Level.WARNING, "access", facts.no_overview, "without it loads, tiers and cache were not checked"
        )
    if old := (facts.health or {}).get("tenants"):
        why = (facts.overview or {}).get("auth", {}).get("problem")
        remedy = "mend the file: its keys and limits count from then on, without a restart"
        yield Finding(Level.WARNING, "tenants", f"{old}: {why}" if why else str(old), remedy)
    for path in facts.loose_files:
        yield Finding(Level.FAILURE, "files", f"{path} is open to other users", f"chmod go= {path}")


def machine(facts: Facts) -> Findings:
    """Check the machine that a local cluster runs on."""
    found = facts.machine
    if found is None or facts.status is None:
        return
    problems = []
    if found.open_files_max < OPEN_FILES_MIN:
        text = f"a process may open {found.open_files_max} files; a busy router needs {OPEN_FILES_MIN}"
        problems.append((text, f"ulimit -n {OPEN_FILES_MIN * 4} before the start"))
    if found.memory_free_bytes < FREE_MEMORY_SHARE_MIN * found.memory_bytes:
        text = f"{format_bytes(found.memory_free_bytes)} of {format_bytes(found.memory_bytes)} memory is available"
        problems.append((text, "smaller --kv-memory or --host-tier, fewer groups"))
    if found.swap_used_bytes > found.memory_bytes // 20:
        text = (
            f"{format_bytes(found.swap_used_bytes)} is swapped out; KV that is swapped is slower than KV on disk"
        )
        problems.append((text, "smaller --kv-memory or --host-tier"))
    if found.shared_memory_free_bytes is not None and found.shared_memory_free_bytes < SHARED_MEMORY_MIN:
        text = f"/dev/shm has {format_bytes(found.shared_memory_free_bytes)} free; ranks exchange data there"
        problems.append((text, "a larger /dev/shm (in a container: shm size, or an emptyDir of medium Memory)"))
    if found.cache_free_bytes is not None and found.cache_free_bytes < FREE_DISK_MIN:
        text = f"the disk of the cache folder has {format_bytes(found.cache_free_bytes)} free"
        problems.append((text, "make room, or a smaller --disk-tier"))
    if found.gpus.problem:
        problems.append(
            (f"no GPU can be used: {found.gpus.problem}", "look at nvidia-smi, and at torch's version")
        )
    workers = sum(row.get("role") == "worker" for row in facts.status.get("processes", []))
    if workers > found.cores:
        text = f"{workers} workers share {found.cores} cores"
        problems.append((text, "on CPUs fewer --groups or --tp are faster"))
    for text, remedy in problems:
        yield Finding(Level.WARNING, "machine", text, remedy)
    if not problems:
        gpus = f"; {found.gpus.count} GPUs can be used" if found.gpus.count else ""
        yield Finding(Level.OK, "machine", f"files, memory, disk and cores are enough{gpus}")


CHECKS: Final[tuple[Callable[[Facts], Findings], ...]] = (
    health,
    groups,
    processes,
    tiers,
    stores,
    peers,
    records,
    cache,
    probe,
    access,
    machine,
)


def _overview_group(facts: Facts, index: object) -> Mapping[str, Any]:
    found = (facts.overview or {}).get("groups", [])
    return next((group for group in found if group["group"] == index), {})
