"""The command lines of pods, against the command line that there is."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from kubernetes.checks import matches
from kubernetes.rendering import OVERLAYS, Object, build, containers, needs_kustomize, pod_templates, render

from trunkline.deploy.cli.app import app
from trunkline.router.membership.open_source import problem_of_members

EVERYTHING: Object = {
    "groups": {
        "prefill": 1,
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
                case ["/bin/sh", "-c", script, "sh"] if "exec trunkline group" in script:
                    found.append(("group", [*container["args"], "--role", "prefill"]))
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


def test_routers_read_where_the_groups_are() -> None:
    for pods, service in ((1, "tl-trunkline-group"), (2, "tl-trunkline-group-leaders")):
        objects = render({"groups": {"podsPerGroup": pods}})
        ((_, arguments),) = (line for line in _command_lines(objects) if line[0] == "router")
        url = arguments[arguments.index("--members") + 1]
        assert url == f"kubernetes://$(POD_NAMESPACE)/{service}?port=requests&events=events"
        assert problem_of_members(url.replace("$(POD_NAMESPACE)", "llm")) == ""
        found = [each for each in objects if (each["kind"], each["metadata"]["name"]) == ("Service", service)]
        (spec,) = (each["spec"] for each in found)
        assert [port["name"] for port in spec["ports"]] == ["requests", "events"]
        (chosen,) = (pod for _, pod in pod_templates(objects) if matches(spec["selector"], pod))
        assert "group" in chosen["spec"]["containers"][0]["command"]
