"""Prefill by a library's attention: which entries of a plan it takes, and how its results are joined.

Torch brings FlashAttention-2 and cuDNN, whose kernels for plain causal attention are better than ours. They want a
sequence's keys dense in memory, and know neither shifts nor positions. FlashAttention-2 takes fewer queries than
keys, namely the last ones (`AttentionLibrary.at_end`), so an entry is one call, and so are neighbouring entries
whose keys fit into the buffer together. For a library without that, and where a context is longer than the buffer,
an entry is cut into parts:

      cached context                             new tokens
      ├───── part ──────┼── part ───┤            ├── part ───┤
      all queries see all of its keys            causal
                 └─ each gives a result and a log-sum-exp ─┘ joined

The keys and values of a part are gathered from the pool into one buffer, which all parts, entries and layers
use in turn: a longer context takes no more memory. On the way KV in 8 bits becomes numbers of the type in which it
was computed. A log-sum-exp is the natural logarithm of the sum of `exp(scaled score)` over the keys of a part; it
says what weight the part has among the others (`join`).
What follows from the plan is sent to the device once for all layers. A layer of one part is three launches:
gathering, the library's, and the copy of its result.

An entry is *plain* if it reads whole blocks one after the other (the last may be partly filled), unshifted, and
its queries are the last of these tokens. Entries that are not, and layers with anything else in their scores
(caps, biases, sinks, spans, windows that hide a key), are left to kernels of our own (`rest`).

All of this is plain torch, and runs on any device.
"""

from __future__ import annotations

import itertools
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
OPERATIONS_MIN: Final = float(1 << 32)
"""Operations of an entry in one layer from which on it is given to a library: with 32 heads of 128 a prompt of 724
tokens, or 125 behind a context of 2,048. On an H200 1,024 tokens took 66 µs by FlashAttention-2, gathered, and 136
by our kernel; 512 behind 512 (6.4 billion operations) 70 and 99."""
_TRIAL_ERROR: Final = 0.03
"""Largest error of numbers of size 1 in bfloat16, and of their log-sum-exps."""
HEAD_DIM_STEP: Final = 8
HEAD_DIM_MAX: Final = 256


class Attended(NamedTuple):
    """Attention over a part of the keys."""

    out: Tensor
    """`[queries, heads, head_dim]`; zeros where a query has seen no key."""
    lse: Tensor
    """Natural logarithm of the sum of `exp(scaled score)`, at least float32, `[heads, queries]`; -inf: no key."""


def join(a: Attended, b: Attended, out: Tensor) -> Attended:
    """Return attention over the keys of both parts (the reduction of ChunkAttention §3.2, by log-sum-exps).

    Parts without a key change nothing; two of them give another one, without NaN.

    Args:
        out: The memory of the result, which is computed in at least float32 and then rounded.
    """
    share = torch.sigmoid(b.lse - a.lse).nan_to_num_(nan=0.0).mT.unsqueeze(-1)
    out.copy_((a.out * (1 - share)).addcmul_(b.out, share))
    return Attended(out, torch.logaddexp(a.lse, b.lse))


class Lengths(NamedTuple):
    """The sequences of one call, whose queries and keys stand one behind the other."""

    queries: Tensor
    """Where each sequence's queries begin, and the last one's end: int32 `[sequences + 1]`, on the device."""
    keys: Tensor
    """The same of its keys."""
    queries_max: int
    """Largest number of queries of a sequence."""
    keys_max: int
    """Largest number of keys of a sequence."""


