"""What comes first on a GPU: is everything there, does every op run?"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
from gpu_checks import one_round
from gpu_device import Gpu, Output, Visit
from gpu_errors import LIMITS

from trunkline.kernels.cuda_build import find_compiler, library_path

PACKAGES: Final = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "apache-tvm-ffi",
    "msgspec",
    "pyzmq",
    "structlog",
    "flashinfer-python",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)
"""Whose versions are worth knowing."""
MODULES: Final = (
    "trunkline.kernels.cuda",
    "trunkline.worker.runner",
    "trunkline.worker.grammar.automaton",
    "trunkline.worker.tiers.tier_service",
    "trunkline.controller.engine.engine",
    "trunkline.deploy.main",
    "trunkline.router.server",
    "engine_loop",
    "gpu_attention",
    "gpu_baselines",
    "gpu_engine",
    "gpu_model",
    "gpu_prefill",
    "gpu_serve",
    "gpu_tiers",
)
"""All that later parts import."""


def start(gpu: Gpu, out: Output, visit: Visit) -> None:
    """Versions, imports, the compiled library, one call of every op: the part `start`. Ends at the first failure.

    Raises:
        Exception: whatever fails.
    """
    del visit
    tell_versions(out)
    for module in MODULES:
        importlib.import_module(module)
    tell_device(gpu, out)
    for name, error in one_round(gpu, 0, torch.bfloat16, (128,)):
        out.add({"op": name}, "relative_error", error, "", 1)
        if not error <= LIMITS[torch.bfloat16]:
            raise ValueError(f"{name} is off by {error:.2e}; {LIMITS[torch.bfloat16]:.1e} is allowed")


def tell_versions(out: Output) -> None:
    out.fact("python", sys.version.split()[0])
    for package in PACKAGES:
        try:
            out.fact(package, version(package))
        except PackageNotFoundError:
            out.fact(package, "not installed")
    compiler = find_compiler()
    out.fact("nvcc", "none" if compiler is None else f"{compiler.release[0]}.{compiler.release[1]}")


def tell_device(gpu: Gpu, out: Output) -> None:
    """What it is, and which library runs there."""
    if gpu.device.type == "cuda":
        properties = torch.cuda.get_device_properties(gpu.device)
        out.fact("gpu", properties.name)
        out.fact("compute capability", f"{properties.major}.{properties.minor}")
        out.fact("processors", properties.multi_processor_count)
        out.fact("memory", f"{properties.total_memory / 1e9:.0f} GB")
        out.fact("cuda of torch", torch.version.cuda)
        out.fact("cudnn of torch", torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        out.fact("driver", _driver())
        out.fact("library", library_path((properties.major, properties.minor)).name)
    gpu.kernels()


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
