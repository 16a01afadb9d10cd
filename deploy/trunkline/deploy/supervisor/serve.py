"""`trunkline serve`: from settings to a supervised cluster.

A cluster that cannot work is refused here, before a process starts: because of the model's folder or architecture,
the number of ranks, the memory or the port. Then each process gets its configuration as a JSON file in the run
folder.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import psutil
from rich.console import Console
from structlog import get_logger

from trunkline.controller.engine_config import ConfigError
from trunkline.deploy.config import models, stretched
from trunkline.deploy.config.disk_folders import DiskFolders, add_groups, disk_folders, plan_disk
from trunkline.deploy.config.further_models import settings_of_models
from trunkline.deploy.config.machine import available_cores, free_port, open_listener
from trunkline.deploy.config.node_settings import NodePlan
from trunkline.deploy.config.option_values import format_bytes
from trunkline.deploy.config.plans import Beside, ClusterPlan, place, settle
from trunkline.deploy.config.record_files import plan_records, prepare_records
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.config.window_share import check_windows
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.configs import Config, configs_of, expected_folders
from trunkline.deploy.supervisor.forks import command_line
from trunkline.deploy.supervisor.members import CommandError, Limits, Member, Role
from trunkline.deploy.supervisor.membership import ChildSpec, Membership
from trunkline.deploy.supervisor.reporters import JsonReporter, TerminalReporter
from trunkline.deploy.supervisor.run_folder import (
    MEMBERS_FILE,
    Running,
    announced,
    describe,
    make_admin_key,
    run_folder,
)
from trunkline.deploy.supervisor.supervisor import Supervisor
from trunkline.kvstore.chunk_format import ChunkFormat
from trunkline.kvstore.fingerprint import exchange_fingerprint, tier_fingerprint
from trunkline.router.membership.member import Member as GroupMember
from trunkline.router.membership.static_source import write_members
from trunkline.runtime.process import enter_role
from trunkline.worker.errors import WorkerError
from trunkline.worker.model.adapters import read_adapter
from trunkline.worker.model.families import check_model
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.tensor_index import has_blocks

__all__ = ["ClusterPlan", "children", "plan_cluster", "plan_models", "serve"]

_ALONE: Final = Beside()
_TELL_BYTES: Final = 2 << 30
"""Number of bytes of weights above which reading them is announced, because it takes seconds."""


def plan_cluster(
    settings: ServeSettings,
    tell: Callable[[str], None] = lambda text: None,
    listener: socket.socket | None = None,
    node: NodePlan | None = None,
    beside: Beside = _ALONE,
) -> ClusterPlan:
    """Choose what the settings leave open, and refuse what cannot work. Only digests of weights are written.

    Args:
        settings: The settings as they were given.
        tell: Called with a sentence before a step that takes seconds.
        listener: A socket that listens on the port already; None to only try whether that is possible.
        node: The part of a cluster that is to run here, if it is not all of one.
        beside: What other models of the cluster have of this machine.

    Raises:
        UserError: The cluster cannot work. The text says what was given, what is allowed and what to do.
    """
    settings.validate()
    folder = stretched.folder_of(settings)
    settings, placement = settle(settings, folder, beside)
    device = placement.device
    _check_device(settings, device)
    dtype = models.resolve_dtype(folder, settings.dtype, device)
    try:
        if settings.quantization != "none" and has_blocks(folder):
            raise UserError(
                f"--quantization is {settings.quantization}, but {settings.model} has quantised weights; leave "
                "the option out"
            )
        model = _checked_model(settings, folder, dtype, device)
        chunk = model.chunk_format(settings.chunk_size, dtype, settings.kv_dtype)
        for name, path in settings.adapters:
            read_adapter(name, Path(path), model, settings.max_lora_rank)
    except WorkerError as error:
        raise UserError(str(error)) from error
    max_context = _context(settings, model)
    chunk_bytes = chunk.of_rank(settings.ranks).chunk_bytes
    _check_kv_memory(settings, chunk_bytes, device)
    check_windows(settings, model, chunk.of_rank(settings.ranks), device)
    weights = models.weights_digest(folder, _reading(tell))
    fingerprint = models.fingerprint(weights, settings.quantization, settings.ep)
    tier, exchange = _tier_fingerprints(settings, chunk, fingerprint)
    plan = ClusterPlan(
        settings=settings,
        folder=folder,
        model_name=models.main_name(settings),
        dtype=dtype,
        placement=placement,
        max_context=max_context,
        vocab_size=model.vocab_size,
        fingerprint=fingerprint,
        weights=weights.hex(),
        tier_fingerprint=tier,
        exchange_fingerprint=exchange,
        positions_shift=chunk.shifts,
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


def _context(settings: ServeSettings, model: ModelConfig) -> int:
    """Return the longest sequence in tokens, checked."""
    max_context = settings.max_context or model.max_positions
    if max_context > model.max_positions:
        raise UserError(
            f"--max-context is {max_context}; {settings.model} allows at most {model.max_positions} tokens, or "
            "more with --rope-scaling yarn"
        )
    return max_context


def _check_device(settings: ServeSettings, device: str) -> None:
    """Check that there are kernels for what was asked for."""
    if settings.kernels in ("cpu", "cuda") and settings.kernels != device:
        raise UserError(
            f"--kernels is {settings.kernels}, but the model runs on device {device}; use --kernels auto"
        )


def _checked_model(settings: ServeSettings, folder: Path, dtype: str, device: str) -> ModelConfig:
    """Return the model if its ranks can share it and there are kernels for all that it computes."""
    model = check_model(
        folder, settings.ranks, dtype, settings.max_context or 0, expert_parallel=settings.ep == "on"
    )
    if device != "cpu" and settings.kernels != "reference" and model.only_on_cpus:
        raise UserError(
            f"{settings.model} has {model.only_on_cpus}, for which there are kernels on CPUs only, but the model "
            f"runs on device {device}; use --device cpu, or, for tests, --kernels reference"
        )
    return model


def _reading(tell: Callable[[str], None]) -> Callable[[int], None]:
    """Return what says that so many bytes of weights are read, if they are many."""

    def tell_reading(count: int) -> None:
        if count >= _TELL_BYTES:
            tell(
                f"Reading {format_bytes(count)} of weights: what is computed with them is kept under their digest."
            )

    return tell_reading


def plan_models(
    settings: ServeSettings, tell: Callable[[str], None] = lambda text: None, listener: socket.socket | None = None
) -> ClusterPlan:
    """Plan a cluster of one model or several (see `plan_cluster`): the first's plan has those of the others."""
    if not settings.models:
        return plan_cluster(settings, tell, listener)
    each_settings = settings_of_models(settings)
    groups = sum(each.groups for each in each_settings)
    beside, plans = Beside(), list[ClusterPlan]()
    for each in each_settings:
        plan = plan_cluster(each, tell, listener, beside=replace(beside, groups=groups - each.groups))
        beside = beside.with_gpus(plan.placement, is_shared=each.gpu_memory_fraction is not None)
        first_group = sum(other.settings.groups for other in plans)
        records = None if plans else plan.records
        plans.append(replace(plan, first_group=first_group, records=records))
    for index, plan in enumerate(plans):
        for other in plans[:index]:
            if same := set(plan.names).intersection(other.names):
                raise UserError(f"two models are named {min(same)!r}; give each a name of its own")
            if plan.tier_fingerprint == other.tier_fingerprint:
                raise UserError(
                    f"{other.model_name!r} and {plan.model_name!r} are the same model in the same form; give one "
                    "of them more groups instead"
                )
    _check_memory([(plan.settings, plan.device) for plan in plans])
    workers = sum(plan.settings.workers_here for plan in plans)
    threads = max(1, available_cores() // workers)
    first, *others = (
        replace(plan, settings=replace(plan.settings, threads=plan.settings.threads or threads)) for plan in plans
    )
    found = replace(first, others=tuple(others))
    check_configs(found)
    return found


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
    except OSError as error:  # a file of the model
        raise UserError(f"{error.filename or plan.folder} cannot be read: {error.strerror or error}") from error


def children(plan: ClusterPlan, folder: Path, disk: DiskFolders | None = None) -> list[ChildSpec]:
    """Write the configuration of each process, and return how to start them: workers first, as they take longest.

    Args:
        plan: What the processes agree on.
        folder: The run folder, into which the configurations are written.
        disk: Where the disk tier is; None if there is none.
    """
    make_admin_key(folder)
    return specs_of(plan, folder, configs_of(plan, folder, disk or DiskFolders()))


def specs_of(plan: ClusterPlan, folder: Path, configs: Mapping[Member, Config]) -> list[ChildSpec]:
    """Write configurations into the run folder, and return how to start their processes, workers first.

    Raises:
        OSError: One of them cannot be written.
    """
    specs = []
    for member, config in configs.items():
        path = folder / f"{member.name}.json"
        path.unlink(missing_ok=True)  # of the same group when it was here before
        # Only this user may read it, wherever the folder is: there may be a password in it.
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(config))
        argv = command_line(f"trunkline.{member.role}", "--config", str(path))
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
        plan = plan_models(settings, lambda text: console.print(text, markup=False), listener)
        enter_role("supervisor", log_level=settings.log_level, log_format=settings.log_format)
        with disk_folders(plan.disk, [other.disk for other in plan.others]) as disk:
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
            supervisor.membership = Growing(plan, folder, disk, running)
            supervisor.membership.publish(plan.groups)
            return supervisor.run()
    finally:
        reporter.close()


