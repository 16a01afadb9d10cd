"""What runs on a host that has a part of a cluster: a group, some of its ranks, or routers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import WorkerHello
from trunkline.controller.service.membership import disagreement
from trunkline.deploy.cli.app import group, router, workers
from trunkline.deploy.config.disk_folders import DiskFolders
from trunkline.deploy.config.node_settings import Kind, NodeSettings
from trunkline.deploy.config.options import SERVE_OPTIONS
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.serve import Config, configs_of, plan_cluster
from trunkline.router.config import RouterConfig
from trunkline.worker.config import WorkerConfig

SETTINGS = ServeSettings(tp=2, dtype="float32", device="cpu", port=0)


def configs(kind: Kind, **given: Any) -> dict[str, Config]:
    """Of the processes that run in such a part, by name."""
    settings, node = NodeSettings(plain_tcp=True, **given).plan(kind, SETTINGS)
    plan = plan_cluster(settings, node=node)
    return {member.name: config for member, config in configs_of(plan, Path("/run/x"), DiskFolders()).items()}


def worker_of(found: dict[str, Config], name: str) -> WorkerConfig:
    config = found[name]
    assert isinstance(config, WorkerConfig)
    return config


def test_a_whole_group_opens_two_ports_and_keeps_its_ranks_to_itself() -> None:
    found = configs(Kind.GROUP, listen="127.0.0.1:7400")
    assert set(found) == {"controller", "worker-0", "worker-1"}
    controller, worker = found["controller"], worker_of(found, "worker-1")
    assert isinstance(controller, ControllerConfig)
    assert (controller.router_endpoint, controller.events_endpoint) == (
        "tcp://127.0.0.1:7400",
        "tcp://127.0.0.1:7401",
    )
    assert controller.plan_endpoint == worker.plan_endpoint == "ipc:///run/x/g0-plan"
    assert not worker.is_spread
    assert worker.collectives == "auto"


def test_ranks_of_two_hosts_meet_at_the_leaders_ports() -> None:
    here = configs(Kind.GROUP, listen="0.0.0.0:7400", ranks="0")
    there = configs(Kind.WORKERS, leader="h:7400", ranks="1")
    assert set(here) == {"controller", "worker-0"}
    assert set(there) == {"worker-1"}
    controller, near, far = here["controller"], worker_of(here, "worker-0"), worker_of(there, "worker-1")
    assert isinstance(controller, ControllerConfig)
    assert (controller.plan_endpoint, controller.report_endpoint) == ("tcp://0.0.0.0:7402", "tcp://0.0.0.0:7403")
    assert (near.plan_endpoint, near.rendezvous) == ("tcp://127.0.0.1:7402", "tcp://0.0.0.0:7404")
    assert (far.plan_endpoint, far.report_endpoint) == ("tcp://h:7402", "tcp://h:7403")
    assert far.rendezvous == "tcp://h:7404"
    assert near.is_spread
    assert far.is_spread
    assert near.collectives == far.collectives == "gloo"
    assert near.terms == far.terms
    assert near.terms == {name: value for name, value in controller.terms.items() if name in near.terms}
    assert len(near.terms["model"]) == 32


def test_a_router_knows_requests_and_events_of_each_group(tmp_path: Path) -> None:
    settings, node = NodeSettings(plain_tcp=True, controllers="g-{0..1}.g:7400").plan(Kind.ROUTER, SETTINGS)
    plan = dataclasses.replace(plan_cluster(SETTINGS), settings=settings, node=node)
    (config,) = configs_of(plan, tmp_path, DiskFolders()).values()
    assert isinstance(config, RouterConfig)
    assert config.controllers == ["tcp://g-0.g:7400", "tcp://g-1.g:7400"]
    assert config.events == ["tcp://g-0.g:7401", "tcp://g-1.g:7401"]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Kind.ROUTER, {}, "--controllers is missing"),
        (Kind.WORKERS, {"ranks": "1"}, "--leader is missing"),
        (Kind.GROUP, {"health_port": 65536}, "--health-port is 65536"),
        (Kind.GROUP, {"health_host": "a b"}, "--health-host is 'a b'"),
        (Kind.GROUP, {"wire_keys": "f", "plain_tcp": True}, "exclude each other"),
        (Kind.GROUP, {"listen": "no-such-host.invalid"}, "cannot be resolved"),
    ],
)
def test_what_cannot_be_a_part(kind: Kind, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NodeSettings(**given).plan(kind, SETTINGS)


def test_a_part_without_keys_is_refused() -> None:
    settings, node = NodeSettings(listen="127.0.0.1:7400").plan(Kind.GROUP, SETTINGS)
    with pytest.raises(UserError, match="wire keys"):
        plan_cluster(settings, node=node)


def test_a_rank_of_another_model_is_told_what_differs() -> None:
    terms = {"tp": "2", "dtype": "float32", "model": "aa"}
    hello = WorkerHello(1, 1, "", bytes(16), {"tp": "2", "model": "bb", "dtype": "float32"})
    assert disagreement(terms, hello) == "rank 1 has another checkpoint or quantization (bb) than the group (aa)"
    assert disagreement({**terms, "model": "bb"}, hello) == ""
    assert "another tp (2) than the group (4)" in disagreement({**terms, "tp": "4"}, hello)
    assert disagreement(terms, WorkerHello(1, 1, "", bytes(16))) == ""


def test_every_option_of_serve_is_in_some_part() -> None:
    known = {name for made in (group, workers, router) for name in vars(made)["__signature__"].parameters}
    assert {option.field for option in SERVE_OPTIONS if option.parameter not in known} == {"groups"}
    fields = {field.name for field in dataclasses.fields(ServeSettings)}
    assert fields - {option.field for option in SERVE_OPTIONS} == {"ranks_here"}
