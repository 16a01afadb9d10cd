"""One rank of the whole engine for the GPU benchmark: generates greedily and prints the token ids as JSON.

    python benchmarks/gpu_engine.py MODEL DEVICE KERNELS DTYPE KV_DTYPE RANK TP COLLECTIVES RENDEZVOUS

COLLECTIVES is `none`, or a value of `WorkerConfig.collectives` to force them. The plans are those of a controller
with one request after the other: prompts with a common prefix, computed once, then all rows decode together.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from trunkline.kvstore.chunks import blocks_for, pack_int32, unpack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Join, Sampling, StepPlan
from trunkline.worker.runner import Runner
from trunkline.worker.tensor_parallel import TensorParallel

CHUNK = 16
PREFIX = 6 * CHUNK
STREAMS = 5
NEW_TOKENS = 48


def generate(runner: Runner, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    prefix = rng.integers(5, vocabulary, PREFIX).tolist()
    prompts = [prefix + rng.integers(5, vocabulary, 3 + 7 * i).tolist() for i in range(STREAMS)]
    shared, used, tables = list(range(PREFIX // CHUNK)), PREFIX // CHUNK, []
    for prompt in prompts:
        own = blocks_for(len(prompt) + NEW_TOKENS, CHUNK) - len(shared)
        tables.append([*shared, *range(used, used + own)])
        used += own
    outputs: list[list[int]] = [[] for _ in prompts]
    step = 0
    for index, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        step += 1
        start = PREFIX if index else 0
        join = Join(index + 1, pack_int32(prompt), 0, len(prompt), pack_int32(table), Sampling(temperature=0))
        entry = pack_int32([index + 1, start, len(prompt) - start, start, 1])
        result = runner.execute(StepPlan(step, 1, joins=[join], prefill=entry, rows=b"", runs=b""))
        outputs[index].append(int(unpack_int32(result.tokens)[0]) if result else 0)
    rows, runs = pack_int32(list(range(1, STREAMS + 1))), pack_int32([0, STREAMS, 0, len(shared)])
    for new in range(NEW_TOKENS - 1):
        step += 1
        changed = {"rows": rows, "runs": runs} if new == 0 else {}
        result = runner.execute(StepPlan(step, 1, **changed))  # type: ignore[arg-type]
        for output, token in zip(
            outputs, unpack_int32(result.tokens).tolist() if result else [0] * STREAMS, strict=True
        ):
            output.append(token)
    return outputs


def main() -> None:
    model, device, kernels, dtype, kv_dtype, rank, tp, collectives, rendezvous = sys.argv[1:10]
    forced = collectives != "none"
    config = WorkerConfig(
        model=model,
        plan_endpoint="",
        report_endpoint="",
        rank=int(rank),
        tp=int(tp),
        device=device,
        gpu=int(rank) % max(1, torch.cuda.device_count()) if device == "cuda" else None,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kernels=kernels,
        collectives=collectives if forced else "auto",
        chunk_size=CHUNK,
        pool_blocks=256,
        rendezvous=rendezvous if forced else "",
    )
    connect = TensorParallel.connect if forced else TensorParallel.join
    runner = load_runner(config, lambda *_: None, connect=connect)
    outputs = generate(runner, 4000)
    calls = runner.kernels.counters.calls
    runner.close()
    if int(rank) == 0:
        print(json.dumps({"tokens": outputs, "kernels": runner.kernels.name, "calls": calls}))


if __name__ == "__main__":
    main()