@dataclass(frozen=True)
class AttentionLibrary:
    """Fused attention of a library, as torch calls it."""

    name: str
    dtypes: frozenset[torch.dtype]
    call: Callable[[Tensor, Tensor, Tensor, bool, float, Lengths | None], tuple[Tensor, Tensor]]
    """Returns the result `[n, heads, head_dim]` and the log-sum-exp `[heads, n]`. Arguments: queries of the
    result's shape; keys and values `[m, kv_heads, head_dim]`; whether queries are causal; the scale; and the
    lengths of several sequences, whose log-sum-exps are not used (None: there is one sequence)."""
    at_end: bool
    """Whether causal queries may be fewer than keys, of which they are the last (a mask aligned to the bottom
    right), and one call may be given several sequences. Otherwise the i-th query sees keys up to the i-th."""

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


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    forward = torch.ops.aten._flash_attention_forward
    if lengths is not None:
        out, lse, *_ = forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
        return out, lse
    q, k, v = q[None], k[None], v[None]
    out, lse, *_ = forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale)
    return out[0], lse[0]


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    assert lengths is None
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse, *_ = attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out[0].transpose(0, 1), lse.reshape(q.shape[1:-1])  # with a last dimension of 1


def _flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    if lengths is not None:
        ends = zip(lengths.queries[1:-1].tolist(), lengths.keys[1:-1].tolist(), strict=True)
        splits = [(0, 0), *ends, (len(q), len(k))]
        results = [
            _flash_on_cpu(q[i:j], k[m:n], v[m:n], causal, scale, None)
            for (i, m), (j, n) in itertools.pairwise(splits)
        ]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], dim=1)
    attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    hidden = torch.full((len(q), len(k)), -torch.inf, dtype=q.dtype).triu(len(k) - len(q) + 1) if causal else None
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = attention(q, k, v, 0.0, False, attn_mask=hidden, scale=scale)
    return out[0].transpose(0, 1), lse[0].contiguous()  # as those for GPUs are


_HALF: Final = frozenset({torch.float16, torch.bfloat16})
FLASH: Final = AttentionLibrary("flash", _HALF, _flash, at_end=True)
"""FlashAttention-2."""
CUDNN: Final = AttentionLibrary("cudnn", _HALF, _cudnn, at_end=False)
"""For comparisons: it prepares a plan for each shape that it has not met yet, and prompts all have lengths of
their own."""
FLASH_ON_CPU: Final = AttentionLibrary(
    "flash-on-cpu", _HALF | {torch.float32, torch.float64}, _flash_on_cpu, at_end=True
)
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
        chosen = (queries > 0) & (queries <= tokens) & (tokens <= window) & (operations >= self.operations_min)
        chosen &= queries * gathered_bytes(pool) <= gather_bytes
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
    """Return what is wrong with a library on a device, empty if nothing is: it computes small attentions of each
    kind that it is asked for, in bfloat16, where heads share keys. The first call waits for the device; the answer
    is kept."""
    trials: list[tuple[tuple[tuple[int, int], ...], bool]] = [
        (((9, 9),), False),
        (((9, 9),), True),
        (((9, 5),), False),
    ]
    trials += [(((4, 9),), True), (((4, 9), (7, 7)), True)] if library.at_end else []
    for sequences, causal in trials:
        try:
            found = _trial(library, device, sequences, causal)
        except RuntimeError as error:
            first_line = str(error).split("\n")[0]
            return f"{library.name} fails: {first_line[:300]}"
        if found:
            return f"{library.name} gives {found}"
    return ""


