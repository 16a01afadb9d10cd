"""Attention in the shapes that the supported model families have, small batches on every implementation.

The random tests of the ops vary everything at once over head sizes that are multiples of 16; here stands what
particular models need.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch
from kernels import test_decode, test_prefill, test_write_kv
from kernels.forests import Forest, Range, Shape, one_row, random_forest
from kernels.implementations import DTYPES
from kernels.oracle import alibi_slopes, make_spec
from kernels.test_prefill import own_tokens

from trunkline.kernels.ops import AttentionSpec, Kernels

FAMILIES: Final = {
    "gpt2": make_spec(4, 4, 64, rotary_dim=0),
    "opt-2.7b": make_spec(2, 2, 80, rotary_dim=0),
    "llama": make_spec(4, 2, 128),
    "llama-3.2-1b": make_spec(8, 2, 64),
    "mistral": make_spec(8, 2, 128, window=24),
    "falcon-7b": make_spec(71, 1, 64),
    "falcon-40b": make_spec(32, 2, 64),
    "falcon-rw": make_spec(8, 8, 64, rotary_dim=0, alibi_slopes=alibi_slopes(8) / 8),
    "mpt": make_spec(4, 4, 128, rotary_dim=0, alibi_slopes=alibi_slopes(4)),
    "gemma-2-2b": make_spec(4, 2, 256, soft_cap=50.0),
    "gemma-2 local": make_spec(4, 2, 256, soft_cap=50.0, window=20),
    "gemma-2-27b": replace(make_spec(4, 2, 128, soft_cap=50.0), scale=144**-0.5),
    "gemma-3-1b": replace(make_spec(4, 1, 256, window=17), scale=256**-0.5),
    "pythia-70m": make_spec(8, 8, 64, rotary_dim=16),
    "pythia-2.8b": make_spec(4, 4, 80, rotary_dim=20),
    "neox-20b": make_spec(4, 4, 96, rotary_dim=24),
    "tiny": make_spec(4, 2, 8),
    "tiny partial": make_spec(4, 1, 8, rotary_dim=2),
    "tiny 16": make_spec(4, 4, 16, rotary_dim=4),
    "tiny 20": make_spec(3, 1, 20, soft_cap=5.0),
    "tiny 20 partial": make_spec(2, 2, 20, rotary_dim=10, window=7),
    "tiny 36": make_spec(2, 1, 36, rotary_dim=0, alibi_slopes=alibi_slopes(2), window=9),
}


@functools.lru_cache(maxsize=4)
def family_forest(chunk_size: int, rows: int, shifts: bool) -> Forest:
    rng = np.random.default_rng(chunk_size + rows)
    shape = Shape(rows, chunk_size, depth_max=3, private_max=2, shifts=shifts, holes=shifts, modules=1)
    return random_forest(rng, shape)


def forest_for(spec: AttentionSpec, chunk_size: int) -> Forest:
    """Shifted parts too, where positions are relative."""
    return family_forest(chunk_size, 5, spec.inverse_frequencies is not None or spec.alibi_slopes is not None)


@functools.lru_cache(maxsize=4)
def decode_case(family: str, chunk_size: int, dtype: torch.dtype) -> test_decode.Case:
    spec = FAMILIES[family]
    return test_decode.make_case(forest_for(spec, chunk_size), spec, dtype, chunk_size)


@functools.lru_cache(maxsize=4)
def prefill_case(family: str, chunk_size: int, dtype: torch.dtype) -> test_prefill.Case:
    spec = FAMILIES[family]
    forest = forest_for(spec, chunk_size)
    counts = [min(own_tokens(row), 40) for row in forest.rows]
    return test_prefill.make_case(forest, counts, spec, dtype, chunk_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_attention(family: str, chunk_size: int, dtype: torch.dtype, kernels: Kernels) -> None:
    test_decode.check(kernels, decode_case(family, chunk_size, dtype), chunk_size // 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_attention(family: str, chunk_size: int, dtype: torch.dtype, kernels: Kernels) -> None:
    test_prefill.check(kernels, prefill_case(family, chunk_size, dtype), chunk_size // 16)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (71, 1, 64, 64),
        (8, 8, 64, 16),
        (4, 4, 80, 20),
        (4, 4, 96, 24),
        (4, 1, 8, 2),
        (4, 4, 16, 4),
        (3, 1, 20, 20),
        (2, 2, 20, 10),
        (2, 1, 36, 6),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_stored(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, normed: bool, kernels: Kernels
) -> None:
    test_write_kv.test_splits_normalises_rotates_and_stores(
        dtype, heads, kv_heads, head_dim, rotary_dim, normed, kernels
    )


@functools.lru_cache(maxsize=2)
def windowed_case(window: int, soft_cap: float) -> test_decode.Case:
    """Rows that end at every place of a block, behind two shared ones."""
    chunk_size, shared = 8, 2
    forest = Forest(chunk_size, [], np.array([[0, 8, 0, shared]], dtype=np.int32), shared + 8)
    for index in range(8):
        row = one_row(chunk_size, shared * chunk_size)
        row.ranges.append(Range(shared, shared + index, 0, index + 1, shared * chunk_size, 0))
        row.position += index + 1
        forest.rows.append(row)
    spec = make_spec(4, 2, 16, window=window, soft_cap=soft_cap)
    return test_decode.make_case(forest, spec, torch.float32, window)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("window", range(1, 26))
def test_every_window(window: int, soft_cap: float, kernels: Kernels) -> None:
    """One token, around a block, around the whole context, and more."""
    case = windowed_case(window, soft_cap)
    test_decode.check(kernels, case, window)
    counts = [row.tokens for row in case.forest.rows]
    # Prompts of 17 to 24 tokens, all of them queries.
    prompts = test_prefill.make_case(case.forest, counts, case.spec, torch.float32, window)
    kernels.counters.reset()
    test_prefill.check(kernels, prompts, window)
