"""What units of decode attention take on a GPU, fitted to the times of a visit (part `decode`).

    python benchmarks/gpu_unit_fit.py loads gpu-results/decode.jsonl RECORDS    # at the commit that was measured
    python benchmarks/gpu_unit_fit.py fit [RECORDS] [--each]
    python benchmarks/gpu_unit_fit.py plans [RECORDS]                           # as they are made now, by that fit

`loads` plans each case again as the device had it, and writes a line for each plan: the mean of what was measured,
and what the thread blocks had that could be the last to end. `fit` takes these lines. Its model of a call, in µs:

    launch + largest over thread blocks of (narrow_unit * narrow units + wide_unit * wide units
                                            + (narrow_tile + from_memory * fresh + two_blocks * together)
                                            * narrow tiles
                                            + wide_tile * wide tiles)
           + merge * MB of partial results + merge_next * partial results of a row

`fresh` is the share of what is read that no earlier read brought to the L2 cache, `together` the share of
processors on which two thread blocks have units. Constants are those with the least sum of squared errors over
times, of 16-bit KV. `left out`: each cell is predicted by a fit to all others.
`gpu_decode_h200.jsonl` has the records of an H200 at `2e311c2f`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from gpu_attention import BATCH_CELL, BATCHES
from gpu_cases import TABLE_3, Cell
from gpu_host_deal import GPU
from numpy.typing import NDArray

from trunkline.kernels.cuda_decode import unit_times
from trunkline.kernels.plan import WorkOptions, plan_decode_work
from trunkline.kernels.quantised_kv import SCALE_BYTES
from trunkline.kvstore.chunks import Int32Array

Floats = NDArray[np.float64]

RECORDS: Final = Path(__file__).parent / "gpu_decode_h200.jsonl"
NAMES: Final = (
    *("launch", "narrow_unit", "narrow_tile", "from_memory", "two_blocks"),
    *("wide_unit", "wide_tile", "merge", "merge_next"),
)
START: Final = (2.5, 3.5, 1.4, 0.25, 0.45, 12.0, 1.75, 0.3, 0.4)
HEADER: Final = {"pieces": 2, "rows": 5, "partials": 6, "piece_items": 9, "piece_entries": 10, "item_block": 11}
HEADS: Final = 32
ITEM_COUNT, WORKERS, UNIT_BOUNDS, UNITS = 13, 25, 26, 27
"""Words of the header (csrc/common/work_plan.h, WorkHeader)."""


@dataclass(frozen=True)
class Record:
    """A plan that was executed, and what it took."""

    heads: str
    batch: int
    n_p: int
    n_s: int
    ways: tuple[str, ...]
    """What was measured of it: `ours`, `each row alone`, variants of a sweep."""
    us: float
    loads: tuple[tuple[int, int, int, int], ...]
    """Narrow units, narrow tiles, wide units, wide tiles of thread blocks; those that have no more of anything
    than another one are left out."""
    partial_mb: float
    """Of partial results that are merged."""
    fresh: float
    together: float
    """The share of processors on which two thread blocks have units."""

    @property
    def cell(self) -> tuple[str, int, int, int]:
        return self.heads, self.batch, self.n_p, self.n_s

    @property
    def row_partials(self) -> float:
        """Partial results of a row; rows of a cell are all alike."""
        return self.partial_mb * 1e6 / (self.batch * HEADS * GPU.partial_bytes)

    @property
    def in_bytes(self) -> bool:
        """Whether KV is in 8 bits."""
        return "KV" in self.heads


class Model:
    """The model of a call over some records."""

    def __init__(self, records: Sequence[Record]) -> None:
        most = max(len(record.loads) for record in records)
        self._loads = np.array([(record.loads * most)[:most] for record in records], dtype=np.float64)
        self._fresh = np.array([record.fresh for record in records])
        self._together = np.array([record.together for record in records])
        self._merged = np.array([(record.partial_mb, record.row_partials) for record in records])

    def slopes(self, constants: Floats) -> Floats:
        """What each constant counts, `[records, constants]`: of the thread block that ends last."""
        _, narrow_unit, narrow_tile, from_memory, two_blocks, wide_unit, wide_tile, *_ = constants
        tile = narrow_tile + from_memory * self._fresh + two_blocks * self._together
        each = np.stack(np.broadcast_arrays(narrow_unit, tile, wide_unit, wide_tile), axis=-1)
        last = np.einsum("rwk,rk->rw", self._loads, each).argmax(axis=1)
        units = self._loads[np.arange(len(last)), last]
        tiles = units[:, 1]
        columns = (*units[:, :2].T, tiles * self._fresh, tiles * self._together, *units[:, 2:].T, *self._merged.T)
        return np.stack([np.ones(len(last)), *columns], axis=1)

    def times(self, constants: Floats) -> Floats:
        """In µs."""
        return self.slopes(constants) @ constants


def predicted(constants: Floats, records: Sequence[Record]) -> Floats:
    """In µs."""
    return Model(records).times(constants)


def fitted(records: Sequence[Record], start: Sequence[float] = START) -> Floats:
    """The constants with the least sum of squared errors, each over its time, none negative (Levenberg, 1944)."""
    model, measured = Model(records), np.array([record.us for record in records])
    scale = 1 / np.sqrt(measured)
    found, damping = np.array(start), 1e-2
    wrong = (model.times(found) - measured) * scale
    while damping < 1e6:
        slopes = model.slopes(found) * scale[:, None]
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slopes.T @ wrong)
        tried = np.maximum(0.0, found + step)
        now = (model.times(tried) - measured) * scale
        if now @ now < wrong @ wrong - 1e-9:
            found, wrong, damping = tried, now, max(damping / 3, 1e-7)
        else:
            damping *= 3
    return found


def errors(made: Floats, records: Sequence[Record]) -> tuple[float, float]:
    """Root mean square of predicted minus measured times, in µs, and of that over the measured."""
    measured = np.array([record.us for record in records])
    wrong = made - measured
    return float(np.sqrt((wrong**2).mean())), float(np.sqrt(((wrong / measured) ** 2).mean()))


def left_out(records: Sequence[Record]) -> Floats:
    """Times of each cell, predicted by a fit to all others."""
    made = np.zeros(len(records))
    for cell in {record.cell for record in records}:
        own = np.array([record.cell == cell for record in records])
        others = [record for record in records if record.cell != cell]
        made[own] = predicted(fitted(others), records)[own]
    return made


def loads_of(words: Int32Array, options: WorkOptions, *, in_turns: bool = False) -> NDArray[np.int64]:
    """What each thread block has, `[workers, 4]`, as in `Record.loads`."""
    pieces = int(words[HEADER["pieces"]])
    items = words[words[HEADER["piece_items"]] :][: 2 * pieces].reshape(-1, 2)
    vectors = np.diff(words[words[HEADER["piece_entries"]] :][: pieces + 1]) * options.group
    counts = words[words[ITEM_COUNT] :]
    tokens = np.array([counts[start:stop].sum() for start, stop in items], dtype=np.int64)
    narrow = (vectors <= options.narrow_vectors).astype(np.int64)
    tiles = -(-tokens // options.tile_tokens)
    each = np.stack([narrow, narrow * tiles, 1 - narrow, (1 - narrow) * tiles], axis=1)
    if in_turns:
        unit: NDArray[np.integer[Any]] = np.arange(pieces * options.kv_heads)
        worker = unit % options.workers
    else:
        bounds = words[words[UNIT_BOUNDS] :][: 2 * int(words[WORKERS]) + 1 : 2]
        unit = words[words[UNITS] :][: bounds[-1]]
        worker = np.repeat(np.arange(options.workers), np.diff(bounds))
    loads = np.zeros((options.workers, 4), dtype=np.int64)
    np.add.at(loads, worker, each[unit // options.kv_heads])
    return loads


def largest(loads: NDArray[np.int64]) -> tuple[tuple[int, int, int, int], ...]:
    """Those of which no other has as much of everything."""
    rows = np.unique(loads, axis=0)
    covered = (rows[None] >= rows[:, None]).all(axis=2).sum(axis=1) > 1  # each covers itself
    return tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in rows[~covered])


def cell_of(case: dict[str, Any]) -> Cell:
    """The cell of a line of a visit."""
    name, _, kept = case["heads"].partition(", ")
    kv_heads = 32 if name == "MHA" else int(name.split("/")[1])
    return Cell(case["n_p"], case["n_s"], 32, kv_heads, case["batch"], kv_dtype=kept.split(" ")[0] or "auto")


def options_of(cell: Cell, way: str) -> tuple[WorkOptions, bool]:
    """How an H200 cuts the cell in a way of measuring it, and whether thread blocks take turns."""
    in_bytes = cell.kv_dtype != "auto"
    row = cell.head_dim + SCALE_BYTES if in_bytes else 2 * cell.head_dim
    options = replace(
        GPU,
        kv_heads=cell.kv_heads,
        group=cell.heads // cell.kv_heads,
        kv_token_bytes=2 * row,
        share=way != "each row alone",
        **unit_times(64, cell.head_dim, in_bytes=in_bytes),
    )
    if cut := re.match(r"(\d+) pieces of (\d+) tokens", way):
        options = replace(options, pieces_per_worker=int(cut[1]), piece_tokens_min=int(cut[2]))
    if cut := re.match(r"shared tokens in (\d+) pieces", way):  # as `gpu_attention.measure_units` has them cut
        options = replace(options, narrow_unit_ns=1, wide_unit_ns=1, partial_bytes_per_ns=1 << 30)
        options = replace(options, piece_tokens_min=cell.n_s // int(cut[1]))
    return options, way.endswith("in turns")


def record_of(cell: Cell, way: str, us: float) -> Record:
    """One measured time with its plan."""
    options, in_turns = options_of(cell, way)
    plan = cell.plan()
    words: Int32Array = plan_decode_work(plan, options).numpy()
    partials, rows = int(words[HEADER["partials"]]), int(words[HEADER["rows"]])
    items = int(words[words[HEADER["piece_items"]] :][: 2 * int(words[HEADER["pieces"]])].max(initial=0))
    counts, blocks = words[words[ITEM_COUNT] :][:items], words[words[HEADER["item_block"]] :][:items]
    first = np.unique(blocks, return_index=True)[1]
    loads = loads_of(words, options, in_turns=in_turns)
    at_work = int((loads.sum(axis=1) > 0).sum())
    return Record(
        *(cell.name, cell.batch, cell.n_p, cell.n_s),
        ways=(way,),
        us=us,
        loads=largest(loads),
        partial_mb=partials * cell.heads * options.partial_bytes / 1e6 if partials > rows else 0.0,
        fresh=round(float(counts[first].sum() / counts.sum()), 4),
        together=round(max(0.0, 2 * at_work / options.workers - 1), 4),
    )


def records_of(lines: Iterable[str]) -> list[Record]:
    """Records of a visit's lines. Ways with the same plan and layouts are one, with the mean of their times."""
    found: dict[object, list[Record]] = {}
    for line in lines:
        each = json.loads(line)
        case = each.get("case", {})
        way = case.get("variant", each.get("metric"))
        if way not in ("ours", "each row alone") and each.get("metric") != "time":
            continue
        if way in ("attention alone", "merge alone", "other kernels"):
            continue
        record = record_of(cell_of(case), way, each["value"])
        layout = way if "layout" in way or way == "2 stages for narrow pieces" else "turns" * ("turns" in way)
        found.setdefault((record.cell, record.loads, record.partial_mb, layout), []).append(record)
    return [
        replace(
            group[0],
            ways=tuple(record.ways[0] for record in group),
            us=round(float(np.mean([record.us for record in group])), 2),
        )
        for group in found.values()
    ]


