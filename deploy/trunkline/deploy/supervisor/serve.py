"""`trunkline serve`: from settings to a supervised cluster.

A cluster that cannot work is refused here, before a process starts: because of the model's folder or architecture,
the number of ranks, the memory or the port. Then each process gets its configuration as a JSON file in the run
folder.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from rich.console import Console

from trunkline.controller.config import ControllerConfig
from trunkline.controller.engine_config import ConfigError
from trunkline.deploy.config import models
from trunkline.deploy.config.disk_folders import INDEX_NAME, DiskFolders, disk_folders, plan_disk
from trunkline.deploy.config.machine import free_port, open_listener
from trunkline.deploy.config.node_settings import NodePlan
from trunkline.deploy.config.option_values import format_bytes, keys_needed, server_key_digest
from trunkline.deploy.config.plans import ClusterPlan, Meeting, local_endpoint, settle
from trunkline.deploy.config.record_files import plan_records, prepare_records
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.members import Limits, Member, Role
from trunkline.deploy.supervisor.reporters import JsonReporter, TerminalReporter
from trunkline.deploy.supervisor.run_folder import (
    STATUS_SOCKET,
    Running,
    admin_key_digest,
    announced,
    make_admin_key,
    run_folder,
)
from trunkline.deploy.supervisor.supervisor import ChildSpec, Supervisor
from trunkline.kvstore.fingerprint import KvShape, tier_fingerprint
from trunkline.router.config import RouterConfig
from trunkline.runtime.process import enter_role
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import WorkerError
from trunkline.worker.model.families import check_model
from trunkline.worker.model.model_config import ModelConfig

__all__ = ["ClusterPlan", "children", "plan_cluster", "serve"]

_TELL_BYTES: Final = 2 << 30
"""Number of bytes of weights above which reading them is announced, because it takes seconds."""


def plan_cluster(
    settings: ServeSettings,
    tell: Callable[[str], None] = lambda text: None,
    listener: socket.socket | None = None,
    node: NodePlan | None = None,
) -> ClusterPlan:
    """Choose what the settings leave open, and refuse what cannot work. Only digests of weights are written.

    Args:
        settings: The settings as they were given.
        tell: Called with a sentence before a step that takes seconds.
        listener: A socket that listens on the port already; None to only try whether that is possible.
        node: The part of a cluster that is to run here, if it is not all of one.

    Raises:
        UserError: The cluster cannot work. The text says what was given, what is allowed and what to do.
    """
    settings.validate()
    folder = models.resolve(settings.model)
    settings, placement = settle(settings, folder)
    device = placement.device
    if settings.kernels in ("cpu", "cuda") and settings.kernels != device:
        raise UserError(
            f"--kernels is {settings.kernels}, but the model runs on device {device}; use --kernels auto"
        )
    dtype = models.resolve_dtype(folder, settings.dtype, device)
    try:
        model = check_model(folder, settings.ranks, dtype)
    except WorkerError as error:
        raise UserError(str(error)) from error
    max_context = settings.max_context or model.max_positions
    if max_context > model.max_positions:
        raise UserError(
            f"--max-context is {max_context}; {settings.model} allows at most {model.max_positions} tokens"
        )
    _check_kv_memory(settings, model, dtype, device)

    def tell_reading(count: int) -> None:
        if count >= _TELL_BYTES:
            tell(
                f"Reading {format_bytes(count)} of weights: what is computed with them is kept under their digest."
            )

    fingerprint = models.fingerprint(folder, settings.quantization, tell_reading)
    tier = _tier_fingerprint(settings, model, dtype, fingerprint)
    chunk_bytes = model.kv_block_bytes(settings.chunk_size, settings.ranks, dtype)
    plan = ClusterPlan(
        settings=settings,
        folder=folder,
        model_name=settings.served_model_name or models.default_name(settings.model),
        dtype=dtype,
        placement=placement,
        max_context=max_context,
        vocab_size=model.vocab_size,
        fingerprint=fingerprint,
        tier_fingerprint=tier,
        positions_shift=model.positions_shift,
        disk=plan_disk(
            settings.disk_tier, tier, settings.groups, settings.ranks_here or settings.ranks, chunk_bytes
        )
        if _has_room_on_host(settings, device, chunk_bytes)
        else None,
        records=plan_records(settings) if node is None else None,
        port=free_port(settings.host, settings.port) if listener is None else listener.getsockname()[1],
        listen_fd=0 if listener is None else listener.fileno(),
        node=node,
    )
    _check_host_tier(settings, chunk_bytes)
    check_configs(plan)
    return plan


def check_configs(plan: ClusterPlan) -> None:
    """Check the configurations that the processes would get.

    Raises:
        UserError: A process would refuse its configuration.
    """
    try:  # with endpoints of a folder that does not exist yet: the rules are about everything else
        for config in configs_of(plan, Path("/run"), expected_folders(plan)).values():
            config.validate()
    except (ConfigError, WorkerError, ValueError) as error:
        raise UserError(str(error)) from error


def children(plan: ClusterPlan, folder: Path, disk: DiskFolders | None = None) -> list[ChildSpec]:
    """Write the configuration of each process, and return how to start them: workers first, as they take longest.

    Args:
        plan: What the processes agree on.
        folder: The run folder, into which the configurations are written.
        disk: Where the disk tier is; None if there is none.
    """
    specs = []
    make_admin_key(folder)
    for member, config in configs_of(plan, folder, disk or DiskFolders()).items():
        path = folder / f"{member.name}.json"
        # Only this user may read it, wherever the folder is: there may be a password in it.
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(config))
        module = f"trunkline.{member.role}"
        # -P: a module in the current directory must not stand in for an installed one.
        argv = (sys.executable, "-P", "-m", module, "--config", str(path))
        inherits = (plan.listen_fd,) if member.role is Role.ROUTER and plan.listen_fd else ()
        specs.append(ChildSpec(member, argv, descriptors=inherits))
    order = [Role.WORKER, Role.CONTROLLER, Role.ROUTER]
    return sorted(specs, key=lambda spec: order.index(spec.member.role))


def serve(settings: ServeSettings) -> int:
    """Run a cluster until it is stopped or fails; return the exit code (0, 1, or 2 if it can never work).

    Raises:
        UserError: It cannot work; nothing was started.
    """
    console = Console(stderr=True, highlight=False)
    settings.validate()
    # Before anything slow: from here on no other process can take the port.
    with open_listener(settings.host, settings.port) as listener:
        plan = plan_cluster(settings, lambda text: console.print(text, markup=False), listener)
        enter_role("supervisor", log_level=settings.log_level, log_format=settings.log_format)
        with disk_folders(plan.disk) as disk:
            return _supervise(plan, disk, listener, console)


def _supervise(plan: ClusterPlan, disk: DiskFolders, listener: socket.socket, console: Console) -> int:
    settings = plan.settings
    reporter = reporter_of(settings, console, plan.title, plan.url, plan.model_name)
    try:
        announce(plan, disk, reporter)
        plan = with_records(plan, disk, reporter)
        running = Running(plan.port, plan.url, plan.title, os.getpid())
        with run_folder() as folder, announced(folder, running):
            supervisor = Supervisor(
                children(plan, folder, disk),
                reporter,
                host=settings.connect_host,
                port=plan.port,
                limits=Limits(drain_s=settings.drain_seconds),
                restart=settings.restart,
                folder=folder,
                listener=listener,
            )
            return supervisor.run()
    finally:
        reporter.close()


def reporter_of(
    settings: ServeSettings, console: Console, title: str, url: str = "", model_name: str = ""
) -> TerminalReporter | JsonReporter:
    """Return what shows the cluster's state in the form of `--log-format`.

    Args:
        url: Where the cluster serves; "" for a part of one, which has no moment from which on it is complete.
    """
    if settings.log_format == "json":
        return JsonReporter(sys.stderr, title=title, url=url, log_level=settings.log_level)
    return TerminalReporter(console, title=title, url=url, model_name=model_name, log_level=settings.log_level)


def announce(plan: ClusterPlan, disk: DiskFolders, reporter: TerminalReporter | JsonReporter) -> None:
    """Say where workers compute and where KV goes, before the first process starts."""
    if gpus := plan.placement.describe():
        reporter.say(gpus, "info")
    reporter.say(f"KV tiers below the device: {plan.describe_tiers(disk)}", "info")
    for warning in (plan.placement.warning, *disk.warnings):
        if warning:
            reporter.say(warning, "warning")


def with_records(plan: ClusterPlan, disk: DiskFolders, reporter: TerminalReporter | JsonReporter) -> ClusterPlan:
    """Return the plan with a place for records that can be used, and say where it is.

    Raises:
        UserError: The place that was asked for cannot be used.
    """
    if plan.records is None:
        return plan
    records = prepare_records(plan.records, disk.groups, reporter.say)
    reporter.say(f"Sessions and schemas: {records.described}", "info")
    return replace(plan, records=records)


def _has_room_on_host(settings: ServeSettings, device: str, chunk_bytes: int) -> bool:
    """Return whether KV can pass through host memory on its way to and from the tiers below it.

    Raises:
        UserError: KV cannot pass through host memory, but a tier below it was asked for.
    """
    memory, asked = settings.host_tier_per_worker(device), settings.asked_tier
    if settings.prefix_cache and memory >= 2 * chunk_bytes:
        return True
    if asked:
        raise UserError(
            f"{asked} is given, but --host-tier is {format_bytes(memory)}; KV passes through host memory on its "
            f"way, where two chunks of {format_bytes(chunk_bytes)} are the least"
        )
    return False


def _tier_fingerprint(settings: ServeSettings, model: ModelConfig, dtype: str, fingerprint: str) -> str:
    kv_heads = max(1, model.kv_heads // settings.ranks)
    shape = KvShape(model.layers, kv_heads, settings.chunk_size, model.head_dim)
    # Their text names all fields: a field that is added changes it, and KV is computed again.
    positions = repr((model.architecture.positions, model.attention, model.alibi_slopes, model.max_positions))
    return tier_fingerprint(bytes.fromhex(fingerprint), dtype, settings.ranks, shape, positions).hex()


def _check_kv_memory(settings: ServeSettings, model: ModelConfig, dtype: str, device: str) -> None:
    """Check that each worker has room for two chunks, and that the machine has the memory that was asked for.

    Longer requests are refused one by one. The default is not checked: memory that is not used is never touched.
    """
    memory = settings.kv_memory_per_worker(device)
    chunk = model.kv_block_bytes(settings.chunk_size, settings.ranks, dtype)
    if memory and memory < 2 * chunk:
        raise UserError(
            f"--kv-memory is {format_bytes(memory)}; a chunk of {settings.chunk_size} tokens takes "
            f"{format_bytes(chunk)} per worker and two are the least"
        )
    asked = (settings.kv_memory_bytes or 0) * settings.workers_here
    if device == "cpu" and asked > (machine := psutil.virtual_memory().total):
        raise UserError(
            f"--kv-memory is {format_bytes(memory)} for each of {settings.workers_here} workers, "
            f"{format_bytes(asked)} in all; this machine has {format_bytes(machine)} of memory"
        )


def _check_host_tier(settings: ServeSettings, chunk_bytes: int) -> None:
    """Check that the host tier that was asked for holds a chunk at least, and that this machine has the memory."""
    memory = settings.host_tier_bytes or 0
    if memory and settings.prefix_cache and memory < chunk_bytes:
        raise UserError(
            f"--host-tier is {format_bytes(memory)}; a chunk of {settings.chunk_size} tokens takes "
            f"{format_bytes(chunk_bytes)} per worker; give it room for some, or 0 for none"
        )
    asked = memory * settings.workers_here
    if asked > (machine := psutil.virtual_memory().total):
        raise UserError(
            f"--host-tier is {format_bytes(memory)} for each of {settings.workers_here} workers, "
            f"{format_bytes(asked)} in all; this machine has {format_bytes(machine)} of memory"
        )


Config = RouterConfig | ControllerConfig | WorkerConfig

# Settings that a process gets as they were given, under their own names.
_OF_ROUTERS: Final = """policy routers host resume_seconds drain_seconds tool_call_parser tenant_limits
    tenant_header allow_anonymous trace_sample records_tenant_bytes"""
_OF_CONTROLLERS: Final = """chunk_size token_budget max_waiting prefix_cache preemption target_itl_ms tier_policy
    drain_seconds"""
_OF_WORKERS: Final = "kernels chunk_size"


def configs_of(plan: ClusterPlan, folder: Path, disk: DiskFolders) -> dict[Member, Config]:
    """Return the configuration of each process that is to run here.

    Args:
        folder: The run folder.
        disk: Where the disk tier is.
    """
    settings, node = plan.settings, plan.node
    configs: dict[Member, Config] = {}
    if node is None or node.ranks:
        for group in range(settings.groups):
            meeting = plan.meeting(folder, group)
            if node is None or node.listen is not None:
                member = Member(f"controller{_suffix(plan, group)}", Role.CONTROLLER, group)
                configs[member] = _controller_config(plan, group, meeting, folder, disk)
            configs.update(_worker_configs(plan, group, meeting, folder, disk))
    if node is None or node.controllers:
        router = _router_config(plan, folder)
        for number in range(settings.routers):
            name = f"router-{number}" if settings.routers > 1 else "router"
            configs[Member(name, Role.ROUTER, -1)] = msgspec.structs.replace(router, number=number)
    return configs


def _as_given(plan: ClusterPlan, names: str) -> dict[str, Any]:
    """Return some settings by their names, and what processes of every role are told alike."""
    settings, node = plan.settings, plan.node
    return {
        **{name: getattr(settings, name) for name in names.split()},
        "max_context": plan.max_context,
        "parent_pid": os.getpid(),
        "log_level": settings.log_level,
        "log_format": "json",
        "otlp_endpoint": settings.otlp_endpoint,
        "wire_keys": node.wire_keys if node else "",
        "plain_tcp": node.plain_tcp if node else False,
    }


def _router_config(plan: ClusterPlan, folder: Path) -> RouterConfig:
    settings, node = plan.settings, plan.node
    assert plan.records is not None
    if node is None:
        meetings = [plan.meeting(folder, group) for group in range(settings.groups)]
        controllers = [meeting.router for meeting in meetings]
        events = [meeting.events for meeting in meetings]
    else:
        controllers = [address.endpoint(0) for address in node.controllers]
        events = [address.endpoint(1) for address in node.controllers]
    return RouterConfig(
        **_as_given(plan, _OF_ROUTERS),
        model_path=str(plan.folder),
        controllers=controllers,
        events=events,
        metrics_path=str(folder / "metrics"),
        tenants=str(Path(settings.tenants).absolute()) if settings.tenants else "",
        tenants_kept=str(folder / "tenants") if settings.tenants else "",
        api_key_digest=server_key_digest(settings.api_key_file),
        admin_key_digest=admin_key_digest(folder),
        needs_keys=keys_needed(settings.tenants, settings.api_key_file),
        allowed_hosts=list(settings.allowed_hosts),
        cors_origins=list(settings.cors_origins),
        idempotency_ttl_seconds=settings.idempotency_ttl,
        records=plan.records.url_in(folder),
        records_bytes_max=settings.records_max_bytes,
        port=plan.port,
        listen_fd=plan.listen_fd,
        status_path=str(folder / STATUS_SOCKET),
        served_model_name=plan.model_name,
    )


def _suffix(plan: ClusterPlan, group: int) -> str:
    return f"-{group}" if plan.settings.groups > 1 else ""


def _controller_config(
    plan: ClusterPlan, group: int, meeting: Meeting, folder: Path, disk: DiskFolders
) -> ControllerConfig:
    settings = plan.settings
    kept = disk.groups[group] if disk.groups else None
    return ControllerConfig(
        **_as_given(plan, _OF_CONTROLLERS),
        group=group,
        tp=settings.ranks,
        plan_endpoint=meeting.plan,
        report_endpoint=meeting.report,
        router_endpoint=meeting.router,
        events_endpoint=meeting.events,
        local_endpoint=local_endpoint(folder) if plan.node else "",
        status_path=str(folder / STATUS_SOCKET),
        model_fingerprint=plan.fingerprint,
        dtype=plan.dtype,
        max_rows=settings.max_batch,
        index_path=str(kept / INDEX_NAME) if kept else "",
        tier_fingerprint=plan.tier_fingerprint if kept or settings.remote_tier else "",
        remote_tier=bool(settings.remote_tier),
        session_ttl_s=settings.session_ttl,
        positions_shift=plan.positions_shift,
        vocab_size=plan.vocab_size,
    )


def _worker_configs(
    plan: ClusterPlan, group: int, meeting: Meeting, folder: Path, disk: DiskFolders
) -> Iterator[tuple[Member, WorkerConfig]]:
    settings, node = plan.settings, plan.node
    kept = disk.groups[group] if disk.groups else None
    is_spread = node is not None and node.is_spread(settings.ranks)
    suffix = _suffix(plan, group)
    for here, rank in enumerate(node.ranks if node else range(settings.ranks)):
        yield (
            Member(f"worker{suffix}{'.' if suffix else '-'}{rank}", Role.WORKER, group),
            WorkerConfig(
                **_as_given(plan, _OF_WORKERS),
                model=str(plan.folder),
                rank=rank,
                tp=settings.ranks,
                group=f"group-{group}",
                device=plan.device,
                gpu=plan.placement.gpu(group, here),
                gpu_memory_fraction=plan.placement.fraction,
                dtype=plan.dtype,
                quantisation="int8" if settings.quantization == "int8" else "",
                kv_memory_bytes=settings.kv_memory_per_worker(plan.device),
                host_memory_bytes=settings.host_tier_per_worker(plan.device),
                disk_path=str(kept / f"rank-{rank}.slab") if kept else "",
                disk_bytes=disk.rank_bytes if kept else 0,
                remote_url=settings.remote_tier,
                remote_ttl_s=settings.session_ttl,
                tier_fingerprint=plan.tier_fingerprint if kept or settings.remote_tier else "",
                plan_endpoint=meeting.plan_at,
                report_endpoint=meeting.report_at,
                rendezvous=meeting.rendezvous,
                is_spread=is_spread,
                collectives="gloo" if is_spread and plan.device == "cpu" else "auto",
                model_fingerprint=plan.fingerprint,
                status_path=str(folder / STATUS_SOCKET) if node and node.leader else "",
                threads=settings.threads_per_worker(),
            ),
        )


def expected_folders(plan: ClusterPlan) -> DiskFolders:
    """Return the folders that the disk tier gets if no other server uses them, without making any: `check_configs`
    checks the processes' configurations with them. The size of a slab in it is a placeholder."""
    if plan.disk is None:
        return DiskFolders()
    return DiskFolders([plan.disk.group_folder(group) for group in range(plan.settings.groups)], 1)
