"""What attention over latents costs beside attention over keys and values: decode attention on a CPU.

    python benchmarks/latent_attention.py [--quick] [--json PATH]

`attention_time` is decode attention of one layer over a row of so many tokens, bfloat16, one thread, CPU time; the
KV of all layers together is larger than the caches, and all forms take turns. `time_ratio` compares with keys and
values of as many heads, `token_bytes` is what is kept of a token in a layer. `of_peak` is the arithmetic of scores
and results per second over that of products within the first-level cache, measured beside it.

`score_error` (standard deviation, of scores whose own is 2.8) and `result_error` (relative) say what a rounding of
stored rows does to attention: rows of normal numbers, of which two of the rotary part and two of the latent are so
many times larger (`outliers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from quantisation import CHUNK, CPU, int32
from report import Report, argument_parser, median_seconds
from torch import Tensor

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.native import library
from trunkline.kernels.ops import AttentionSpec
from trunkline.kernels.plan import Segments, build_decode_plan
from trunkline.kernels.quantised_kv import from_rows, to_rows
from trunkline.kvstore.chunk_format import ChunkFormat, kv_format, latent_format
from trunkline.worker.model.decoder import make_kv_pool

POOL_BYTES: Final = 150e6
LENGTHS: Final = (1024, 4096, 16384)
HEADS: Final = (16, 32, 128)
"""DeepSeek V2-Lite's, and parts of V3's on four ranks and on one."""
ROTARY: Final = 64
LATENT: Final = 512
PEAK_REPEATS: Final = 20_000


class Form(NamedTuple):
    """What is kept of a token, for so many query heads."""

    name: str
    kv_heads: int
    """0: latents."""
    key: int
    """Numbers of a key."""
    value: int
    kv_dtype: str = "auto"

    def chunk(self, layers: int) -> ChunkFormat:
        if self.kv_heads:
            return kv_format((layers, self.kv_heads, CHUNK, self.key), "bfloat16")
        return latent_format((layers, CHUNK, self.key - self.value, self.value), "bfloat16", self.kv_dtype)

    def spec(self, heads: int) -> AttentionSpec:
        latent = 0 if self.kv_heads else self.value
        return AttentionSpec(heads, self.kv_heads or 1, self.key, self.key**-0.5, latent_dim=latent)


def forms(heads: int) -> list[Form]:
    return [
        Form("keys and values", heads, 128, 128),
        Form("2 KV heads", 2, 128, 128),
        Form("latents", 0, 576, 512),
        Form("latents in int8", 0, 576, 512, "int8"),
    ]


def attention(kernels: CpuKernels, form: Form, heads: int, tokens: int) -> Callable[[], object]:
    """Decode attention of a row, over one layer after the other."""
    blocks = tokens // CHUNK
    layers = max(1, min(16, int(POOL_BYTES / (blocks * form.chunk(1).chunk_bytes))))
    pool = make_kv_pool(blocks, form.chunk(layers), CPU)
    for block in range(blocks):  # as sealed chunks
        rows = torch.randn(1, *pool.format.shape[:-1], form.key).to(torch.bfloat16)
        if pool.format.is_quantised:
            rows = to_rows(rows, "int8", form.value)
        kernels.scatter_blocks(pool, int32([block]), range(layers), rows)
    each, zeros = np.arange(blocks, dtype=np.int32), int32([0] * blocks)
    segments = Segments(zeros, each, each, zeros, zeros + CHUNK, each * CHUNK, zeros)
    plan = build_decode_plan(segments, int32([tokens - 1]), int32(np.zeros((0, 4))), CHUNK)
    spec, layer = form.spec(heads), 0
    q = torch.randn(1, heads, form.key).to(torch.bfloat16)
    out = torch.empty(1, heads, form.value, dtype=torch.bfloat16)

    def step() -> None:
        nonlocal layer
        layer = (layer + 1) % layers
        kernels.decode_attention(plan, q, pool, layer, spec, out)

    return step


def peak(kernels: CpuKernels) -> float:
    """Return floating-point operations per second of products within the first-level cache."""
    like, rates, module = torch.empty(1, dtype=torch.bfloat16), [], cast("Any", library())
    for _ in range(5):
        start = time.process_time()
        done = float(module.limit_multiply(kernels.context.handle, like, PEAK_REPEATS))
        rates.append(done / (time.process_time() - start))
    return sorted(rates)[len(rates) // 2]


def roundings(rows: Tensor) -> dict[str, Tensor]:
    """Return what is left of rows by ways to keep them."""
    ours, in_bfloat16 = from_rows(to_rows(rows, "int8", LATENT), torch.float32, LATENT), rows.bfloat16().float()

    def int8(x: Tensor) -> Tensor:
        return from_rows(to_rows(x, "int8"), torch.float32)

    groups = [int8(part) for part in torch.split(rows[:, ROTARY:], 128, dim=1)]
    return {
        "bfloat16": in_bfloat16,
        "int8, one scale": int8(rows),
        "int8, a scale for each part": torch.cat((int8(rows[:, :ROTARY]), int8(rows[:, ROTARY:])), dim=1),
        "rotary part bfloat16, latent int8": torch.cat((in_bfloat16[:, :ROTARY], int8(rows[:, ROTARY:])), dim=1),
        "rotary part 16 bits, latent int8": ours,
        "the same, a scale for 128 of the latent": torch.cat((ours[:, :ROTARY], *groups), dim=1),
    }


def run_roundings(report: Report) -> None:
    for outliers in ((1, 1), (10, 1), (100, 1), (10, 10)):
        rows, q = torch.randn(2048, ROTARY + LATENT), torch.randn(16, ROTARY + LATENT)
        rows[:, [3, 40]] *= outliers[0]
        rows[:, [70, 300]] *= outliers[1]
        for part in (slice(0, ROTARY), slice(ROTARY, None)):
            q[:, part] *= 2.0 / (q[:, part] @ rows[:, part].T).std()
        scores = q @ rows.T
        exact = scores.softmax(dim=1) @ rows[:, ROTARY:]
        for name, kept in roundings(rows).items():
            own = q @ kept.T
            result = own.softmax(dim=1) @ kept[:, ROTARY:]
            case = {"outliers": f"{outliers[0]}, {outliers[1]}", "rows": name}
            report.add(case, "score_error", float((own - scores).std()), "", 1)
            report.add(case, "result_error", 100 * float((result - exact).norm() / exact.norm()), "%", 1)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report, kernels = Report("latent_attention"), CpuKernels(threads=1)
    with torch.inference_mode():
        run_roundings(report)
        for heads in HEADS[:1] if arguments.quick else HEADS:
            for tokens in LENGTHS[:2] if arguments.quick else LENGTHS:
                chosen = forms(heads)
                calls = [attention(kernels, form, heads, tokens) for form in chosen]
                seconds, runs = median_seconds(calls, 1, 0.5 if arguments.quick else 3.0)
                limit = peak(kernels)
                for form, taken in zip(chosen, seconds, strict=True):
                    case = {"heads": heads, "tokens": tokens, "kv": form.name}
                    report.add(case, "attention_time", taken * 1e3, "ms", runs)
                    report.add(case, "time_ratio", taken / seconds[0], "x", runs)
                    report.add(case, "token_bytes", form.chunk(1).layer_token_bytes, "B", 1)
                    done = 2.0 * heads * tokens * (form.key + form.value)
                    report.add(case, "of_peak", 100 * done / taken / limit, "%", runs)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
