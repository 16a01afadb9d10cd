"""Others' decode attention beside ours on the same buffers, in turn (part `flashinfer`): FlashInfer and torch.

FlashInfer compiles its kernels with nvcc at their first use, which takes longer than what is measured with them:
part `compile` does that earlier, beside parts that time nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from gpu_attention import case_of, decode_calls, make_sets
from gpu_cases import CHUNK, TABLE_3, Buffers, Cell, make_buffers, replay_error
from gpu_device import Call, Gpu, Output, Visit
from gpu_errors import LIMITS
from torch import Tensor

Calls = list[Call]

_WORKSPACE_BYTES: Final = 256 << 20
_BATCH_WORKSPACE_BYTES: Final = 4 << 30
_DEVICE = torch.device("cuda")


def has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def _sdpa_into(out: Tensor, q: Tensor, kv: Tensor) -> None:
    """The copy is of the queries' size: nothing, beside the dense KV."""
    out.copy_(F.scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=True)[:, :, 0])


def torch_sdpa(cell: Cell, sets: list[Buffers]) -> Calls:
    """Every row's KV dense in memory, which no server has; it reads shared tokens once per row."""
    calls: Calls = []
    for buffers in sets:
        tables = torch.from_numpy(cell.tables().astype(np.int64)).to(buffers.q.device)
        kv = buffers.pool.data[tables, 0]  # [batch, blocks, 2, kv_heads, chunk, d]
        dense = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., : cell.n_s + cell.tail, :].contiguous()
        q = buffers.q[:, :, None]
        calls.append(partial(_sdpa_into, buffers.out, q, dense))
    return calls


def _pages(cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
    """int32 row pointers, page ids, and tokens of each row's last page, on the device."""
    tables = cell.tables()
    indptr = np.arange(cell.batch + 1, dtype=np.int32) * np.int32(tables.shape[1])
    last = np.full(cell.batch, cell.last_page_tokens, dtype=np.int32)
    a, b, c = (torch.from_numpy(x).to(_DEVICE) for x in (indptr, tables.reshape(-1).copy(), last))
    return a, b, c


def _workspace() -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=_DEVICE)


def flashinfer_decode(cell: Cell, sets: list[Buffers]) -> Calls:
    library: Any = importlib.import_module("flashinfer")
    use_matrix_units = cell.heads // cell.kv_heads >= 4
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "HND", use_tensor_cores=use_matrix_units)
    shape = (cell.heads, cell.kv_heads, cell.head_dim, CHUNK)
    wrapper.plan(*_pages(cell), *shape, q_data_type=torch.float16, kv_data_type=torch.float16)
    return [lambda b=b: wrapper.run(b.q, b.pool.data[:, 0], out=b.out) for b in sets]  # type: ignore[misc]


def flashinfer_batch_attention(cell: Cell, sets: list[Buffers]) -> Calls:
    library: Any = importlib.import_module("flashinfer")
    wrapper = library.BatchAttention(kv_layout="HND")
    # It reserves room for partial results of the largest grid, which its own buffer does not have.
    wrapper.float_workspace_buffer = torch.empty(_BATCH_WORKSPACE_BYTES, dtype=torch.uint8, device=_DEVICE)
    indptr, indices, _ = _pages(cell)
    lengths = torch.full((cell.batch,), cell.n_s + cell.tail, dtype=torch.int32, device=_DEVICE)
    queries = torch.arange(cell.batch + 1, dtype=torch.int32, device=_DEVICE)
    shape = (cell.heads, cell.kv_heads, cell.head_dim, cell.head_dim, CHUNK)
    types = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
    wrapper.plan(queries, indptr, indices, lengths, *shape, causal=False, **types)
    return [lambda b=b: wrapper.run(b.q, b.pool.data[:, 0], out=b.out) for b in sets]  # type: ignore[misc]


