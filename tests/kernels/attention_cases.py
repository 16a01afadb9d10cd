"""Attention cases with their exact results, and how an implementation is run on one and compared."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from kernels.forests import FILLINGS, Forest, Row, Shape, fill_pool, pool_data, random_forest, wrap
from kernels.oracle import assert_as_exact_as, attention_oracle, has_positions, random_spec
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, Kernels, KvPool
from trunkline.kernels.plan import DecodePlan, PrefillPlan
from trunkline.kernels.quantised_kv import from_rows

CHUNKS: Final = (1, 2, 3, 5, 8, 16, 24, 32, 64, 100, 128, 256)
"""Chunk sizes: odd ones, multiples of 16 (which CPU kernels pack) and others."""


@dataclass(frozen=True)
class Case:
    """A batch, its pool's contents in plain order, and what should come out."""

    forest: Forest
    counts: list[int]
    """How many of each row's last own tokens are queries; 1 each in decode."""
    spec: AttentionSpec
    data: Tensor
    q: Tensor
    exact: Tensor
    plain: Tensor
    kv_dtype: str = "auto"
    """In which type pools keep the data; results are those of what they keep."""

    def assert_result(self, out: Tensor) -> None:
        """Compare a result. Two sums are rounded: that of a score, over the head, and that of values, over tokens.

        An error of a score is a relative error of its weight; it grows with the size of the queries.
        """
        score_terms = self.spec.head_dim * float(self.q.double().square().mean())
        terms = max(row.tokens for row in self.forest.rows) + round(score_terms)
        assert_as_exact_as(out, self.exact, self.plain, sum_terms=terms)


