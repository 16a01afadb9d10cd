"""Prefill by a library's attention: which entries of a plan it takes, and how its results are joined.

Torch brings FlashAttention-2 and cuDNN, whose kernels for plain causal attention are better than ours. They want a
sequence's keys dense in memory, and know neither shifts nor positions. So they are given an entry in parts:

      cached context                             new tokens
      ├───── piece ─────┼── piece ──┤            ├── piece ──┤
      all queries see all of its keys            causal
                 └─ each gives a result and a log-sum-exp ─┘ joined

The keys and values of a piece are gathered from the pool into one buffer, which all pieces, entries and layers
take in turn: however long a context is, it takes no more memory. Those that are kept in 8 bits become numbers of
the type that they were computed in on the way. A log-sum-exp is the natural logarithm of the sum
of `exp(scaled score)` over the keys of a piece; it says what weight the piece has among the others (`join`).

An entry is *plain* if it reads whole blocks one after the other (the last may be partly filled), unshifted, and
its queries are the last of these tokens. Entries that are not, and layers with anything else in their scores
(caps, biases, sinks, spans, windows that hide a key), are left to kernels of our own (`rest`).

All of this is plain torch, and runs on any device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.native import NativeLibraryError
from trunkline.kernels.ops import AttentionSpec, KvPool
from trunkline.kernels.plan import PrefillPlan
from trunkline.kernels.quantised_kv import vectors_of

VARIABLE: Final = "TRUNKLINE_CUDA_PREFILL"
"""Environment variable that says whose attention computes plain prefill on GPUs, for comparisons: a name in
`CUDA_LIBRARIES`, or `OWN`."""
OWN: Final = "own"
OPERATIONS_MIN: Final = float(1 << 34)
"""Operations of an entry in one layer from which on it is given to a library: with 32 heads of 128 a prompt of
1,450 tokens, or 460 tokens behind a context of 2,048. A library costs some ten launches for each entry, our kernel
one for all; so many operations take it about 80 µs if it reaches 200 TFLOP/s. An estimate, never measured."""
_TRIAL_ERROR: Final = 0.03
"""Largest error of numbers of size 1 in bfloat16, and of their log-sum-exps."""
HEAD_DIM_STEP: Final = 8
HEAD_DIM_MAX: Final = 256


class Attended(NamedTuple):
    """Attention over a part of the keys."""

    out: Tensor
    """`[heads, queries, head_dim]`; zeros where a query has seen no key."""
    lse: Tensor
    """Natural logarithm of the sum of `exp(scaled score)`, at least float32, `[heads, queries]`; -inf: no key."""


def join(a: Attended, b: Attended) -> Attended:
    """Return attention over the keys of both parts (the reduction of ChunkAttention §3.2, by log-sum-exps).

    Parts without a key change nothing; two of them give another one, without NaN. The result is at least float32.
    """
    share = torch.sigmoid(b.lse - a.lse).nan_to_num_(nan=0.0).unsqueeze(-1)
    return Attended((a.out * (1 - share)).addcmul_(b.out, share), torch.logaddexp(a.lse, b.lse))


@dataclass(frozen=True)
class AttentionLibrary:
    """Fused attention of a library, as torch calls it."""

    name: str
    dtypes: frozenset[torch.dtype]
    call: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    """Returns the result `[1, heads, n, head_dim]` and the log-sum-exp `[1, heads, n]`. Arguments: queries of the
    result's shape; keys and values `[1, kv_heads, m, head_dim]`; whether the i-th query sees only keys up to the
    i-th (then n = m); the scale."""

    def takes(self, spec: AttentionSpec, pool: KvPool) -> bool:
        """Return whether the library computes attention of such a layer, as far as keys are not hidden."""
        return (
            pool.computed in self.dtypes
            and spec.head_dim <= HEAD_DIM_MAX
            and spec.head_dim % HEAD_DIM_STEP == 0
            and not (spec.soft_cap or spec.span or spec.latent_dim)
            and spec.alibi_slopes is None
            and spec.sinks is None
        )


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse.reshape(q.shape[:-1])  # with a last dimension of 1


def _flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


_HALF: Final = frozenset({torch.float16, torch.bfloat16})
FLASH: Final = AttentionLibrary("flash", _HALF, _flash)
"""FlashAttention-2."""
CUDNN: Final = AttentionLibrary("cudnn", _HALF, _cudnn)
"""For comparisons: it prepares a plan for each shape that it has not met yet, and prompts all have lengths of
their own."""
FLASH_ON_CPU: Final = AttentionLibrary("flash-on-cpu", _HALF | {torch.float32, torch.float64}, _flash_on_cpu)
"""For tests: it gives what the others give."""
CUDA_LIBRARIES: Final = {library.name: library for library in (FLASH, CUDNN)}


@dataclass(frozen=True)
class LibraryPrefill:
    """Which entries are given to a library."""

    library: AttentionLibrary
    operations_min: float = OPERATIONS_MIN
    """Operations of an entry in one layer, both products, from which on it is."""

    def window(self, spec: AttentionSpec, pool: KvPool) -> int | None:
        """Return how many tokens an entry of such a layer may read at most, to be given to the library; None: it
        takes none. Layers of equal sizes for which this is equal give it the same entries."""
        if not self.library.takes(spec, pool):
            return None
        return spec.window or 1 << 31

    def entries(self, plan: PrefillPlan, pool: KvPool, spec: AttentionSpec, gather_bytes: int) -> list[int]:
        """Return the entries of a plan that are given to the library.

        Args:
            gather_bytes: Size of the buffer for keys and values. New tokens have to fit in.
        """
        window = self.window(spec, pool)
        if window is None:
            return []
        queries = np.diff(plan.query_indptr).astype(np.int64)
        ends = np.concatenate(([0], np.cumsum(plan.count, dtype=np.int64)))
        tokens = ends[plan.item_indptr[1:]] - ends[plan.item_indptr[:-1]]
        pairs = queries * (tokens - queries) + queries * (queries + 1) // 2
        operations = 4.0 * spec.heads * spec.head_dim * pairs
        # Of a row's new tokens the first may lie in the middle of a block.
        new_blocks = (queries + plan.chunk_size - 1) // plan.chunk_size + 1
        chosen = (queries > 0) & (queries <= tokens) & (tokens <= window) & (operations >= self.operations_min)
        chosen &= new_blocks * gathered_bytes(pool) <= gather_bytes
        return [int(entry) for entry in np.flatnonzero(chosen) if is_plain(plan, int(entry))]


def prefill_of_environment() -> LibraryPrefill | None:
    """Return what of prefill a library computes on GPUs: large plain entries, by FlashAttention-2 where torch has
    it, unless `VARIABLE` says otherwise. None: nothing.

    Raises:
        NativeLibraryError: The variable is none of the names.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked == OWN or not (asked or torch.backends.cuda.is_flash_attention_available()):
        return None
    name = asked or FLASH.name
    if name not in CUDA_LIBRARIES:
        allowed = ", ".join((OWN, *CUDA_LIBRARIES))
        raise NativeLibraryError(f"{VARIABLE} is {name!r}; allowed: {allowed}", f"correct or unset {VARIABLE}")
    return LibraryPrefill(CUDA_LIBRARIES[name])


