"""`trunkline serve`: from settings to a supervised cluster.

Everything that can be known to be impossible is refused here, before a process starts: the folder, the
architecture, the split over ranks, the port. Then each process gets its configuration as a JSON file in
the run folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
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
from trunkline.deploy.lifecycle import Limits, Member, Role
from trunkline.deploy.process import enter_role
from trunkline.deploy.rundir import run_folder
from trunkline.deploy.settings import ServeSettings, free_port
from trunkline.deploy.sizes import format_bytes
from trunkline.deploy.supervisor import ChildSpec, Supervisor
from trunkline.router.config import RouterConfig
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import WorkerError
from trunkline.worker.families import ModelConfig, check_model

_FIRST_EPOCH: Final = 1


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
    port: int

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


def plan_cluster(settings: ServeSettings) -> ClusterPlan:
    """Settle what was left open and refuse what cannot work.

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
    plan = ClusterPlan(
        settings=settings,
        folder=folder,
        model_name=settings.served_model_name or models.default_name(settings.model),
        dtype=dtype,
        device=device,
        max_context=max_context,
        vocab_size=model.vocab_size,
        fingerprint=models.fingerprint(folder),
        port=free_port(settings.host, settings.port),
    )
    try:  # with endpoints of a folder that does not exist yet: the rules are about everything else
        for config in _configs(plan, Path("/run")).values():
            config.validate()
    except (ConfigError, WorkerError, ValueError) as error:
        raise UserError(str(error)) from error
    return plan


def children(plan: ClusterPlan, folder: Path) -> list[ChildSpec]:
    """Write each process's configuration into `folder`; how to start them, workers (slowest) first."""
    specs = []
    for member, config in _configs(plan, folder).items():
        path = folder / f"{member.name}.json"
        path.write_bytes(msgspec.json.encode(config))
        module = f"trunkline.{member.role}"
        # -P: a module in the current directory must not stand in for an installed one.
        argv = (sys.executable, "-P", "-m", module, "--config", str(path))
        specs.append(ChildSpec(member, argv))
    order = [Role.WORKER, Role.CONTROLLER, Role.ROUTER]
    return sorted(specs, key=lambda spec: order.index(spec.member.role))


def serve(settings: ServeSettings) -> int:
    """Run a cluster until it is stopped or fails; the exit code (0, 1).

    Raises:
        UserError: it cannot work; nothing was started.
    """
    plan = plan_cluster(settings)
    enter_role("supervisor", log_level=settings.log_level)
    reporter = TerminalReporter(
        Console(stderr=True, highlight=False),
        title=plan.title,
        url=plan.url,
        model_name=plan.model_name,
        log_level=settings.log_level,
    )
    try:
        with run_folder() as folder:
            supervisor = Supervisor(
                children(plan, folder),
                reporter,
                host=settings.connect_host,
                port=plan.port,
                limits=Limits(drain_s=settings.drain_seconds),
            )
            return supervisor.run()
    finally:
        reporter.close()


_Config = RouterConfig | ControllerConfig | WorkerConfig


def _configs(plan: ClusterPlan, folder: Path) -> dict[Member, _Config]:
    settings = plan.settings
    configs: dict[Member, _Config] = {}
    for group in range(settings.groups):
        configs.update(_group_configs(plan, group, folder))
    router = RouterConfig(
        model_path=str(plan.folder),
        controllers=[_endpoint(folder, group, "router") for group in range(settings.groups)],
        host=settings.host,
        port=plan.port,
        served_model_name=plan.model_name,
        max_context=plan.max_context,
        tool_call_parser=settings.tool_call_parser,
        drain_seconds=settings.drain_seconds,
        parent_pid=os.getpid(),
        log_level=settings.log_level,
    )
    configs[Member("router", Role.ROUTER, -1)] = router
    return configs


def _group_configs(plan: ClusterPlan, group: int, folder: Path) -> Iterator[tuple[Member, _Config]]:
    settings = plan.settings
    suffix = f"-{group}" if settings.groups > 1 else ""
    yield (
        Member(f"controller{suffix}", Role.CONTROLLER, group),
        ControllerConfig(
            group=group,
            tp=settings.tp,
            plan_endpoint=_endpoint(folder, group, "plan"),
            report_endpoint=_endpoint(folder, group, "report"),
            router_endpoint=_endpoint(folder, group, "router"),
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
            vocab_size=plan.vocab_size,
            epoch=_FIRST_EPOCH,
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
                max_context=plan.max_context,
                plan_endpoint=_endpoint(folder, group, "plan"),
                report_endpoint=_endpoint(folder, group, "report"),
                rendezvous=f"file://{folder}/g{group}-rendezvous",
                threads=settings.threads_per_worker(),
                epoch=_FIRST_EPOCH,
                parent_pid=os.getpid(),
                log_level=settings.log_level,
            ),
        )


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


def _endpoint(folder: Path, group: int, name: str) -> str:
    return f"ipc://{folder}/g{group}-{name}"


def _resolve_device(device: str) -> str:
    """`auto` is CUDA where the driver shows a device. Asking torch would cost seconds, so look for its file."""
    has_cuda = Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists()  # dxg: Windows' Linux subsystem
    if device == "cuda" and not has_cuda:
        raise UserError("--device is cuda, but this machine shows no NVIDIA GPU; use --device cpu")
    return ("cuda" if has_cuda else "cpu") if device == "auto" else device