def _trial(
    library: AttentionLibrary, device: torch.device, sequences: tuple[tuple[int, int], ...], causal: bool
) -> str:
    """Return what differs from attention in float64, "" if nothing does. `sequences`: queries and keys of each."""
    generator = torch.Generator().manual_seed(0)
    ends = np.cumsum([(0, 0), *sequences], axis=0, dtype=np.int32)
    q = torch.randn(int(ends[-1, 0]), 4, 64, generator=generator).bfloat16()
    kv = torch.randn(2, 2, int(ends[-1, 1]), 64, generator=generator).bfloat16()
    scale, outs, sums = 0.125, [], []
    for (i, m), (j, n) in itertools.pairwise(ends.tolist()):
        k, v = kv[:, :, m:n].double().repeat_interleave(2, dim=1)
        hidden = torch.ones(j - i, n - m, dtype=torch.bool).triu(n - m - (j - i) + 1) & causal
        scores = (q[i:j].double().transpose(0, 1) @ k.mT * scale).masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(dim=-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(dim=-1))
    lengths = None
    if len(sequences) > 1:
        queries, keys = torch.from_numpy(ends.T.copy()).to(device)
        lengths = Lengths(queries, keys, *np.max(sequences, axis=0).tolist())
    k, v = kv.to(device).transpose(1, 2)
    results = library.call(q.to(device), k, v, causal, scale, lengths)
    out, lse = (result.double().cpu() for result in results)
    expected = torch.cat(outs)
    if out.shape != expected.shape or not torch.allclose(out, expected, rtol=0, atol=_TRIAL_ERROR):
        return "a wrong result"
    if lengths is None and (
        lse.shape != sums[0].shape or not torch.allclose(lse, sums[0], rtol=0, atol=_TRIAL_ERROR)
    ):
        return "wrong log-sum-exps"
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


def gather_rows(pool: KvPool, layer: int, ranges: Tensor, out: Tensor) -> None:
    """Write keys and values of ranges of tokens into a buffer, in the type in which they are computed.

    Args:
        ranges: int32 `[n, 4]`: a block, the first token in it, how many, and where the first one goes.
        out: `[2, kv_heads, tokens, head_dim]`, contiguous.
    """
    for block, first, count, to in ranges.tolist():
        rows = pool.data[block, layer, :, :, first : first + count]
        out[:, :, to : to + count] = vectors_of(pool, rows, out.dtype)


class PartOps(NamedTuple):
    """How parts are gathered and joined: the buffer, and the two operations around the library's call."""

    memory: Tensor
    """The buffer, one-dimensional, of any type whose bytes are aligned as the pool's are."""
    gather: Callable[[KvPool, int, Tensor, Tensor], None] = gather_rows
    """`gather_rows`, or a kernel that does the same."""
    join: Callable[[Attended, Attended, Tensor], Attended] = join
    """`join`, or a kernel that does the same."""


def gathered_bytes(pool: KvPool) -> int:
    """Return the bytes of a token's keys and values of one layer in the buffer."""
    form = pool.format
    return len(form.bands) * form.heads * form.row[0].count * pool.computed.itemsize


class Part(NamedTuple):
    """Keys that are gathered and attended to at once."""

    ranges: Tensor
    """Where they lie (`gather_rows`), on the device."""
    tokens: int
    is_causal: bool
    lengths: Lengths | None
    """Of a part of several entries; None: it is of one."""