class Growing(Membership):
    """The groups of a cluster on one machine, whose number may change while it serves."""

    def __init__(self, plan: ClusterPlan, folder: Path, disk: DiskFolders, running: Running) -> None:
        """`running`: the description of the cluster for commands."""
        self._plan = plan
        self._folder = folder
        self._disk = disk
        self._running = running

    def grow(self, count: int, missing: Sequence[int]) -> list[ChildSpec]:
        """See `Membership.grow`."""
        if self._plan.others:
            raise CommandError(
                "several models are served here, and it is not clear whose groups these would be; change `groups` "
                "of the model in --config and start again"
            )
        try:
            plan = grown(self._plan, count)
        except UserError as error:
            raise CommandError(f"there is no room for {count} groups: {error}") from error
        if plan.disk is not None and (problem := add_groups(plan.disk, self._disk, count)):
            get_logger("trunkline.deploy").warning("group_without_disk_tier", problem=problem)
        configs = configs_of(plan, self._folder, self._disk)
        try:
            own = {member: config for member, config in configs.items() if member.group in missing}
            return specs_of(plan, self._folder, own)
        except OSError as error:
            raise CommandError(f"nothing can be written into {self._folder}: {error.strerror or error}") from error

    def publish(self, groups: Sequence[int]) -> None:
        """See `Membership.publish`."""
        meetings = {number: self._plan.meeting(self._folder, number) for number in groups}
        members = (GroupMember(str(number), at.router, at.events) for number, at in meetings.items())
        write_members(self._folder / MEMBERS_FILE, members)
        if not self._plan.others:
            title = replace(self._plan, settings=replace(self._plan.settings, groups=len(groups))).title
            describe(self._folder, msgspec.structs.replace(self._running, title=title))


