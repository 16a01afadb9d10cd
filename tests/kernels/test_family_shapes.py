"""Attention in the shapes that the supported model families have, small batches on every implementation.

The random tests of the ops use head sizes that are multiples of 16; these are the shapes of particular models.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from kernels.attention_cases import Case, check_decode, check_prefill, make_case, own_tokens
from kernels.forests import Forest, Shape, behind_prefix, random_forest
from kernels.implementations import CPU, DTYPES, make_kernels
from kernels.oracle import alibi_slopes, make_spec
from kernels.pairwise import pairwise

from trunkline.kernels.ops import AttentionSpec

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
    "deepseek-v2-lite": make_spec(16, 1, 576, rotary_dim=64, latent_dim=512),
    "tiny latent": make_spec(3, 1, 20, rotary_dim=8, latent_dim=12),
    "tiny latent, window": make_spec(2, 1, 42, rotary_dim=10, latent_dim=32, window=9, soft_cap=5.0),
    "tiny latent, last words not full": make_spec(3, 1, 24, rotary_dim=6, latent_dim=18),
    "tiny": make_spec(4, 2, 8),
    "tiny partial": make_spec(4, 1, 8, rotary_dim=2),
    "tiny 16": make_spec(4, 4, 16, rotary_dim=4),
    "tiny 20": make_spec(3, 1, 20, soft_cap=5.0),
    "tiny 20 partial": make_spec(2, 2, 20, rotary_dim=10, window=7),
    "tiny 36": make_spec(2, 1, 36, rotary_dim=0, alibi_slopes=alibi_slopes(2), window=9),
}

LATENTS: Final = [family for family, spec in FAMILIES.items() if spec.latent_dim]


@functools.lru_cache(maxsize=4)
def family_forest(chunk_size: int, rows: int, shifts: bool) -> Forest:
    rng = np.random.default_rng(chunk_size + rows)
    shape = Shape(rows, chunk_size, depth_max=3, private_max=2, shifts=shifts, holes=shifts, modules=1)
    return random_forest(rng, shape)


def forest_for(spec: AttentionSpec, chunk_size: int) -> Forest:
    """Shifted parts too, where positions are relative."""
    return family_forest(chunk_size, 5, spec.inverse_frequencies is not None or spec.alibi_slopes is not None)


@functools.lru_cache(maxsize=8)
def family_case(family: str, chunk_size: int, dtype: torch.dtype, kv_dtype: str, is_prefill: bool) -> Case:
    spec = FAMILIES[family]
    forest = forest_for(spec, chunk_size)
    counts = [min(own_tokens(row), 40) for row in forest.rows] if is_prefill else None
    return make_case(forest, spec, dtype, chunk_size, counts, kv_dtype)


@pairwise(family=list(FAMILIES), implementation=CPU, dtype=DTYPES, chunk_size=(16, 64))
def test_attention(family: str, implementation: str, dtype: torch.dtype, chunk_size: int) -> None:
    check(family, implementation, dtype, chunk_size, "auto")


@pairwise(family=LATENTS, implementation=CPU, dtype=DTYPES, chunk_size=(5, 16, 64))
def test_latents_in_int8(family: str, implementation: str, dtype: torch.dtype, chunk_size: int) -> None:
    check(family, implementation, dtype, chunk_size, "int8")


def check(family: str, implementation: str, dtype: torch.dtype, chunk_size: int, kv_dtype: str) -> None:
    seed = chunk_size // 16
    for is_prefill, attention in ((False, check_decode), (True, check_prefill)):
        attention(make_kernels(implementation), family_case(family, chunk_size, dtype, kv_dtype, is_prefill), seed)


@functools.lru_cache(maxsize=4)
def windowed_case(window: int, soft_cap: float, is_prefill: bool) -> Case:
    """Rows that end at every place of a block, behind two shared ones; as prompts, all tokens are queries."""
    forest = behind_prefix(8, 2, range(1, 9))
    spec = make_spec(4, 2, 16, window=window, soft_cap=soft_cap)
    counts = [row.tokens for row in forest.rows] if is_prefill else None
    return make_case(forest, spec, torch.float32, window, counts)


@pairwise(window=range(1, 26), implementation=CPU)
def test_every_window(window: int, implementation: str) -> None:
    """One token, around a block, around the whole context, and more."""
    soft_cap = (0.0, 3.0)[(window + CPU.index(implementation)) % 2]
    check_decode(make_kernels(implementation), windowed_case(window, soft_cap, False), window)
    check_prefill(make_kernels(implementation), windowed_case(window, soft_cap, True), window)
