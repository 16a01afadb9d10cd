"""`trunkline serve`: from settings to a supervised cluster.

Everything that can be known to be impossible is refused here, before a process starts: the folder, the
architecture, the split over ranks, the port. Then each process gets its configuration as a JSON file in
the run folder.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil
from rich.console import Console

from trunkline.controller.config import ConfigError, ControllerConfig
from trunkline.deploy import models
from trunkline.deploy.display import TerminalReporter
from trunkline.deploy.errors import UserError
from trunkline.deploy.listening import free_port, open_listener
from trunkline.deploy.members import Limits, Member, Role
from trunkline.deploy.process import enter_role
from trunkline.deploy.registry import Running, announced
from trunkline.deploy.rundir import run_folder
from trunkline.deploy.settings import ServeSettings
from trunkline.deploy.sizes import format_bytes
from trunkline.deploy.statuses import SOCKET_NAME as STATUS_SOCKET
from trunkline.deploy.supervisor import ChildSpec, Supervisor, Surroundings
from trunkline.deploy.tier_options import redacted
from trunkline.deploy.tiers import INDEX_NAME, DiskFolders, DiskPlan, disk_folders, plan_disk
from trunkline.kvstore.fingerprint import KvShape, tier_fingerprint
from trunkline.router.config import RouterConfig
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import WorkerError
from trunkline.worker.families import ModelConfig, check_model

_TELL_BYTES: Final = 2 << 30
"""To read so much takes seconds: somebody may wonder."""


@dataclass(frozen=True)
class ClusterPlan:
    """What all processes of a cluster must agree on, settled once."""

    settings: ServeSettings
    folder: Path
    """The checkpoint."""
    model_name: str
    dtype: str
    device: str
    max_context: int
    vocab_size: int
    fingerprint: str
    """Of the model as it is computed with."""
    tier_fingerprint: str
    positions_shift: bool
    disk: DiskPlan | None
    port: int
    listen_fd: int = 0
    """The listening socket that routers inherit; 0: none, the only one binds its own."""

    @property
    def url(self) -> str:
        """Where clients on this machine connect."""
        host = self.settings.connect_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def title(self) -> str:
        """What is served, by how many, in a few words."""
        settings = self.settings
        groups = f"{settings.groups} groups of " if settings.groups > 1 else ""
        workers = f"{groups}{settings.tp} worker{'s' if settings.tp > 1 else ''}"
        memory = settings.kv_memory_per_worker(self.device)
        kv = f" · {format_bytes(memory)} of KV each" if memory else ""
        weights = f" · {settings.quantization} weights" if settings.quantization != "none" else ""
        return f"{self.model_name} · {workers} on {self.device} · {self.dtype}{weights}{kv}"

    def describe_tiers(self, disk: DiskFolders) -> str:
        """Where KV goes that is not on the device, in one line."""
        settings, parts = self.settings, []
        if settings.prefix_cache and (memory := settings.host_tier_per_worker(self.device)):
            parts.append(f"host {format_bytes(memory)} each")
        if self.disk is not None and disk.groups:
            parts.append(f"disk {format_bytes(disk.rank_bytes)} each in {self.disk.base}")
        if settings.remote_tier:
            parts.append(f"remote {redacted(settings.remote_tier)}")
        return " · ".join(parts) or "none"


def _quietly(text: str) -> None:
    """Nobody wants to know."""


def plan_cluster(
    settings: ServeSettings, tell: Callable[[str], None] = _quietly, listener: socket.socket | None = None
) -> ClusterPlan:
    """Settle what was left open and refuse what cannot work. Nothing is written, but digests of large weights.

    Args:
        settings: what was asked for.
        tell: called before what takes seconds.
        listener: listens on the port already; None: whether that will be possible is tried out.

    Raises:
        UserError: with what was given, what is allowed and what to do.
    """
    settings.validate()
    folder = models.resolve(settings.model)
    device = _resolve_device(settings.device)
    if settings.kernels in ("cpu", "cuda") and settings.kernels != device:
        raise UserError(
            f"--kernels is {settings.kernels}, but the model runs on device {device}; use --kernels auto"
        )
    dtype = models.resolve_dtype(folder, settings.dtype, device)
    try:
        model = check_model(folder, settings.tp, dtype)
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
    chunk_bytes = model.kv_block_bytes(settings.chunk_size, settings.tp, dtype)
    plan = ClusterPlan(
        settings=settings,
        folder=folder,
        model_name=settings.served_model_name or models.default_name(settings.model),
        dtype=dtype,
        device=device,
        max_context=max_context,
        vocab_size=model.vocab_size,
        fingerprint=fingerprint,
        tier_fingerprint=tier,
        positions_shift=model.positions_shift,
        disk=plan_disk(settings.disk_tier, tier, settings.groups, settings.tp, chunk_bytes)
        if _has_room_on_host(settings, device, chunk_bytes)
        else None,
        port=free_port(settings.host, settings.port) if listener is None else listener.getsockname()[1],
        listen_fd=0 if listener is None else listener.fileno(),
    )
    _check_host_tier(settings, chunk_bytes)
    try:  # with endpoints of a folder that does not exist yet: the rules are about everything else
        for config in _configs(plan, Path("/run"), _expected_folders(plan)).values():
            config.validate()
    except (ConfigError, WorkerError, ValueError) as error:
        raise UserError(str(error)) from error
    return plan


def children(plan: ClusterPlan, folder: Path, disk: DiskFolders | None = None) -> list[ChildSpec]:
    """Write each process's configuration into `folder`; how to start them, workers (slowest) first.

    Args:
        plan: what they agree on.
        folder: of this run.
        disk: where the disk tier is; None: nowhere.
    """
    specs = []
    for member, config in _configs(plan, folder, disk or DiskFolders()).items():
        path = folder / f"{member.name}.json"
        # Nobody else may read it, wherever the folder is: there may be a password in it.
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
    """Run a cluster until it is stopped or fails; the exit code (0, 1).

    Raises:
        UserError: it cannot work; nothing was started.
    """
    console = Console(stderr=True, highlight=False)
    settings.validate()
    # Before anything slow: nobody else can take the port any more.
    with open_listener(settings.host, settings.port) as listener:
        plan = plan_cluster(settings, lambda text: console.print(text, markup=False), listener)
        enter_role("supervisor", log_level=settings.log_level)
        with disk_folders(plan.disk) as disk:
            return _supervise(plan, disk, listener, console)


def _supervise(plan: ClusterPlan, disk: DiskFolders, listener: socket.socket, console: Console) -> int:
    settings = plan.settings
    reporter = TerminalReporter(
        console, title=plan.title, url=plan.url, model_name=plan.model_name, log_level=settings.log_level
    )
    try:
        reporter.say(f"KV tiers below the device: {plan.describe_tiers(disk)}", "info")
        for warning in disk.warnings:
            reporter.say(warning, "warning")
        running = Running(plan.port, plan.url, plan.title, os.getpid())
        with run_folder() as folder, announced(folder, running):
            supervisor = Supervisor(
                children(plan, folder, disk),
                reporter,
                host=settings.connect_host,
                port=plan.port,
                limits=Limits(drain_s=settings.drain_seconds),
                restart=settings.restart,
                surroundings=Surroundings(folder, listener),
            )
            return supervisor.run()
    finally:
        reporter.close()


_Config = RouterConfig | ControllerConfig | WorkerConfig


def _configs(plan: ClusterPlan, folder: Path, disk: DiskFolders) -> dict[Member, _Config]:
    settings = plan.settings
    configs: dict[Member, _Config] = {}
    for group in range(settings.groups):
        configs.update(_group_configs(plan, group, folder, disk))
    router = RouterConfig(
        model_path=str(plan.folder),
        controllers=[_endpoint(folder, group, "router") for group in range(settings.groups)],
        events=[_endpoint(folder, group, "events") for group in range(settings.groups)],
        policy=settings.policy,
        routers=settings.routers,
        tenants=str(Path(settings.tenants).absolute()) if settings.tenants else "",
        tenants_kept=str(folder / "tenants") if settings.tenants else "",
        tenant_limits=settings.tenant_limits,
        tenant_header=settings.tenant_header,
        idempotency_ttl_seconds=settings.idempotency_ttl,
        host=settings.host,
        port=plan.port,
        listen_fd=plan.listen_fd,
        status_path=str(folder / STATUS_SOCKET),
        resume_seconds=settings.resume_seconds,
        served_model_name=plan.model_name,
        max_context=plan.max_context,
        tool_call_parser=settings.tool_call_parser,
        drain_seconds=settings.drain_seconds,
        parent_pid=os.getpid(),
        log_level=settings.log_level,
    )
    for number in range(settings.routers):
        name = f"router-{number}" if settings.routers > 1 else "router"
        configs[Member(name, Role.ROUTER, -1)] = router
    return configs


def _group_configs(
    plan: ClusterPlan, group: int, folder: Path, disk: DiskFolders
) -> Iterator[tuple[Member, _Config]]:
    settings = plan.settings
    kept = disk.groups[group] if disk.groups else None
    remote = settings.remote_tier
    has_tiers = bool(kept or remote)
    suffix = f"-{group}" if settings.groups > 1 else ""
    yield (
        Member(f"controller{suffix}", Role.CONTROLLER, group),
        ControllerConfig(
            group=group,
            tp=settings.tp,
            plan_endpoint=_endpoint(folder, group, "plan"),
            report_endpoint=_endpoint(folder, group, "report"),
            router_endpoint=_endpoint(folder, group, "router"),
            events_endpoint=_endpoint(folder, group, "events"),
            status_path=str(folder / STATUS_SOCKET),
            model_fingerprint=plan.fingerprint,
            dtype=plan.dtype,
            chunk_size=settings.chunk_size,
            max_context=plan.max_context,
            token_budget=settings.token_budget,
            max_rows=settings.max_batch,
            max_waiting=settings.max_waiting,
            prefix_cache=settings.prefix_cache,
            preemption=settings.preemption,
            target_itl_ms=settings.target_itl_ms,
            index_path=str(kept / INDEX_NAME) if kept else "",
            tier_fingerprint=plan.tier_fingerprint if has_tiers else "",
            remote_tier=bool(remote),
            tier_policy=settings.tier_policy,
            session_ttl_s=settings.session_ttl,
            positions_shift=plan.positions_shift,
            vocab_size=plan.vocab_size,
            drain_seconds=settings.drain_seconds,
            parent_pid=os.getpid(),
            log_level=settings.log_level,
        ),
    )
    for rank in range(settings.tp):
        yield (
            Member(f"worker{suffix}{'.' if suffix else '-'}{rank}", Role.WORKER, group),
            WorkerConfig(
                model=str(plan.folder),
                rank=rank,
                tp=settings.tp,
                group=f"group-{group}",
                device=plan.device,
                dtype=plan.dtype,
                kernels=settings.kernels,
                quantisation="int8" if settings.quantization == "int8" else "",
                chunk_size=settings.chunk_size,
                kv_memory_bytes=settings.kv_memory_per_worker(plan.device),
                host_memory_bytes=settings.host_tier_per_worker(plan.device),
                disk_path=str(kept / f"rank-{rank}.slab") if kept else "",
                disk_bytes=disk.rank_bytes if kept else 0,
                remote_url=remote,
                remote_ttl_s=settings.session_ttl,
                tier_fingerprint=plan.tier_fingerprint if has_tiers else "",
                max_context=plan.max_context,
                plan_endpoint=_endpoint(folder, group, "plan"),
                report_endpoint=_endpoint(folder, group, "report"),
                rendezvous=f"file://{folder}/g{group}-rendezvous",
                threads=settings.threads_per_worker(),
                parent_pid=os.getpid(),
                log_level=settings.log_level,
            ),
        )


def _has_room_on_host(settings: ServeSettings, device: str, chunk_bytes: int) -> bool:
    """Whether KV can pass through host memory on its way to and from the tiers below.

    Raises:
        UserError: it cannot, but such a tier was asked for.
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


