"""Writes, copies, gathers and scatters in any order, against a pool that is nothing but a tensor.

Kernels may keep blocks that they wrote in an order of their own, so contents are compared through `gather_blocks`
and through attention, never by looking into the pool.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import torch
from kernels.forests import Forest, Range, Row, contents, no_runs, same_bits, wrap
from kernels.implementations import CPU, CUDA, DTYPES, REFERENCE, make_kernels
from kernels.oracle import assert_as_exact_as, attention_oracle, make_spec
from kernels.pairwise import pairwise
from torch import Tensor

from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import AttentionSpec, Kernels, KvPool
from trunkline.kernels.plan import WritePlan
from trunkline.kernels.quantised_kv import from_rows, to_rows
from trunkline.kvstore.chunk_format import KV_DTYPES
from trunkline.kvstore.chunks import Int32Array

BLOCKS: Final = 6
LAYERS: Final = 3
CHUNKS: Final = (1, 2, 7, 8, 16, 32, 64, 128)


class Model:
    """An implementation's pool beside the plain one; every operation goes to both."""

    def __init__(
        self,
        kernels: Kernels,
        spec: AttentionSpec,
        chunk_size: int,
        dtype: torch.dtype,
        seed: int,
        kv_dtype: str = "auto",
    ) -> None:
        self.kernels = kernels
        self.spec = spec
        self.rng = np.random.default_rng(seed)
        shape = (BLOCKS, LAYERS, spec.bands, spec.kv_heads, chunk_size, spec.head_dim)
        self.dtype = dtype
        self.pool = wrap(torch.full(shape, float("nan"), dtype=dtype), kv_dtype, spec.latent_dim)
        self.plain = self.pool.data.clone()

    @property
    def chunk_size(self) -> int:
        return self.pool.chunk_size

    def random(self, *shape: int) -> Tensor:
        """Numbers that tell positions apart."""
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32)).to(self.dtype)

    def rows(self, vectors: Tensor) -> Tensor:
        """What the pool keeps of keys or values `[..., head_dim]`."""
        form = self.pool.format
        return to_rows(vectors, form.row[0].dtype, self.spec.latent_dim) if form.is_quantised else vectors

    def vectors(self) -> Tensor:
        """The keys and values that are kept."""
        if not self.pool.format.is_quantised:
            return self.plain
        return from_rows(self.plain, torch.float32, self.spec.latent_dim)

    def write(self, slots: list[int], layers: range) -> None:
        """Store random keys and values; -1 is skipped."""
        spec, plan = self.spec, WritePlan(self.chunk_size, np.array(slots, dtype=np.int32))
        for layer in layers:
            qkv = self.random(len(slots), spec.qkv_width)
            heads = qkv.clone().view(len(slots), -1, spec.head_dim)[:, spec.heads :]
            for token, slot in enumerate(slots):
                if slot >= 0:
                    kv = heads[token].view(spec.bands, spec.kv_heads, spec.head_dim)
                    self.plain[slot // self.chunk_size, layer, :, :, slot % self.chunk_size] = self.rows(kv)
            self.kernels.write_kv(plan, qkv, None, self.pool, layer, spec)

    def fill(self, block: int) -> None:
        """A whole block, in pieces as prefill and decode steps would write it."""
        slots = [block * self.chunk_size + offset for offset in range(self.chunk_size)]
        cut = int(self.rng.integers(0, len(slots) + 1))
        for part in (slots[:cut], slots[cut:]):
            if part:
                self.write(part, range(LAYERS))

    def overwrite(self) -> None:
        """Some tokens anywhere, in full blocks and others; some layers."""
        total = BLOCKS * self.chunk_size
        count = int(self.rng.integers(1, min(total, 40) + 1))
        slots = self.rng.choice(total, size=count, replace=False).tolist()
        start = int(self.rng.integers(0, LAYERS))
        self.write(
            [slot if self.rng.random() < 0.9 else -1 for slot in slots],
            range(start, int(self.rng.integers(start + 1, LAYERS + 1))),
        )

    def copy(self) -> None:
        """Token ranges from some blocks to others, several to one destination and from one source."""
        order = self.rng.permutation(BLOCKS)
        sources, destinations = order[: BLOCKS // 2], order[BLOCKS // 2 :]
        copies = []
        for destination in destinations[: int(self.rng.integers(1, len(destinations) + 1))].tolist():
            first = int(self.rng.integers(0, self.chunk_size))
            count = int(self.rng.integers(1, self.chunk_size - first + 1))
            if self.rng.random() < 0.3:
                first, count = 0, self.chunk_size
            copies.append([int(self.rng.choice(sources)), destination, first, count])
        self.kernels.copy_blocks(self.pool, np.array(copies, dtype=np.int32))
        for source, destination, first, count in copies:
            chosen = slice(first, first + count)
            self.plain[destination, ..., chosen, :] = self.plain[source, ..., chosen, :]

    def scatter(self) -> None:
        blocks = self.rng.permutation(BLOCKS)[: int(self.rng.integers(1, BLOCKS))].astype(np.int32)
        layers = self.some_layers()
        data = self.rows(self.random(len(blocks), len(layers), *self.plain.shape[2:-1], self.spec.head_dim))
        if self.rng.random() < 0.5:
            self.kernels.scatter_blocks(self.pool, blocks, layers, data.clone())
        else:
            host, slots = self.host_memory(len(blocks))
            host[torch.from_numpy(slots).long(), layers.start : layers.stop] = data
            self.kernels.scatter_slots(self.pool, blocks, layers, host, slots)
        for index, block in enumerate(blocks.tolist()):
            self.plain[block, layers.start : layers.stop] = data[index]

    def gather(self) -> None:
        blocks = self.rng.permutation(BLOCKS)[: int(self.rng.integers(1, BLOCKS))].astype(np.int32)
        layers = self.some_layers()
        out = torch.full((len(blocks), len(layers), *self.plain.shape[2:]), 7.0, dtype=self.plain.dtype)
        self.kernels.gather_blocks(self.pool, blocks, layers, out)
        want = self.plain[torch.from_numpy(blocks).long(), layers.start : layers.stop]
        assert same_bits(out, want), f"blocks {blocks.tolist()}, layers {layers}"
        host, slots = self.host_memory(len(blocks))
        expected = host.clone()
        expected[torch.from_numpy(slots).long(), layers.start : layers.stop] = want
        self.kernels.gather_slots(self.pool, blocks, layers, host, slots)
        assert same_bits(host, expected), f"blocks {blocks.tolist()}, layers {layers}, slots {slots.tolist()}"

    def host_memory(self, count: int) -> tuple[Tensor, Int32Array]:
        """Slots in main memory, and `count` of them in any order."""
        slots = count + int(self.rng.integers(0, 3))
        host = torch.full((slots, *self.plain.shape[1:]), 7.0, dtype=self.plain.dtype)
        return host, self.rng.permutation(slots)[:count].astype(np.int32)

    def some_layers(self) -> range:
        start = int(self.rng.integers(0, LAYERS))
        return range(start, int(self.rng.integers(start + 1, LAYERS + 1)))

    def attend(self) -> None:
        """Two rows over all that is whole in a layer; each has a tail of its own, perhaps with a part unused."""
        layer = int(self.rng.integers(0, LAYERS))
        kept = self.vectors()
        whole = ~kept[:, layer].isnan().flatten(1).any(dim=1)
        blocks = whole.nonzero().flatten().tolist()
        if len(blocks) < 2:
            return
        size, tails = self.chunk_size, blocks[-2:]
        rows = []
        for tail in tails:
            table = [*blocks[:-2], tail]
            ranges = [Range(i, block, 0, size, i * size, 0) for i, block in enumerate(table)]
            used = int(self.rng.integers(1, size + 1))
            ranges[-1] = ranges[-1]._replace(tokens=used)
            rows.append(Row(ranges, (len(table) - 1) * size + used - 1))
        runs = np.array([[0, 2, 0, len(blocks)]], dtype=np.int32)
        forest = Forest(size, rows, runs, BLOCKS)
        q = self.random(2, self.spec.heads, self.spec.head_dim)
        out = torch.full((2, self.spec.heads, self.spec.value_dim), float("nan"), dtype=q.dtype)
        self.kernels.decode_attention(forest.decode_plan(), q, self.pool, layer, self.spec, out)
        exact, plain = attention_oracle(forest, [1, 1], q, kept, layer, self.spec)
        assert_as_exact_as(out, exact, plain, sum_terms=rows[0].tokens)

    def run(self, name: str) -> None:
        if name == "fill":
            self.fill(int(self.rng.integers(0, BLOCKS)))
        else:
            getattr(self, name)()


OPERATIONS = ("fill", "fill", "overwrite", "copy", "scatter", "gather", "attend")


def check(
    name: str, seed: int, chunk_size: int, dtype: torch.dtype, operations: list[str], kept: str = "auto"
) -> None:
    kernels = make_kernels(name, threads=1 + seed % 2)
    spec, kv_dtype = make_spec(4, 2, (64, 80)[seed % 2]), kept
    if kept.startswith("latents"):
        spec = make_spec(4, 1, (64, 84)[seed % 2], rotary_dim=16, latent_dim=(48, 68)[seed % 2])
        kv_dtype = kept.removeprefix("latents ")
    model = Model(kernels, spec, chunk_size, dtype, seed, kv_dtype)
    for operation in operations:
        model.run(operation)
    assert same_bits(contents(kernels, model.pool), model.plain)


@pairwise(
    seeded=True,
    chunk_size=CHUNKS,
    implementation=CPU,
    dtype=DTYPES,
    kept=(*KV_DTYPES, "latents auto", "latents int8"),
)
def test_operations_in_any_order(
    chunk_size: int, implementation: str, dtype: torch.dtype, kept: str, seed: int
) -> None:
    rng = np.random.default_rng([chunk_size, seed])
    check(implementation, seed, chunk_size, dtype, rng.choice(OPERATIONS, size=14).tolist(), kept)


@pairwise(implementation=(*CPU, *CUDA), dtype=DTYPES, chunk_size=(1, 16, 64))
def test_tokens_one_at_a_time_fill_a_block(implementation: str, dtype: torch.dtype, chunk_size: int) -> None:
    """As decode writes them; read back after each near the end, where a block may be put into another order."""
    kernels = make_kernels(implementation)
    model = Model(kernels, make_spec(4, 2, 64), chunk_size, dtype, 1)
    for token in range(chunk_size + 1):
        model.write([chunk_size + token], range(LAYERS))
        if token >= chunk_size - 2:
            assert same_bits(contents(kernels, model.pool), model.plain)


@pairwise(seeded=True, chunk_size=(1, 7, 16), implementation=CUDA, dtype=DTYPES, kept=KV_DTYPES)
def test_operations_in_any_order_on_gpus(
    chunk_size: int, implementation: str, dtype: torch.dtype, kept: str, seed: int
) -> None:
    """Tiles of one token and of seven do not begin at multiples of 16 bytes in 8 bits."""
    rng = np.random.default_rng([chunk_size, seed])
    operations = ["fill", "fill", "fill", *rng.choice(OPERATIONS, size=5).tolist(), "attend"]
    check(implementation, seed, chunk_size, dtype, operations, kept)


@pairwise(
    seeded=True,
    implementation=(*CPU, *CUDA),
    dtype=DTYPES,
    kv_dtype=("int8", "fp8"),
    head_dim=(64, 70, 84),
)
def test_numbers_of_all_sizes_are_rounded_as_the_reference_does(
    implementation: str, dtype: torch.dtype, kv_dtype: str, head_dim: int, seed: int
) -> None:
    """Numbers over 40 binary orders, ties, zeros with signs, vectors of zeros; NaN and infinity."""
    kernels = make_kernels(implementation)
    model = Model(kernels, make_spec(4, 2, head_dim), 16, dtype, seed, kv_dtype)
    given = torch.randn(16, model.spec.qkv_width) * 2.0 ** torch.randint(-40, 1, (16, model.spec.qkv_width))
    given[1] = given[1].sign() * torch.randint(0, 480, given[1].shape) / 512.0
    given[2], given[3] = 0.0, -0.0
    given[4, -1], given[5, -2], given[6, -3] = float("nan"), float("inf"), -float("inf")
    given[7] *= 1e-30  # the scale of some vectors is the smallest normal number
    qkv = given.to(dtype)
    rows = model.rows(qkv.clone().view(16, -1, head_dim)[:, 4:].view(16, 2, 2, head_dim))
    kernels.write_kv(WritePlan(16, np.arange(16, dtype=np.int32)), qkv, None, model.pool, 0, model.spec)
    found, expected = contents(kernels, model.pool)[0, 0], rows.permute(1, 2, 0, 3)
    assert same_bits(found[..., :head_dim], expected[..., :head_dim])
    scales = [part[..., head_dim:].contiguous().view(torch.float32) for part in (found, expected)]
    assert torch.equal(scales[0].nan_to_num(-1.0), scales[1].nan_to_num(-1.0))
    assert int(scales[0].isnan().sum()) == 3


def test_floats_of_8_bits_are_the_nearest() -> None:
    """Against all of them, written out: a sign, four bits of exponent, three of fraction; ties go to even."""
    finite = [m / 512 for m in range(8)] + [(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    values = torch.tensor(finite[:127])
    between = (values[1:] + values[:-1]) / 2
    below, above = between.nextafter(values[:-1]), between.nextafter(values[1:])
    x = torch.cat((values, between, below, above))
    expected = torch.cat(
        (torch.arange(127), torch.arange(126) + torch.arange(126) % 2, torch.arange(126), torch.arange(1, 127))
    )
    scale_of_one = torch.full((len(x), 1), 448.0)
    for sign in (1, -1):
        rows = to_rows(torch.cat((sign * x[:, None], scale_of_one), dim=1), "fp8")
        assert rows[:, 0].int().tolist() == (expected + (128 if sign < 0 else 0)).tolist()
        back = from_rows(rows, torch.float64)
        assert back[:, 0].tolist() == (sign * values[expected].double()).tolist()


@pairwise(implementation=(*CPU, *CUDA), dtype=DTYPES)
def test_part_of_a_full_block_is_copied_to_an_open_one_and_back(implementation: str, dtype: torch.dtype) -> None:
    """Copy on write at a fork: the copy goes on, the original stays; then the copy's tokens return elsewhere."""
    kernels = make_kernels(implementation)
    model = Model(kernels, make_spec(4, 2, 64), 32, dtype, 2)
    model.fill(0)
    model.fill(1)
    model.write([2 * 32 + offset for offset in range(5)], range(LAYERS))
    for copies in ([[0, 2, 5, 11]], [[0, 3, 0, 7], [1, 3, 7, 25]], [[2, 1, 3, 9], [3, 0, 0, 32]]):
        kernels.copy_blocks(model.pool, np.array(copies, dtype=np.int32))
        for source, destination, first, count in copies:
            chosen = slice(first, first + count)
            model.plain[destination, ..., chosen, :] = model.plain[source, ..., chosen, :]
        assert same_bits(contents(kernels, model.pool), model.plain)
    model.write([2 * 32 + offset for offset in range(16, 32)], range(LAYERS))
    model.write([3 * 32 + 31, 32], range(LAYERS))
    assert same_bits(contents(kernels, model.pool), model.plain)
    model.attend()


@pairwise(implementation=(*CPU, *CUDA))
def test_copies_outside_the_pool_are_refused(kernels: Kernels) -> None:
    model = Model(kernels, make_spec(4, 2, 64), 8, torch.float32, 3)
    model.fill(2)
    for copy, reason in (
        ([0, 6, 0, 1], "6 blocks"),
        ([-1, 1, 0, 1], "6 blocks"),
        ([0, 1, 4, 5], "a block has 8"),
        ([0, 1, 0, 0], "a block has 8"),
        ([0, 1, -1, 3], "a block has 8"),
        ([0, 1, 1, 2**31 - 1], "a block has 8"),
    ):
        with pytest.raises(ValueError, match=reason):
            # The whole call is refused, its valid part too.
            kernels.copy_blocks(model.pool, np.array([[2, 3, 0, 8], copy], dtype=np.int32))
        assert same_bits(contents(kernels, model.pool), model.plain)


def test_the_reference_refuses_packed_blocks() -> None:
    """It cannot know their order; only overwriting a whole block is right whatever that was."""
    kernels = make_kernels(REFERENCE)
    model = Model(kernels, make_spec(4, 2, 64), 8, torch.float32, 4)
    for block in range(BLOCKS):
        model.fill(block)
    model.pool.packed[2, 1] = 1
    forest = Forest(8, [Row([Range(0, 2, 0, 8, 0, 0), Range(1, 3, 0, 1, 8, 0)], 8)], no_runs(), 6)
    q = torch.randn(1, 4, 64)
    refused = pytest.raises(ValueError, match="block 2 is packed")
    with refused:
        model.write([2 * 8], range(1, 2))
    with refused:
        kernels.copy_blocks(model.pool, np.array([[1, 2, 0, 3]], dtype=np.int32))
    with refused:
        kernels.copy_blocks(model.pool, np.array([[2, 1, 0, 3]], dtype=np.int32))
    with refused:
        contents(kernels, model.pool)
    with refused:
        kernels.decode_attention(forest.decode_plan(), q, model.pool, 1, model.spec, torch.empty_like(q))
    with refused:
        kernels.prefill_attention(forest.prefill_plan([1]), q, model.pool, 1, model.spec, torch.empty_like(q))
    data = torch.randn(1, 2, *model.plain.shape[2:])
    kernels.scatter_blocks(model.pool, np.array([2], dtype=np.int32), range(1, 3), data)
    assert torch.equal(contents(kernels, model.pool)[2, 1:3], data[0])


def test_slots_are_checked() -> None:
    """Before anything is written: a wrong slot is memory of something else."""
    kernels = load_kernels("cpu", "cpu", 1)
    pool, blocks = KvPool.wrap(torch.zeros(4, 3, 2, 1, 8, 64)), np.array([1, 2], dtype=np.int32)
    host = torch.zeros(5, *pool.data.shape[1:])
    for move in (kernels.gather_slots, kernels.scatter_slots):
        for slots in ([0, 5], [-1, 0]):
            with pytest.raises(ValueError, match="there are 5"):
                move(pool, blocks, range(3), host, np.array(slots, dtype=np.int32))
        for wrong in ([0], [0, 1, 2]):
            with pytest.raises((ValueError, RuntimeError), match="slots must be one per block"):
                move(pool, blocks, range(3), host, np.array(wrong, dtype=np.int32))
        with pytest.raises((ValueError, RuntimeError), match="all layers"):
            move(pool, blocks, range(3), host[:, :2].contiguous(), np.array([0, 1], dtype=np.int32))
        with pytest.raises(ValueError, match="block 4"):
            move(pool, np.array([4, 1], dtype=np.int32), range(3), host, np.array([0, 1], dtype=np.int32))
    assert not host.any()
