"""The plan of a cluster, or of the part that runs here: what all its processes must agree on."""

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
    """The endpoints at which a group's processes meet, for ZeroMQ and torch.distributed."""

    router: str
    """Bound by the controller, as the next three."""
    events: str
    plan: str
    report: str
    plan_at: str
    """Where its ranks connect for plans; a report goes to the next one."""
    report_at: str
    rendezvous: str


def local_endpoint(folder: Path) -> str:
    """Return the endpoint at which a controller takes requests of its own host, beside its network port.

    Args:
        folder: The run folder.
    """
    return f"ipc://{folder}/g0-router"


@dataclass(frozen=True)
class NodePlan:
    """What runs on this host of a cluster that is spread over hosts."""

    ranks: range = range(0)
    """Ranks of the group that run here."""
    listen: Address | None = None
    """Address of the group whose controller runs here."""
    leader: Address | None = None
    """Address of the group whose controller runs on another host."""
    controllers: tuple[Address, ...] = ()
    """Addresses of the groups that a router here serves."""
    wire_keys: str = ""
    """File with the keys of sockets between hosts."""
    plain_tcp: bool = False
    """Whether sockets between hosts have no keys."""

    def is_spread(self, tp: int) -> bool:
        """Return whether the group has ranks on other hosts, too."""
        return bool(self.ranks) and len(self.ranks) < tp


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
    """The listening socket that routers inherit; 0: none, the only one binds its own."""
    node: NodePlan | None = None
    """None: everything runs on this machine."""

    @property
    def device(self) -> str:
        """The device of its workers: "cpu" or "cuda"."""
        return self.placement.device

    @property
    def url(self) -> str:
        """Where clients on this machine connect."""
        host = self.settings.connect_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def title(self) -> str:
        """The model, its workers and its KV memory in a few words."""
        settings = self.settings
        groups = f"{settings.groups} groups of " if settings.groups > 1 else ""
        workers = f"{groups}{settings.ranks} worker{'s' if settings.ranks > 1 else ''}"
        memory = settings.kv_memory_per_worker(self.device)
        kv = f" · {format_bytes(memory)} of KV each" if memory else ""
        weights = f" · {settings.quantization} weights" if settings.quantization != "none" else ""
        return f"{self.model_name} · {workers} on {self.device} · {self.dtype}{weights}{kv}"

    def describe_tiers(self, disk: DiskFolders) -> str:
        """Return the tiers below the device in one line."""
        settings, parts = self.settings, []
        if settings.prefix_cache and (memory := settings.host_tier_per_worker(self.device)):
            parts.append(f"host {format_bytes(memory)} each")
        if self.disk is not None and disk.groups:
            parts.append(f"disk {format_bytes(disk.rank_bytes)} each in {self.disk.base}")
        if settings.remote_tier:
            parts.append(f"remote {redacted(settings.remote_tier)}")
        return " · ".join(parts) or "none"

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
