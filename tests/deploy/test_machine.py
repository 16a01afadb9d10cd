"""What a machine has: the cores that this process may keep busy, the cache folder, ports, GPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trunkline.deploy.config import machine
from trunkline.deploy.config.machine import available_cores, free_port, whole_cores_of_quota
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError

REGISTERS = machine.has_matrix_registers
MEMBERSHIP_1 = "12:memory:/job\n3:cpu,cpuacct:/job/step\n1:cpuset:/job\n0::/\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/", None),
        ({}, "", None),
        ({}, "nonsense", None),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "200000 100000"}, "0::/", 2),
        ({"cpu.max": "250000 100000"}, "0::/", 2),
        ({"cpu.max": "50000 100000"}, "0::/", 1),
        ({"a/cpu.max": "max 100000", "a/b/cpu.max": "400000 50000"}, "0::/a/b", 8),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 50000"}, "0::/a/b", 3),
        # The host's path: the container's own group is mounted as the root.
        ({"cpu.max": "300000 100000"}, "0::/docker/0123/x", 3),
        ({"cpu.max": "300000 100000"}, "0::/../..", 3),
        ({"cpu.max": "broken"}, "0::/", None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, MEMBERSHIP_1, None),
        ({"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, MEMBERSHIP_1, 5),
        (
            {"cpu,cpuacct/job/step/cpu.cfs_quota_us": "20000", "cpu,cpuacct/job/step/cpu.cfs_period_us": "10000"},
            MEMBERSHIP_1,
            2,
        ),
        ({"cpuset/cpu.cfs_quota_us": "100000", "cpuset/cpu.cfs_period_us": "100000"}, MEMBERSHIP_1, None),
    ],
)
def test_quota(files: dict[str, str], membership: str, expected: int | None, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert whole_cores_of_quota(tmp_path, membership) == expected


@pytest.mark.parametrize(("quota", "expected"), [("max", 16), ("300000", 3), ("6400000", 16)])
def test_the_smaller_of_affinity_and_quota(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"cpu.max": f"{quota} 100000", "membership": "0::/"})
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert available_cores() == expected
    assert ServeSettings(groups=1, tp=2).threads_per_worker() == max(1, expected // 2)
    assert ServeSettings(groups=4, tp=8).threads_per_worker() == 1
    assert ServeSettings(threads=7).threads_per_worker() == 7


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (["flags : fpu amx_bf16 avx512_vnni avx512_bf16 amx_tile amx_int8"] * 2, True),
        (["flags : fpu amx_bf16 amx_tile amx_int8"], False),
        (["flags : fpu amx_tile amx_int8"], False),
        (["flags : fpu not_amx_bf16"], False),
        (["Features : fp asimd"], False),
        ([], False),
    ],
)
def test_matrix_registers(
    cores: list[str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"processor : {number}\n{flags}\n\n" for number, flags in enumerate(cores))
    write(tmp_path, {"cpuinfo": text})
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert REGISTERS() == expected
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "missing")
    assert not REGISTERS()


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        with pytest.raises(UserError, match="choose another --port"):
            free_port("127.0.0.1", taken.getsockname()[1])


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert machine.cache_folder() == tmp_path / "x" / "trunkline"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert machine.cache_folder() == tmp_path / ".cache" / "trunkline"
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert machine.cache_folder() is None


FAKE_DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static int of(const char *name) { return atoi(getenv(name)); }
int cuInit(unsigned flags) { (void)flags; return of("FAKE_INIT"); }
int cuDeviceGetCount(int *count) { *count = of("FAKE_GPUS"); return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "GPU of %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = ((size_t)device) << 30; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 803 ? "driver mismatch" : NULL; return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the driver's functions that shows as many GPUs as the environment says."""
    source = tmp_path_factory.mktemp("driver") / "libcuda.c"
    source.write_text(FAKE_DRIVER)
    library = str(source.with_suffix(".so"))
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, str(source)], check=True)
    return library


@pytest.mark.processes
def test_the_driver_is_asked(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(count: int, init: int = 0) -> machine.Gpus:
        monkeypatch.setenv("FAKE_GPUS", str(count))
        monkeypatch.setenv("FAKE_INIT", str(init))
        return machine.ask_driver(driver)

    for count in (0, 1, 2, 8):
        shown = tuple(machine.Gpu(f"GPU of {10 + n}", (10 + n) << 30) for n in range(count))
        assert asked(count) == machine.Gpus(shown)
    assert asked(1, init=100) == machine.Gpus()  # none, or all are hidden
    assert asked(1, init=803).problem == "CUDA error 803 of cuInit: driver mismatch"
    assert "unknown error" in asked(1, init=5).problem
    assert machine.ask_driver("/no/such/library.so") == machine.Gpus()


def test_a_torch_for_cpus_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the fixture's stand-in for `look`
    monkeypatch.setattr(machine, "ask_driver", lambda _: machine.Gpus((machine.Gpu("a", 1), machine.Gpu("b", 1))))
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for line, count in (("cuda: Optional[str] = None", 0), ("cuda: Optional[str] = '12.8'", 2), ("other = 1", 2)):
        (folder / "version.py").write_text(f"debug = False\n{line}\nhip = None\n")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        found = machine.find_gpus()
        assert found.count == count
        assert ("built for CPUs only" in found.problem) == (count == 0)