@cache
def trial_problem(library: AttentionLibrary, device: torch.device) -> str:
    """Return what is wrong with a library on a device, empty if nothing is: it computes a small attention with its
    log-sum-exps, in bfloat16, where heads share keys. The first call waits for the device; the answer is kept."""
    heads, tokens, scale = (4, 2, 2), 9, 0.125
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, count, tokens, 64, generator=generator).bfloat16() for count in heads)
    for causal in (False, True):
        scores = q.double() @ k.double().repeat_interleave(2, dim=1).mT * scale
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) & causal
        scores = scores.masked_fill(hidden, -torch.inf)
        try:
            results = library.call(q.to(device), k.to(device), v.to(device), causal, scale)
            out, lse = (result.double().cpu() for result in results)
        except RuntimeError as error:
            first_line = str(error).split("\n")[0]
            return f"{library.name} fails: {first_line[:300]}"
        expected = scores.softmax(dim=-1) @ v.double().repeat_interleave(2, dim=1)
        if out.shape != expected.shape or not torch.allclose(out, expected, rtol=0, atol=_TRIAL_ERROR):
            return f"{library.name} gives a wrong result"
        sums = scores.logsumexp(dim=-1)
        if lse.shape != sums.shape or not torch.allclose(lse, sums, rtol=0, atol=_TRIAL_ERROR):
            return f"{library.name} gives wrong log-sum-exps"
    return ""


def is_plain(plan: PrefillPlan, entry: int) -> bool:
    """Return whether an entry reads whole blocks one after the other, and its queries are the last tokens."""
    items = slice(int(plan.item_indptr[entry]), int(plan.item_indptr[entry + 1]))
    position = plan.query_position[int(plan.query_indptr[entry]) : int(plan.query_indptr[entry + 1])]
    base, count = plan.base[items], plan.count[items]
    if not len(base) or plan.shift[items].any() or plan.first[items].any():
        return False
    if (count[:-1] != plan.chunk_size).any() or (np.diff(base) != plan.chunk_size).any():
        return False
    end = int(base[-1]) + int(count[-1])
    return bool(np.array_equal(position, np.arange(end - len(position), end)))


def rest(plan: PrefillPlan, entries: Sequence[int]) -> PrefillPlan | None:
    """Return the plan without these entries, for kernels of our own; None: no other entry has queries.

    The entries stay where they are, with their queries and without items, so that rows keep their numbers. Kernels
    give them zeros, which are overwritten.
    """
    kept = np.ones(plan.num_entries, dtype=bool)
    kept[list(entries)] = False
    if not (np.diff(plan.query_indptr)[kept] > 0).any():
        return None
    sizes = np.diff(plan.item_indptr)
    items = np.repeat(kept, sizes)
    return replace(
        plan,
        item_indptr=np.concatenate(([0], np.cumsum(sizes * kept))).astype(np.int32),
        **{name: getattr(plan, name)[items] for name in ("block", "first", "count", "base", "shift")},
        state=None,
    )


