"""Others' decode attention for the GPU benchmark: torch, and FlashInfer where it can be imported.

    python benchmarks/gpu_baselines.py NAME CELLS

Runs one of them in a process of its own, so that whatever it does to the device or to the process ends with it.
CELLS are indices into `gpu_cases.TABLE_3`, with commas. A line of JSON per cell: what was measured, or why not.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from gpu_cases import (
    CHUNK,
    TABLE_3,
    Buffers,
    Cell,
    cache_bytes,
    captured,
    make_buffers,
    replay_error,
    time_events,
)
from gpu_checks import LIMITS
from torch import Tensor

Calls = list[Callable[[], object]]

_WORKSPACE_BYTES: Final = 256 << 20


def has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def _sdpa_into(out: Tensor, q: Tensor, kv: Tensor) -> None:
    """The copy is of the queries' size: nothing, beside the dense KV."""
    out.copy_(F.scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=True)[:, :, 0])


def torch_sdpa(cell: Cell, sets: list[Buffers]) -> Calls:
    """Every row's KV dense in memory, which no server has; it reads shared tokens once per row."""
    calls: Calls = []
    for buffers in sets:
        tables = torch.from_numpy(cell.tables().astype(np.int64)).cuda()
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
    a, b, c = (torch.from_numpy(x).cuda() for x in (indptr, tables.reshape(-1).copy(), last))
    return a, b, c


def _workspace() -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


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
    indptr, indices, _ = _pages(cell)
    lengths = torch.full((cell.batch,), cell.n_s + cell.tail, dtype=torch.int32, device="cuda")
    queries = torch.arange(cell.batch + 1, dtype=torch.int32, device="cuda")
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
        return torch.tensor(np.ascontiguousarray(x), dtype=torch.int32, device="cuda")

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


def measure(name: str, cell: Cell) -> dict[str, float]:
    """Microseconds per call, and the relative error of what the timed graph wrote."""
    sets = [make_buffers(cell, seed) for seed in range(cell.rotated_sets(cache_bytes()))]
    graph = captured(BASELINES[name](cell, sets))
    error = replay_error(graph, cell, sets)
    if not error <= LIMITS[torch.float16]:
        raise ValueError(f"off by {error:.2e}")
    return {"time_us": time_events(graph.replay) / len(sets), "error": error}


def main() -> None:
    name, cells = sys.argv[1], [int(index) for index in sys.argv[2].split(",")]
    for index in cells:
        try:
            result: dict[str, object] = {**measure(name, TABLE_3[index])}
        except FOREIGN_ERRORS as error:
            result = {"failure": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"cell": index, **result}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
