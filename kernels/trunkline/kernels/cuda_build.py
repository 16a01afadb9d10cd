"""Compile the CUDA kernels: for every device when a wheel is built, or for one device at its first use.

    python -m trunkline.kernels.cuda_build [--check | --find | --if-possible] [--to FOLDER]

A wheel contains one library for all devices (`prebuilt/`; see `EVERY_DEVICE`). Without it, the library for the
device is taken from the user's cache (`$XDG_CACHE_HOME/trunkline`, or `~/.cache/trunkline`), where nvcc builds it
if needed.

Invariant: a library's name holds a digest of everything that decides its contents (the bytes of all sources and
headers, the flags, the devices, and nvcc's version), so a stale one is never loaded. Two builds of one name are
the same bytes, but for names that nvcc makes of the sources' folder. A library appears under its name complete or
not at all: compiled in a temporary folder and renamed, under a lock that lets one process build while others wait.

Imports nothing but the standard library, so that a build can run this file by its path.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent
SOURCES: Final = PACKAGE / "csrc" / "cuda"
HEADERS: Final = PACKAGE / "csrc" / "common"
PREBUILT: Final = PACKAGE / "prebuilt"
"""Folder of the libraries that came with the package."""
SYSTEM_COMPILER: Final = Path("/usr/local/cuda/bin/nvcc")
OLDEST: Final = (8, 0)
"""The oldest compute capability that the kernels run on: the first with asynchronous copies and bfloat16 matrix
units."""
OLDEST_COMPILER: Final = (12, 0)
"""The oldest nvcc that compiles the kernels: the first that knows C++20."""

FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-Xcompiler",
    "-Wall,-Wextra,-fPIC",
)
STRICT: Final = ("-Werror", "all-warnings")
"""Warning flags for developers only: a newer nvcc may warn of more, and a user's first use must not fail for
that."""
LINK_FLAGS: Final = ("-shared", "-cudart", "static", "-Xlinker", "--strip-all")
"""Flags for linking. Symbols are stripped: they have no use at run time, and some are named after nvcc's temporary
files."""
INSTALL_COMPILER: Final = (
    "install nvcc with `pip install 'trunkline[nvcc]'` (cuda-toolkit[nvcc,cccl,cudart]), or install the CUDA "
    "toolkit and put its nvcc on PATH, or set CUDA_HOME"
)

NO_COMPILER: Final = (
    "No nvcc was found: the wheel will have NO CUDA kernels inside. It serves on CPUs; on a GPU it compiles them "
    f"at first use, if nvcc is there. To have them inside, {INSTALL_COMPILER}."
)


class CudaBuildError(Exception):
    """The CUDA kernels do not exist for this device and cannot be made here."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc, and its version."""

    path: Path
    version: str
    """The output of `nvcc --version`."""

    @property
    def release(self) -> tuple[int, int]:
        """The release number; (0, 0) if the version does not contain one."""
        found = re.search(r"release (\d+)\.(\d+)", self.version)
        return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True)
class Devices:
    """The devices that a library is compiled for."""

    name: str
    """Name of the devices, as part of the library's file name."""
    codes: tuple[str, ...]
    """Values of nvcc's option `-gencode`."""


EVERY_DEVICE: Final = Devices("all", ("arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a"))
"""The devices of the library in a wheel. Machine code of 8.0 runs on 8.6, 8.7 and 8.9 too; that of 9.0a on 9.0
alone. Every newer device gets 8.0's PTX, which its driver compiles when it is loaded (PTX of 9.0a would do for
none of them)."""


def architecture(capability: tuple[int, int]) -> str:
    """Return nvcc's name of a device's architecture: "80", "89", "90a".

    Raises:
        CudaBuildError: The device is too old.
    """
    if capability < OLDEST:
        raise CudaBuildError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}; the kernels need "
            f"{OLDEST[0]}.{OLDEST[1]} or newer"
        )
    suffix = "a" if capability == (9, 0) else ""
    return f"{capability[0]}{capability[1]}{suffix}"


def one_device(arch: str) -> Devices:
    """Return the devices of a library for one architecture, such as "90a"."""
    return Devices(arch, (f"arch=compute_{arch},code=sm_{arch}",))


