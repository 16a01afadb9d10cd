"""The plan of a cluster, or of the part that runs here: what all its processes must agree on.

A part of it is the placement: workers compute on CPUs, or each on a GPU of its own. Each group has GPUs of its
own, and each rank of a group one of them:

    --groups 2 --tp 2     GPU    0          1          2          3
                                 group 0    group 0    group 1    group 1
                                 rank 0     rank 1     rank 0     rank 1

Groups share GPUs only when asked for by `--gpu-memory-fraction`: then group g has the same GPUs as group g - s,
where s is the number of groups that fit side by side. Ranks of one group never share a GPU: NCCL refuses that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Final

from trunkline.deploy.config import machine
from trunkline.deploy.config.disk_folders import DiskFolders, DiskPlan
from trunkline.deploy.config.node_settings import ANY_HOST, Address, NodePlan
from trunkline.deploy.config.option_values import format_bytes, redacted
from trunkline.deploy.config.record_files import RecordsPlan
from trunkline.deploy.config.settings import GPU_MEMORY_FRACTION, ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.kvstore.chunk_format import type_name
from trunkline.router.tenancy.auth import is_loopback
from trunkline.worker.errors import ParallelismError, WorkerError
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.parallelism import check_parallelism

TP_ON_CPUS: Final = 2
"""The default number of workers of a group on CPUs. With matrix registers it is 1: products take so little time
there that what every worker does for itself counts (docs/measurements/servers.md)."""


@dataclass(frozen=True)
class Placement:
    """The GPUs of this machine, and which worker has which. Without any, workers compute on CPUs."""

    visible: tuple[machine.Gpu, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    """Indices of GPUs, by group and by rank on this machine; empty: workers compute on CPUs."""
    fraction: float = GPU_MEMORY_FRACTION
    """Part of a GPU's memory that one worker may use."""
    warning: str = ""
    """Why CPUs compute although there is a driver for GPUs; "": there is nothing to warn of."""

    @property
    def device(self) -> str:
        """The device's name in torch."""
        return "cuda" if self.groups else "cpu"

    def gpu(self, group: int, here: int) -> int | None:
        """Return the GPU of a worker, None on CPUs.

        Args:
            here: The worker's number among those of its group on this machine.
        """
        return self.groups[group][here] if self.groups else None

    def describe(self, first_group: int = 0) -> str:
        """Say in one line which group has which GPUs; "" on CPUs."""
        if not self.groups:
            return ""
        names = sorted({f"{gpu.name}, {format_bytes(gpu.memory_bytes)}" for gpu in self.visible})
        if len(self.groups) == 1:
            places = _listed(self.groups[0])
        else:
            places = " · ".join(
                f"group {number}: {_listed(own)}" for number, own in enumerate(self.groups, first_group)
            )
        return (
            f"{places} of {len(self.visible)} visible ({'; '.join(names)}) · "
            f"each worker may use {self.fraction * 100:g} % of its GPU's memory"
        )


@dataclass(frozen=True)
class Beside:
    """What other models of the same cluster have of this machine."""

    groups: int = 0
    """The number of groups of all other models together."""
    taken: Mapping[int, float] = field(default_factory=dict)
    """Parts of GPUs that are given to other models already, by index; 1: the whole GPU."""

    def with_gpus(self, placement: Placement, *, is_shared: bool) -> Beside:
        """Return this with the GPUs of one more model, which other models may share with it or not."""
        taken = dict(self.taken)
        for gpu in {gpu for own in placement.groups for gpu in own}:
            workers = sum(own.count(gpu) for own in placement.groups)
            taken[gpu] = taken.get(gpu, 0.0) + (workers * placement.fraction if is_shared else 1.0)
        return replace(self, taken=taken)


_ALONE: Final = Beside()


