"""What the host does in a whole decode step on a GPU, without one: for `gpu_host.py`.

The real runner executes plans of steady decoding. In the place of the library of CUDA kernels stands one that
counts its calls and does nothing; torch's operations run on the CPU over a model so small that they cost little,
and count, too. A graph's replay is a call that does nothing. So host time is Python's and the planner's, with
little of the launches themselves: a GPU's driver takes some microseconds for each of them on top.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from gpu_device import Gpu
from gpu_model import Batch, ModelShape, make_checkpoint
from report import Report
from torch.utils._python_dispatch import TorchDispatchMode

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_library import AttentionShape
from trunkline.worker import loading
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.step_graphs import Replay

VIEWS = (
    *(
        "view",
        "slice",
        "select",
        "as_strided",
        "alias",
        "detach",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
    ),
    *("to", "resolve_conj", "resolve_neg"),
)
"""Operations that launch nothing."""


class NoDevice:
    """Stands where the library of kernels stands: an H100 that computes nothing."""

    path = Path("no-device")

    def __init__(self) -> None:
        self.calls = 0

    def call(self, name: str, *arguments: Any) -> None:
        del name, arguments
        self.calls += 1

    def attention_shape(self, dtype: torch.dtype, head_dim: int, kv_dtype: str = "auto") -> AttentionShape:
        del dtype, head_dim, kv_dtype
        return AttentionShape(
            tile_rows=64,
            tile_tokens=64,
            stages=2,
            narrow_rows=16,
            narrow_stages=3,
            shared_bytes=1 << 16,
            grid=264,
            is_matrix=1,
        )


class NoGraphs:
    """Captures nothing, and counts replays."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        return self

    def replay(self) -> None:
        self.replays += 1

    def forget(self) -> None:
        pass


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations that launch something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = func.name().removeprefix("aten::").partition(".")[0].strip("_")
        self.calls += not (name in VIEWS or name.startswith(("empty", "new_empty")))
        return func(*args, **(kwargs or {}))


class Way:
    """A runner that executes steps op by op, or as graphs."""

    def __init__(self, shape: ModelShape, rows_max: int, *, graphs: bool) -> None:
        self.library = NoDevice()
        kernels = CudaKernels(self.library, lambda: 0)  # type: ignore[arg-type]
        self.graphs = NoGraphs()
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(loading, "choose_kernels", lambda *_: kernels),
        ):
            make_checkpoint(Path(folder), shape, torch.device("cpu"))
            config = WorkerConfig(
                model=folder,
                plan_endpoint="",
                report_endpoint="",
                chunk_size=64,
                pool_blocks=shape.pool_blocks,
                dtype=shape.dtype,
                max_context=2 * shape.context,
                max_rows=rows_max,
                cuda_graphs=graphs,
            )
            self.runner = load_runner(config, lambda *_: None, graphs=lambda: self.graphs)
        self.batch = Batch(self.runner, shape, Gpu())

    @property
    def words(self) -> int:
        graphs = self.runner.launched.graphs
        if graphs is not None:
            return graphs.uploaded_words
        kernels = self.runner.kernels
        assert isinstance(kernels, CudaKernels)
        return kernels.uploaded_words

    def calls(self) -> int:
        """Launches, copies and replays of a step."""
        before = self.library.calls + self.graphs.replays
        with Operations() as operations:
            self.batch.execute()
        return self.library.calls + self.graphs.replays - before + int(operations.calls)


def measure_steps(report: Report, batches: tuple[int, ...], steps: int) -> None:
    """Steady steps of both ways in turn, over models of two and of four layers: the difference is what a layer
    costs."""
    context = 4096
    found: dict[tuple[int, int, str], dict[int, tuple[float, float, float]]] = {}
    for layers in (2, 4):
        shape = ModelShape(128, layers, 4, 2, 256, 512, "float32", context=context, prompt=64, batches=batches)
        ways = {
            "op by op": Way(shape, max(batches), graphs=False),
            "graph": Way(shape, max(batches), graphs=True),
        }
        for rows in batches:
            for shared in (0, context // 2) if rows > 1 else (0,):
                for way in ways.values():
                    way.batch.replace(rows, shared)
                times: dict[str, list[float]] = {name: [] for name in ways}
                words = {name: -way.words for name, way in ways.items()}
                for step in range(steps):
                    for name in ways if step % 2 else reversed(ways):
                        start = time.thread_time()
                        ways[name].batch.execute()
                        times[name].append(1e6 * (time.thread_time() - start))
                for name, way in ways.items():
                    sent = (words[name] + way.words) / steps
                    found.setdefault((rows, shared, name), {})[layers] = (median(times[name]), way.calls(), sent)
    for (rows, shared, name), by_layers in found.items():
        case = {"part": "step", "rows": rows, "shared": shared, "way": name}
        (time_2, calls_2, sent), (time_4, calls_4, _) = by_layers[2], by_layers[4]
        report.add(case, "host_p50", time_2, "us", steps)
        report.add(case, "host_per_layer", (time_4 - time_2) / 2, "us", steps)
        report.add(case, "calls", calls_2, "1/step", 1)
        report.add(case, "calls_per_layer", (calls_4 - calls_2) / 2, "1/layer", 1)
        report.add(case, "words", sent, "1/step", steps)
