"""Linear layers of a small model: prepacked weights (`trunkline`) against `torch.nn.functional.linear` (`torch`).

    python benchmarks/linear.py [--quick] [--json PATH] [--beside LIBRARY [--int8]]

The layers are those of a random Llama of 110 M parameters (hidden 768, 12 layers, 12 heads, 4 KV heads, MLP 2,048,
vocabulary 16,384), whole and as one of two tensor-parallel ranks holds them; `gate_up` includes its activation.
`model` runs the linear layers of all 12 blocks and the output layer in order, as a decode step does. Weights are
rotated: each call finds its weights out of the caches.

Beside the time stands its share of the limit: the larger of the weights' bytes over the read bandwidth and the
multiplications over the matmul rate, both measured in the same run. One thread is measured in CPU time, two in
wall time. With `--beside` there is only this: `model` by this build and by another one (`builds.py`), from one row
to 2,048; with `--int8` over layers in int8, all but the output layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from builds import add_beside, compare, of_builds
from report import Report, argument_parser, median_seconds
from torch import Tensor

from trunkline.kernels import native
from trunkline.kernels.cpu import DenseOps
from trunkline.kernels.ops import KernelCounters, PackedLinear, Quantisation

BLOCKS: Final = 12
ROTATED_BYTES: Final = 160 << 20
"""Several times the last-level cache."""
STREAM_BYTES: Final = 256 << 20
CEILING_SIZE: Final = 2048


@dataclass(frozen=True)
class Shape:
    """A layer; `width` and `out` as one rank has them, `out` before gating."""

    name: str
    width: int
    out: int
    gated: bool = False


def shapes(tp: int) -> list[Shape]:
    return [
        Shape("qkv", 768, 1280 // tp),
        Shape("out", 768 // tp, 768),
        Shape("gate_up", 768, 4096 // tp, gated=True),
        Shape("down", 2048 // tp, 768),
        Shape("head", 768, 16384 // tp),
    ]


@dataclass(frozen=True)
class Limits:
    """What the machine gives, measured in this run."""

    read_bytes_per_s: float
    flop_per_s: float

    def seconds(self, weight_bytes: int, flop: int) -> float:
        return max(weight_bytes / self.read_bytes_per_s, flop / self.flop_per_s)


class Arm:
    """One thread count: our ops with that many threads, and torch set to it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        module: Any = native.library()
        self.ops = DenseOps(module, native.NativeContext(None, threads), KernelCounters())
        torch.set_num_threads(threads)

    def median_seconds(self, calls: list[Callable[[], object]], budget_s: float) -> tuple[list[float], int]:
        """Medians of calls that take turns."""
        return median_seconds(calls, self.threads, budget_s)


class Layer:
    """A layer in several copies, for both implementations; quantised for ours only."""

    def __init__(
        self, arm: Arm, shape: Shape, dtype: torch.dtype, copies: int, quantisation: Quantisation = ""
    ) -> None:
        self.shape = shape
        self._quantisation = quantisation
        weight = (torch.randn(shape.out, shape.width) * shape.width**-0.5).to(dtype)
        self.weights = [weight.clone() for _ in range(copies)]
        self.packed = [self._pack(arm, weight) for _ in range(copies)]
        self.weight_bytes = weight.nbytes

    def _pack(self, arm: Arm, weight: Tensor) -> PackedLinear:
        return (
            arm.ops.pack_gated_linear(weight, None, "silu", self._quantisation)
            if self.shape.gated
            else arm.ops.pack_linear(weight, None, self._quantisation)
        )

    def torch_call(self, x: Tensor, copy: int) -> Tensor:
        y = F.linear(x, self.weights[copy])
        if not self.shape.gated:
            return y
        gate, up = y.chunk(2, dim=1)
        return F.silu(gate).mul_(up)

    def own_call(self, arm: Arm, x: Tensor, copy: int) -> Tensor:
        return (
            arm.ops.gated_linear(x, self.packed[copy])
            if self.shape.gated
            else arm.ops.linear(x, self.packed[copy])
        )