def make_case(
    forest: Forest,
    spec: AttentionSpec,
    dtype: torch.dtype,
    seed: int,
    counts: list[int] | None = None,
    kv_dtype: str = "auto",
) -> Case:
    counts = [1] * len(forest.rows) if counts is None else counts
    data = pool_data(forest, spec, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    # Mild to peaked softmax: partial results whose peaks differ are where merges go wrong.
    size = (0.3, 1.0, 3.0)[seed % 3]
    q = (size * torch.randn(sum(counts), spec.heads, spec.head_dim, generator=generator)).to(dtype)
    expected = attention_oracle(forest, counts, q, kept(data, kv_dtype, spec.latent_dim), 1, spec)
    return Case(forest, counts, spec, data, q, *expected, kv_dtype)


def kept(data: Tensor, kv_dtype: str, latent: int = 0) -> Tensor:
    """The keys and values that a pool keeps of `data`, in float32 if it rounds them."""
    return data if kv_dtype == "auto" else from_rows(wrap(data, kv_dtype, latent).data, torch.float32, latent)


def with_rounded_kv(case: Case) -> Case:
    """The case, held against PyTorch over keys and values that are rounded to the queries' type, too: for kernels
    that are given such keys and values."""
    data = kept(case.data, case.kv_dtype).to(case.q.dtype)
    _, plain = attention_oracle(case.forest, case.counts, case.q, data, 1, case.spec)
    return replace(case, plain=plain)


def own_tokens(row: Row) -> int:
    """Tokens at the row's end that lie at consecutive positions."""
    positions = row.key_positions()[::-1]
    return int((positions == row.position - np.arange(len(positions))).cumprod().sum())


@functools.lru_cache(maxsize=8)
def random_decode_case(
    seed: int,
    chunk_size: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: str = "auto",
    *,
    rows: int | None = None,
) -> Case:
    rng = np.random.default_rng(seed)
    spec, longest = random_spec(rng, head_dim), 900 // chunk_size
    most = 5 if chunk_size >= 100 or head_dim == 256 else 20
    shape = Shape(
        rows or int(rng.integers(1, most)),
        chunk_size,
        depth_max=min(8, longest),
        private_max=min(3, longest),
        shifts=has_positions(spec) and bool(rng.random() < 0.5),
        holes=bool(rng.random() < 0.5),
        modules=int(rng.choice([0, 0, 1, 3])),
    )
    return make_case(random_forest(rng, shape), spec, dtype, seed, kv_dtype=kv_dtype)


@functools.lru_cache(maxsize=8)
def random_prefill_case(
    seed: int, chunk_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: str = "auto"
) -> Case:
    rng = np.random.default_rng(seed)
    spec, longest = random_spec(rng, head_dim), 500 // chunk_size
    shape = Shape(
        int(rng.integers(1, 5)),
        chunk_size,
        depth_max=min(6, longest),
        private_max=min(8, longest),
        shifts=has_positions(spec) and bool(rng.random() < 0.5),
        holes=bool(rng.random() < 0.5),
        modules=int(rng.choice([0, 1])),
    )
    forest = random_forest(rng, shape)
    counts = [int(rng.integers(1, own_tokens(row) + 1)) for row in forest.rows]
    return make_case(forest, spec, dtype, seed, counts, kv_dtype)


def decode(
    kernels: Kernels,
    case: Case,
    pool: KvPool | None = None,
    plan: DecodePlan | None = None,
    *,
    strided: bool = False,
) -> Tensor:
    """Run decode attention with everything around its operands poisoned; without `pool` on the plain data."""
    plan = plan or case.forest.decode_plan()
    return _run(kernels.decode_attention, plan, case, pool or wrap(case.data), strided)


def prefill(
    kernels: Kernels,
    case: Case,
    pool: KvPool | None = None,
    plan: PrefillPlan | None = None,
    *,
    strided: bool = False,
) -> Tensor:
    """As `decode`, for prefill attention."""
    plan = plan or case.forest.prefill_plan(case.counts)
    return _run(kernels.prefill_attention, plan, case, pool or wrap(case.data), strided)


def _run(attention: Any, plan: Any, case: Case, pool: KvPool, strided: bool) -> Tensor:
    queries, heads, head_dim = case.q.shape
    width = heads + case.spec.bands * case.spec.kv_heads if strided else heads
    around = torch.full((queries + 4, width, head_dim), float("nan"), dtype=case.q.dtype)
    q = around[2:-2, :heads]
    q.copy_(case.q)
    results = torch.full((queries + 4, heads, case.spec.value_dim), float("nan"), dtype=case.q.dtype)
    attention(plan, q, pool, 1, case.spec, results[2:-2])
    assert bool(results[:2].isnan().all() & results[-2:].isnan().all()), "written outside of its rows"
    return results[2:-2]


def check_decode(kernels: Kernels, case: Case, seed: int) -> None:
    """Run decode attention on a pool that was filled in one of three ways; compare results and counters."""
    filling = FILLINGS[seed % 5 % 3]
    pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(seed), filling, case.kv_dtype)
    case.assert_result(decode(kernels, case, pool, strided=seed % 2 == 0))
    counters, spec = kernels.counters, case.spec
    assert (counters.calls["decode_attention"], counters.decode_plans) == (1, 1)
    # Sharing that does not pay, and blocks outside a window, may be left; nothing is read twice for one row.
    assert counters.decode_tokens_read <= sum(row.tokens for row in case.forest.rows)
    assert counters.decode_tokens_read >= case.forest.distinct_tokens() or spec.window
    assert counters.decode_bytes_read == counters.decode_tokens_read * pool.format.layer_token_bytes


def check_prefill(kernels: Kernels, case: Case, seed: int) -> None:
    """As `check_decode`, for prefill attention."""
    filling = FILLINGS[seed % 5 % 3]
    pool = fill_pool(kernels, case.data, case.spec, np.random.default_rng(seed), filling, case.kv_dtype)
    case.assert_result(prefill(kernels, case, pool, strided=seed % 2 == 0))
    assert kernels.counters.calls["prefill_attention"] == 1
    most = sum(row.tokens for row in case.forest.rows)
    assert kernels.counters.prefill_tokens_read == most or case.spec.window
