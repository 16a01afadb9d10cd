"""Find what this machine has: GPUs, cores, the user's cache folder, and a port to listen on.

GPUs are found without torch: the driver's library answers through ctypes, in milliseconds; to import torch would
take seconds. Like every CUDA program it respects `CUDA_VISIBLE_DEVICES`, so index i here is `cuda:i` of a worker
with the same environment.

Cores are those of this process: its affinity, or less if a control group's quota is smaller. A container limited
to two CPUs of a large machine sees all of them; threads beyond the quota only use it up sooner and then all wait
for the next period.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from trunkline.deploy.errors import UserError

CUDA_LIBRARY: Final = "libcuda.so.1"
"""Name of the driver's library. It is not part of the CUDA toolkit: where it is missing, no CUDA program runs."""
_NO_DEVICE: Final = 100
"""The driver's error `CUDA_ERROR_NO_DEVICE`: there is no GPU, or `CUDA_VISIBLE_DEVICES` hides all GPUs."""
_NAME_BYTES: Final = 256
_TORCH_CUDA: Final = re.compile(r"^cuda\b[^=]*=\s*(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Gpu:
    """A GPU, as the driver describes it."""

    name: str
    memory_bytes: int
    """The whole memory, whether it is used or free."""


@dataclass(frozen=True)
class Gpus:
    """All GPUs that this process can see, in the order of their indices."""

    devices: tuple[Gpu, ...] = ()
    problem: str = ""
    """Why no GPU can be used although a driver is installed; "": GPUs can be used, or no driver is installed."""

    @property
    def count(self) -> int:
        """Number of GPUs that workers can use."""
        return len(self.devices)


class _DriverError(Exception):
    """A call of the driver failed; the text is the driver's own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def find_gpus() -> Gpus:
    """Ask the driver for the GPUs that workers can use. Without a driver there are none."""
    found = ask_driver(CUDA_LIBRARY)
    if found.devices and not _torch_has_cuda():
        return Gpus(problem="the installed torch is built for CPUs only; install a build of torch for CUDA")
    return found


def ask_driver(library: str) -> Gpus:
    """Ask a driver's library, whatever torch can do.

    Args:
        library: The name or path of the shared library.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return Gpus()
    try:
        _call_driver(driver, "cuInit", 0)
        count = ctypes.c_int()
        _call_driver(driver, "cuDeviceGetCount", ctypes.byref(count))
        return Gpus(tuple(_describe_gpu(driver, index) for index in range(count.value)))
    except _DriverError as error:
        return Gpus() if error.code == _NO_DEVICE else Gpus(problem=str(error))
    except AttributeError as error:  # a library that lacks a function is not this driver
        return Gpus(problem=f"{library}: {error}")


def _describe_gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _call_driver(driver, "cuDeviceGet", ctypes.byref(device), index)
    _call_driver(driver, "cuDeviceGetName", name, _NAME_BYTES, device)
    _call_driver(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return Gpu(name.value.decode(errors="replace"), memory.value)


def _call_driver(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    """Call a function of the driver.

    Raises:
        _DriverError: It failed; with the number and the text of the driver's error.
    """
    code = int(getattr(driver, function)(*arguments))
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"unknown error").decode(errors="replace")
        raise _DriverError(code, f"CUDA error {code} of {function}: {said}")


def _torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA, by its version file; True if that is not known."""
    found = importlib.util.find_spec("torch")
    for folder in (found and found.submodule_search_locations) or ():
        try:
            match = _TORCH_CUDA.search((Path(folder) / "version.py").read_text())
        except OSError:
            continue
        if match is not None:
            return match[1] != "None"
    return True


_CPUINFO: Final = Path("/proc/cpuinfo")
_REGISTERS: Final = {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni"}
"""What the kernels' level for matrix registers needs (`csrc/cpu/cpu_level.cc`)."""
_CGROUP_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


def has_matrix_registers() -> bool:
    """Return whether cores here multiply bfloat16 matrices in registers made for that (Intel's AMX)."""
    try:
        with _CPUINFO.open() as lines:  # only the first core's: to describe a core takes Linux a while
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return False
    return set(flags.split()) >= _REGISTERS


def available_cores() -> int:
    """Return the number of cores for this process, at least 1."""
    cores = len(os.sched_getaffinity(0))
    membership = _text_of(_CGROUP_MEMBERSHIP)
    quota = None if membership is None else whole_cores_of_quota(_CGROUP_ROOT, membership)
    return cores if quota is None else min(cores, quota)


def whole_cores_of_quota(root: Path, membership: str) -> int | None:
    """Return the smallest CPU quota of a process's control groups, in whole cores, at least 1; None: no quota.

    The quotas of the groups above them count, too.

    Args:
        root: Where the control groups are mounted.
        membership: The text of the process's `/proc/PID/cgroup`.
    """
    cores = []
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            cores += [_version_2(folder) for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            for mount in (root / controllers, root / "cpu"):
                cores += [_version_1(folder) for folder in _upwards(mount, path)]
    return min((max(1, found) for found in cores if found is not None), default=None)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and all above it. In a container the path may be the host's, of which only the
    mount's own folder exists."""
    group = PurePosixPath(path.lstrip("/"))
    return (mount / folder for folder in (group, *group.parents) if ".." not in folder.parts)


def _version_2(folder: Path) -> int | None:
    quota, _, period = (_text_of(folder / "cpu.max") or "").partition(" ")
    return _ratio(quota, period)


def _version_1(folder: Path) -> int | None:
    return _ratio(_text_of(folder / "cpu.cfs_quota_us") or "", _text_of(folder / "cpu.cfs_period_us") or "")


def _ratio(quota: str, period: str) -> int | None:
    """Return the quota in whole cores; None if there is no quota, which is written as "max" or -1."""
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:
        return None
    return quota_us // period_us if quota_us > 0 and period_us > 0 else None


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def cache_folder() -> Path | None:
    """Return `$XDG_CACHE_HOME/trunkline` or `~/.cache/trunkline`, which may not exist yet; None without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the standard says to ignore relative ones
        return Path(given) / "trunkline"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "trunkline" if home.is_dir() else None


DEFAULT_URL: Final = "http://127.0.0.1:8000"
"""The address of a server unless its options say otherwise."""
_BACKLOG: Final = 2048
"""Largest number of connections that wait while all routers are busy or being started again."""


def open_listener(host: str, port: int, option: str = "--port") -> socket.socket:
    """Open a listening socket, which routers inherit.

    Args:
        host: An address of this machine or its name.
        port: The port; 0 for any free one.
        option: The option that gave the port, for messages; the one for the host is named after it.

    Raises:
        UserError: The port is in use, needs privileges, or the host is not an address of this machine.
    """
    listener: socket.socket | None = None
    try:
        family, *_, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise UserError(_why_not_listening(error, host, port, option)) from error


def free_port(host: str, port: int) -> int:
    """Return `port` if a server can listen there now; for 0 a free one.

    Raises:
        UserError: As `open_listener`.
    """
    with open_listener(host, port) as listener:
        return int(listener.getsockname()[1])


def _why_not_listening(error: OSError, host: str, port: int, option: str) -> str:
    if isinstance(error, PermissionError):
        return f"port {port} needs privileges; choose one above 1023 with {option}"
    advice = (
        f"choose another {option}, or stop the process that has it"
        if error.errno == errno.EADDRINUSE
        else f"{option.replace('port', 'host')} must be an address of this machine, such as 127.0.0.1 or 0.0.0.0"
    )
    return f"cannot listen on {host}:{port}: {error.strerror}; {advice}"