class LimitMeter:
    """What the machine gives at this moment; a shared one gives more or less from one second to the next."""

    def __init__(self, arm: Arm, dtype: torch.dtype) -> None:
        self._arm = arm
        self._stream = torch.ones(STREAM_BYTES // 4)
        self._square = Layer(arm, Shape("square", CEILING_SIZE, CEILING_SIZE), dtype, 1)
        self._x = torch.randn(CEILING_SIZE, CEILING_SIZE).to(dtype)

    def read(self, budget_s: float = 0.5) -> tuple[float, int]:
        """Return bytes per second of the fastest of torch's reductions, and how often each ran."""
        calls: list[Callable[[], object]] = [
            lambda: self._stream.sum(),
            lambda: torch.dot(self._stream, self._stream),
        ]
        seconds, runs = self._arm.median_seconds(calls, budget_s)
        return STREAM_BYTES / min(seconds), runs

    def multiply(self, budget_s: float = 1.0) -> tuple[list[float], int]:
        """Return floating-point operations per second of large squares, torch's and ours; how often each ran."""
        calls: list[Callable[[], object]] = [
            lambda: self._square.torch_call(self._x, 0),
            lambda: self._square.own_call(self._arm, self._x, 0),
        ]
        seconds, runs = self._arm.median_seconds(calls, budget_s)
        return [2 * CEILING_SIZE**3 / taken for taken in seconds], runs


def measure_limits(arm: Arm, dtype: torch.dtype, report: Report) -> Limits:
    """Reading: the fastest of torch's reductions. Matmul: the faster of torch's and ours on large squares."""
    meter = LimitMeter(arm, dtype)
    read, runs = meter.read()
    case = {"dtype": str(dtype).removeprefix("torch."), "threads": arm.threads}
    report.add({"impl": "read_bandwidth", **case}, "rate", read / 1e9, "GB/s", runs)
    rates, runs = meter.multiply()
    for impl, rate in zip(("torch", "trunkline"), rates, strict=True):
        report.add({"impl": impl, "layer": "2048 cubed", **case}, "rate", rate / 1e9, "GFLOP/s", runs)
    return Limits(read, max(rates))


def add_pair(report: Report, case: dict[str, Any], seconds: list[float], limit_s: float, runs: int) -> None:
    for impl, taken in zip(("torch", "trunkline"), seconds, strict=True):
        report.add({"impl": impl, **case}, "time", taken * 1e6, "us", runs)
        report.add({"impl": impl, **case}, "share_of_limit", 100 * limit_s / taken, "%", runs)


def run_layer(arm: Arm, layer: Layer, rows: int, dtype: torch.dtype, budget_s: float) -> tuple[list[float], int]:
    x = torch.randn(rows, layer.shape.width).to(dtype)
    # A large batch takes so long that the next copy is out of the second-level cache anyway.
    copies = range(len(layer.packed) if rows <= 64 else 2)

    def torch_calls() -> None:
        for copy in copies:
            layer.torch_call(x, copy)

    def own_calls() -> None:
        for copy in copies:
            layer.own_call(arm, x, copy)

    seconds, runs = arm.median_seconds([torch_calls, own_calls], budget_s)
    return [taken / len(copies) for taken in seconds], runs * len(copies)


def run_model(
    arm: Arm, layers: list[Layer], rows: int, dtype: torch.dtype, budget_s: float
) -> tuple[list[float], int]:
    """The linear layers of a whole step; each layer has a copy per block, the head one."""
    inputs = {width: torch.randn(rows, width).to(dtype) for width in {layer.shape.width for layer in layers}}
    order = [(layer, block) for block in range(BLOCKS) for layer in layers[:-1]] + [(layers[-1], 0)]

    def torch_calls() -> None:
        for layer, block in order:
            layer.torch_call(inputs[layer.shape.width], block)

    def own_calls() -> None:
        for layer, block in order:
            layer.own_call(arm, inputs[layer.shape.width], block)

    return arm.median_seconds([torch_calls, own_calls], 4 * budget_s)


def builds(beside: Path, threads: int, dtype: torch.dtype, arguments: argparse.Namespace, report: Report) -> None:
    def make() -> tuple[Arm, list[Layer]]:
        arm, (*blocks, head) = Arm(threads), shapes(1)
        layers = [Layer(arm, shape, dtype, BLOCKS, "int8" if arguments.int8 else "") for shape in blocks]
        return arm, [*layers, Layer(arm, head, dtype, 1)]

    this, other = of_builds(beside, make)
    clock = time.process_time if threads == 1 else time.perf_counter
    for rows in (1, 32, 512) if arguments.quick else (1, 8, 32, 128, 512, 2048):
        inputs = {shape.width: torch.randn(rows, shape.width).to(dtype) for shape in shapes(1)}

        def seconds(arm: Arm, layers: list[Layer], inputs: dict[int, Tensor] = inputs) -> float:
            begun = clock()
            for block in range(BLOCKS):
                for layer in layers[:-1]:
                    layer.own_call(arm, inputs[layer.shape.width], block)
            layers[-1].own_call(arm, inputs[layers[-1].shape.width], 0)
            return clock() - begun

        case = {"layer": "model", "dtype": str(dtype).removeprefix("torch."), "rows": rows, "threads": threads}
        case |= {"weights": "int8"} if arguments.int8 else {}
        rounds = max(6, 40 // (1 + rows // 32)) if arguments.quick else max(20, 200 // (1 + rows // 32))
        compare(report, case, partial(seconds, *this), partial(seconds, *other), rounds)


def run_arm(arm: Arm, dtype: torch.dtype, arguments: argparse.Namespace, report: Report) -> None:
    limits = measure_limits(arm, dtype, report)
    batches = (1, 8, 32, 512) if arguments.quick else (1, 2, 4, 8, 16, 32, 33, 128, 512, 2048)
    budget_s = 0.05 if arguments.quick else 0.2
    for tp in (1, 2):
        if arguments.quick and tp == 2:
            continue
        layers = []
        for shape in shapes(tp):
            weight_bytes = shape.width * shape.out * dtype.itemsize
            layers.append(Layer(arm, shape, dtype, max(BLOCKS, -(-ROTATED_BYTES // weight_bytes))))
            for rows in batches:
                seconds, runs = run_layer(arm, layers[-1], rows, dtype, budget_s)
                case = {"layer": shape.name, "tp": tp, "dtype": str(dtype).removeprefix("torch.")}
                limit_s = limits.seconds(weight_bytes, 2 * rows * shape.width * shape.out)
                add_pair(report, {**case, "rows": rows, "threads": arm.threads}, seconds, limit_s, runs)
        total = BLOCKS * sum(layer.weight_bytes for layer in layers[:-1]) + layers[-1].weight_bytes
        for rows in (rows for rows in batches if rows <= 64):
            seconds, runs = run_model(arm, layers, rows, dtype, budget_s)
            case = {"layer": "model", "tp": tp, "dtype": str(dtype).removeprefix("torch.")}
            limit_s = limits.seconds(total, 2 * rows * total // dtype.itemsize)
            add_pair(report, {**case, "rows": rows, "threads": arm.threads}, seconds, limit_s, runs)


def run(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    report = Report("linear")
    for dtype in (torch.bfloat16,) if arguments.quick else (torch.bfloat16, torch.float32):
        for threads in (1, 2):
            if arguments.beside is not None:
                builds(arguments.beside, threads, dtype, arguments, report)
            else:
                run_arm(Arm(threads), dtype, arguments, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    add_beside(parser)
    parser.add_argument(
        "--int8", action="store_true", help="with --beside: layers in int8, but for the output layer"
    )
    given = parser.parse_args()
    if given.int8 and given.beside is None:
        parser.error("--int8 needs --beside")
    run(given)