def cache_folder() -> Path:
    """Return the folder of the user's cache for libraries that were compiled here."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "trunkline"


def find_compiler() -> Compiler | None:
    """Return the first nvcc that is new enough, else the first that runs, else None.

    It is looked for in $CUDA_HOME, on the search path, in the `trunkline[nvcc]` packages and in /usr/local/cuda.
    """
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    found = shutil.which("nvcc")
    candidates += [Path(found)] if found else []
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    candidates += sorted(nvcc for folder in packages for nvcc in Path(folder).glob("nvidia/*/bin/nvcc"))
    candidates.append(SYSTEM_COMPILER)
    too_old = None
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if shown.returncode == 0:
                compiler = Compiler(path, shown.stdout)
                if compiler.release >= OLDEST_COMPILER:
                    return compiler
                too_old = too_old or compiler
    return too_old


def check_compiler(compiler: Compiler) -> None:
    """Check an nvcc before anything is compiled, because a failure inside a source would not show the reason.

    Raises:
        CudaBuildError: The nvcc is too old, finds no C++ compiler, or refuses the one that it finds.
    """
    if compiler.release < OLDEST_COMPILER:
        major, minor = compiler.release
        said = f"is release {major}.{minor}" if major else f"says only {compiler.version.strip()[-200:]!r}"
        raise CudaBuildError(
            f"{compiler.path} {said}; the CUDA kernels are C++20 and need nvcc {OLDEST_COMPILER[0]} or newer: "
            f"{INSTALL_COMPILER}"
        )
    host = _host_compiler()
    if shutil.which(host) is None:
        raise CudaBuildError(
            f"nvcc compiles with the help of a C++ compiler, and there is no {host} here; install it (Debian and "
            "Ubuntu: apt-get install g++), or name another in NVCC_CCBIN"
        )
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.cu")
        empty.touch()
        command = [str(compiler.path), *FLAGS, "-E", str(empty), "-o", str(Path(folder, "out"))]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (tried.stderr + tried.stdout).strip()
    # A C++ compiler that is too old for C++20 is only warned of.
    if tried.returncode or "not supported with the configured host compiler" in said:
        version = subprocess.run([host, "--version"], capture_output=True, text=True, check=False).stdout
        raise CudaBuildError(
            f"{compiler.path} (release {compiler.release[0]}.{compiler.release[1]}) does not work with {host} "
            f"({version.partition(chr(10))[0]}):\n{said[-2000:]}\n"
            "Install a g++ that this nvcc takes and name it in NVCC_CCBIN, for example NVCC_CCBIN=g++-13"
        )


def _host_compiler() -> str:
    """Return the C++ compiler that nvcc calls."""
    chosen = os.environ.get("NVCC_CCBIN", "")
    return str(Path(chosen) / "g++") if chosen and Path(chosen).is_dir() else chosen or "g++"


def source_digest(devices: Devices) -> str:
    """Return a digest of everything but the compiler that decides a library's contents."""
    digest = hashlib.blake2b(digest_size=10)
    digest.update(repr((FLAGS, LINK_FLAGS, devices.codes)).encode())
    for folder in (SOURCES, HEADERS):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh", ".h")):
            contents = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(contents)}\n".encode())
            digest.update(contents)
    return digest.hexdigest()


def _prefix(devices: Devices) -> str:
    return f"trunkline_cuda-{devices.name}-{source_digest(devices)}"


def library_name(devices: Devices, compiler: Compiler) -> str:
    """Return the file name of a library of the present sources, made by this compiler."""
    version = hashlib.blake2b(compiler.version.encode(), digest_size=5).hexdigest()
    return f"{_prefix(devices)}-{version}.so"


def prebuilt_library() -> Path | None:
    """Return the library that came with the package; None if there is none for these sources."""
    known = sorted(PREBUILT.glob(f"{_prefix(EVERY_DEVICE)}-*.so"))
    return known[-1] if known else None


