"""What KV in 8 bits costs and brings: the demo model's perplexity, decode attention, and bytes.

    python benchmarks/kv_dtype.py [--quick] [--json PATH] [--parts perplexity,attention]

`perplexity` is that of the demo model on text it was not trained on, in separate windows of 512 tokens, computed
by the worker's decoder; every token attends to KV as it is kept. `kl_divergence` is the mean over the tokens of
KL(float32 || this) for the same form of the model. `token_bytes` is the KV of one token, all layers. The forms
are keys and values, and latents, as which latent_model.py writes the demo model: once exactly, so that latents
hold its values, and once with the slowest 12 of 32 pairs of its keys in the latents, without positions, which is
another model.

`attention_time` is decode attention of one layer, one thread, in CPU time: a row of so many tokens whose KV,
with that of the other layers, is larger than the caches; all formats take turns. `gain` is the time of KV as it
is computed over that in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from latent_model import write_latent
from quantisation import CHUNK, CPU, DTYPES, WINDOW, Model, heldout_windows, int32, losses
from report import Report, argument_parser, median_seconds

from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import AttentionSpec, Kernels
from trunkline.kernels.plan import Segments, build_decode_plan
from trunkline.kernels.quantised_kv import to_rows
from trunkline.kvstore.chunk_format import KV_DTYPES, kv_format
from trunkline.worker.model.decoder import make_kv_pool

POOL_BYTES: Final = 150e6
"""Bytes of the KV of all layers, in bfloat16."""
SHAPES: Final = ((8, 8, 128), (32, 8, 128), (8, 2, 64))
"""Heads, KV heads, head size: all heads with KV of their own; four to one; the demo model's."""
LENGTHS: Final = (1024, 4096, 16384)
LATENTS: Final = {"latents": 0, "latents, slow keys too": 12}
"""Pairs of each key that latents hold."""
PARTS: Final = ("perplexity", "attention")


def demo_models(kernels: Kernels, scratch: Path) -> Iterator[tuple[str, str, str, Model]]:
    """Yield the form of the demo model, its type, that of its KV, and the model."""
    blocks = WINDOW // CHUNK
    for dtype, kv_dtype in product(DTYPES, KV_DTYPES):
        model = Model(DEMO_FOLDER, dtype, "", kernels, blocks, kv_dtype=kv_dtype)
        yield "keys, values", dtype, kv_dtype, model
    for form, slow_pairs in LATENTS.items():
        folder = scratch / str(slow_pairs)
        change = write_latent(DEMO_FOLDER, folder, slow_pairs)
        for dtype, kv_dtype in product(DTYPES, ("auto", "int8")):
            yield (
                form,
                dtype,
                kv_dtype,
                Model(folder, dtype, "", kernels, blocks, kv_dtype=kv_dtype, change=change),
            )


def run_perplexity(kernels: Kernels, quick: bool, report: Report) -> None:
    windows = heldout_windows(12 if quick else None)
    with TemporaryDirectory() as scratch:
        for form, group in groupby(demo_models(kernels, Path(scratch)), lambda found: found[0]):
            found = list(group)
            kept = zip(found, losses([model for *_, model in found], windows), strict=True)
            for (_, dtype, kv_dtype, model), loss in kept:
                case = {"model": "demo", "kept": form, "dtype": dtype, "kv": kv_dtype, "tokens": loss.tokens}
                report.add(case, "perplexity", math.exp(loss.nats / loss.tokens), "", 1)
                report.add(case, "kl_divergence", 1e6 * loss.divergence / loss.tokens, "1e-6 nats", 1)
                report.add(case, "token_bytes", model.decoder.pool.format.chunk_bytes / CHUNK, "B", 1)


def attention(kernels: Kernels, kv_dtype: str, shape: tuple[int, int, int], tokens: int) -> Callable[[], object]:
    """Decode attention of a row, over one layer after the other."""
    heads, kv_heads, d = shape
    blocks = tokens // CHUNK
    layers = max(1, min(16, int(POOL_BYTES / (tokens * kv_heads * d * 4))))
    form = kv_format((layers, kv_heads, CHUNK, d), "bfloat16", kv_dtype)
    pool = make_kv_pool(blocks, form, CPU)
    for block in range(blocks):  # as sealed chunks
        vectors = torch.randn(1, *form.shape[:-1], d).to(torch.bfloat16)
        rows = to_rows(vectors, kv_dtype) if form.is_quantised else vectors
        kernels.scatter_blocks(pool, int32([block]), range(layers), rows)
    each, zeros = np.arange(blocks, dtype=np.int32), int32([0] * blocks)
    segments = Segments(zeros, each, each, zeros, zeros + CHUNK, each * CHUNK, zeros)
    plan = build_decode_plan(segments, int32([tokens - 1]), int32(np.zeros((0, 4))), CHUNK)
    q = torch.randn(1, heads, d).to(torch.bfloat16)
    spec, out, layer = AttentionSpec(heads, kv_heads, d, d**-0.5), torch.empty_like(q), 0

    def step() -> None:
        nonlocal layer
        layer = (layer + 1) % layers
        kernels.decode_attention(plan, q, pool, layer, spec, out)

    return step


def run_attention(kernels: Kernels, quick: bool, report: Report) -> None:
    for shape in SHAPES:
        for tokens in LENGTHS:
            calls = [attention(kernels, kv_dtype, shape, tokens) for kv_dtype in KV_DTYPES]
            seconds, runs = median_seconds(calls, 1, 0.5 if quick else 3.0)
            for kv_dtype, taken in zip(KV_DTYPES, seconds, strict=True):
                case = {"heads": f"{shape[0]}/{shape[1]}", "d": shape[2], "tokens": tokens, "kv": kv_dtype}
                report.add(case, "attention_time", taken * 1e3, "ms", runs)
                report.add(case, "gain", seconds[0] / taken, "x", runs)


def main() -> None:
    arguments = argument_parser(__doc__, PARTS).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report = Report("kv_dtype")
    kernels = load_kernels("cpu", "cpu", 1)
    with torch.inference_mode():
        if "perplexity" in arguments.parts:
            run_perplexity(kernels, arguments.quick, report)
        if "attention" in arguments.parts:
            run_attention(kernels, arguments.quick, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
