"""Where the ranks of a group on several hosts meet, and through which network they exchange.

They meet at the address of `WorkerConfig.rendezvous`, where rank 0 listens, anew in every epoch. What they write
there has the epoch's number as prefix, so that a process of an earlier epoch never meets ranks of this one. The
collectives' own connections go through the network interface by which this host reaches that address.

None of this is encrypted or authenticated: any host that reaches these ports can harm the group. So only the hosts
of one group may reach the network between them (docs/nodes.md).
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import Final
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import WorkerError

_ANY: Final = "0.0.0.0"
_ELSEWHERE: Final = "192.0.2.1"
"""Address of an imaginary other host, reserved for documentation: the route to it is the route to any other host.
Nothing is sent."""
_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def open_store(config: WorkerConfig, timeout: datetime.timedelta) -> dist.distributed_c10d.Store:
    """Return the store by which the ranks of an epoch exchange addresses. Waits for rank 0.

    Raises:
        WorkerError: Rank 0 does not answer within the timeout, or cannot listen there.
    """
    host, port = _address(config.rendezvous)
    try:
        descriptor = None
        if config.rank == 0:
            # An own socket, because torch's would listen on all addresses of the host.
            descriptor = socket.create_server((host, port)).detach()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1" if host == _ANY else host,
            port,
            is_master=config.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except (OSError, RuntimeError) as error:
        raise WorkerError(
            f"rank {config.rank} cannot meet the others at {config.rendezvous} (the group's port + 4): {error}"
        ) from error
    return dist.PrefixStore(f"epoch-{config.epoch}", store)  # type: ignore[attr-defined]


def choose_interface(config: WorkerConfig) -> None:
    """Let the collectives use the interface that leads to the other hosts, unless the environment names one."""
    host, port = _address(config.rendezvous)
    address = _own_address(_ELSEWHERE if host == _ANY else host, port)
    name = interface_of(address) if address else ""
    if not name and host == _ANY:  # no default route
        name = next((other for other in sorted(psutil.net_if_addrs()) if other != "lo"), "")
    if name:
        for variable in _INTERFACE_VARIABLES:
            os.environ.setdefault(variable, name)


def interface_of(address: str) -> str:
    """Return the name of the interface with this address; "" if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return str(name)
    return ""


def _own_address(host: str, port: int) -> str:
    """Return this host's own address on the route to another host; "" if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.connect((host, port))  # looks up the route, sends nothing
            address, _ = trial.getsockname()
            return str(address)
    except OSError:
        return ""


def _address(rendezvous: str) -> tuple[str, int]:
    parts = urlsplit(rendezvous)
    if not parts.hostname or not parts.port:
        raise WorkerError(f"rendezvous is {rendezvous!r}; ranks of several hosts meet at tcp://HOST:PORT")
    return parts.hostname, parts.port