def settle(settings: ServeSettings, folder: Path, beside: Beside = _ALONE) -> tuple[ServeSettings, Placement]:
    """Decide where workers compute, and how many a group has if that is left open.

    Args:
        folder: The checkpoint.
        beside: What other models have. The default of `tp` leaves each group of theirs as many GPUs.

    Returns:
        The settings with a number for `tp`, and the placement.

    Raises:
        UserError: GPUs were asked for, and there are none or too few.
    """
    found = machine.Gpus() if settings.device == "cpu" else machine.find_gpus()
    if settings.device == "cuda" and not found.devices:
        why = found.problem or "this machine shows no NVIDIA GPU"
        raise UserError(f"--device is cuda, but {why}; use --device cpu, or look at nvidia-smi")
    if not found.devices:
        if settings.gpu_memory_fraction is not None:
            why = found.problem or "this machine shows no NVIDIA GPU"
            given = f"{settings.gpu_memory_fraction:g}"
            why = "" if settings.device == "cpu" else f" ({why})"
            raise UserError(f"--gpu-memory-fraction is {given}, but workers compute on CPUs{why}; leave it out")
        warning = found.problem and f"No GPU is used: {found.problem}."
        tp = 1 if machine.has_matrix_registers() else TP_ON_CPUS
        return _with_tp(settings, lambda: tp), Placement(warning=warning)
    fair = found.count * settings.groups // (settings.groups + beside.groups)
    settings = _with_tp(settings, lambda: default_tp(settings.groups, fair, _splits(folder)))
    return settings, place(settings, found.devices, beside.taken)


