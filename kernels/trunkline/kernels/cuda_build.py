"""Compiling the CUDA kernels, once per machine: `python -m trunkline.kernels.cuda_build [--check] [--arch 90a]`.

A library is looked for beside the package (`prebuilt/`, filled when a wheel or an image is built), then in the
user's cache (`$XDG_CACHE_HOME/trunkline`, or `~/.cache/trunkline`), else nvcc makes it there.

Invariant: a library's name holds a digest of everything that decides its contents (the bytes of all sources and
headers, the flags, the architecture, and nvcc's version), so a stale one is never loaded. It appears under that
name complete or not at all: compiled in a temporary folder and renamed, under a lock that lets one process build
while others wait.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
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
"""Libraries that came with the package."""
CHECKED_ARCHITECTURES: Final = ("80", "90a")
SYSTEM_COMPILER: Final = Path("/usr/local/cuda/bin/nvcc")
OLDEST: Final = (8, 0)
"""Compute capability: asynchronous copies and bfloat16 matrix units."""

FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-Xcompiler",
    "-Wall,-Wextra,-fPIC",
)
STRICT: Final = ("-Werror", "all-warnings")
"""For developers only: a newer nvcc may warn of more, and a user's first use must not fail for that."""


class CudaBuildError(Exception):
    """The CUDA kernels do not exist for this device and cannot be made here."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc and what identifies it."""

    path: Path
    version: str


def architecture(capability: tuple[int, int]) -> str:
    """What nvcc calls a device: "80", "89", "90a".

    Raises:
        CudaBuildError: a device that is too old.
    """
    if capability < OLDEST:
        raise CudaBuildError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}; the kernels need "
            f"{OLDEST[0]}.{OLDEST[1]} or newer"
        )
    suffix = "a" if capability == (9, 0) else ""
    return f"{capability[0]}{capability[1]}{suffix}"


def _compatible(capability: tuple[int, int]) -> list[str]:
    """Other architectures whose code the device runs, best first: lower minors of its major. Those with an "a"
    run on nothing but their own device."""
    major, minor = capability
    lower = (architecture((major, other)) for other in reversed(range(minor)))
    return [arch for arch in lower if not arch.endswith("a")]


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "trunkline"


def find_compiler() -> Compiler | None:
    """nvcc of $CUDA_HOME, of the search path, of the `trunkline[nvcc]` packages, or of a system-wide toolkit."""
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    found = shutil.which("nvcc")
    candidates += [Path(found)] if found else []
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    candidates += sorted(nvcc for folder in packages for nvcc in Path(folder).glob("nvidia/*/bin/nvcc"))
    candidates.append(SYSTEM_COMPILER)
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if shown.returncode == 0:
                return Compiler(path, shown.stdout)
    return None


def source_digest(arch: str) -> str:
    """Of everything that decides a library's contents but the compiler."""
    digest = hashlib.blake2b(digest_size=10)
    digest.update(repr((FLAGS, arch)).encode())
    for folder in (SOURCES, HEADERS):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh", ".h")):
            contents = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(contents)}\n".encode())
            digest.update(contents)
    return digest.hexdigest()


def _prefix(arch: str) -> str:
    return f"trunkline_cuda-{arch}-{source_digest(arch)}"


def library_name(arch: str, compiler: Compiler) -> str:
    version = hashlib.blake2b(compiler.version.encode(), digest_size=5).hexdigest()
    return f"{_prefix(arch)}-{version}.so"


def library_path(capability: tuple[int, int]) -> Path:
    """The library for a device, built now if it has to be.

    Raises:
        CudaBuildError: it is not there and cannot be built; the message names the remedies.
    """
    arch = architecture(capability)
    prefix = _prefix(arch)
    for candidate in (arch, *_compatible(capability)):
        known = sorted(PREBUILT.glob(f"{_prefix(candidate)}-*.so"))
        if known:
            return known[-1]
    compiler = find_compiler()
    if compiler is None:
        # Whichever nvcc made it; a toolkit that was removed since leaves a usable library.
        known = sorted(cache_folder().glob(f"{prefix}-*.so"))
        if known:
            return known[-1]
        raise CudaBuildError(
            f"there are no CUDA kernels for sm_{arch} and no nvcc to compile them; install it with "
            "`pip install 'trunkline[nvcc]'` (cuda-toolkit[nvcc,cccl,cudart]), or install the CUDA toolkit and "
            "put its nvcc on PATH, or set CUDA_HOME"
        )
    return build(arch, cache_folder() / library_name(arch, compiler), compiler)


def build(arch: str, target: Path, compiler: Compiler, flags: tuple[str, ...] = ()) -> Path:
    """Make `target` unless it is there already; of several processes one works, the others wait for it.

    Args:
        flags: besides `FLAGS`.

    Raises:
        CudaBuildError: nvcc fails, or the folder cannot be written.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
                    made = _compile(arch, Path(folder), compiler, flags)
                    os.replace(made, target)
    except OSError as error:
        raise CudaBuildError(f"the CUDA kernels cannot be built in {target.parent}: {error}") from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        yield


def _compile(arch: str, folder: Path, compiler: Compiler, flags: tuple[str, ...]) -> Path:
    """Compile every source and link them; the files of head sizes take the longest, so side by side."""
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [compiler.path, *FLAGS, *flags, code, "-I", SOURCES / "device"]
    jobs = [[*command, "-c", source, "-o", folder / f"{source.stem}.o"] for source in sorted(SOURCES.glob("*.cu"))]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(_run, jobs))
    library = folder / "library.so"
    objects = sorted(folder.glob("*.o"))
    # Toolkits from packages have lib, installed ones lib64; nvcc itself only looks in one.
    folders = [compiler.path.resolve().parents[1] / name for name in ("lib", "lib64")]
    search = [f"-L{path}" for path in folders if path.is_dir()]
    _run([compiler.path, "-shared", "-cudart", "static", code, *search, "-o", library, *objects])
    return library


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(map(str, command))
        raise CudaBuildError(f"nvcc failed:\n{words}\n{(done.stderr + done.stdout).strip()[-4000:]}")


def check(architectures: list[str]) -> None:
    """Compile everything for each architecture, warnings being errors, and keep nothing.

    Raises:
        CudaBuildError: no nvcc, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CudaBuildError("no nvcc was found")
    for arch in architectures:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            size = _compile(arch, Path(folder), compiler, STRICT).stat().st_size
        print(f"sm_{arch}: {size / 1e6:.1f} MB in {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compile, and keep nothing")
    parser.add_argument("--arch", action="append", help="architecture such as 90a; may be repeated")
    parser.add_argument(
        "--to", type=Path, default=PREBUILT, help="folder for the libraries; default: the package's"
    )
    arguments = parser.parse_args()
    architectures = arguments.arch or list(CHECKED_ARCHITECTURES)
    try:
        if arguments.check:
            check(architectures)
            return
        compiler = find_compiler()
        if compiler is None:
            raise CudaBuildError("no nvcc was found")
        for arch in architectures:
            print(build(arch, arguments.to / library_name(arch, compiler), compiler))
    except CudaBuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
