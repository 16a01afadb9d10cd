"""The command lines of pods, against the command line that there is."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from kubernetes.rendering import OVERLAYS, Object, build, containers, needs_kustomize, pod_templates, render

from trunkline.deploy.cli.app import app
from trunkline.deploy.config.node_settings import parse_addresses

EVERYTHING: Object = {
    "groups": {
        "tp": 2,
        "podsPerGroup": 2,
        "dtype": "float32",
        "quantization": "int8",
        "kvMemory": "1GiB",
        "hostTier": "1GiB",
        "maxContext": 4096,
        "maxBatch": 8,
        "tokenBudget": 64,
        "maxWaiting": 9,
        "sessionTtlSeconds": 60,
    },
    "routers": {"tenantHeader": "X-Tenant"},
    "model": {"servedName": "mine"},
    "remoteTier": {"mode": "valkey"},
    "records": {"maxMiB": 512},
    "tracing": {"endpoint": "http://collector:4318", "sample": 0.5},
}


def _command_lines(objects: list[Object]) -> list[tuple[str, list[str]]]:
    """Each container of ours, as the command and its arguments."""
    found = []
    for _, template in pod_templates(objects):
        for container in containers(template):
            match container["command"]:
                case ["trunkline", command]:
                    found.append((command, container["args"]))
                case ["/bin/sh", "-c", script, "sh"] if "exec trunkline workers" in script:
                    found.append(("workers", [*container["args"], "--ranks", "1-1"]))
    return found


def _check(command: str, arguments: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    known = group.commands[command]
    context = known.make_context(command, list(arguments), resilient_parsing=False)
    assert context.params["model"]


@pytest.mark.parametrize("values", [{}, {"auth": {"enabled": False}}, EVERYTHING])
def test_the_commands_take_every_option_that_pods_give_them(values: Object) -> None:
    lines = _command_lines(render(values))
    assert {command for command, _ in lines} >= {"group", "router"}
    for command, arguments in lines:
        _check(command, arguments)


@needs_kustomize
@pytest.mark.processes
@pytest.mark.area("kubernetes")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_so_do_those_of_the_overlays(overlay: str) -> None:
    lines = _command_lines(build(overlay))
    assert {command for command, _ in lines} >= {"group", "router"}
    for command, arguments in lines:
        _check(command, arguments)


def test_routers_read_the_groups_addresses() -> None:
    ((_, arguments),) = (
        line for line in _command_lines(render({"groups": {"replicas": 3}})) if line[0] == "router"
    )
    addresses = parse_addresses(arguments[arguments.index("--controllers") + 1], "--controllers")
    assert [str(address) for address in addresses] == [
        f"tl-trunkline-group-{index}.tl-trunkline-group.llm.svc:7400" for index in range(3)
    ]