def default_tp(groups: int, visible: int, splits: Callable[[int], bool]) -> int:
    """Return the largest number of ranks that each group can have GPUs for and the model can be split over.

    Args:
        visible: The number of GPUs that this machine shows.
        splits: Says whether the model can be split over a number of ranks.
    """
    return next((tp for tp in range(visible // groups, 1, -1) if splits(tp)), 1)


def place(
    settings: ServeSettings, visible: tuple[machine.Gpu, ...], taken: Mapping[int, float] | None = None
) -> Placement:
    """Give each worker of this machine its GPU.

    Args:
        taken: Parts of GPUs that other models have. GPUs without any go first.

    Raises:
        UserError: There are fewer GPUs than the workers need.
    """
    if not taken:
        return _place(settings, visible)
    fraction = settings.gpu_memory_fraction
    free = [gpu for gpu in range(len(visible)) if gpu not in taken]
    room = [gpu for gpu in range(len(visible)) if taken.get(gpu, 0.0) + (fraction or 1.0) <= 1.0 + 1e-9]
    if (settings.ranks_here or settings.ranks) > len(room):
        raise UserError(
            f"model {settings.served_model_name!r} needs {_many(settings.groups * settings.ranks, 'GPU')}, and of "
            f"{len(visible)} other models leave {len(room)}; give models fewer groups or a smaller tp, or let "
            "them share GPUs by --gpu-memory-fraction"
        )
    tries = [own for own in (free, room) if len(own) >= (settings.ranks_here or settings.ranks)]
    for last, own in zip([*[False] * (len(tries) - 1), True], tries, strict=True):
        share = max(taken.get(gpu, 0.0) for gpu in own)
        try:
            found = _place(settings, tuple(visible[gpu] for gpu in own), 1.0 - share)
        except UserError:
            if last:
                raise
            continue
        groups = tuple(tuple(own[gpu] for gpu in each) for each in found.groups)
        return replace(found, visible=visible, groups=groups)
    raise AssertionError("the last try has returned or raised")


def _place(settings: ServeSettings, visible: tuple[machine.Gpu, ...], room: float = 1.0) -> Placement:
    """Give each worker a GPU of these, of each of which a part is free."""
    groups, ranks, fraction = settings.groups, settings.ranks_here or settings.ranks, settings.gpu_memory_fraction
    count = len(visible)
    shown = f"this machine shows {count} ({_kinds(visible)})"
    if ranks > count:
        option = "--ranks" if ranks < settings.ranks else "--tp"
        raise UserError(
            f"{option} asks for {ranks} workers of a group on this machine, and each needs a GPU of its own; "
            f"{shown}. Ask for {count} at most, show more by CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    side_by_side = count // ranks
    together = -(-groups // side_by_side)
    if together > 1 and fraction is None:
        raise UserError(
            f"--groups {groups} with {_many(ranks, 'worker')} each needs {groups * ranks} GPUs; {shown}. Use "
            f"--groups {side_by_side}, let groups share GPUs by --gpu-memory-fraction {_share(together):g}, "
            "or use --device cpu"
        )
    if fraction is not None and together * fraction > room and not isclose(together * fraction, room):
        raise UserError(
            f"--gpu-memory-fraction is {fraction:g}, but --groups {groups} with {_many(ranks, 'worker')} each "
            f"puts {together} workers on a GPU ({shown}); allowed are up to {_share(together, room):g}"
        )
    own = tuple(tuple(group % side_by_side * ranks + rank for rank in range(ranks)) for group in range(groups))
    return Placement(visible, own, GPU_MEMORY_FRACTION if fraction is None else fraction)


def _with_tp(settings: ServeSettings, choose: Callable[[], int]) -> ServeSettings:
    return settings if settings.tp is not None else replace(settings, tp=choose())


def _splits(folder: Path) -> Callable[[int], bool]:
    """Return a function that says whether the model can be split over a number of ranks.

    Raises:
        UserError: The model's configuration cannot be used.
    """
    try:
        model = read_model_config(folder)
    except WorkerError as error:
        raise UserError(str(error)) from error

    def splits(tp: int) -> bool:
        try:
            check_parallelism(model, tp)
        except ParallelismError:
            return False
        return True

    return splits


def _share(together: int, room: float = 1.0) -> float:
    """Return the largest fraction of a GPU's memory, with two decimals, that each of `together` workers on it can
    have, of a part that is free."""
    return int(100 * room / together) / 100


def _kinds(visible: tuple[machine.Gpu, ...]) -> str:
    return ", ".join(sorted({gpu.name for gpu in visible}))


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _listed(own: tuple[int, ...]) -> str:
    return f"GPU{'' if len(own) == 1 else 's'} {', '.join(map(str, own))}"


@dataclass(frozen=True)
class Meeting:
    """The endpoints at which a group's processes meet, for ZeroMQ and torch.distributed."""

    router: str
    """The endpoint for requests, which the controller binds together with the next three."""
    events: str
    plan: str
    report: str
    plan_at: str
    """The endpoint to which the ranks connect for step plans."""
    report_at: str
    """The endpoint to which the ranks send reports."""
    rendezvous: str


def local_endpoint(folder: Path) -> str:
    """Return the endpoint at which a controller takes requests of its own host, beside its network port.

    Args:
        folder: The run folder.
    """
    return f"ipc://{folder}/g0-router"


@dataclass(frozen=True)
class ClusterPlan:
    """The plan of a cluster, made once before anything is started."""

    settings: ServeSettings
    folder: Path
    """The checkpoint."""
    model_name: str
    dtype: str
    placement: Placement
    max_context: int
    vocab_size: int
    fingerprint: str
    """Digest of the model's configuration and weights, as they are computed with."""
    tier_fingerprint: str
    positions_shift: bool
    disk: DiskPlan | None
    port: int
    listen_fd: int = 0
    """File descriptor of the listening socket that routers inherit; 0: there is no such socket, and the only
    router binds its own."""
    records: RecordsPlan | None = None
    """The place of sessions, schemas and kept answers; None: no routers run on this host."""
    node: NodePlan | None = None
    """The part of the cluster that runs on this host; None: the whole cluster runs on this machine."""
    first_group: int = 0
    """The number of its first group: more than 0 for a further model, whose plan has groups only."""
    weights: str = ""
    """Digest of the model's configuration and weights, as they are stored; "": this part has no workers."""
    exchange_fingerprint: str = ""
    """Digest of all that must agree for groups to use each other's KV; "": this part has no workers."""
    others: tuple[ClusterPlan, ...] = ()
    """The plans of further models."""

    @property
    def models(self) -> tuple[ClusterPlan, ...]:
        """The plans of all models, this one first."""
        return (self, *self.others)

    @property
    def groups(self) -> range:
        """The numbers of all groups, of every model."""
        return range(self.first_group, self.first_group + sum(plan.settings.groups for plan in self.models))

    @property
    def device(self) -> str:
        """The device of its workers: "cpu" or "cuda"."""
        return self.placement.device

    @property
    def url(self) -> str:
        """The address at which clients on this machine connect."""
        host = self.settings.connect_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def title(self) -> str:
        """The models, their workers and their KV memory in a few words."""
        return " + ".join(plan._own_title for plan in self.models)

    @property
    def _own_title(self) -> str:
        settings = self.settings
        groups = f"{settings.groups} groups of " if settings.groups > 1 else ""
        workers = f"{groups}{settings.ranks} worker{'s' if settings.ranks > 1 else ''}"
        memory = settings.kv_memory_per_worker(self.device)
        kv = f" · {format_bytes(memory)} of KV each" if memory else ""
        weights = f" · {settings.quantization} weights" if settings.quantization != "none" else ""
        computed = type_name(self.dtype, settings.kv_dtype)
        scaled = settings.rope_scaling != "none"
        context = f" · context stretched to {self.max_context} ({settings.rope_scaling})" if scaled else ""
        return f"{self.model_name} · {workers} on {self.device} · {computed}{weights}{kv}{context}"

    @property
    def names(self) -> list[str]:
        """All names of the model in the API, the main one first."""
        return [self.model_name, *self.settings.served_names[1:]]

    def describe_tiers(self, disk: DiskFolders) -> str:
        """Return the tiers below the device in one line."""
        settings, parts = self.settings, []
        if settings.prefix_cache and (memory := settings.host_tier_per_worker(self.device)):
            parts.append(f"host {format_bytes(memory)} each")
        if self.disk is not None and disk.groups:
            parts.append(f"disk {format_bytes(disk.rank_bytes)} each in {self.disk.base}")
        elif parts and settings.disk_tier is None and machine.cache_folder() is None:
            parts.append("no disk, as there is no home folder (--disk-tier PATH:SIZE)")
        if settings.remote_tier:
            parts.append(f"remote {redacted(settings.remote_tier)}")
        return " · ".join(parts) or "none"

    def export_of(self, folder: Path, group: int, rank: int, here: int) -> tuple[str, str]:
        """Return where a rank exports KV to peers, and the host under which those reach it, if it differs; "" and
        "": it exports none.

        Args:
            folder: The run folder.
            here: The rank's number among those of this host.
        """
        node = self.node
        if not self.has_peers:
            return "", ""
        outside = node.listen or node.leader if node is not None else None
        if node is None or outside is None or is_loopback(outside.host):
            return f"ipc://{folder}/g{group}-kv{rank}", ""
        ports = outside.export_ports(here)
        if node.listen is not None:
            return f"tcp://{node.listen.host}:{ports}", node.reached.host
        return f"tcp://{ANY_HOST}:{ports}", ""

    @property
    def has_peers(self) -> bool:
        """Whether its groups give KV to peers and take it from them."""
        settings = self.settings
        host_memory = settings.host_tier_per_worker(self.device)
        return settings.peers == "on" and settings.prefix_cache and host_memory > 0

    def meeting(self, folder: Path, group: int) -> Meeting:
        """Return the endpoints of a group.

        Args:
            folder: The run folder, for sockets that stay on this machine.
        """
        inside = {name: f"ipc://{folder}/g{group}-{name}" for name in ("router", "events", "plan", "report")}
        here = Meeting(
            **inside,
            plan_at=inside["plan"],
            report_at=inside["report"],
            rendezvous=f"file://{folder}/g{group}-rendezvous",
        )
        if self.node is None or (self.node.listen is None and self.node.leader is None):
            return here
        outside = self.node.listen or self.node.leader
        assert outside is not None
        router, events, plan, report = (outside.endpoint(offset) for offset in range(4))
        if self.node.listen is not None and not self.node.is_spread(self.settings.ranks):
            return Meeting(router, events, here.plan, here.report, here.plan, here.report, here.rendezvous)
        near = Address("127.0.0.1" if outside.host == ANY_HOST else outside.host, outside.port)
        return Meeting(router, events, plan, report, near.endpoint(2), near.endpoint(3), outside.endpoint(4))
