"""What attention over latents costs beside attention over keys and values: decode attention on a CPU.

    python benchmarks/latent_attention.py [--quick] [--json PATH]

`attention_time` is decode attention of one layer over a row of so many tokens, bfloat16, one thread, CPU time; the
KV of all layers together is larger than the caches, and all forms take turns. `time_ratio` compares with keys and
values of as many heads, `token_bytes` is what is kept of a token in a layer. `of_peak` is the arithmetic of scores
and results per second over that of products within the first-level cache, measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from quantisation import CHUNK, CPU, int32
from report import Report, argument_parser, median_seconds

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.native import library
from trunkline.kernels.ops import AttentionSpec
from trunkline.kernels.plan import Segments, build_decode_plan
from trunkline.kvstore.chunk_format import ChunkFormat, kv_format, latent_format
from trunkline.worker.model.decoder import make_kv_pool

POOL_BYTES: Final = 150e6
LENGTHS: Final = (1024, 4096, 16384)
HEADS: Final = (16, 32, 128)
"""DeepSeek V2-Lite's, and parts of V3's on four ranks and on one."""
PEAK_REPEATS: Final = 20_000


class Form(NamedTuple):
    """What is kept of a token, for so many query heads."""

    name: str
    kv_heads: int
    """0: latents."""
    key: int
    """Numbers of a key."""
    value: int

    def chunk(self, layers: int) -> ChunkFormat:
        if self.kv_heads:
            return kv_format((layers, self.kv_heads, CHUNK, self.key), "bfloat16")
        return latent_format((layers, CHUNK, self.key - self.value, self.value), "bfloat16")

    def spec(self, heads: int) -> AttentionSpec:
        latent = 0 if self.kv_heads else self.value
        return AttentionSpec(heads, self.kv_heads or 1, self.key, self.key**-0.5, latent_dim=latent)


def forms(heads: int) -> list[Form]:
    return [
        Form("keys and values", heads, 128, 128),
        Form("2 KV heads", 2, 128, 128),
        Form("latents", 0, 576, 512),
    ]


def attention(kernels: CpuKernels, form: Form, heads: int, tokens: int) -> Callable[[], object]:
    """Decode attention of a row, over one layer after the other."""
    blocks = tokens // CHUNK
    layers = max(1, min(16, int(POOL_BYTES / (blocks * form.chunk(1).chunk_bytes))))
    pool = make_kv_pool(blocks, form.chunk(layers), CPU)
    for block in range(blocks):  # as sealed chunks
        rows = torch.randn(1, *pool.format.shape).to(torch.bfloat16)
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


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report, kernels = Report("latent_attention"), CpuKernels(threads=1)
    with torch.inference_mode():
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
