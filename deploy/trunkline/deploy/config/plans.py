"""What all processes of a cluster, or of the part of one that runs here, must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trunkline.deploy.config.disk_folders import DiskFolders, DiskPlan
from trunkline.deploy.config.node_addresses import ANY_HOST, Address
from trunkline.deploy.config.placement import Placement
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.config.sizes import format_bytes
from trunkline.deploy.config.tier_options import redacted


@dataclass(frozen=True)
class Meeting:
    """Where a group's processes meet: endpoints of ZeroMQ, and where torch.distributed begins."""

    router: str
    """Bound by the controller, as the next three."""
    events: str
    plan: str
    report: str
    plan_at: str
    """Where its ranks connect."""
    report_at: str
    rendezvous: str


def local_endpoint(folder: Path) -> str:
    """Where the controller of a part of a cluster takes requests of its own host, besides those from elsewhere.

    Args:
        folder: of the run.
    """
    return f"ipc://{folder}/g0-router"


@dataclass(frozen=True)
class NodePlan:
    """A part of a cluster that is spread over hosts."""

    ranks: range = range(0)
    """Of its group, those that run here."""
    listen: Address | None = None
    """Of the group whose controller runs here."""
    leader: Address | None = None
    """Of the group whose controller runs elsewhere."""
    controllers: tuple[Address, ...] = ()
    """Of the groups that a router here serves."""
    wire_keys: str = ""
    """File of the keys of all sockets between hosts."""
    plain_tcp: bool = False
    """They have none."""

    def is_spread(self, tp: int) -> bool:
        """Whether the group has ranks elsewhere, too."""
        return bool(self.ranks) and len(self.ranks) < tp


@dataclass(frozen=True)
class ClusterPlan:
    """Settled once, before anything is started."""

    settings: ServeSettings
    folder: Path
    """The checkpoint."""
    model_name: str
    dtype: str
    placement: Placement
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
    node: NodePlan | None = None
    """None: everything runs on this machine."""

    @property
    def device(self) -> str:
        """Of its workers: "cpu" or "cuda"."""
        return self.placement.device

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
        workers = f"{groups}{settings.ranks} worker{'s' if settings.ranks > 1 else ''}"
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

    def meeting(self, folder: Path, group: int) -> Meeting:
        """Where a group's processes meet.

        Args:
            folder: of this run, for what stays on this machine.
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
