"""Correctness on the GPU: every op of the CUDA kernels against the float64 reference, over random trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product

import numpy as np
import torch
from gpu_device import Gpu, Output, Visit
from gpu_errors import LIMITS, relative_error
from gpu_kept import check_rounding, kept, over, widest
from gpu_layers import check_experts, check_float8, check_float8_rounding
from torch import Tensor

from trunkline.kernels.library_attention import AttentionLibrary, LibraryPrefill, gathered_bytes
from trunkline.kernels.ops import AttentionSpec, KvPool, QkNorm, make_angles
from trunkline.kernels.plan import DecodePlan, PrefillPlan, Segments, WritePlan, build_decode_plan
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.reference_sampling import ReferenceSampling
from trunkline.kernels.sampling import Biases, Draws, LogitEdits, Masks, Penalties, SamplingOps
from trunkline.kvstore.chunk_format import KV_DTYPES

HEAD_DIMS = (64, 80, 96, 128, 256)
MOST_OF_THE_TIME = 0.85
"""Share of a part's limit, which it must not run into: it tells what it has found at the end."""
ROWS = 37


@dataclass(frozen=True)
class Trial:
    """A random batch: groups of rows with a common prefix, parts of blocks, shifts, and a tail each."""

    spec: AttentionSpec
    data: Tensor
    """float64 pool; slots that nobody reads are NaN."""
    segments: Segments
    runs: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    positions: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    chunk: int

    def decode_plan(self) -> DecodePlan:
        return build_decode_plan(self.segments, self.positions, self.runs, self.chunk)

    def prefill_plan(self, queries: int) -> PrefillPlan:
        """The last tokens of each row, at most `queries`, and never more than its tail has."""
        s, rows = self.segments, len(self.positions)
        ends = np.flatnonzero(np.append(s.row[1:] != s.row[:-1], True))
        counts = np.minimum(s.count[ends], queries)
        position = np.concatenate(
            [np.arange(p - n + 1, p + 1) for p, n in zip(self.positions, counts, strict=True)]
        )
        return PrefillPlan(
            chunk_size=self.chunk,
            query_indptr=np.cumsum([0, *counts], dtype=np.int32),
            query_position=position.astype(np.int32),
            item_indptr=np.searchsorted(s.row, np.arange(rows + 1)).astype(np.int32),
            block=s.block,
            first=s.first,
            count=s.count,
            base=s.base,
            shift=s.shift,
        )


