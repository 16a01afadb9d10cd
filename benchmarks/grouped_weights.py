"""Layers over weights in groups of 4 and 8 bits: what exact products and inputs rounded to int8 cost and bring.

    python benchmarks/grouped_weights.py [--quick] [--json PATH]

`perplexity` is that of the demo model on text that it was not trained on, as in `quantisation.py`, with the
layers' matrices in groups of 32 inputs (8 bits; 4 bits with an offset), rounded to the nearest codes, or in fp8
with a scale for each 128 × 128 of them.
`kl_divergence` is the mean over the tokens of KL(float32 || this). `rounded`: layers round their inputs to int8
and multiply integers.

`time` is one call of a layer of 4,096 outputs and 2,048 inputs in bfloat16, weights out of the caches, of plain,
int8 and grouped weights in turn, the least of several CPU times of one thread; `bytes_rate` what it reads of its
weights per second, beside `read_bandwidth` of the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from quantisation import DTYPES, Model, heldout_windows, losses
from report import Report, parse_arguments
from torch import Tensor

from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.kernels.float8 import float8
from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import Activation, Kernels, PackedLinear

BLOCKS: Final = 8
ROWS, WIDTH, COPIES = 4096, 2048, 8
FORMS: Final = ("8 bits", "8 bits, rounded", "fp8", "4 bits", "4 bits, rounded")
FLOAT8_BLOCK: Final = 128
FLOAT8_MAX: Final = 448.0


def in_groups(weight: Tensor, form: str) -> GroupedWeight:
    """Return a weight in groups of 32 or blocks of 128 × 128, rounded to the nearest codes."""
    if form == "fp8":
        return in_blocks(weight)
    parts = weight.float().view(len(weight), -1, 32)
    rounded = form.endswith("rounded")
    if form.startswith("8"):
        scale = (parts.abs().amax(dim=2) / 127).clamp_min(1e-6).half()
        codes = (parts / scale.float()[..., None]).round().clamp(-127, 127) + 128
        packed = codes.flatten(1).to(torch.uint8)
        return GroupedWeight(packed, 8, 32, scale, weight.dtype, zero=128, int8_inputs=rounded)
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    scale, offset = ((high - low) / 15).clamp_min(1e-6).half(), (-low).half()
    codes = ((parts + offset.float()[..., None]) / scale.float()[..., None]).round().clamp(0, 15)
    packed = codes.flatten(1).to(torch.uint8)
    return GroupedWeight(packed, 4, 32, scale, weight.dtype, offset=offset, int8_inputs=rounded)


def in_blocks(weight: Tensor) -> GroupedWeight:
    """Return a weight in fp8; the last blocks may be smaller."""
    (rows, width), block = weight.shape, FLOAT8_BLOCK
    padded = F.pad(weight.float(), (0, -width % block, 0, -rows % block))
    largest = padded.view(-1, block, padded.shape[1] // block, block).abs().amax(dim=(1, 3))
    scale = (largest / FLOAT8_MAX).clamp_min(1e-12).repeat_interleave(block, dim=0)[:rows]
    group = math.gcd(block, width)
    scale = scale.repeat_interleave(block // group, dim=1)[:, : width // group]
    codes = weight.float() / scale.repeat_interleave(group, dim=1)
    return float8(codes.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn), scale, weight.dtype)


class GroupingKernels:
    """Kernels that bring weights into groups before they pack them, where they are asked to quantise them."""

    def __init__(self, kernels: Kernels, form: str) -> None:
        self._kernels, self._form = kernels, form

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, quantisation: str = "") -> PackedLinear:
        return self._kernels.pack_linear(in_groups(weight, self._form) if quantisation else weight, bias)

    def pack_gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, quantisation: str = ""
    ) -> PackedLinear:
        grouped = in_groups(weight, self._form) if quantisation else weight
        return self._kernels.pack_gated_linear(grouped, bias, activation)


def run_perplexity(kernels: Kernels, windows: list[Tensor], report: Report) -> None:
    truth = Model(DEMO_FOLDER, "float32", "", kernels, BLOCKS)
    for dtype in DTYPES:
        models = [truth, Model(DEMO_FOLDER, dtype, "", kernels, BLOCKS)]
        for form in FORMS:
            grouping: Any = GroupingKernels(kernels, form)
            models.append(Model(DEMO_FOLDER, dtype, "int8", grouping, BLOCKS))
        for form, loss in zip(("", *FORMS), losses(models, windows)[1:], strict=True):
            case = {"model": "demo", "dtype": dtype, "weights": form or dtype, "tokens": loss.tokens}
            report.add(case, "perplexity", math.exp(loss.nats / loss.tokens), "", 1)
            report.add(case, "kl_divergence", 1e6 * loss.divergence / loss.tokens, "1e-6 nats", 1)


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def run_speed(kernels: Kernels, quick: bool, report: Report) -> None:
    weight = (torch.randn(ROWS, WIDTH) * WIDTH**-0.5).bfloat16()
    packed = {"bfloat16": [kernels.pack_linear(weight, None) for _ in range(COPIES)]}
    packed["int8"] = [kernels.pack_linear(weight, None, "int8") for _ in range(COPIES)]
    for form in FORMS:
        packed[form] = [kernels.pack_linear(in_groups(weight, form), None) for _ in range(COPIES)]
    stream = torch.ones(64 << 20)
    for rows in (1, 8) if quick else (1, 2, 4, 8, 16, 32, 128):
        x, rounds = torch.randn(rows, WIDTH).bfloat16(), 3 if quick else 9
        least, read = dict.fromkeys(packed, math.inf), math.inf

        def step(layers: list[PackedLinear], x: Tensor = x) -> None:
            for layer in layers:
                kernels.linear(x, layer)

        for _ in range(rounds):
            read = min(read, cpu_seconds(stream.sum))
            for form, layers in packed.items():
                least[form] = min(least[form], cpu_seconds(partial(step, layers)) / COPIES)
        report.add({"weights": "read_bandwidth", "rows": rows}, "rate", stream.nbytes / read / 1e9, "GB/s", rounds)
        for form, seconds in least.items():
            case = {"weights": form, "rows": rows}
            report.add(case, "time", seconds * 1e6, "us", rounds)
            report.add(case, "gain", least["bfloat16"] / seconds, "x", rounds)
            report.add(case, "bytes_rate", packed[form][0].packed_bytes / seconds / 1e9, "GB/s", rounds)


def main() -> None:
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report = Report("grouped_weights")
    kernels = load_kernels("cpu", "cpu", 1)
    with torch.inference_mode():
        run_speed(kernels, arguments.quick, report)
        run_perplexity(kernels, heldout_windows(12 if arguments.quick else None), report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