def flashinfer_cascade(cell: Cell, sets: list[Buffers]) -> Calls:
    """Two levels: the shared pages once for all rows, then each row's own."""
    if not cell.n_s:
        raise ValueError("nothing is shared")
    library: Any = importlib.import_module("flashinfer")
    wrapper = library.MultiLevelCascadeAttentionWrapper(2, _workspace(), "HND")
    tables, shared = cell.tables(), cell.n_s // CHUNK

    def device(x: Any) -> Tensor:
        return torch.tensor(np.ascontiguousarray(x), dtype=torch.int32, device=_DEVICE)

    own = tables[:, shared:]
    wrapper.plan(
        [device([0, cell.batch]), device(np.arange(cell.batch + 1))],
        [device([0, shared]), device(np.arange(cell.batch + 1) * own.shape[1])],
        [device(tables[0, :shared]), device(own.reshape(-1))],
        [device([CHUNK]), device(np.full(cell.batch, cell.last_page_tokens))],
        cell.heads,
        cell.kv_heads,
        cell.head_dim,
        CHUNK,
        q_data_type=torch.float16,
    )
    # The merge of levels allocates its result.
    return [lambda b=b: b.out.copy_(wrapper.run(b.q, b.pool.data[:, 0])) for b in sets]  # type: ignore[misc]


BASELINES: Final[dict[str, Callable[[Cell, list[Buffers]], Calls]]] = {
    "flashinfer_decode": flashinfer_decode,
    "flashinfer_batch": flashinfer_batch_attention,
    "flashinfer_cascade": flashinfer_cascade,
    "torch_sdpa": torch_sdpa,
}

FOREIGN_ERRORS: Final = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    OSError,
    ImportError,
    AssertionError,
    LookupError,
    subprocess.SubprocessError,
)
"""Other projects' code, which also runs compilers: whatever it raises is its entry in the table."""


ORDER: Final = tuple(
    cell
    for kv_heads in (8, 32)
    for n_p in (4096, 2048, 1024)
    for cell in TABLE_3
    if (cell.kv_heads, cell.n_p) == (kv_heads, n_p)
)
"""What users meet most comes first."""
COMPILED: Final = (Cell(256, 128, 32, 8, batch=4), Cell(256, 128, 32, 32, batch=4))
"""Cells whose kernels are those of all others."""


def compare_all(gpu: Gpu, out: Output, visit: Visit, cells: Sequence[Cell] = ORDER) -> None:
    """The part `flashinfer`."""
    names = [name for name in BASELINES if has_flashinfer() or not name.startswith("flashinfer")]
    if not has_flashinfer():
        out.note("flashinfer is not installed: torch alone was measured beside ours")
    broken: set[str] = set()
    for cell in cells[: 4 if visit.quick else None]:
        if visit.has_used(0.9):
            out.note(f"no time was left for {cell} and what follows it")
            break
        compare(gpu, out, cell, [name for name in names if name not in broken], broken)


def compare(gpu: Gpu, out: Output, cell: Cell, names: list[str], broken: set[str]) -> None:
    """
    Args:
        broken: gets the names of those that failed, so that they are not tried again.
    """
    sets = make_sets(gpu, out, cell)
    if not sets:
        return
    kernels = gpu.kernels()
    graphs = {"ours": gpu.graph(decode_calls(kernels, cell, sets), [kernels])}
    alive = []  # a graph holds addresses in what the calls hold
    for name in names:
        if name == "flashinfer_cascade" and not cell.n_s:
            continue
        try:
            alive.append(BASELINES[name](cell, sets))
            graph = gpu.graph(alive[-1])
            error = replay_error(gpu, graph, cell, sets)
        except FOREIGN_ERRORS as failure:
            out.note(f"{name} at {cell}: {type(failure).__name__}: {str(failure)[-400:]}")
            broken.add(name)
            continue
        if error <= LIMITS[torch.float16]:
            graphs[name] = graph
        else:
            out.note(f"{name} at {cell} is off by {error:.2e} and was not measured")
    for name, spent in gpu.interleaved_us({name: graph.replay for name, graph in graphs.items()}).items():
        out.add(case_of(cell), name, spent / len(sets), "us", 15)


def compile_flashinfer(gpu: Gpu, out: Output, visit: Visit) -> None:
    """The part `compile`: each kernel once."""
    del visit
    if not has_flashinfer():
        out.note("flashinfer is not installed")
        return
    for name in (name for name in BASELINES if name.startswith("flashinfer")):
        for cell in COMPILED:
            try:
                for call in BASELINES[name](cell, [make_buffers(gpu, cell, 0)]):
                    call()
                gpu.synchronize()
            except FOREIGN_ERRORS as failure:
                out.note(f"{name} was not compiled: {type(failure).__name__}: {str(failure)[-400:]}")
