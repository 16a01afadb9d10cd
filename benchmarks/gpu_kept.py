"""Parts of the GPU benchmark: pools whose KV is kept in 8 bits, and whether the kernels round it to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from gpu_device import Gpu
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, KvPool, QkNorm, make_angles
from trunkline.kernels.plan import WritePlan
from trunkline.kernels.quantised_kv import to_rows, vectors_of
from trunkline.kvstore.chunk_format import kv_format


def kept(data: Tensor, kv_dtype: str) -> KvPool:
    """A pool around keys and values `[blocks, layers, 2, KV heads, chunk, head_dim]`, kept in a type of
    `KV_DTYPES`."""
    if kv_dtype == "auto":
        return KvPool.wrap(data)
    _, layers, _, heads, chunk, head_dim = data.shape
    dtype = str(data.dtype).removeprefix("torch.")
    return KvPool.wrap(to_rows(data, kv_dtype), kv_format((layers, heads, chunk, head_dim), dtype, kv_dtype))


def widest(pool: KvPool) -> KvPool:
    """What a pool keeps, in float64."""
    return KvPool.wrap(vectors_of(pool, pool.data, torch.float64))


def over(kv_dtype: str) -> str:
    """What is added to the name of an op over such a pool."""
    return "" if kv_dtype == "auto" else f"_over_{kv_dtype}"


def check_rounding(
    gpu: Gpu, seed: int, head_dim: int, dtype: torch.dtype, kv_dtype: str
) -> Iterator[tuple[str, float]]:
    """Rows in 8 bits are those of the keys, behind norm and rotation, and of the values, to the bit; and copies of
    parts of them. Infinite if any byte differs."""
    generator = torch.Generator().manual_seed(seed)
    spec, tokens = AttentionSpec(6, 2, head_dim, 1.0), 19
    qkv = (torch.randn(tokens, 10 * head_dim, generator=generator) * 2.0 ** (seed % 40 - 20)).to(gpu.device, dtype)
    q_weight, k_weight = torch.randn(2, head_dim, generator=generator).to(gpu.device, dtype)
    norm = QkNorm(q_weight, k_weight, 1e-5)
    frequencies = 1000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = make_angles(torch.arange(tokens) * 7, frequencies)
    angles = type(angles)(*(x.to(gpu.device, dtype) for x in angles))
    pool = kept(torch.zeros(4, 2, 2, 2, 16, head_dim, dtype=dtype, device=gpu.device), kv_dtype)
    expected, slots = pool.data.clone(), np.random.default_rng(seed).permutation(4 * 16)[:tokens].astype(np.int32)
    kernels = gpu.kernels()
    kernels.write_kv(WritePlan(16, slots), qkv, angles, pool, 1, spec, norm)  # keys change where they lie
    rows = to_rows(qkv.view(tokens, 10, head_dim)[:, 6:].cpu(), kv_dtype).view(tokens, 2, 2, -1).to(gpu.device)
    expected[slots // 16, 1, :, :, slots % 16] = rows
    kernels.copy_blocks(pool, np.array([[0, 3, 3, 9]], dtype=np.int32))
    expected[3, ..., 3:12, :] = expected[0, ..., 3:12, :]
    gpu.synchronize()
    yield f"write_kv_in_{kv_dtype}", 0.0 if torch.equal(pool.data, expected) else float("inf")