class LibraryWork:
    """The entries of a prefill plan that a library computes, and where their keys and values lie."""

    def __init__(
        self,
        library: AttentionLibrary,
        plan: PrefillPlan,
        entries: Sequence[int],
        pool: KvPool,
        gather_bytes: int,
    ) -> None:
        """
        Args:
            entries: Plain ones, ascending, whose new tokens fit into the buffer.
            gather_bytes: Size of the buffer.
        """
        self._library, self._device = library, pool.data.device
        self._buffer: Tensor | None = None
        self._views: list[tuple[Tensor, Tensor, Tensor]] = []
        self.calls: list[tuple[slice, tuple[Part, ...]]] = []
        """For each entry, or run of neighbours: its queries, and the parts of its keys: the last, then from the
        start."""
        ends = np.concatenate(([0], np.cumsum(plan.count, dtype=np.int64)))[plan.item_indptr]
        capacity = gather_bytes // gathered_bytes(pool)
        for run in _runs(plan, entries, np.diff(ends), capacity if library.at_end else 0):
            queries, tokens = plan.query_indptr[run[0] : run[-1] + 2], np.diff(ends[run[0] : run[-1] + 2])
            if len(run) > 1:
                parts: list[tuple[list[tuple[int, int]], bool]] = [([(0, int(count)) for count in tokens], True)]
            else:
                context = int(tokens[0]) - int(queries[1] - queries[0])
                last = max(0, int(tokens[0]) - capacity) if library.at_end else context
                starts = range(0, last, capacity)
                parts = [([(last, int(tokens[0]))], True)]
                parts += [([(start, min(start + capacity, last))], False) for start in starts]
            self.calls.append(
                (
                    slice(int(queries[0]), int(queries[-1])),
                    tuple(self._part(plan, run, queries, *part) for part in parts),
                )
            )

    def _part(
        self,
        plan: PrefillPlan,
        run: Sequence[int],
        queries: NDArray[np.int32],
        tokens: Sequence[tuple[int, int]],
        is_causal: bool,
    ) -> Part:
        """Return a part that reads the tokens `[start, stop)` of each entry of a run."""
        ranges, size, to = [], plan.chunk_size, [0]
        for entry, (start, stop) in zip(run, tokens, strict=True):
            places = np.arange(start // size, -(-stop // size))
            low, high = np.maximum(places * size, start), np.minimum((places + 1) * size, stop)
            block = plan.block[places + plan.item_indptr[entry]]
            ranges.append((block, low - places * size, high - low, low - start + to[-1]))
            to.append(to[-1] + stop - start)
        table = np.concatenate(ranges, axis=1).T.astype(np.int32, order="C")
        lengths = None
        if len(run) > 1:
            keys = np.asarray(to, dtype=np.int32)
            first_queries, first_keys = self._send(np.stack((queries - queries[0], keys)))
            lengths = Lengths(first_queries, first_keys, int(np.diff(queries).max()), int(np.diff(keys).max()))
        return Part(self._send(table), to[-1], is_causal, lengths)

    def _send(self, x: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(x).to(self._device, non_blocking=True)

    def attend(self, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor, ops: PartOps) -> None:
        """Compute attention of the entries (`Kernels.prefill_attention`)."""
        views = iter(self._gathered(pool, ops.memory))
        for queries, parts in self.calls:
            is_all = queries == slice(0, len(q))
            vectors, into = (q, out) if is_all else (q[queries], out[queries])
            found: Attended | None = None
            for index, part in enumerate(parts):
                whole, k, v = next(views)
                ops.gather(pool, layer, part.ranges, whole)
                this = Attended(*self._library.call(vectors, k, v, part.is_causal, spec.scale, part.lengths))
                if found is not None:
                    is_last = index == len(parts) - 1
                    this = ops.join(found, this, into if is_last else _wide(found))
                found = this
            if len(parts) == 1 and found is not None:
                into.copy_(found.out)

    def _gathered(self, pool: KvPool, memory: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for each part the memory of its keys and values, `[2, kv_heads, tokens, head_dim]`, then the keys
        and the values as a library takes them. They are the same for all layers."""
        if self._buffer is not memory:
            numbers, form = memory.view(pool.computed), pool.format
            width = len(form.bands) * form.heads * form.row[0].count
            self._buffer, self._views = memory, []
            for part in (part for _, parts in self.calls for part in parts):
                whole = numbers[: part.tokens * width].view(2, form.heads, part.tokens, -1)
                self._views.append((whole, whole[0].transpose(0, 1), whole[1].transpose(0, 1)))
        return self._views


def _wide(found: Attended) -> Tensor:
    """Return memory for a result that others will be joined to: its own if that is at least float32."""
    dtype = found.lse.dtype
    return found.out if found.out.dtype == dtype else torch.empty_like(found.out, dtype=dtype)


def _runs(
    plan: PrefillPlan, entries: Sequence[int], tokens: NDArray[np.int64], capacity: int
) -> Iterator[Sequence[int]]:
    """Yield runs of neighbouring entries: as many as have at most `capacity` tokens together, at least one."""
    run: list[int] = []
    for entry in entries:
        if run and (entry != run[-1] + 1 or sum(int(tokens[e]) for e in (*run, entry)) > capacity):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
