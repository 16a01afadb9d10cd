"""The description of a chunk agrees with itself, and with tensors of its shape."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from seeds import seeds

from trunkline.kvstore.chunk_format import KV_DTYPES, NUMBER_BYTES, kv_format, latent_format, type_name
from trunkline.kvstore.shards import HeadShard, rows_of


def test_keys_and_values() -> None:
    chunk = kv_format((2, 4, 64, 128), "bfloat16")
    assert (chunk.shape, chunk.element) == ((2, 2, 4, 64, 128), "bfloat16")
    assert (chunk.row_bytes, chunk.head_bytes, chunk.layer_token_bytes) == (256, 64 * 256, 2 * 4 * 256)
    assert chunk.chunk_bytes == 2 * 2 * 4 * 64 * 256
    assert [chunk.of_rank(tp).heads for tp in (1, 2, 4, 8)] == [4, 2, 1, 1]


@pytest.mark.parametrize(("kv_dtype", "element"), [("int8", "int8"), ("fp8", "uint8")])
def test_8_bits_have_their_scales_in_the_chunk(kv_dtype: str, element: str) -> None:
    chunk = kv_format((2, 4, 64, 128), "bfloat16", kv_dtype)
    assert (chunk.shape, chunk.element) == ((2, 2, 4, 64, 132), element)
    assert (chunk.row_bytes, chunk.is_quantised, chunk.computed) == (132, True, "bfloat16")
    assert chunk.name == type_name("bfloat16", kv_dtype) == f"bfloat16 with {kv_dtype} KV"
    assert kv_format((2, 4, 64, 128), "bfloat16").name == type_name("bfloat16", "auto") == "bfloat16"
    assert chunk.chunk_bytes / kv_format((2, 4, 64, 128), "bfloat16").chunk_bytes == 132 / 256


def test_latent_attention_fits() -> None:
    """One latent and one rotary part per token and layer, whole on every rank."""
    chunk = latent_format((3, 64, 64, 512), "bfloat16")
    assert (chunk.is_quantised, chunk.name, chunk.stretches) == (False, "bfloat16", 3)
    assert chunk.text != latent_format((3, 64, 32, 544), "bfloat16").text  # as many numbers, other ones
    assert (chunk.shape, chunk.element, chunk.row_bytes) == ((3, 1, 1, 64, 576), "bfloat16", 1152)
    assert chunk.of_rank(4) == chunk
    assert HeadShard(1, 3, 4).pieces(2)[0].rank == 1  # taken whole from either


def test_latents_in_int8() -> None:
    """The latent in 8 bits, the rotary part in 16, a scale for each."""
    chunk = latent_format((3, 64, 64, 512), "bfloat16", "int8")
    assert (chunk.shape, chunk.element, chunk.row_bytes) == ((3, 1, 1, 64, 648), "int8", 2 * 64 + 512 + 8)
    assert (chunk.is_quantised, chunk.latent, chunk.name) == (True, 512, "bfloat16 with int8 KV")
    assert chunk.of_rank(4) == chunk
    assert chunk.text != latent_format((3, 64, 32, 576), "bfloat16", "int8").text  # as many bytes


@pytest.mark.parametrize("seed", seeds(20))
def test_rows_are_the_tensor(seed: int) -> None:
    chance = random.Random(seed)
    dtype, kv_dtype = chance.choice(["float32", "bfloat16", "float16"]), chance.choice(KV_DTYPES)
    sizes = (
        chance.randint(1, 4),
        chance.choice([1, 2, 4, 8]),
        chance.choice([1, 4, 16]),
        2 * chance.randint(1, 20),
    )
    chunk = kv_format(sizes, dtype, kv_dtype)
    data = np.random.default_rng(seed).integers(0, 256, chunk.chunk_bytes, dtype=np.uint8)
    plain = data.reshape(*chunk.shape[:-1], chunk.row_bytes)
    assert chunk.shape[-1] * NUMBER_BYTES[chunk.element] == chunk.row_bytes
    rows = rows_of(data.data, chunk)
    layer, band, head = (chance.randrange(size) for size in chunk.shape[:3])
    assert (rows[layer * len(chunk.bands) + band, head] == plain[layer, band, head].reshape(-1)).all()
    tp = chance.choice([tp for tp in (1, 2, 4, 8) if chunk.heads % tp == 0])
    assert chunk.of_rank(tp).chunk_bytes * tp == chunk.chunk_bytes
    assert replace(chunk.of_rank(tp), heads=chunk.heads) == chunk
