"""`trunkline serve`: from settings to a supervised cluster.

A cluster that cannot work is refused here, before a process starts: because of the model's folder or architecture,
the number of ranks, the memory or the port. Then each process gets its configuration as a JSON file in the run
folder.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import psutil
from rich.console import Console

from trunkline.controller.engine_config import ConfigError
from trunkline.deploy.config import models
from trunkline.deploy.config.disk_folders import DiskFolders, disk_folders, plan_disk
from trunkline.deploy.config.listening import free_port, open_listener
from trunkline.deploy.config.placement import settle
from trunkline.deploy.config.plans import ClusterPlan, NodePlan
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.config.sizes import format_bytes
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.client_keys import make_admin_key
from trunkline.deploy.supervisor.display import TerminalReporter
from trunkline.deploy.supervisor.json_reporter import JsonReporter
from trunkline.deploy.supervisor.member_configs import configs_of, expected_folders
from trunkline.deploy.supervisor.members import Limits, Role
from trunkline.deploy.supervisor.registry import Running, announced
from trunkline.deploy.supervisor.rundir import run_folder
from trunkline.deploy.supervisor.supervisor import ChildSpec, Supervisor, Surroundings
from trunkline.kvstore.fingerprint import KvShape, tier_fingerprint
from trunkline.runtime.process import enter_role
from trunkline.worker.errors import WorkerError
from trunkline.worker.model.families import ModelConfig, check_model

__all__ = ["ClusterPlan", "children", "plan_cluster", "serve"]

_TELL_BYTES: Final = 2 << 30
"""Reading so many bytes takes seconds, so it is announced."""


def _quietly(text: str) -> None:
    """Do not show the text."""


def plan_cluster(
    settings: ServeSettings,
    tell: Callable[[str], None] = _quietly,
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


def _has_room_on_host(settings: ServeSettings, device: str, chunk_bytes: int) -> bool:
    """Return whether KV can pass through host memory on its way to and from the tiers below it.

    Raises:
        UserError: It cannot, but such a tier was asked for.
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
    """What was asked for holds a chunk at least, and this machine has it, with GPUs or without."""
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