def grown(plan: ClusterPlan, groups: int) -> ClusterPlan:
    """Return the plan for another number of groups. Each group that both plans have is the same in both.

    Raises:
        UserError: The machine has no room for so many.
    """
    settings = replace(plan.settings, groups=groups)
    settings.validate()
    _check_machine(settings, plan.device)
    placement = place(settings, plan.placement.visible) if plan.placement.groups else plan.placement
    return replace(plan, settings=settings, placement=placement)


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
    for each, its_disk in zip(plan.models, (disk, *disk.others), strict=True):
        name = f"Model {each.model_name}, {_numbers(each)}: " if plan.others else ""
        if gpus := each.placement.describe(each.first_group):
            reporter.say(name + gpus, "info")
        reporter.say(f"{name}KV tiers below the device: {each.describe_tiers(its_disk)}", "info")
        for warning in (each.placement.warning if each is plan else "", *its_disk.warnings):
            if warning:
                reporter.say(warning, "warning")


def _numbers(plan: ClusterPlan) -> str:
    """Return the numbers of a model's groups in words."""
    first, last = plan.first_group, plan.first_group + plan.settings.groups - 1
    return f"group {first}" if first == last else f"groups {first} to {last}"


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


def _tier_fingerprints(settings: ServeSettings, chunk: ChunkFormat, fingerprint: str) -> tuple[str, str]:
    """Return the fingerprints of the tiers' bytes: of each rank's, and of those that groups exchange."""
    digest = bytes.fromhex(fingerprint)
    return tier_fingerprint(digest, chunk, settings.ranks).hex(), exchange_fingerprint(digest, chunk).hex()


