"""Addresses of hosts, as texts. Pure."""

from __future__ import annotations

import ipaddress

from trunkline.deploy.launch.fileformat import Host, Ssh

LOOPBACK = "127.0.0.1"


def joined(address: str, port: int) -> str:
    """`HOST:PORT`, with brackets where they are needed."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only the machine itself can reach it there."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost" or address.endswith(".localhost")


def is_any(address: str) -> bool:
    """Whether it stands for all addresses of a machine."""
    return address in ("0.0.0.0", "::")


def address_of(host: Host) -> str:
    """Where the cluster's other hosts reach it."""
    if host.address or host.ssh is None:
        return host.address or LOOPBACK
    target = host.ssh.host if isinstance(host.ssh, Ssh) else host.ssh
    return target.rpartition("@")[2].strip("[]")