def read_records(path: Path = RECORDS) -> list[Record]:
    """Records as `loads` writes them."""
    records = []
    for line in path.read_text().splitlines():
        each = json.loads(line)
        each |= {"ways": tuple(each["ways"]), "loads": tuple(map(tuple, each["loads"]))}
        records.append(Record(**each))
    return records


def show_fit(records: Sequence[Record], each: bool, show: Callable[[str], None] = print) -> None:
    """Constants, errors, and with `each` those of each record."""
    in_16 = [record for record in records if not record.in_bytes]
    constants = fitted(in_16)
    show("  ".join(f"{name} {value:.3g}" for name, value in zip(NAMES, constants, strict=True)))
    made = predicted(constants, in_16)
    for name, them in (("fit", made), ("left out", left_out(in_16))):
        micros, share = errors(them, in_16)
        show(f"{name}: {len(them)} plans, root mean square error {micros:.2f} µs, {share:.1%}")
    for record, time in zip(in_16, made, strict=True) if each else ():
        cell = f"{record.heads} {record.batch} {record.n_p}/{record.n_s}"
        show(f"{cell} {record.us:.1f} {time - record.us:+.1f} {', '.join(record.ways)}")


def show_plans(records: Sequence[Record], show: Callable[[str], None] = print) -> None:
    """What the fit says of plans of today: whole calls, and each row alone."""
    constants = fitted([record for record in records if not record.in_bytes])
    for cell in (*TABLE_3, *(replace(BATCH_CELL, batch=batch) for batch in BATCHES)):
        plans = [record_of(cell, way, 0.0) for way in ("ours", "each row alone")]
        ours, alone = predicted(constants, plans)
        show(f"{cell.name} {cell.batch} {cell.n_p}/{cell.n_s} {ours:.1f} {alone:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    loads = commands.add_parser("loads")
    loads.add_argument("measured", type=Path)
    loads.add_argument("records", type=Path)
    for name in ("fit", "plans"):
        command = commands.add_parser(name)
        command.add_argument("records", type=Path, nargs="?", default=RECORDS)
        if name == "fit":
            command.add_argument("--each", action="store_true", help="also the error of each plan")
    arguments = parser.parse_args()
    if arguments.command == "plans":
        show_plans(read_records(arguments.records))
        return
    if arguments.command == "fit":
        show_fit(read_records(arguments.records), arguments.each)
        return
    records = records_of(arguments.measured.read_text().splitlines())
    arguments.records.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))


if __name__ == "__main__":
    main()