def _check_kv_memory(settings: ServeSettings, chunk: int, device: str) -> None:
    """Check that each worker has room for two chunks, and that the machine has the memory that was asked for.

    Longer requests are refused one by one. The default is not checked: memory that is not used is never touched.

    Args:
        chunk: Bytes of a chunk on one rank.
    """
    memory = settings.kv_memory_per_worker(device)
    if memory and memory < 2 * chunk:
        raise UserError(
            f"--kv-memory is {format_bytes(memory)}; a chunk of {settings.chunk_size} tokens takes "
            f"{format_bytes(chunk)} per worker and two are the least"
        )
    _check_machine(settings, device)


def _check_machine(settings: ServeSettings, device: str) -> None:
    """Check that the machine has the memory that was asked for."""
    machine = psutil.virtual_memory().total
    for option, memory in _memory_asked(settings, device).items():
        if memory * settings.workers_here > machine:
            raise UserError(
                f"{option} is {format_bytes(memory)} for each of {settings.workers_here} workers, "
                f"{format_bytes(memory * settings.workers_here)} in all; this machine has {format_bytes(machine)} "
                "of memory"
            )


def _memory_asked(settings: ServeSettings, device: str) -> dict[str, int]:
    """Return the bytes of this machine's memory that were asked for each worker, by option."""
    asked = {"--host-tier": settings.host_tier_bytes or 0}
    if device == "cpu":
        asked["--kv-memory"] = settings.kv_memory_bytes or 0
    return asked


def _check_memory(models: Sequence[tuple[ServeSettings, str]]) -> None:
    """Check that the machine has the memory that was asked for all models together."""
    machine, total = psutil.virtual_memory().total, Counter[str]()
    for settings, device in models:
        for option, memory in _memory_asked(settings, device).items():
            total[option] += memory * settings.workers_here
    for option, memory in total.items():
        if memory > machine:
            raise UserError(
                f"{option} is {format_bytes(memory)} for the workers of all models; this machine has "
                f"{format_bytes(machine)} of memory"
            )


def _check_host_tier(settings: ServeSettings, chunk_bytes: int) -> None:
    """Check that the host tier that was asked for holds a chunk at least."""
    memory = settings.host_tier_bytes or 0
    if memory and settings.prefix_cache and memory < chunk_bytes:
        raise UserError(
            f"--host-tier is {format_bytes(memory)}; a chunk of {settings.chunk_size} tokens takes "
            f"{format_bytes(chunk_bytes)} per worker; give it room for some, or 0 for none"
        )
