"""Parts of the GPU benchmark: the cells of ChunkAttention's Table 3, their buffers, and what is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from gpu_device import Gpu, Replay
from gpu_errors import relative_error
from gpu_kept import kept
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, KvPool
from trunkline.kernels.plan import DecodePlan, Segments, build_decode_plan
from trunkline.kernels.quantised_kv import SCALE_BYTES, vectors_of
from trunkline.kvstore.chunks import Int32Array

CHUNK: Final = 64
ROTATED_SETS_MIN: Final = 4
"""Buffers used in turn, so that small cells do not measure the cache."""
CACHE_TIMES: Final = 3
"""How often what a rotation reads must fill the L2 cache."""


@dataclass(frozen=True)
class Cell:
    """`batch` rows of `n_p` tokens of which the first `n_s` are shared; computed in float16."""

    n_p: int
    n_s: int
    heads: int
    kv_heads: int
    batch: int = 32
    head_dim: int = 128
    kv_dtype: str = "auto"
    """In which KV is kept, one of `KV_DTYPES`."""

    @property
    def name(self) -> str:
        name = "MHA" if self.heads == self.kv_heads else f"GQA {self.heads}/{self.kv_heads}"
        return name if self.kv_dtype == "auto" else f"{name}, {self.kv_dtype} KV"

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values."""
        row = 2 * self.head_dim if self.kv_dtype == "auto" else self.head_dim + SCALE_BYTES
        return 2 * self.kv_heads * row

    @property
    def tail(self) -> int:
        """Own tokens of a row; a decoding row always has one at least (its own last), also where all is shared."""
        return max(1, self.n_p - self.n_s)

    @property
    def blocks(self) -> int:
        return self.n_s // CHUNK + self.batch * -(-self.tail // CHUNK)

    @property
    def pool_bytes(self) -> int:
        return self.blocks * CHUNK * self.token_bytes

    @property
    def floor_bytes(self) -> int:
        """What a step has to read: shared KV once."""
        return (self.n_s + self.batch * (self.n_p - self.n_s)) * self.token_bytes

    def rotated_sets(self, cache_bytes: int) -> int:
        return max(ROTATED_SETS_MIN, -(-CACHE_TIMES * cache_bytes // self.floor_bytes))

    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    def tables(self) -> Int32Array:
        """int32 `[batch, blocks of a row]`."""
        shared = np.arange(self.n_s // CHUNK, dtype=np.int32)
        own = np.arange(len(shared), self.blocks, dtype=np.int32).reshape(self.batch, -1)
        return np.concatenate([np.broadcast_to(shared, (self.batch, len(shared))), own], axis=1)

    @property
    def last_page_tokens(self) -> int:
        return (self.tail - 1) % CHUNK + 1

    def plan(self) -> DecodePlan:
        tables = self.tables()
        width = tables.shape[1]
        count = np.full(tables.shape, CHUNK, dtype=np.int32)
        count[:, -1] = self.last_page_tokens
        index = np.tile(np.arange(width, dtype=np.int32), self.batch)
        zero = np.zeros(tables.size, dtype=np.int32)
        segments = Segments(
            row=np.repeat(np.arange(self.batch, dtype=np.int32), width),
            table_index=index,
            block=tables.reshape(-1),
            first=zero,
            count=count.reshape(-1),
            base=index * np.int32(CHUNK),
            shift=zero,
        )
        run = [[0, self.batch, 0, self.n_s // CHUNK]] if self.n_s else []
        position = np.full(self.batch, self.n_s + self.tail - 1, dtype=np.int32)
        return build_decode_plan(segments, position, np.array(run, dtype=np.int32).reshape(-1, 4), CHUNK)


TABLE_3: Final = tuple(
    Cell(n_p, n_p * quarters // 4, 32, kv_heads)
    for kv_heads in (32, 8)
    for n_p in (1024, 2048, 4096)
    for quarters in (0, 2, 3, 4)
)

ACCEPT_US: Final[dict[tuple[int, int], tuple[int, ...]]] = {
    (32, 1024): (165, 90, 52, 14),
    (32, 2048): (321, 170, 95, 19),
    (32, 4096): (633, 331, 180, 29),
    (8, 1024): (48, 29, 20, 10),
    (8, 2048): (87, 49, 31, 12),
    (8, 4096): (165, 90, 52, 14),
}
GOAL_US: Final[dict[tuple[int, int], tuple[int, ...]]] = {
    (32, 1024): (145, 78, 44, 10),
    (32, 2048): (284, 149, 82, 15),
    (32, 4096): (561, 292, 158, 23),
    (8, 1024): (41, 24, 16, 7),
    (8, 2048): (75, 42, 25, 8),
    (8, 4096): (145, 78, 44, 10),
}
"""Set for an H200, by (KV heads, n_p), for n_s = 0, 1/2, 3/4 and all."""


def target_us(table: dict[tuple[int, int], tuple[int, ...]], cell: Cell) -> int:
    return table[cell.kv_heads, cell.n_p][(0, 2, 3, 4).index(4 * cell.n_s // cell.n_p)]


@dataclass(frozen=True)
class Buffers:
    """One set of what a step reads and writes."""

    pool: KvPool
    q: Tensor
    out: Tensor


def make_buffers(gpu: Gpu, cell: Cell, seed: int) -> Buffers:
    generator = torch.Generator(device=gpu.device).manual_seed(seed)
    shape = (cell.blocks, 1, 2, cell.kv_heads, CHUNK, cell.head_dim)
    data = torch.empty(shape, dtype=torch.float16, device=gpu.device)
    data.normal_(generator=generator)
    q = torch.empty(cell.batch, cell.heads, cell.head_dim, dtype=torch.float16, device=gpu.device)
    q.normal_(generator=generator)
    return Buffers(kept(data, cell.kv_dtype), q, torch.full_like(q, float("nan")))


def exact_rows(cell: Cell, buffers: Buffers, rows: list[int]) -> Tensor:
    """float64 `[rows, heads, head_dim]`: plain attention of some rows."""
    group, results = cell.heads // cell.kv_heads, []
    length = cell.n_s + cell.tail
    for row in rows:
        blocks = torch.from_numpy(cell.tables()[row].astype(np.int64)).to(buffers.q.device)
        stored = vectors_of(buffers.pool, buffers.pool.data[blocks, 0], torch.float64)
        kv = stored.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        k, v = kv.repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,htd->ht", buffers.q[row].double(), k) * cell.head_dim**-0.5
        results.append(torch.einsum("ht,htd->hd", scores.softmax(dim=-1), v))
    return torch.stack(results)


def replay_error(gpu: Gpu, graph: Replay, cell: Cell, sets: list[Buffers]) -> float:
    """Relative error of what a replay writes, of some rows of some sets; infinite if anything is not written."""
    for buffers in sets:
        buffers.out.fill_(float("nan"))
    graph.replay()
    gpu.synchronize()
    if not all(bool(buffers.out.isfinite().all()) for buffers in sets):
        return float("inf")
    rows = [0, cell.batch // 2, cell.batch - 1]
    return max(relative_error(each.out[rows], exact_rows(cell, each, rows)) for each in (sets[0], sets[-1]))