def _expected_folders(plan: ClusterPlan) -> DiskFolders:
    """As they will be if nobody else uses them, for checks before anything is made."""
    if plan.disk is None:
        return DiskFolders()
    return DiskFolders([plan.disk.group_folder(group) for group in range(plan.settings.groups)], 1)


def _tier_fingerprint(settings: ServeSettings, model: ModelConfig, dtype: str, fingerprint: str) -> str:
    kv_heads = max(1, model.kv_heads // settings.tp)
    shape = KvShape(model.layers, kv_heads, settings.chunk_size, model.head_dim)
    # The records' own text: a field that is added to them changes it, at the price of KV that is computed again.
    positions = repr((model.architecture.positions, model.attention, model.alibi_slopes, model.max_positions))
    return tier_fingerprint(bytes.fromhex(fingerprint), dtype, settings.tp, shape, positions).hex()


def _check_kv_memory(settings: ServeSettings, model: ModelConfig, dtype: str, device: str) -> None:
    """A worker needs room for two chunks at least; anything longer is refused request by request. And what
    was asked for must exist; the default is not checked, for what is not used is never touched."""
    memory = settings.kv_memory_per_worker(device)
    chunk = model.kv_block_bytes(settings.chunk_size, settings.tp, dtype)
    if memory and memory < 2 * chunk:
        raise UserError(
            f"--kv-memory is {format_bytes(memory)}; a chunk of {settings.chunk_size} tokens takes "
            f"{format_bytes(chunk)} per worker and two are the least"
        )
    asked = (settings.kv_memory_bytes or 0) * settings.groups * settings.tp
    if device == "cpu" and asked > (machine := psutil.virtual_memory().total):
        raise UserError(
            f"--kv-memory is {format_bytes(memory)} for each of {settings.groups * settings.tp} workers, "
            f"{format_bytes(asked)} in all; this machine has {format_bytes(machine)} of memory"
        )


def _check_host_tier(settings: ServeSettings, chunk_bytes: int) -> None:
    """What was asked for holds a chunk at least, and this machine has it, with GPUs or without."""
    memory = settings.host_tier_bytes or 0
    if memory and settings.prefix_cache and memory < chunk_bytes:
        raise UserError(
            f"--host-tier is {format_bytes(memory)}; a chunk of {settings.chunk_size} tokens takes "
            f"{format_bytes(chunk_bytes)} per worker; give it room for some, or 0 for none"
        )
    asked = memory * settings.groups * settings.tp
    if asked > (machine := psutil.virtual_memory().total):
        raise UserError(
            f"--host-tier is {format_bytes(memory)} for each of {settings.groups * settings.tp} workers, "
            f"{format_bytes(asked)} in all; this machine has {format_bytes(machine)} of memory"
        )


def _endpoint(folder: Path, group: int, name: str) -> str:
    return f"ipc://{folder}/g{group}-{name}"


def _resolve_device(device: str) -> str:
    """`auto` is CUDA where the driver shows a device. Asking torch would cost seconds, so look for its file."""
    has_cuda = Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists()  # dxg: Windows' Linux subsystem
    if device == "cuda" and not has_cuda:
        raise UserError("--device is cuda, but this machine shows no NVIDIA GPU; use --device cpu")
    return ("cuda" if has_cuda else "cpu") if device == "auto" else device
