"""Make the command lines that run the agent on a host: here, behind a command, or over ssh. Pure.

Nothing but a fixed command goes through the shell that `ssh` starts on the other side: what the agent is to do
comes over its standard input.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Final

from trunkline.deploy.launch.fileformat import Host, Ssh

_CONTROL_NAME: Final = "%C"
"""ssh's own digest of user, host and port: 40 characters, as a socket's path must be short."""
_SSH_OPTIONS: Final = (
    "BatchMode=yes",  # a question would wait for ever
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "ForwardAgent=no",
    "ForwardX11=no",
    "LogLevel=ERROR",
)
"""Behind those of the file: ssh takes the first value that it finds."""


def agent_command(host: Host, sockets: Path | None) -> list[str]:
    """Return the command line that runs the agent of a host.

    Args:
        sockets: Folder for connections that commands share; None if they share none.
    """
    here = [sys.executable, "-P", "-m", "trunkline.deploy.launch.agent"]
    there = [host.trunkline or "trunkline", "launch", "agent"]
    if host.command is not None:
        return [*host.command, *(there if host.trunkline else here)]
    if host.ssh is None:
        return [str(Path(there[0]).expanduser()), *there[1:]] if host.trunkline else here
    ssh = Ssh(host=host.ssh) if isinstance(host.ssh, str) else host.ssh
    return [*_ssh(ssh, sockets), _remote(there)]


def describe(host: Host) -> str:
    """Return how a host is reached, in a few words."""
    if host.ssh is not None:
        ssh = Ssh(host=host.ssh) if isinstance(host.ssh, str) else host.ssh
        return f"ssh {f'{ssh.user}@' if ssh.user else ''}{ssh.host}{f' port {ssh.port}' if ssh.port else ''}"
    return shlex.join(host.command) if host.command else "this machine"


def _ssh(ssh: Ssh, sockets: Path | None) -> list[str]:
    words = ["ssh", "-T"]
    for option in (*ssh.options, *_SSH_OPTIONS):
        words += ["-o", option]
    if sockets is not None and ssh.share_seconds:
        words += ["-o", "ControlMaster=auto", "-o", f"ControlPath={_escaped(sockets)}/{_CONTROL_NAME}"]
        words += ["-o", f"ControlPersist={ssh.share_seconds}"]
    if ssh.port is not None:
        words += ["-p", str(ssh.port)]
    if ssh.user:
        words += ["-l", ssh.user]
    if ssh.identity:
        words += ["-i", str(Path(ssh.identity).expanduser()), "-o", "IdentitiesOnly=yes"]
    return [*words, "--", ssh.host]


def _escaped(path: Path) -> str:
    """Return a path for an option of ssh, in which % must be doubled."""
    return str(path).replace("%", "%%")


def _remote(words: list[str]) -> str:
    """Return a command line for the shell on the host, with all words quoted, but for a leading ~/."""
    first = words[0]
    home = "~/" if first.startswith("~/") else ""
    return f"{home}{shlex.quote(first.removeprefix(home) if home else first)} {shlex.join(words[1:])}"
