"""Run the part of a cluster that is on this host, or in this pod: `trunkline group`, `workers` and `router`.

Planning and supervisor are those of `serve`, for the processes of this part only. A part does not wait for the
rest of the cluster, which may start later, stop, and come back. So a process that dies is started again from the
first moment on.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack, closing
from dataclasses import replace

from rich.console import Console

from trunkline.deploy.config import models, stretched
from trunkline.deploy.config.disk_folders import disk_folders
from trunkline.deploy.config.machine import open_listener
from trunkline.deploy.config.node_settings import GROUP_PORTS, Address, Kind, NodePlan, NodeSettings
from trunkline.deploy.config.plans import TP_ON_CPUS, ClusterPlan, Placement, settle
from trunkline.deploy.config.record_files import plan_records
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.node.health import NodeHealth, probe_of, serving
from trunkline.deploy.node.joined import joined, warning_of
from trunkline.deploy.supervisor.members import Limits
from trunkline.deploy.supervisor.run_folder import Running, announced, run_folder
from trunkline.deploy.supervisor.serve import (
    announce,
    check_configs,
    children,
    plan_cluster,
    reporter_of,
    with_records,
)
from trunkline.deploy.supervisor.supervisor import Supervisor
from trunkline.kvstore.chunk_format import type_name
from trunkline.runtime.process import enter_role


def run_node(kind: Kind, settings: ServeSettings, node_settings: NodeSettings) -> int:
    """Run a part of a cluster until it is stopped or fails; return the exit code (0, 1, or 2 if it can never
    work).

    Raises:
        UserError: It cannot work; nothing was started.
    """
    console = Console(stderr=True, highlight=False)
    settings.validate()
    node_settings.validate(kind)
    with ExitStack() as stack:
        listener = None
        health = NodeHealth()
        if node_settings.health_port:  # at once: to read a large model takes minutes
            health_port = open_listener(node_settings.health_host, node_settings.health_port, "--health-port")
            stack.enter_context(health_port)
            stack.enter_context(serving(health_port, health))
        settings, node = node_settings.plan(kind, _with_tp(kind, settings, node_settings))
        if kind is Kind.ROUTER:
            listener = stack.enter_context(open_listener(settings.host, settings.port))
            plan = plan_routers(settings, node, listener)
        else:
            if node.listen is not None:
                _check_ports(node.listen, GROUP_PORTS if node.is_spread(settings.ranks) else 2)
            plan = plan_cluster(settings, lambda text: console.print(text, markup=False), node=node)
        enter_role("supervisor", log_level=settings.log_level, log_format=settings.log_format)
        disk = stack.enter_context(disk_folders(plan.disk))
        title = _title(kind, plan)
        reporter = stack.enter_context(closing(reporter_of(settings, console, title)))
        if kind is not Kind.ROUTER:
            announce(plan, disk, reporter)
            if warning := warning_of(node):
                reporter.say(warning, "warning")
        plan = with_records(plan, disk, reporter)
        folder = stack.enter_context(run_folder())
        stack.enter_context(announced(folder, _running(kind, plan, node_settings, title)))
        membership = stack.enter_context(joined(node, plan.model_name, plan.fingerprint, settings.role))
        supervisor = Supervisor(
            children(plan, folder, disk),
            reporter,
            host="",
            port=0,
            limits=Limits(drain_s=settings.drain_seconds),
            restart=settings.restart,
            folder=folder,
            listener=listener,
        )
        supervisor.membership = membership
        if node_settings.health_port:
            health.begin(folder, probe_of(kind, folder, settings.connect_host, plan.port))
        return supervisor.run()


def _with_tp(kind: Kind, settings: ServeSettings, node_settings: NodeSettings) -> ServeSettings:
    """Return the settings with a number of ranks, against which the options of a part are checked.

    With `--ranks` neither GPUs nor CPUs of the other hosts are known, so the default is the same everywhere.

    Raises:
        UserError: There is no such model, or no such device.
    """
    if settings.tp is not None or kind is Kind.ROUTER:
        return settings
    if kind is Kind.GROUP and not node_settings.ranks:
        return settle(settings, stretched.folder_of(settings))[0]
    return replace(settings, tp=TP_ON_CPUS)


def plan_routers(settings: ServeSettings, node: NodePlan, listener: socket.socket) -> ClusterPlan:
    """Return the plan of a part that has routers only, for which no weights are needed.

    Raises:
        UserError: It cannot work.
    """
    plan = ClusterPlan(
        settings=settings,
        folder=stretched.folder_of(settings, needs_weights=False),
        model_name=models.main_name(settings),
        dtype="",
        placement=Placement(),
        max_context=settings.max_context or 0,
        vocab_size=0,
        fingerprint="",
        tier_fingerprint="",
        positions_shift=True,
        disk=None,
        records=plan_records(settings),
        port=listener.getsockname()[1],
        listen_fd=listener.fileno(),
        node=node,
    )
    check_configs(plan)
    return plan


def _title(kind: Kind, plan: ClusterPlan) -> str:
    node, settings = plan.node, plan.settings
    assert node is not None
    if kind is Kind.ROUTER:
        count = len(node.controllers)
        groups = f"{count} group{'s' if count > 1 else ''}" if count else f"the groups in {node.members}"
        return f"{plan.model_name} · router of {groups} · {plan.url}"
    ranks = f"rank{'s' if len(node.ranks) > 1 else ''} {node.ranks[0]}"
    ranks += f"-{node.ranks[-1]}" if len(node.ranks) > 1 else ""
    where = f"listens on {node.listen}" if kind is Kind.GROUP else f"of the group at {node.leader}"
    computed = type_name(plan.dtype, settings.kv_dtype)
    return f"{plan.model_name} · {ranks} of {settings.ranks} on {plan.device} · {computed} · {where}"


def _running(kind: Kind, plan: ClusterPlan, node_settings: NodeSettings, title: str) -> Running:
    """Return what commands find of this part. Workers are known by their health port, their only one."""
    assert plan.node is not None
    if kind is Kind.ROUTER:
        return Running(plan.port, plan.url, title, os.getpid(), kind)
    address = plan.node.listen or plan.node.leader
    port = plan.node.listen.port if plan.node.listen is not None else node_settings.health_port
    return Running(port, f"tcp://{address}", title, os.getpid(), kind)


def _check_ports(address: Address, count: int) -> None:
    """Check that the controller will be able to open its ports, so that the user hears now if it cannot.

    Raises:
        UserError: A port is in use, or the address is not this machine's.
    """
    for port in range(address.port, address.port + count):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((address.host, port))
                trial.listen(1)
        except OSError as error:
            what = (
                f"a group needs {count} ports from there on; stop what has port {port}, or choose others"
                if error.errno == errno.EADDRINUSE
                else "write an address of this machine, or 0.0.0.0 for all of them"
            )
            raise UserError(f"--listen is {address}: {error.strerror}; {what}") from error
