"""FlashInfer's kernels that a visit to a GPU machine has compiled, for the next visit: that takes minutes.

FlashInfer loads `data/aot/NAME/NAME.so` in its package as it is. What it compiles lies in the user's cache, and is
compiled again wherever FlashInfer itself was unpacked anew, as the compiler's log there goes by paths and times.
Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Final

KERNELS: Final = "flashinfer-kernels"
"""Folder in a kit; with `.tar.gz` a file among the results of a visit."""
BUILT_IN: Final = Path("flashinfer", "data", "aot")


def cache_folder() -> Path:
    """Where FlashInfer compiles."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()), ".cache", "flashinfer")


def complete_kernels(cache: Path) -> Iterator[Path]:
    """Libraries that were linked to their end: those of a compiler that was killed are not in its log."""
    for library in sorted(cache.glob("*/*/cached_ops/*/*.so")):
        log = library.with_name(".ninja_log")
        if library.stem == library.parent.name and log.exists() and library.name in log.read_text():
            yield library


def has_kernel(beginning: str) -> bool:
    """Whether FlashInfer finds a kernel of such a name compiled: here, or brought along."""
    found = find_spec("flashinfer")
    site = None if found is None or found.origin is None else Path(found.origin).parents[1]
    brought = () if site is None else (site / BUILT_IN).glob("*/*.so")
    return any(library.name.startswith(beginning) for library in chain(brought, complete_kernels(cache_folder())))


def compiled_here(to: Path, brought: Path | None = None) -> None:
    """Keep them in a file, if there are any.

    Args:
        brought: folder of those that were there before, for the file to have all.
    """
    libraries = list(complete_kernels(cache_folder()))
    if not libraries:
        return
    here = {library.stem for library in libraries}
    before = [] if brought is None else sorted(brought.glob("*/*.so"))
    with tarfile.open(to, "w:gz") as archive:
        for library in (*libraries, *(each for each in before if each.stem not in here)):
            archive.add(library, f"{KERNELS}/{library.stem}/{library.name}")


def take(archive: Path, to: Path) -> int:
    """Unpack the libraries of such a file, or of one with the whole cache, and nothing else of it.

    Returns:
        How many there are.

    Raises:
        ValueError: it is no such file.
    """
    count = 0
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                path = PurePosixPath(member.name)
                source = opened.extractfile(member) if path.suffix == ".so" else None
                if source is None or path.stem != path.parent.name:
                    continue
                target = to / path.stem / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(source, file)
                count += 1
    except (OSError, tarfile.TarError) as error:
        raise ValueError(f"{archive} cannot be read: {error}; a visit leaves {KERNELS}.tar.gz") from None
    if not count:
        raise ValueError(f"{archive} has no kernels inside; a visit leaves {KERNELS}.tar.gz among its results")
    return count


def put_beside(kernels: Path, site: Path) -> None:
    """Give them to the FlashInfer that was unpacked in a folder, if there are any and it was."""
    if kernels.is_dir() and (site / BUILT_IN.parts[0]).is_dir():
        shutil.copytree(kernels, site / BUILT_IN, dirs_exist_ok=True)