def random_trial(seed: int, head_dim: int, chunk: int = 64, rows: int = ROWS) -> Trial:
    rng = np.random.default_rng(seed)
    heads, kv_heads = ((8, 8), (8, 2), (6, 2), (4, 1))[seed % 4]
    rotary = None if seed % 5 == 4 else 1000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    slopes = 2.0 ** -torch.arange(1.0, heads + 1) if rotary is None else None
    spec = AttentionSpec(
        heads, kv_heads, head_dim, head_dim**-0.5, rotary, slopes, (0, 0, 100)[seed % 3], (0.0, 20.0)[seed % 2]
    )
    table: list[tuple[int, ...]] = []  # row, table index, block, first, count, base, shift
    runs, position, blocks, start = [], [], 0, 0
    while start < rows:
        stop = min(rows, start + int(rng.integers(1, 20)))
        depth = int(rng.integers(0, 12))
        prefix, end = [], 0
        for index in range(depth):
            first = int(rng.integers(0, chunk)) if rng.random() < 0.2 else 0
            count = int(rng.integers(1, chunk - first + 1)) if first else chunk
            prefix.append((index, blocks, first, count, end))
            blocks, end = blocks + 1, end + count
        runs += [(start, stop, 0, depth)] if depth else []
        for row in range(start, stop):
            # Moved as a whole, as after a truncation: shifts only where the context acts earlier.
            shift = -int(rng.integers(0, 30)) if rng.random() < 0.3 else 0
            table += [(row, *part, shift) for part in prefix]
            count = int(rng.integers(1, chunk + 1))
            table.append((row, depth, blocks, 0, count, end, 0))
            position.append(end + count - 1)
            blocks += 1
        start = stop
    columns = np.array(table, dtype=np.int32).T.copy()
    data = torch.full((blocks, 2, 2, kv_heads, chunk, head_dim), float("nan"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for _, _, block, first, count, _, _ in table:
        part = data[block, ..., first : first + count, :]
        part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    to_int = np.array(runs, dtype=np.int32).reshape(-1, 4), np.array(position, dtype=np.int32)
    return Trial(spec, data, Segments(*columns), *to_int, chunk)


def check_attention(
    gpu: Gpu, trial: Trial, dtype: torch.dtype, kv_dtype: str = "auto"
) -> Iterator[tuple[str, float]]:
    """(op, relative error) of decode, in both modes, and prefill."""
    head_dim, pool = trial.spec.head_dim, kept(trial.data.to(gpu.device, dtype), kv_dtype)
    exact_pool = widest(pool)
    for name in ("decode_attention", "decode_attention_invariant", "prefill_attention"):
        kernels, reference = gpu.kernels(invariant=name.endswith("invariant")), ReferenceKernels()
        prefill = name == "prefill_attention"
        count = len(trial.prefill_plan(40).query_position) if prefill else len(trial.positions)
        q = torch.randn(count, trial.spec.heads, head_dim, device=gpu.device).to(dtype)
        out = torch.full_like(q, float("nan"))
        exact = torch.empty_like(q, dtype=torch.float64)
        if prefill:
            kernels.prefill_attention(trial.prefill_plan(40), q, pool, 1, trial.spec, out)
            reference.prefill_attention(trial.prefill_plan(40), q.double(), exact_pool, 1, trial.spec, exact)
        else:
            kernels.decode_attention(trial.decode_plan(), q, pool, 1, trial.spec, out)
            reference.decode_attention(trial.decode_plan(), q.double(), exact_pool, 1, trial.spec, exact)
        yield name + over(kv_dtype), relative_error(out, exact)


PROMPTS = ((1, 0), (40, 0), (7, 100), (130, 333), (1, 64), (20, 128), (16, 150))
"""New tokens and cached ones of each."""


def prompts_plan(seed: int, chunk: int) -> tuple[PrefillPlan, int]:
    """`PROMPTS` in blocks in any order, and the number of blocks. The last but one has a shifted context, the last
    has a hole."""
    sizes = [-(-(new + context) // chunk) for new, context in PROMPTS]
    ends, total = np.cumsum(sizes), sum(sizes)
    index = np.concatenate([np.arange(size) for size in sizes])
    count = np.full(total, chunk)
    count[ends - 1] = [
        new + context - (size - 1) * chunk for (new, context), size in zip(PROMPTS, sizes, strict=True)
    ]
    first, shift = np.zeros(total), np.zeros(total)
    shift[ends[-3] : ends[-3] + 2] = -3
    first[ends[-2]], count[ends[-2]] = 5, chunk - 5
    position = [np.arange(context, context + new) for new, context in PROMPTS]
    arrays = {
        "query_indptr": np.cumsum([0, *(new for new, _ in PROMPTS)]),
        "query_position": np.concatenate(position),
        "item_indptr": np.concatenate(([0], ends)),
        "block": np.random.default_rng(seed).permutation(total),
        "first": first,
        "count": count,
        "base": index * chunk + first,
        "shift": shift,
    }
    return PrefillPlan(chunk, **{name: array.astype(np.int32) for name, array in arrays.items()}), total


def check_library(
    gpu: Gpu, library: AttentionLibrary, seed: int, head_dim: int, dtype: torch.dtype, kv_dtype: str = "auto"
) -> Iterator[tuple[str, float]]:
    """Prefill that is given to a library, as far as it may be; so little memory that a context is in pieces."""
    chunk, (heads, kv_heads) = 64, ((8, 8), (8, 2), (6, 2), (4, 1))[seed % 4]
    frequencies = 1000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, frequencies)
    plan, blocks = prompts_plan(seed, chunk)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(blocks, 2, 2, kv_heads, chunk, head_dim, generator=generator).to(gpu.device, dtype)
    q = torch.randn(len(plan.query_position), heads, head_dim, generator=generator).to(gpu.device, dtype)
    for block, start, count in zip(plan.block, plan.first, plan.count, strict=True):
        data[block, ..., :start, :] = data[block, ..., start + count :, :] = float("nan")
    pool, exact = kept(data, kv_dtype), torch.empty_like(q, dtype=torch.float64)
    if not library.takes(spec, pool):
        return
    ReferenceKernels().prefill_attention(replace(plan), q.double(), widest(pool), 1, spec, exact)
    kernels = gpu.kernels(
        prefill=LibraryPrefill(library, operations_min=0), workspace_bytes=5 * chunk * gathered_bytes(pool)
    )
    out = torch.full_like(q, float("nan"))
    kernels.prefill_attention(replace(plan), q, pool, 1, spec, out)
    was_given = "library_attention" in kernels.counters.calls
    name = f"prefill_by_{library.name}{over(kv_dtype)}"
    yield name, relative_error(out, exact) if was_given else float("inf")


def check_writes(gpu: Gpu, seed: int, head_dim: int, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """The fused write with norms, copies, gathers and scatters."""
    generator = torch.Generator().manual_seed(seed)
    spec = AttentionSpec(6, 2, head_dim, 1.0)
    qkv = torch.randn(19, 10 * head_dim, generator=generator).to(gpu.device, dtype)
    weights = [torch.randn(head_dim, generator=generator).to(gpu.device, dtype) for _ in range(2)]
    frequencies = 1000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = make_angles(torch.arange(19) * 7, frequencies)
    slots = np.random.default_rng(seed).permutation(6 * 16)[:19].astype(np.int32)
    slots[::5] = -1
    shape, results = (6, 3, 2, 2, 16, head_dim), []
    for kernels, wide in ((gpu.kernels(), dtype), (ReferenceKernels(), torch.float64)):
        pool = KvPool.wrap(torch.zeros(shape, dtype=wide, device=gpu.device))
        moved = type(angles)(*(x.to(gpu.device, dtype).to(wide) for x in angles))
        norm = QkNorm(weights[0].to(wide), weights[1].to(wide), 1e-5)
        q = kernels.write_kv(WritePlan(16, slots), qkv.clone().to(wide), moved, pool, 1, spec, norm)
        kernels.copy_blocks(pool, np.array([[0, 4, 3, 9], [1, 5, 0, 16]], dtype=np.int32))
        part = torch.empty((3, 2, *shape[2:]), dtype=wide, device=gpu.device)
        kernels.gather_blocks(pool, np.array([5, 1, 2], dtype=np.int32), range(1, 3), part)
        kernels.scatter_blocks(pool, np.array([0, 3, 1], dtype=np.int32), range(2), part)
        results.append((q, pool.data))
    yield "write_kv", relative_error(results[0][0], results[1][0])
    yield "pool_moves", relative_error(results[0][1], results[1][1])


def check_norms(gpu: Gpu, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(seed)
    x, delta = (torch.randn(13, 200, generator=generator).to(gpu.device, dtype) for _ in range(2))
    weight = torch.randn(200, generator=generator).to(gpu.device, dtype)
    kernels, reference = gpu.kernels(), ReferenceKernels()
    wide = (x.double(), weight.double(), 1e-5)
    yield "rms_norm", relative_error(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(*wide))
    summed = x.clone()
    out = kernels.add_rms_norm(delta, summed, weight, 1e-5)
    yield "add_rms_norm", relative_error(out, reference.rms_norm(summed.double(), weight.double(), 1e-5))


def check_dense(gpu: Gpu, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Layers over plain weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(13, 200, generator=generator).to(gpu.device, dtype)
    matrix = (torch.randn(320, 200, generator=generator) / 14).to(gpu.device, dtype)
    kernels, reference = gpu.kernels(), ReferenceKernels()
    out = kernels.linear(x, kernels.pack_linear(matrix, None), torch.float32)
    yield "linear", relative_error(out, x.double() @ matrix.double().T)
    for activation in ("silu", "gelu", "gelu_tanh"):
        gated = kernels.gated_linear(x, kernels.pack_gated_linear(matrix, None, activation))
        packed = reference.pack_gated_linear(matrix.double(), None, activation)
        yield f"gated_{activation}", relative_error(gated, reference.gated_linear(x.double(), packed))


def check_sampling(gpu: Gpu, seed: int) -> Iterator[tuple[str, float]]:
    """Tokens drawn with all kinds of limits, after a bias, masks and penalties: infinite if any differs."""
    generator = torch.Generator().manual_seed(seed)
    rows, vocabulary = 9, 3001 + seed % 7
    logits, results = torch.randn(rows, vocabulary, generator=generator) * 3, []
    factors = torch.tensor([[0.7, 1.0, 30.0], [0.9, 1.0, 0.5], [-3.0, float("-inf"), -1.0]]).repeat(1, 3)
    factors[0, 0] = 0.0
    draws = Draws(
        torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator),
        torch.arange(rows),
        torch.tensor([0, 5, 0, 50, 1, 0, 0, 999, 0], dtype=torch.int32),
        factors,
        limited=True,
    )
    numbers = torch.arange(0, rows, 2, dtype=torch.int32)
    count = vocabulary // 3
    tokens = torch.randperm(vocabulary, generator=generator)[:count].int().repeat(len(numbers))
    words = torch.randint(-(1 << 31), 1 << 31, (len(numbers), -(-vocabulary // 32)), generator=generator).int()
    edits = LogitEdits(
        Biases(numbers, numbers * 7, torch.rand(len(numbers), generator=generator)),
        Masks(numbers, words),
        Penalties(
            numbers,
            torch.arange(len(numbers) + 1) * count,
            tokens,
            tokens % 3,
            torch.rand(len(numbers), 3, generator=generator) + 0.5,
        ),
    )
    ways: tuple[SamplingOps, ...] = (gpu.kernels().sampling(), ReferenceSampling())
    for ops, x in zip(ways, (logits.to(gpu.device), logits.clone()), strict=True):
        ops.edit_logits(x, edits)
        results.append((x.cpu(), ops.draw(x, draws).cpu()))
    (edited, drawn), (exact, expected) = results
    yield "edit_logits", 0.0 if torch.equal(edited, exact) else float("inf")
    yield "draw", 0.0 if torch.equal(drawn, expected) else float("inf")


def check_replays(
    gpu: Gpu, trials: list[Trial], dtype: torch.dtype, kv_dtype: str = "auto"
) -> Iterator[tuple[str, float]]:
    """A captured step, replayed over other plans of as many rows: each must compute what its plan says now."""
    first = trials[0]
    blocks = max(len(trial.data) for trial in trials)
    data = torch.zeros(blocks, *first.data.shape[1:], dtype=dtype, device=gpu.device)
    pool, kernels, reference = kept(data, kv_dtype), gpu.kernels(), ReferenceKernels()
    q = torch.randn(len(first.positions), first.spec.heads, first.spec.head_dim, device=gpu.device).to(dtype)
    out = torch.full_like(q, float("nan"))
    plan = first.decode_plan()
    for trial in trials:  # the largest workspace is taken before the capture
        kernels.prepare_replay(trial.decode_plan(), pool, first.spec)
    kernels.prepare_replay(plan, pool, first.spec)

    def step() -> None:
        kernels.decode_attention(plan, q, pool, 1, first.spec, out)

    graph = gpu.graph([step], [kernels])
    for trial in (*trials, first):
        data.zero_()
        data[: len(trial.data)] = trial.data.to(gpu.device, dtype)
        pool.data.copy_(kept(data, kv_dtype).data)
        kernels.prepare_replay(trial.decode_plan(), pool, first.spec)
        out.fill_(float("nan"))
        graph.replay()
        gpu.synchronize()
        exact = torch.empty_like(q, dtype=torch.float64)
        reference.decode_attention(trial.decode_plan(), q.double(), widest(pool), 1, first.spec, exact)
        yield "replays_of_other_plans" + over(kv_dtype), relative_error(out, exact)


def one_round(
    gpu: Gpu, seed: int, dtype: torch.dtype, head_dims: tuple[int, ...], rows: int = ROWS
) -> Iterator[tuple[str, float]]:
    """Every op once per head size; KV in 8 bits in one of its types, in turn."""
    yield from check_norms(gpu, seed, dtype)
    yield from check_dense(gpu, seed, dtype)
    yield from check_experts(gpu, seed, dtype)
    yield from check_float8_rounding(gpu, seed, dtype)
    yield from check_float8(gpu, seed, dtype)
    yield from check_sampling(gpu, seed)
    for index, head_dim in enumerate(head_dims):
        trial, kv_dtype = random_trial(seed, head_dim, rows=rows), KV_DTYPES[1:][(seed + index) % 2]
        yield from check_attention(gpu, trial, dtype)
        yield from check_attention(gpu, trial, dtype, kv_dtype)
        yield from check_writes(gpu, seed, head_dim, dtype)
        yield from check_rounding(gpu, seed, head_dim, dtype, kv_dtype)
    trials = [random_trial(seed + other, head_dims[0], rows=rows) for other in (0, 20, 40)]
    trials = [replace(trial, spec=trials[0].spec) for trial in trials]
    yield from check_replays(gpu, trials, dtype)
    yield from check_replays(gpu, trials, dtype, KV_DTYPES[1:][seed % 2])


def library_round(
    gpu: Gpu, out: Output, seed: int, dtype: torch.dtype, head_dims: tuple[int, ...]
) -> Iterator[tuple[str, float]]:
    """Every library once per head size. What a library says when it fails is a problem, and the others go on. This
    is apart from `one_round`, because the sanitizer is for kernels of our own."""
    for library in gpu.libraries:
        try:
            for index, head_dim in enumerate(head_dims):
                yield from check_library(gpu, library, seed, head_dim, dtype)
                kv_dtype = KV_DTYPES[1:][(seed + index) % 2]
                yield from check_library(gpu, library, seed, head_dim, dtype, kv_dtype)
        except (RuntimeError, NotImplementedError) as error:
            out.problem(f"prefill by {library.name}, {dtype}: {str(error)[:300]}")


def check_all(
    gpu: Gpu, out: Output, visit: Visit, head_dims: tuple[int, ...] = HEAD_DIMS, seeds_max: int = 1000
) -> None:
    """Rounds with ever new trees, until most of the time is used, the first one perhaps not to its end: the part
    `ops`."""
    worst: dict[tuple[str, torch.dtype], tuple[float, int]] = {}
    for seed, dtype in product(range(2 if visit.quick else seeds_max), LIMITS):
        if visit.has_used(MOST_OF_THE_TIME):
            break
        ours = one_round(gpu, seed, dtype, head_dims)
        for name, error in chain(ours, library_round(gpu, out, seed, dtype, head_dims)):
            before, trials = worst.get((name, dtype), (0.0, 0))
            worst[name, dtype] = (max(before, error), trials + 1)
            if visit.has_used(MOST_OF_THE_TIME):
                break
    for dtype in LIMITS:
        if not any(tried == dtype for _, tried in worst):
            out.note(f"no time was left for ops in {str(dtype).removeprefix('torch.')}")
    for (name, dtype), (error, trials) in worst.items():
        kind = str(dtype).removeprefix("torch.")
        out.add({"op": name, "dtype": kind}, "relative_error_max", error, "", trials)
        out.add({"op": name, "dtype": kind}, "allowed", LIMITS[dtype], "", trials)
        if not error <= LIMITS[dtype]:
            out.problem(f"{name} in {kind} is off by {error:.2e}; {LIMITS[dtype]:.1e} is allowed")
