"""What runs on a host that has a part of a cluster: addresses, ranks, and the configuration of each process."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from trunkline.controller.config import ControllerConfig
from trunkline.controller.reports import WorkerHello
from trunkline.controller.service.membership import disagreement
from trunkline.deploy.cli.serving import group, router, workers
from trunkline.deploy.config.disk_folders import DiskFolders
from trunkline.deploy.config.node_settings import (
    Address,
    Kind,
    NodeSettings,
    parse_address,
    parse_addresses,
    parse_ranks,
)
from trunkline.deploy.config.options import OPTIONS_OF, SERVE_OPTIONS
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor import configs as configs_module
from trunkline.deploy.supervisor.configs import Config, configs_of
from trunkline.deploy.supervisor.serve import plan_cluster
from trunkline.router.config import RouterConfig
from trunkline.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:7400", "10.0.0.1", 7400),
        ("group-0.group.ns.svc:81", "group-0.group.ns.svc", 81),
        ("host_1", "host_1", 7400),
        (" h:65531 ", "h", 65531),
    ],
)
def test_an_address(text: str, host: str, port: int) -> None:
    assert parse_address(text, "--leader") == Address(host, port)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write HOST:PORT"),
        (":7400", "write HOST:PORT"),
        ("-h:1", "write HOST:PORT"),
        ("h/x:1", "write HOST:PORT"),
        ("h:", "allowed are ports 1 to 65531"),
        ("h:0", "allowed are ports 1 to 65531"),
        ("h:65532", "a group has 5"),
        ("h:٣", "allowed are ports"),
        ("[::1]:7400", "IPv6"),
        ("::1", "IPv6"),
    ],
)
def test_what_is_no_address(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_address(text, "--leader")
    assert str(error.value).startswith("--leader is ")


def test_endpoints_are_consecutive_ports() -> None:
    address = parse_address("h:7400", "--leader")
    assert [address.endpoint(offset) for offset in (0, 1, 4)] == ["tcp://h:7400", "tcp://h:7401", "tcp://h:7404"]


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1,b", ["a:1", "b:7400"]),
        ("g-{0..2}.g:7400", ["g-0.g:7400", "g-1.g:7400", "g-2.g:7400"]),
        ("g{08..10}:9", ["g08:9", "g09:9", "g10:9"]),
        ("z{0..1}-{5..6}", ["z0-5:7400", "z0-6:7400", "z1-5:7400", "z1-6:7400"]),
        ("h:74{00..02}", ["h:7400", "h:7401", "h:7402"]),
        ("a , ,b,", ["a:7400", "b:7400"]),
    ],
)
def test_addresses(text: str, addresses: list[str]) -> None:
    assert [str(address) for address in parse_addresses(text, "--controllers")] == addresses


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" , ", "names no group"),
        ("a,a:7400", "names a:7400 twice"),
        ("g-{0..256}", "more than 256"),
        ("g-{0..15}-{0..16}", "more than 256"),
        ("g-{0..999999}", "more than 256"),
        (",".join(f"h{number}" for number in range(257)), "more than 256"),
        ("g-{3..1}", "the smaller number first"),
        ("g-{a..b}", "a range is written"),
        ("g-{0..1", "a range is written"),
    ],
)
def test_what_are_no_addresses(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_addresses(text, "--controllers")


def test_ranks() -> None:
    assert parse_ranks("", 4, is_leader=True) == range(4)
    assert parse_ranks("0-1", 4, is_leader=True) == range(2)
    assert parse_ranks("2-3", 4, is_leader=False) == range(2, 4)
    assert parse_ranks("3", 4, is_leader=False) == range(3, 4)


@pytest.mark.parametrize(
    ("text", "is_leader", "message"),
    [
        ("1-2", True, "rank 0 runs beside the controller, so write 0-2"),
        ("0-1", False, "rank 0 runs beside the controller"),
        ("", False, "write A-B"),
        ("2-4", False, "there are ranks 0 to 3"),
        ("3-2", False, "there are ranks 0 to 3"),
        ("1,2", False, "write A-B"),
        ("-1", False, "write A-B"),
    ],
)
def test_what_are_no_ranks(text: str, is_leader: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_ranks(text, 4, is_leader=is_leader)


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


def test_ranks_export_kv_where_their_peers_may_be() -> None:
    """On one host by a socket in the run folder, else at a port that a firewall can know."""
    near = configs(Kind.GROUP, listen="127.0.0.1:7400")
    assert worker_of(near, "worker-1").export == "ipc:///run/x/g0-kv1"
    controller = near["controller"]
    assert isinstance(controller, ControllerConfig)
    assert controller.peers
    outside = worker_of(configs(Kind.GROUP, listen="0.0.0.0:7400"), "worker-0")
    assert outside.export == "tcp://0.0.0.0:8400-8463"
    assert outside.export_host == socket.getfqdn()
    far = worker_of(configs(Kind.WORKERS, leader="h:7400", ranks="1"), "worker-1")
    assert (far.export, far.export_host) == ("tcp://0.0.0.0:8400-8463", "")
    second = worker_of(configs(Kind.GROUP, listen="0.0.0.0:7405"), "worker-1")
    assert second.export == "tcp://0.0.0.0:8406-8468"
    assert worker_of(configs(Kind.GROUP, listen="0.0.0.0:64472"), "worker-0").export == "tcp://0.0.0.0:65472-65535"
    assert worker_of(configs(Kind.GROUP, listen="0.0.0.0:64473"), "worker-0").export == "tcp://0.0.0.0:*"
    assert far.exchange_fingerprint == outside.exchange_fingerprint
    assert len(far.exchange_fingerprint) == 32


def test_a_group_has_one_role() -> None:
    given = NodeSettings(plain_tcp=True)
    settings, node = given.plan(Kind.GROUP, dataclasses.replace(SETTINGS, role="prefill"))
    found = configs_of(plan_cluster(settings, node=node), Path("/run/x"), DiskFolders()).values()
    assert [config.role for config in found if isinstance(config, ControllerConfig)] == ["prefill"]
    with pytest.raises(UserError, match="this is one group, so write one role"):
        given.plan(Kind.GROUP, dataclasses.replace(SETTINGS, role="prefill,decode"))


@pytest.mark.parametrize("change", [{"peers": "off"}, {"prefix_cache": False}, {"host_tier_bytes": 0}])
def test_no_kv_is_exported_where_there_is_none_to_share(change: dict[str, Any]) -> None:
    plan = plan_cluster(dataclasses.replace(SETTINGS, **change))
    found = configs_of(plan, Path("/run/x"), DiskFolders()).values()
    assert not any(config.export for config in found if isinstance(config, WorkerConfig))
    assert not any(config.peers for config in found if isinstance(config, ControllerConfig))


def test_a_router_knows_requests_and_events_of_each_group(tmp_path: Path, cache_home: Path) -> None:
    settings, node = NodeSettings(plain_tcp=True, controllers="g-{0..1}.g:7400").plan(Kind.ROUTER, SETTINGS)
    plan = dataclasses.replace(plan_cluster(SETTINGS), settings=settings, node=node)
    (config,) = configs_of(plan, tmp_path, DiskFolders()).values()
    assert isinstance(config, RouterConfig)
    assert config.controllers == ["tcp://g-0.g:7400", "tcp://g-1.g:7400"]
    assert config.events == ["tcp://g-0.g:7401", "tcp://g-1.g:7401"]
    assert config.records == f"sqlite:{cache_home}/trunkline/kv/records/records.sqlite"


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


@pytest.mark.parametrize("kind", [Kind.GROUP, Kind.WORKERS])
def test_parts_without_routers_have_no_options_that_only_routers_read(kind: Kind) -> None:
    others = {*configs_module._OF_CONTROLLERS.split(), *configs_module._OF_WORKERS.split()}
    only_routers = set(configs_module._OF_ROUTERS.split()) - others
    assert len(only_routers) > 10
    assert only_routers & {option.field for option in OPTIONS_OF[kind]} == set()