def library_path(capability: tuple[int, int]) -> Path:
    """Return the path of the library for a device, which is built now if needed.

    Raises:
        CudaBuildError: There is none and it cannot be built; the message names the remedies.
    """
    arch = architecture(capability)
    if (prebuilt := prebuilt_library()) is not None:
        return prebuilt
    devices = one_device(arch)
    compiler = find_compiler()
    if compiler is not None and compiler.release >= OLDEST_COMPILER:
        return build(devices, cache_folder() / library_name(devices, compiler), compiler)
    # Any nvcc may have built it: a library stays usable after its toolkit was removed.
    known = sorted(cache_folder().glob(f"{_prefix(devices)}-*.so"))
    if known:
        return known[-1]
    if compiler is not None:
        check_compiler(compiler)
    raise CudaBuildError(
        f"no CUDA kernels came with this package, and there is no nvcc to compile them for sm_{arch}; install a "
        f"wheel that was built where nvcc is, or {INSTALL_COMPILER}"
    )


def build(devices: Devices, target: Path, compiler: Compiler, flags: tuple[str, ...] = ()) -> Path:
    """Build `target` unless it exists. Of several processes one builds, and the others wait for it.

    Args:
        flags: Flags besides `FLAGS`.

    Raises:
        CudaBuildError: nvcc does not work here or fails, or the folder cannot be written.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
                    made = _compile(devices, Path(folder), compiler, flags)
                    os.replace(made, target)
    except OSError as error:
        raise CudaBuildError(f"the CUDA kernels cannot be built in {target.parent}: {error}") from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        yield


def _compile(devices: Devices, folder: Path, compiler: Compiler, flags: tuple[str, ...]) -> Path:
    """Compile all sources, several at once because those of the head sizes take long, and link them."""
    check_compiler(compiler)
    codes = [f"-gencode={code}" for code in devices.codes]
    command = [compiler.path, *FLAGS, *flags, *codes, "-I", SOURCES / "device"]
    jobs = [[*command, "-c", source, "-o", folder / f"{source.stem}.o"] for source in sorted(SOURCES.glob("*.cu"))]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(_run, jobs))
    library = folder / "library.so"
    objects = sorted(folder.glob("*.o"))
    # Toolkits from packages have lib, installed ones lib64; nvcc itself only looks in one.
    folders = [compiler.path.resolve().parents[1] / name for name in ("lib", "lib64")]
    search = [f"-L{path}" for path in folders if path.is_dir()]
    _run([compiler.path, *LINK_FLAGS, *codes, *search, "-o", library, *objects])
    return library


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(map(str, command))
        raise CudaBuildError(f"nvcc failed:\n{words}\n{(done.stderr + done.stdout).strip()[-4000:]}")


def _compiler() -> Compiler:
    compiler = find_compiler()
    if compiler is None:
        raise CudaBuildError(f"no nvcc was found; {INSTALL_COMPILER}")
    return compiler


def check() -> None:
    """Compile everything for all devices, warnings being errors, and keep nothing.

    Raises:
        CudaBuildError: There is no nvcc, or it fails.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        size = _compile(EVERY_DEVICE, Path(folder), _compiler(), STRICT).stat().st_size
    print(f"{', '.join(EVERY_DEVICE.codes)}: {size / 1e6:.1f} MB in {time.perf_counter() - start:.0f} s")


def build_prebuilt(folder: Path) -> Path:
    """Build the library for all devices, as the only one in a folder.

    Raises:
        CudaBuildError: There is no nvcc, or it fails.
    """
    compiler = _compiler()
    target = folder / library_name(EVERY_DEVICE, compiler)
    build(EVERY_DEVICE, target, compiler)
    for other in folder.glob("trunkline_cuda-*"):
        if other.stem != target.stem:
            other.unlink()
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compile, warnings being errors; keep nothing")
    parser.add_argument("--find", action="store_true", help="only print the library that is there, if one is")
    parser.add_argument("--if-possible", action="store_true", help="without an nvcc only say so")
    parser.add_argument("--to", type=Path, default=PREBUILT, help="folder of the library; default: the package's")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            check()
        elif arguments.find:
            print(prebuilt_library() or "")
        elif arguments.if_possible and find_compiler() is None:
            print(prebuilt_library() or NO_COMPILER)
        else:
            print(build_prebuilt(arguments.to))
    except CudaBuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
