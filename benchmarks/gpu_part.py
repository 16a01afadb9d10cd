"""One part of the GPU benchmark, as a process of its own: what `benchmarks/gpu.py` starts.

    python benchmarks/gpu_part.py NAME SECONDS [--kit FOLDER] [--quick]

Writes its findings to standard output, a JSON object per line (`gpu_device.Output`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from gpu_attention import measure_decode
from gpu_baselines import compare_all, compile_flashinfer
from gpu_checks import check_all
from gpu_device import Gpu, Output, Visit, measure_ceilings
from gpu_model import measure_model
from gpu_prefill import Prompt, flashinfer_prefill, measure_prefill, measure_prompt
from gpu_sampling import measure_sampling
from gpu_sanitizer import sanitize
from gpu_serve import check_serving
from gpu_start import start
from gpu_tiers import measure_tiers
from gpu_tokens import check_engines
from gpu_visit import NO_DEVICE

Run = Callable[[Gpu, Output, Visit], None]


def compile_all(gpu: Gpu, out: Output, visit: Visit) -> None:
    """FlashInfer's kernels for decode and then for prefill."""
    compile_flashinfer(gpu, out, visit)
    measure_prompt(gpu, out, Prompt(64, 0), {"FlashInfer": flashinfer_prefill})


RUNS: Final[dict[str, Run]] = {
    "start": start,
    "compile": compile_all,
    "ops": check_all,
    "engine": check_engines,
    "serve": check_serving,
    "sanitizer": sanitize,
    "ceilings": measure_ceilings,
    "decode": measure_decode,
    "flashinfer": compare_all,
    "prefill": measure_prefill,
    "sampling": measure_sampling,
    "model": measure_model,
    "tiers": measure_tiers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--kit", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    # What libraries print must not get between the findings.
    findings = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    out = Output(findings)
    if not torch.cuda.is_available():
        out.problem(f"torch {torch.__version__} finds no CUDA device here: nothing was measured")
        sys.exit(NO_DEVICE)
    RUNS[arguments.name](Gpu(), out, Visit(arguments.seconds, arguments.kit, arguments.quick))


if __name__ == "__main__":
    main()
