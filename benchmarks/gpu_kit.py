"""A folder with all that a visit to a GPU machine needs: `make gpu-kit`, on a machine that needs no GPU.

    python benchmarks/gpu_kit.py [--python 3.12] [--to build/gpu-kit] [--wheel dist/trunkline-….whl]
                                 [--flashinfer-kernels gpu-results/flashinfer-kernels.tar.gz]

The machine to visit has CUDA (with nvcc), Python of that version, torch and `PRESENT`, and no network. The folder
has Trunkline's wheel with its compiled CPU and CUDA kernels and the demo model, the wheels of `BROUGHT`,
FlashInfer (its kernels are compiled there, but for those that an earlier visit to such a GPU has left), these
benchmarks, and the tokens that the engine gives on this CPU. There:

    bash run.sh [--only PART,...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu import COMMIT_FILE
from gpu_compiled import KERNELS, take
from gpu_tokens import EXPECTED, Engine, Tokens, generate
from report import commit

ROOT: Final = Path(__file__).resolve().parents[1]
KIT_BYTES_MAX: Final = 64 << 20
PRESENT: Final = (
    *("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface-hub"),
    *("psutil", "jinja2", "pyyaml", "packaging", "typing-extensions", "tqdm", "httpx", "anyio", "h11"),
    *("typer", "rich", "click", "annotated-doc", "prometheus-client", "uvloop"),
)
"""What the machine has, with all that these need."""
BROUGHT: Final = (
    *("apache-tvm-ffi", "msgspec", "structlog", "pyzmq", "setproctitle", "xxhash"),
    *("xgrammar", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("fastapi", "starlette", "opentelemetry-api", "uvicorn", "httptools", "httpx-sse", "python-multipart"),
    *("redis", "hiredis"),
)
"""What else the kernels, the engine and `trunkline serve` import."""
FLASHINFER: Final = ("flashinfer-python==0.6.12", "nvidia-ml-py", "einops", "tabulate")
"""With what it imports. nvcc and ninja compile it there. Newer releases hold compiled kernels and are as large as
a whole kit may be."""
PLATFORMS: Final = tuple(
    f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014", "_2_12", "1")
)
RUN: Final = """#!/bin/sh
# A visit to a GPU machine: checks and measures everything within ten minutes; --only PART,... repeats some of it.
# Results: gpu-results/results.md and results.json in the current folder (--out FOLDER for another).
here="$(cd "$(dirname "$0")" && pwd)"
exec "${PYTHON:-python3}" "$here/benchmarks/gpu.py" --kit "$here" "$@"
"""


class KitError(Exception):
    """The kit cannot be made."""


def download(names: Sequence[str], python: str, to: Path) -> None:
    """Wheels for the other machine's Python, in the versions that are pinned here.

    Raises:
        KitError: pip fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", "--dest", str(to)]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command += ["-c", str(ROOT / "constraints.txt"), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KitError(f"wheels for Python {python} cannot be downloaded: {done.stderr.strip()[-1500:]}")


def has_cuda_kernels(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any("/kernels/prebuilt/trunkline_cuda-" in name for name in archive.namelist())


def assemble(folder: Path, wheel: Path, others: Path, tokens: Tokens) -> None:
    """Fill a new folder.

    Args:
        wheel: Trunkline's.
        others: folder of the other wheels, and perhaps of FlashInfer's compiled kernels.
        tokens: what the engine generates on a CPU.

    Raises:
        KitError: it gets too large.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    for source in (wheel, *sorted(others.glob("*.whl"))):
        shutil.copy(source, folder / "wheels")
    if (others / KERNELS).is_dir():
        shutil.copytree(others / KERNELS, folder / KERNELS)
    (folder / "benchmarks").mkdir()
    for source in sorted((ROOT / "benchmarks").glob("*.py")):
        shutil.copy(source, folder / "benchmarks")
    (folder / EXPECTED).parent.mkdir()
    (folder / EXPECTED).write_text(json.dumps({"tokens": tokens}) + "\n")
    (folder / COMMIT_FILE).write_text(commit() + "\n")
    (folder / "run.sh").write_text(RUN)
    (folder / "run.sh").chmod(0o755)
    sizes = sorted(
        ((path.stat().st_size, path.name) for path in folder.rglob("*") if path.is_file()), reverse=True
    )
    total = sum(size for size, _ in sizes)
    if total > KIT_BYTES_MAX:
        largest = ", ".join(f"{name} {size / 2**20:.1f} MiB" for size, name in sizes[:3])
        raise KitError(
            f"the kit would take {total / 2**20:.1f} MiB; {KIT_BYTES_MAX >> 20} MiB are allowed. The largest: "
            f"{largest}; --no-flashinfer leaves FlashInfer out"
        )


def newest_wheel() -> Path:
    """
    Raises:
        KitError: none was built.
    """
    wheels = sorted((ROOT / "dist").glob("trunkline-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise KitError("there is no wheel in dist/; make wheel builds one")
    return wheels[-1]


def make_kit(arguments: argparse.Namespace) -> None:
    wheel = arguments.wheel or newest_wheel()
    if not has_cuda_kernels(wheel):
        print(f"{wheel.name} has no CUDA kernels inside: nvcc will compile them on the GPU machine, in its time.")
    others = arguments.to.with_name(f"{arguments.to.name}-wheels")
    shutil.rmtree(others, ignore_errors=True)
    others.mkdir(parents=True)
    download([*BROUGHT, *(() if arguments.no_flashinfer else FLASHINFER)], arguments.python, others)
    if arguments.flashinfer_kernels is not None:
        try:
            take(arguments.flashinfer_kernels, others / KERNELS)
        except ValueError as error:
            raise KitError(f"--flashinfer-kernels: {error}") from None
    assemble(arguments.to, wheel, others, generate(Engine("cpu", "cpu"), 300)["tokens"])
    shutil.rmtree(others)
    size = sum(path.stat().st_size for path in arguments.to.rglob("*") if path.is_file())
    print(f"{arguments.to}: {size / 2**20:.1f} MiB for Python {arguments.python}; there: bash run.sh")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="of the GPU machine; default: 3.12")
    parser.add_argument(
        "--to", type=Path, default=ROOT / "build" / "gpu-kit", help="folder; default: build/gpu-kit"
    )
    parser.add_argument("--wheel", type=Path, help="Trunkline's; default: the newest in dist/")
    parser.add_argument("--no-flashinfer", action="store_true", help="leave FlashInfer out")
    parser.add_argument("--flashinfer-kernels", type=Path, help="file of that name that a visit has left")
    try:
        make_kit(parser.parse_args())
    except KitError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
