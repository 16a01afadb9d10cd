"""`trunkline top` and `doctor`: what they make of what a router says. On real clusters: cluster/test_watch.py."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from trunkline.deploy.cli.app import app
from trunkline.deploy.config.machine import Gpus
from trunkline.deploy.config.node_settings import Kind
from trunkline.deploy.supervisor import run_folder
from trunkline.deploy.supervisor.control import ControlError
from trunkline.deploy.supervisor.members import Command, Reply
from trunkline.deploy.supervisor.run_folder import Running
from trunkline.deploy.watch import screen as screens
from trunkline.deploy.watch.checks import Level, examine
from trunkline.deploy.watch.facts import (
    Facts,
    Look,
    Machine,
    Probe,
    loose_files,
    machine_facts,
)


def group(number: int, **more: Any) -> dict[str, Any]:
    """As the overview says it."""
    tier = {"slots": 100, "used": 50, "hit_tokens": 640, "reads": 3, "writes": 9, "evictions": 0, "failures": 0}
    return {
        "group": number,
        "status": "ready",
        "detail": "",
        "running": 3,
        "waiting": 1,
        "queued_tokens": 12_345,
        "blocks": {"total": 100, "free": 20, "cached": 50},
        "tiers": [{"name": "device", "problem": "", **tier}, {"name": "disk", "problem": "", **tier}],
        "prompt_tokens": 1000,
        "cached_tokens": 800,
        "output_tokens": 400,
        "preemptions": 0,
        "misses": {"new": 4, "evicted": 0},
        **more,
    }


def overview(*groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "model": "demo",
        "now": 1000.0,
        "router": {"name": "router-7", "started": 400.0, "routers": 1, "requests": 4, "waiting": 0},
        "groups": list(groups),
    }


def shown(look: Look) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(screens.screen(look))
    return capture.get()


def test_the_screen_says_what_the_router_says() -> None:
    series = {"tokens_per_s": [None, 10.0, 42.5], "hit_rate": [0.5, 0.75], "group.1.tokens_per_s": [7.0]}
    stored = ({"id": "sess_a", "turns": 3, "tokens": 20_000, "tier": "disk", "group": 1, "used": 990.0},)
    groups = overview(group(0, role="prefill"), group(1, status="failed", detail="no workers", role="both"))
    text = shown(Look(groups, {"series": series}, stored))
    said = (
        "demo",
        "up 10 min",
        "ready, prefill",
        "42.5",
        "75%",
        "12.3k",
        "30%",
        "failed",
        "no workers",
        "sess_a",
        "20.0k",
        "10 s ago",
    )
    assert [words for words in said if words not in text] == []


def pulling(**more: Any) -> dict[str, Any]:
    """A group that has taken KV from another one, as the overview says it."""
    pulls = {"exports": True, "tokens": 6400, "chunks": 100, "bytes": 3 << 20, "saved_s": 4.2, "given_up": {}}
    return {"ready": True, "prefill_us": 100.0, "load_us": [0.0, 1.0, 5.0, 9.0, 7.0], "pulls": {**pulls, **more}}


def test_the_screen_says_what_travelled() -> None:
    groups = overview(
        group(0, **pulling(given_up={"slow": 3, "gone": 2})), group(1, **pulling(given_up={"slow": 1}))
    )
    handed = {"count": 2, "paths": 12, "chunks": 345, "given_up": 1, "seconds": 0.51}
    groups["router"]["handovers"] = {"drain": handed, "warm_up": dict.fromkeys(handed, 0)}
    text = shown(Look(groups))
    assert "200 chunks pulled (6 MiB), with 12.8k prompt tokens of requests that waited for them" in text
    assert ", about 8.4 s of computing saved; chunks given up: 2 gone" in text
    assert " computing saved; chunks given up: 2 gone, 4 slow" in text
    assert "groups that left: 2, 345 chunks of 12 prompts moved in 0.5 s; 1 prompts not completely" in text
    assert "new groups" not in text
    assert "from other groups" not in shown(Look(overview(group(0, pulls=None), group(1))))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"given_up": {"slow": 9, "gone": 100, "lost": 500}}, ""),
        ({"exports": False}, "it gives no KV to other groups"),
        (
            {"chunks": 5, "given_up": {"gone": 10}},
            "10 chunks could not be pulled, because other groups did not answer (5 could)",
        ),
        ({"chunks": 5, "given_up": {"slow": 1200}}, "did not wait for 1,200 chunks"),
        ({"chunks": 0, "given_up": {"gone": 9, "slow": 9}}, ""),
        ({"load_us": [0.0, 1.0, 5.0, 9.0, 100.0]}, "pulling a token takes 100 µs, computing it 100 µs"),
        ({"load_us": [0.0, 1.0, 5.0, 9.0, 99.0]}, ""),
        ({"load_us": [0.0, 1.0, 5.0, 9.0]}, ""),
        ({"load_us": [0.0, 1.0, 5.0, 9.0, 100.0], "prefill_us": 0.0}, ""),
        ({"exports": False, "ready": False}, ""),
    ],
)
def test_a_link_that_is_slow_or_blocked_is_said(changes: dict[str, Any], said: str) -> None:
    of_group = {name: changes.pop(name) for name in ("load_us", "prefill_us", "ready") if name in changes}
    sick = group(0, **(pulling(**changes) | of_group))
    found = [
        one
        for one in examine(replace(HEALTHY, overview=overview(sick, group(1, **pulling()))))
        if "peers" in one.about
    ]
    assert len(found) == 1
    if said:
        assert (found[0].level, found[0].about) == (Level.WARNING, "peers, group 0")
        assert said in found[0].text
        assert found[0].remedy
    else:
        assert found[0].level is Level.OK


def test_a_single_group_has_no_peers_to_speak_of() -> None:
    facts = replace(HEALTHY, overview=overview(group(0, **pulling()), group(1, pulls=None)))
    assert not [finding for finding in examine(facts) if "peers" in finding.about]


def test_a_screen_of_what_is_hardly_known() -> None:
    """A group that is not connected has no figures, and a router that has just begun no history."""
    bare = {"group": 0, "status": "disconnected", "detail": "connection refused", "inflight": 0}
    text = shown(Look(overview(bare)))
    assert "disconnected" in text
    assert "–" in text


def test_any_figures_can_be_shown() -> None:
    draw = random.Random(3)
    for _ in range(60):
        total = draw.choice([0, 1, 1000])
        blocks = {"total": total, "free": draw.randint(0, total), "cached": draw.randint(0, total)}
        values = [draw.choice([None, 0.0, draw.uniform(0, 1e9)]) for _ in range(draw.randint(0, 90))]
        assert len(screens.spark(values)) <= 40
        look = Look(
            overview(group(0, blocks=blocks, running=draw.randint(0, 10**12))),
            {"series": {"tokens_per_s": values, "hit_rate": values}},
            tuple({"id": str(n), "used": draw.choice([None, 1.0])} for n in range(draw.randint(0, 20))),
        )
        assert "demo" in shown(look)


MACHINE = Machine(65_536, 8, 64 << 30, 32 << 30, 0, 8 << 30, 100 << 30)
STATUS = {"processes": [{"name": "worker-0", "role": "worker", "pid": 5, "restarts": 0, "state": "running"}]}
RECORDS = {"store": "sqlite", "bytes_max": 8 << 30, "away": "", "problem": "", "records": 7, "bytes": 5 << 20}
HEALTHY = Facts(
    url="http://127.0.0.1:8000",
    is_loopback=True,
    health={"reason": "a token was generated", "controllers": [{"index": 0, "ready": True, "events": "current"}]},
    health_status=200,
    version="0.1.0",
    own_version="0.1.0",
    overview=overview(group(0)),
    records=RECORDS,
    open_paths=("/v1/models", "/metrics"),
    probe=Probe(200, "", (0.1, 0.05), 96, 100),
    status=STATUS,
    machine=MACHINE,
)


def levels(facts: Facts) -> dict[str, Level]:
    """The worst of each thing."""
    order = list(Level)
    worst: dict[str, Level] = {}
    for finding in examine(facts):
        assert finding.text
        assert finding.remedy or finding.level is Level.OK or finding.about == "access", finding
        worst[finding.about] = max(worst.get(finding.about, Level.OK), finding.level, key=order.index)
    return worst


def test_of_a_healthy_cluster_nothing_is_said_but_ok() -> None:
    assert set(levels(HEALTHY).values()) == {Level.OK}


CASES: list[tuple[dict[str, Any], str, Level]] = [
    ({"unreachable": "nobody is there"}, "server", Level.FAILURE),
    ({"health_status": 503, "health": {"reason": "no workers", "controllers": []}}, "health", Level.FAILURE),
    ({"version": "0.2.0"}, "version", Level.WARNING),
    ({"health": {"controllers": [{"index": 0, "ready": False}]}}, "group 0", Level.FAILURE),
    (
        {"health": {"controllers": [{"index": 0, "name": "a", "ready": False, "problem": "another tokenizer"}]}},
        "group a",
        Level.FAILURE,
    ),
    (
        {"health": {"controllers": [{"index": 0, "ready": False}, {"index": 1, "ready": True}]}},
        "group 0",
        Level.WARNING,
    ),
    ({"health": {"controllers": [{"index": 0, "ready": True, "events": "stale"}]}}, "group 0", Level.WARNING),
    ({"probe": Probe(500, "internal error")}, "request", Level.FAILURE),
    ({"probe": Probe(200, "", (0.1, 0.1), 0, 100)}, "request", Level.WARNING),
    ({"url": "http://10.0.0.1:80", "is_loopback": False}, "access", Level.FAILURE),
    ({"open_paths": ("/ui/api/overview",)}, "access", Level.FAILURE),
    ({"loose_files": ("admin.key",)}, "files", Level.FAILURE),
    ({"health": {**(HEALTHY.health or {}), "tenants": "an older version is in force"}}, "tenants", Level.WARNING),
    ({"machine": replace(MACHINE, open_files_max=1024)}, "machine", Level.WARNING),
    ({"machine": replace(MACHINE, swap_used_bytes=32 << 30)}, "machine", Level.WARNING),
    ({"machine": replace(MACHINE, shared_memory_free_bytes=1 << 20)}, "machine", Level.WARNING),
    ({"machine": replace(MACHINE, cache_free_bytes=0)}, "machine", Level.WARNING),
    ({"machine": replace(MACHINE, cores=0)}, "machine", Level.WARNING),
    ({"machine": replace(MACHINE, gpus=Gpus(problem="CUDA error 803"))}, "machine", Level.WARNING),
    ({"machine": replace(MACHINE, memory_free_bytes=0)}, "machine", Level.WARNING),
    ({"overview": overview(group(0, misses={"evicted": 60, "new": 40}))}, "cache", Level.WARNING),
    ({"overview": overview(group(0, preemptions=90))}, "memory", Level.WARNING),
    ({"records": {**RECORDS, "away": "no answer", "records": None, "bytes": None}}, "records", Level.FAILURE),
    ({"records": {**RECORDS, "problem": "it keeps records in memory only"}}, "records", Level.WARNING),
    ({"records": {**RECORDS, "bytes": 8 << 30}}, "records", Level.WARNING),
    ({"records": {**RECORDS, "bytes_max": 0}}, "records", Level.OK),
    ({"status": {"processes": [{**STATUS["processes"][0], "restarts": 9}]}}, "processes", Level.WARNING),
    ({"status": {"processes": [{**STATUS["processes"][0], "pid": 0}]}}, "processes", Level.WARNING),
]


@pytest.mark.parametrize(("changed", "about", "level"), CASES)
def test_what_is_wrong_is_said(changed: dict[str, Any], about: str, level: Level) -> None:
    assert levels(replace(HEALTHY, **changed))[about] is level


def test_of_a_file_of_records_it_is_said_whom_it_is_for() -> None:
    for kind, store, expected in (
        ("router", "sqlite", True),
        ("router", "redis", False),
        ("cluster", "sqlite", False),
    ):
        found = examine(replace(HEALTHY, kind=kind, records={**RECORDS, "store": store}))
        [finding] = [one for one in found if one.about == "records"]
        assert finding.text.startswith(f"7 stored (5 MiB in {store})")
        assert ("routers on other hosts" in finding.text) is expected


def test_a_process_that_dies_again_and_again_is_not_to_be_undrained() -> None:
    row = {**STATUS["processes"][0], "pid": None, "state": "starts in 30 s"}
    [finding] = [one for one in examine(replace(HEALTHY, status={"processes": [row]})) if one.about == "processes"]
    assert finding.text == "worker-0 does not run (starts in 30 s)"
    assert "undrain" not in finding.remedy


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_gpus_are_counted(count: int, show_gpus: Callable[[int], None]) -> None:
    show_gpus(count)
    found = replace(MACHINE, gpus=machine_facts().gpus)
    [finding] = [one for one in examine(replace(HEALTHY, machine=found)) if one.about == "machine"]
    assert finding.level is Level.OK
    assert ("GPUs" in finding.text, str(count) in finding.text) == (count > 0, count > 0)


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ("down", "undrain 0"),
        ("starting", "logs"),
        ("lost", "given up (worker-0 exited with code 2: no such GPU); mend that, then `trunkline undrain 0`"),
    ],
)
def test_of_a_group_that_was_drained_it_is_said_how_to_start_it(state: str, remedy: str) -> None:
    health = {"controllers": [{"index": 0, "ready": False}, {"index": 1, "ready": True}]}
    why = "worker-0 exited with code 2: no such GPU" if state == "lost" else ""
    status = {**STATUS, "groups": [{"group": 1, "state": "ready"}, {"group": 0, "state": state, "why": why}]}
    [finding] = [one for one in examine(replace(HEALTHY, health=health, status=status)) if one.about == "group 0"]
    assert remedy in finding.remedy


def test_a_tiers_problem_is_said() -> None:
    bad = group(0)
    bad["tiers"][1]["problem"] = "no space left on device"
    found = examine(replace(HEALTHY, overview=overview(bad)))
    assert [finding.text for finding in found if finding.about == "group 0, disk tier"] == [
        "no space left on device"
    ]


def test_files_that_others_may_read_are_found(tmp_path: Any) -> None:
    tmp_path.chmod(0o700)
    key = tmp_path / "admin.key"
    key.write_text("secret")
    key.chmod(0o600)
    assert loose_files(tmp_path) == ()
    key.chmod(0o640)
    assert loose_files(tmp_path) == (str(key),)


def test_of_the_parts_on_this_machine_a_router_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        Path("/g"): Running(7400, "tcp://127.0.0.1:7400", "", 1, Kind.GROUP),
        Path("/w"): Running(0, "tcp://10.0.0.1:7400", "", 2, Kind.WORKERS),
    }
    monkeypatch.setattr(run_folder, "running_clusters", lambda: parts)
    assert run_folder.server_url() == "http://127.0.0.1:8000"
    parts[Path("/r")] = Running(8001, "http://127.0.0.1:8001", "", 3, Kind.ROUTER)
    assert run_folder.server_url() == "http://127.0.0.1:8001"
    parts[Path("/c")] = Running(8002, "http://127.0.0.1:8002", "", 4)
    with pytest.raises(run_folder.ClusterNotFoundError, match="ports 8001, 8002"):
        run_folder.server_url()
    with pytest.raises(run_folder.ClusterNotFoundError, match="no cluster of yours serves on port 7400"):
        run_folder.server_url(7400)


def ask_nobody(path: Path, _: Command) -> list[Reply]:
    raise ControlError(f"asked http://127.0.0.1:{'-cd'.index(path.parent.name)}")


@pytest.mark.parametrize("command", [["chat"], ["schema", "list"], ["top", "--once"], ["doctor"], ["status"]])
def test_commands_find_the_cluster_that_runs_here(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    parts = {Path("/c"): Running(1, "http://127.0.0.1:1", "", 4)}
    monkeypatch.setattr(run_folder, "running_clusters", lambda: parts)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("trunkline.deploy.cli.cluster_cli.ask", ask_nobody)
    told = CliRunner().invoke(app, command)
    assert (told.exit_code, "http://127.0.0.1:1" in told.output) == (1, True), told.output
    parts[Path("/d")] = Running(2, "http://127.0.0.1:2", "", 5)
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1
    way = "--url http://127.0.0.1:PORT" if command[0] == "schema" else "--port"
    assert f"several clusters run, on ports 1, 2; say which with {way}" in told.output
    ways = [["--url", "http://127.0.0.1:2/"], ["--url", "http://localhost:2"], ["--port", "2"]]
    for words in ways[:2] if command[0] == "schema" else ways:
        told = CliRunner().invoke(app, [*command, *words])
        assert (told.exit_code, re.findall(r"(?:127\.0\.0\.1|localhost):(\d+)", told.output)[:1]) == (1, ["2"])
    if command[0] == "schema":  # `add` has as many options as a command may have
        return
    told = CliRunner().invoke(app, [*command, "--port", "3"])
    assert (told.exit_code, "serves on port 3; there are some on 1, 2" in told.output) == (1, True), told.output
    told = CliRunner().invoke(app, [*command, "--port", "2", "--url", "http://127.0.0.1:2"])
    assert (told.exit_code, "--url and --port say the same" in told.output) == (2, True), told.output


def test_status_is_asked_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "running_clusters", dict)
    monkeypatch.setenv("COLUMNS", "300")
    for url in ("https://llm.example.com", "nonsense", "http://[::1"):
        told = CliRunner().invoke(app, ["status", "--url", url])
        assert (told.exit_code, f"{url} is no address on this machine" in told.output) == (2, True), told.output


@pytest.mark.parametrize("name", ["top", "doctor"])
def test_a_missing_server_is_one_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    told = CliRunner().invoke(app, [name, "--url", "http://127.0.0.1:1"])
    assert told.exit_code == 1
    assert "does not answer" in told.output
    assert "Traceback" not in told.output


def test_intervals_that_cannot_be_are_refused() -> None:
    assert CliRunner().invoke(app, ["top", "--interval", "0"]).exit_code == 2
