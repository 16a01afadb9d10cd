"""What `compute-sanitizer` is given (part `sanitizer`): a small round of every op, or one piece of it.

    python benchmarks/gpu_sanitized.py DTYPE [PIECE]

Pieces call no product of torch over numbers of 16 or 8 bits: in those, which are kernels of cuBLAS and CUTLASS, a
racecheck of compute-sanitizer 13.0 on an H200 died by itself, and a process that dies tells nothing of what comes
after. So our kernels around them are called alone here, and whatever else has to be multiplied for them is
multiplied on the host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, cast

import torch
import torch.nn.functional as F
from gpu_checks import (
    check_attention,
    check_norms,
    check_replays,
    check_sampling,
    check_writes,
    one_round,
    random_trial,
)
from gpu_device import Gpu
from gpu_errors import LIMITS, relative_error
from gpu_kept import check_rounding
from gpu_layers import FORMS, Mixture, check_float8_rounding, numbers_of
from torch import Tensor

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.experts import run_experts
from trunkline.kernels.ops import Activation, PackedLinear

Errors = Iterator[tuple[str, float]]
"""(op, relative error)"""

HEAD_DIM: Final = 128
ROWS: Final = 7
SEED: Final = 0
TYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in LIMITS}


class OnHost:
    """Stands for the kernels where a mixture of experts asks for its router's scores: in float64, on the host."""

    def linear(self, x: Tensor, layer: PackedLinear, out_dtype: torch.dtype, *_: object) -> Tensor:
        return (x.cpu().double() @ numbers_of(layer).cpu().T).to(x.device, out_dtype)


def check_gates(gpu: Gpu, dtype: torch.dtype) -> Errors:
    """Activations of what a product gave."""
    generator = torch.Generator().manual_seed(SEED)
    up, down = (torch.zeros(shape, dtype=dtype, device=gpu.device) for shape in ((96, 64), (64, 48)))
    gate_up = torch.randn(13, 400, generator=generator).to(gpu.device, dtype)
    gate, beside = gate_up.double().chunk(2, dim=-1)
    ways: dict[Activation, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
    }
    kernels = gpu.kernels()
    for activation, exact in ways.items():
        expert = (kernels.pack_gated_linear(up, None, activation), kernels.pack_linear(down, None))
        stack = kernels.stack_experts([expert], dtype)
        assert stack is not None
        yield f"gate_{activation}", relative_error(stack.activate(gate_up), exact(gate) * beside)


def check_own_products(gpu: Gpu, dtype: torch.dtype) -> Errors:
    """Experts in each form, and layers over codes of 8 bits."""
    host = cast("CudaKernels", OnHost())
    for form in FORMS:
        mixture = Mixture.random(gpu, SEED, dtype, form=form)
        stack = mixture.op.stack
        assert stack is not None
        op = replace(mixture.op, stack=replace(stack, multiply=mixture.kernels.multiply_grouped))
        up, down = mixture.weights
        exact = Mixture(host, op, (up.cpu(), down.cpu()))
        x = mixture.tokens(40)
        yield f"experts {form}".strip(), relative_error(run_experts(host, op, x).cpu(), exact.exact(x.cpu()))
    generator, kernels = torch.Generator().manual_seed(SEED), gpu.kernels()
    matrix = (torch.randn(320, 208, generator=generator) / 14).to(gpu.device, dtype)
    x = torch.randn(13, 208, generator=generator).to(gpu.device, dtype)
    layer = kernels.pack_linear(matrix, None, "int8")
    product = x.cpu().double() @ numbers_of(layer).cpu().T
    yield "linear over int8", relative_error(kernels.linear(x, layer).cpu(), product)
    gated = kernels.gated_linear(x, kernels.pack_gated_linear(matrix, None, "silu", "int8")).cpu()
    gate, beside = product.chunk(2, dim=-1)
    yield "gate over int8", relative_error(gated, F.silu(gate) * beside)


def check_kept_attention(kv_dtype: str, gpu: Gpu, dtype: torch.dtype) -> Errors:
    yield from check_attention(gpu, random_trial(SEED, HEAD_DIM, rows=ROWS), dtype, kv_dtype)


def check_kept_replays(kv_dtype: str, gpu: Gpu, dtype: torch.dtype) -> Errors:
    trials = [random_trial(seed, HEAD_DIM, rows=ROWS) for seed in (SEED, SEED + 20)]
    yield from check_replays(gpu, [replace(trial, spec=trials[0].spec) for trial in trials], dtype, kv_dtype)


PIECES: Final[dict[str, Callable[[Gpu, torch.dtype], Errors]]] = {
    "norms": lambda gpu, dtype: check_norms(gpu, SEED, dtype),
    "gates": check_gates,
    "products": check_own_products,
    "rounding of inputs": lambda gpu, dtype: check_float8_rounding(gpu, SEED, dtype),
    "sampling": lambda gpu, _: check_sampling(gpu, SEED),
    "attention": partial(check_kept_attention, "auto"),
    "attention over int8": partial(check_kept_attention, "int8"),
    "attention over fp8": partial(check_kept_attention, "fp8"),
    "replays": partial(check_kept_replays, "auto"),
    "replays over int8": partial(check_kept_replays, "int8"),
    "replays over fp8": partial(check_kept_replays, "fp8"),
    "writes": lambda gpu, dtype: check_writes(gpu, SEED, HEAD_DIM, dtype),
    "writes in int8": lambda gpu, dtype: check_rounding(gpu, SEED, HEAD_DIM, dtype, "int8"),
    "writes in fp8": lambda gpu, dtype: check_rounding(gpu, SEED, HEAD_DIM, dtype, "fp8"),
}
"""Each for a type of 16 bits, and for a process of its own."""


def small_errors(gpu: Gpu, dtype: torch.dtype, piece: str = "") -> Errors:
    """A piece, or every op once on small trees."""
    if piece:
        yield from PIECES[piece](gpu, dtype)
    else:
        yield from one_round(gpu, SEED, dtype, (HEAD_DIM,), ROWS)
    gpu.synchronize()


def check_small(gpu: Gpu, dtype: torch.dtype, piece: str = "") -> list[str]:
    """Print each op as soon as its result is there: a process that dies has told how far it came.

    Returns:
        What is wrong.
    """
    bad = []
    for name, error in small_errors(gpu, dtype, piece):
        print(f"computed: {name}", flush=True)
        if not error <= LIMITS[dtype]:
            bad.append(f"{name} in {dtype} is off by {error:.2e}")
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dtype", choices=TYPES)
    parser.add_argument("piece", nargs="?", choices=PIECES)
    arguments = parser.parse_args()
    if bad := check_small(Gpu(), TYPES[arguments.dtype], arguments.piece or ""):
        sys.exit(f"wrong results: {bad}")


if __name__ == "__main__":
    main()
