"""Copies between GPU and main memory, alone and beside decoding (part `tiers`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from gpu_attention import decode_calls, make_sets
from gpu_cases import CHUNK, Cell
from gpu_device import Gpu, Output, Visit

from trunkline.kernels.ops import KvPool


@dataclass(frozen=True)
class Copies:
    """What is copied, and what is decoded meanwhile."""

    blocks: int = 64
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    cell: Cell = Cell(2048, 1024, 32, 8)  # noqa: RUF009 (frozen)


COPIES: Final = Copies()


def measure_tiers(gpu: Gpu, out: Output, visit: Visit, copies: Copies = COPIES) -> None:
    """GB/s of blocks saved and loaded, and what that costs decode attention at the same time."""
    del visit
    shape = (copies.blocks, copies.layers, 2, copies.kv_heads, CHUNK, copies.head_dim)
    pool = KvPool.wrap(torch.empty(shape, dtype=torch.bfloat16, device=gpu.device).normal_())
    host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=gpu.device.type == "cuda")
    moved, kernels = np.arange(copies.blocks, dtype=np.int32), gpu.kernels()
    arguments = (pool, moved, range(copies.layers), host, moved)
    ways = {"save": partial(kernels.gather_slots, *arguments), "load": partial(kernels.scatter_slots, *arguments)}
    size = pool.data.numel() * pool.data.element_size()
    before = pool.data.clone()
    for name, call in ways.items():
        out.add({"copy": name, "beside": "nothing"}, "rate", size / gpu.time_us(call, runs=5) / 1e3, "GB/s", 5)
    if not torch.equal(pool.data, before):
        out.problem("blocks that were saved and loaded are not what they were")
    sets = make_sets(gpu, out, copies.cell)
    if not sets:
        return
    decoding = gpu.kernels()
    graph = gpu.graph(decode_calls(decoding, copies.cell, sets), [decoding])
    alone = gpu.time_us(graph.replay, runs=7)
    for name, call in ways.items():
        # Decoding lasts as long as the copies about.
        replays = max(1, int(gpu.time_us(call, runs=3) / alone))

        def decode(times: int = replays) -> None:
            for _ in range(times):
                graph.replay()

        decoded, copied = gpu.together_us(decode, call)
        case = {"copy": name, "beside": "decode attention"}
        out.add(case, "rate", size / copied / 1e3, "GB/s", 1)
        out.add(case, "decode attention, of its time alone", decoded / replays / alone, "", 1)