Gather = Callable[[KvPool, Tensor, Tensor, Tensor], None]
"""`gather_tiles`, or what does the same."""


def gather_tiles(pool: KvPool, tiles: Tensor, index: Tensor, into: Tensor) -> None:
    """Write keys or values of some tiles into a buffer.

    Args:
        tiles: Tiles of the pool, `[m, tokens * row]`.
        index: Which of them, int64 `[n]`.
        into: `[n, tokens * head_dim]`, of the type in which KV is computed.
    """
    if not pool.format.is_quantised:
        torch.index_select(tiles, 0, index, out=into)
        return
    rows = tiles[index].view(len(index), pool.chunk_size, -1)
    into.copy_(vectors_of(pool, rows, into.dtype).flatten(1))


def gathered_bytes(pool: KvPool) -> int:
    """Return the bytes of one layer of one block in the buffer."""
    form = pool.format
    return len(form.bands) * form.heads * form.chunk_size * form.row[0].count * pool.computed.itemsize


class Piece(NamedTuple):
    """Keys that are gathered and attended to at once."""

    tiles: slice
    """Where its tiles stand in `LibraryWork`'s index."""
    skip: int
    """Tokens in front of its first one in the first block."""
    tokens: int
    is_causal: bool


class LibraryWork:
    """The entries of a prefill plan that a library computes, and where their keys and values lie."""

    def __init__(self, plan: PrefillPlan, entries: Sequence[int], pool: KvPool, gather_bytes: int) -> None:
        """
        Args:
            entries: Plain ones, whose new tokens fit into the buffer.
            gather_bytes: Size of the buffer.
        """
        index: list[NDArray[np.int64]] = []
        self.entries: list[tuple[slice, tuple[Piece, ...]]] = []
        """The queries of each entry, and its pieces: the new tokens, then the context from its start."""
        for entry in entries:
            queries = slice(int(plan.query_indptr[entry]), int(plan.query_indptr[entry + 1]))
            items = slice(int(plan.item_indptr[entry]), int(plan.item_indptr[entry + 1]))
            tokens = int(plan.count[items].sum())
            pieces = tuple(
                self._piece(plan.block[items], piece, pool, index)
                for piece in _pieces(tokens, queries.stop - queries.start, pool, gather_bytes)
            )
            self.entries.append((queries, pieces))
        self._index = torch.from_numpy(np.concatenate(index)).to(pool.data.device, non_blocking=True)

    def _piece(
        self, blocks: NDArray[np.int32], piece: tuple[int, int, bool], pool: KvPool, index: list[NDArray[np.int64]]
    ) -> Piece:
        """Add a piece's tiles to the index: those of all KV heads' keys, then those of their values."""
        start, stop, is_causal = piece
        size, per_layer = pool.chunk_size, pool.data.shape[2] * pool.data.shape[3]
        chosen = blocks[start // size : -(-stop // size)].astype(np.int64) * (per_layer * pool.data.shape[1])
        before = sum(map(len, index))
        index.append((np.arange(per_layer)[:, None] + chosen).ravel())
        return Piece(slice(before, before + len(index[-1])), start % size, stop - start, is_causal)

    def attend(
        self,
        library: AttentionLibrary,
        q: Tensor,
        pool: KvPool,
        layer: int,
        spec: AttentionSpec,
        out: Tensor,
        buffer: tuple[Tensor, Gather],
    ) -> None:
        """Compute attention of the entries (`Kernels.prefill_attention`).

        Args:
            buffer: The buffer, one-dimensional, of any type whose bytes are aligned as the pool's are, and what
                writes into it.
        """
        buffer = buffer[0].view(pool.computed), buffer[1]
        for queries, pieces in self.entries:
            vectors, found = q[queries].transpose(0, 1)[None], None
            for piece in pieces:
                k, v = self._gather(piece, pool, layer, buffer)
                result, lse = library.call(vectors, k, v, piece.is_causal, spec.scale)
                part = Attended(result[0], lse[0])
                found = part if found is None else join(found, part)
            assert found is not None
            out[queries] = found.out.transpose(0, 1)

    def _gather(
        self, piece: Piece, pool: KvPool, layer: int, buffer: tuple[Tensor, Gather]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values `[1, kv_heads, tokens, head_dim]`, in the buffer."""
        _, _, bands, heads, size, row = pool.data.shape
        tiles = pool.data.view(-1, size * row)[layer * bands * heads :]
        index, head_dim = self._index[piece.tiles], pool.format.row[0].count
        memory, gather = buffer
        into = memory[: len(index) * size * head_dim].view(len(index), size * head_dim)
        gather(pool, tiles, index, into)
        k, v = into.view(bands, 1, heads, -1, head_dim)[..., piece.skip : piece.skip + piece.tokens, :]
        return k, v


def _pieces(tokens: int, new: int, pool: KvPool, gather_bytes: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the pieces of an entry: first token, the one behind the last, and whether it is causal."""
    context = tokens - new
    yield context, tokens, True
    step = gather_bytes // gathered_bytes(pool) * pool.chunk_size
    for start in range(0, context, step):
        yield start, min(start + step, context), False
