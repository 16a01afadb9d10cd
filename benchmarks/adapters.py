"""What adapters cost: decode steps of rows with none, one or several adapters, beside steps of the base model.

    python benchmarks/adapters.py [--quick] [--json PATH] [--rank 16] [--dtype bfloat16]

One rank with one thread; random adapters of all linear layers. Batches are decoded in turn, so that each kind of
batch meets the same machine: `none` (no row has an adapter), `half` (every second row has the same one), `one`
(all rows have it), `eight` (the rows take eight adapters in turn). CPU time of the thread, medians; `ratio` is to
`none`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from report import Report, argument_parser
from safetensors.torch import save_file
from small_model import small_model

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.adapters import adapter_salt
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.messages import LoadAdapter, Sampling
from trunkline.worker.model.adapters import CONFIG_FILE, WEIGHTS_FILE, adaptable
from trunkline.worker.model.families import read_model_config
from trunkline.worker.runner import Runner

ADAPTERS: Final = 8
BLOCKS: Final = 256
KINDS: Final = ("none", "half", "one", "eight")


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> Path:
    """Write a random adapter of all linear layers; return its folder."""
    folder.mkdir()
    config, generator = read_model_config(model), torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.layers):
        for module, (rows, columns) in adaptable(config, layer).items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_{{}}.weight"
            tensors[name.format("A")] = torch.randn(rank, columns, generator=generator) * 0.02
            tensors[name.format("B")] = torch.randn(rows, rank, generator=generator) * 0.02
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def load(runner: Runner, model: Path, rank: int) -> list[bytes]:
    """Load the adapters; return their keys."""
    keys = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(ADAPTERS):
            path = write_adapter(Path(folder, str(seed)), model, rank, seed)
            runner.adapters.load(LoadAdapter(seed, str(seed), str(path), rank))
            while not (reports := runner.reports()):
                time.sleep(0.01)
            keys += [report.key for report in reports if hasattr(report, "key")]
    return keys


def key_of(kind: str, row: int, keys: list[bytes]) -> bytes:
    """Return the adapter of a row in a kind of batch."""
    if kind == "none" or (kind == "half" and row % 2):
        return b""
    return keys[row % len(keys)] if kind == "eight" else keys[0]


class Batches:
    """An engine and a rank that decode batches."""

    def __init__(self, runner: Runner, keys: list[bytes]) -> None:
        self._runner, self._keys = runner, keys
        self._engine = Engine(EngineConfig(num_blocks=BLOCKS, max_context=1024, token_budget=1024))
        self._rng = np.random.default_rng(0)
        self._requests = 0

    def decode(self, kind: str, batch: int, tokens: int) -> list[float]:
        """Return the CPU seconds of each decode step of a new batch."""
        engine = self._engine
        for row in range(batch):
            self._requests += 1
            prompt = self._rng.integers(2, 4000, 32).tolist()
            salt = adapter_salt(key_of(kind, row, self._keys), b"")
            sampling = Sampling(temperature=0.0)
            submit = Submit(self._requests, pack_int32(prompt), 32, tokens, sampling, salt=salt)
            engine.receive(Request.of(self._requests, submit), 0.0)
        seconds = []
        while not engine.is_idle:
            plan = engine.step((), 0.0).plan
            assert plan is not None
            start = time.thread_time()
            result = self._runner.execute(plan)
            spent = time.thread_time() - start
            assert result is not None
            if not plan.prefill and not plan.joins and not plan.leaves:
                seconds.append(spent)
            engine.receive(result, 0.0)
        return seconds[2:]


def run(arguments: argparse.Namespace) -> None:
    model = small_model()
    config = WorkerConfig(
        model=str(model),
        plan_endpoint="",
        report_endpoint="",
        dtype=arguments.dtype,
        pool_blocks=BLOCKS,
        threads=1,
    )
    runner = Runner.load(config, lambda *_: None)
    batches = Batches(runner, load(runner, model, arguments.rank))
    report = Report("adapters")
    for batch in (1, 8) if arguments.quick else (1, 8, 32):
        spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(3 if arguments.quick else 8):
            for kind in KINDS:
                spent[kind] += batches.decode(kind, batch, 24)
        base = median(spent["none"])
        for kind, seconds in spent.items():
            case: dict[str, Any] = {"batch": batch, "rows": kind, "rank": arguments.rank, "dtype": arguments.dtype}
            report.add(case, "step_cpu", median(seconds) * 1e3, "ms", len(seconds))
            report.add(case, "ratio", median(seconds) / base, "x", len(seconds))
    report.finish(arguments.json)
    runner.close()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
