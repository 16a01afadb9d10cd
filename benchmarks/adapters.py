"""What adapters cost: decode steps of rows with none, one or several adapters, beside steps of the base model.

    python benchmarks/adapters.py [--quick] [--json PATH] [--rank 16] [--dtype bfloat16] [--models dense,experts]

One rank with one thread; random adapters. Batches are decoded in turn, so that each kind of batch meets the same
machine: `none` (no row has an adapter), `half` (every second row has the same one), `one` (all rows have it),
`eight` (the rows take eight adapters in turn). CPU time of the thread, medians; `ratio` is to `none`.

`dense` is the model of small_model.py, with adapters of all linear layers. `experts` is the Qwen3 of models.py
with 8 of 32 experts, with adapters of attention alone, of routers, too, and of all: then each expert has a pair
for each of its matrices.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from models import FAMILIES, SHAPE, write_random
from report import Report, argument_parser, some_of
from safetensors.torch import save_file
from small_model import small_model

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import AdapterReady
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.adapters import adapter_salt
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import LoadAdapter, Sampling
from trunkline.worker.model.adapters import CONFIG_FILE, WEIGHTS_FILE, adaptable
from trunkline.worker.model.families import read_model_config
from trunkline.worker.runner import Runner

ADAPTERS: Final = 8
BLOCKS: Final = 256
KINDS: Final = ("half", "one", "eight")
EXPERT_LAYERS: Final = 6


def is_dense(module: str) -> bool:
    return "experts." not in module


TARGETS: Final[Mapping[str, Mapping[str, Callable[[str], bool]]]] = {
    "dense": {"all": is_dense},
    "experts": {
        "attention": lambda module: module.startswith("self_attn."),
        "attention, routers": is_dense,
        "all": lambda module: True,
    },
}
"""Of each model, which modules adapters change."""


def write_adapter(folder: Path, model: Path, rank: int, seed: int, changes: Callable[[str], bool]) -> Path:
    """Write a random adapter of the linear layers that it changes; return its folder."""
    folder.mkdir(parents=True)
    config, generator = read_model_config(model), torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.layers):
        for module, (rows, columns) in adaptable(config, layer).items():
            if changes(module):
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{{}}.weight"
                tensors[name.format("A")] = torch.randn(rank, columns, generator=generator) * 0.02
                tensors[name.format("B")] = torch.randn(rows, rank, generator=generator) * 0.02
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def load(runner: Runner, model: Path, rank: int, targets: str, changes: Callable[[str], bool]) -> list[bytes]:
    """Load adapters that change the same layers; return their keys."""
    keys = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(ADAPTERS):
            path = write_adapter(Path(folder, str(seed)), model, rank, seed, changes)
            runner.adapters.load(LoadAdapter(seed, f"{targets} {seed}", str(path), rank))
            while not (reports := runner.reports()):
                time.sleep(0.01)
            for report in reports:
                assert isinstance(report, AdapterReady)
                if report.problem:
                    raise SystemExit(report.problem)
                keys.append(report.key)
    return keys


def key_of(kind: str, row: int, keys: list[bytes]) -> bytes:
    """Return the adapter of a row in a kind of batch; without keys it has none."""
    if not keys or (kind == "half" and row % 2):
        return b""
    return keys[row % len(keys)] if kind == "eight" else keys[0]


class Batches:
    """An engine and a rank that decode batches."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._engine = Engine(EngineConfig(num_blocks=BLOCKS, max_context=1024, token_budget=1024))
        self._rng = np.random.default_rng(0)
        self._requests = 0

    def decode(self, kind: str, keys: list[bytes], batch: int, tokens: int) -> list[float]:
        """Return the CPU seconds of each decode step of a new batch."""
        engine = self._engine
        for row in range(batch):
            self._requests += 1
            prompt = self._rng.integers(2, 4000, 32).tolist()
            salt = adapter_salt(key_of(kind, row, keys), b"")
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


def run(name: str, model: Path, arguments: argparse.Namespace, report: Report) -> None:
    config = WorkerConfig(
        model=str(model),
        plan_endpoint="",
        report_endpoint="",
        dtype=arguments.dtype,
        pool_blocks=BLOCKS,
        threads=1,
    )
    runner = load_runner(config, lambda *_: None)
    batches, kinds = Batches(runner), {("none", "none"): list[bytes]()}
    for targets, changes in TARGETS[name].items():
        keys = load(runner, model, arguments.rank, targets, changes)
        kinds |= {(targets, kind): keys for kind in KINDS}
    for batch in (1, 8) if arguments.quick else (1, 8, 32):
        spent: dict[tuple[str, str], list[float]] = {each: [] for each in kinds}
        for _ in range(3 if arguments.quick else 8):
            for each, keys in kinds.items():
                if batch > 1 or each[1] in ("none", "one"):  # a row alone has one adapter
                    spent[each] += batches.decode(each[1], keys, batch, 24)
        base = median(spent["none", "none"])
        for (targets, kind), seconds in spent.items():
            if seconds:
                case: dict[str, Any] = {"model": name, "batch": batch, "changed": targets, "rows": kind}
                case |= {"rank": arguments.rank, "dtype": arguments.dtype}
                report.add(case, "step_cpu", median(seconds) * 1e3, "ms", len(seconds))
                report.add(case, "ratio", median(seconds) / base, "x", len(seconds))
    runner.close()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    models, some = tuple(TARGETS), f"some of {', '.join(TARGETS)}"
    parser.add_argument("--models", type=some_of(models), default=models, metavar="MODEL,…", help=some)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report("adapters")
    for name in arguments.models:
        if name == "dense":
            run(name, small_model(), arguments, report)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            shape = {**SHAPE, **FAMILIES["qwen3-moe"], "num_hidden_layers": EXPERT_LAYERS}
            run(name, write_random(Path(scratch, name), shape), arguments, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
