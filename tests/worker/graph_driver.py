"""The engine over a runner whose CUDA kernels are emulated: steps op by op, or as graphs that nobody waits for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from kernels.cuda_emulated import ADA, configure, make_emulated
from kernels.emulated_graphs import EmulatedGraphs
from simulation.drafts import RandomDrafts
from simulation.driver import Simulation
from simulation.module_prompts import Schemas
from simulation.streams import Options, Stream
from worker.driver import VOCAB_SIZE, run_config

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Sequence
from trunkline.kernels.library_attention import LibraryPrefill
from trunkline.worker import loading
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import StepPlan
from trunkline.worker.runner import Runner

ROWS_MAX: Final = 6
CHUNK: Final = 8
KINDS: Final = ("plain", "plain", "plain", "samples", "beams", "penalties", "cuts", "modules")


def make_runner(
    folder: Path, blocks: int, *, graphs: bool, prefill: LibraryPrefill | None = None, **fields: Any
) -> Runner:
    """A runner on the emulated device."""
    configure(ADA, 0)
    kernels = make_emulated(prefill=prefill)
    config = run_config(folder, pool_blocks=blocks, cuda_graphs=graphs, max_rows=ROWS_MAX, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "choose_kernels", lambda *_: kernels)
        runner = load_runner(config, lambda *_: None, graphs=lambda: EmulatedGraphs(kernels))
    runner.pool.data.view(torch.uint8).fill_(255)  # NaN: never to be read
    return runner


class Ahead(Simulation):
    """Results are taken when the engine is told of them, so that the next step has been launched before."""

    runner: Runner
    replayed_steps = 0

    def _execute(self, plan: StepPlan) -> StepResult:
        self.runner.launch(plan)
        return StepResult(plan.step, plan.epoch, b"", 0)

    def answer(self) -> bool:
        if not self.results:
            return False
        self.results.popleft()
        result = self.runner.launched.take()
        assert result is not None
        self.replayed_steps += result.replayed
        self.receive(result)
        self._verify()
        return True


def make_simulation(
    folder: Path,
    blocks: int,
    *,
    graphs: bool,
    prefill: LibraryPrefill | None = None,
    fields: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Ahead:
    """An engine over such a runner.

    Args:
        fields: of the runner's configuration.
        settings: of the engine's.
    """
    runner = make_runner(folder, blocks, graphs=graphs, prefill=prefill, **(fields or {}))
    settings = {"max_context": 400, "max_rows": ROWS_MAX, **settings}
    simulation = Ahead(EngineConfig(num_blocks=blocks, chunk_size=CHUNK, **settings))
    simulation.runner = runner
    return simulation


class Traffic:
    """Random requests of every kind, the same ones for every simulation of a seed."""

    def __init__(self, seed: int, steps: int) -> None:
        """
        Args:
            steps: Number of steps in which requests arrive.
        """
        self._seed = seed
        self._steps = steps

    def run(self, simulation: Ahead) -> dict[int, tuple[Any, ...]]:
        """Return what each request got."""
        rng = np.random.default_rng(self._seed)
        schemas = Schemas(random.Random(self._seed), CHUNK, span=40)
        prefix = rng.integers(VOCAB_SIZE, size=4 * CHUNK).tolist()
        for step in range(self._steps):
            # Whatever has become of the others; now and then in any case, as some requests end after two tokens.
            if step % 8 == 0 or rng.random() < 0.1:
                self._submit(simulation, rng, schemas, prefix)
            simulation.step()
        simulation.run()
        return {request: got(stream) for request, stream in simulation.streams.items()}

    def _submit(self, simulation: Ahead, rng: np.random.Generator, schemas: Schemas, prefix: list[int]) -> None:
        kind = KINDS[int(rng.integers(len(KINDS)))]
        prompt = prefix[: int(rng.integers(0, len(prefix)))]
        prompt += rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 8))).tolist()
        options: Options = {"seed": int(rng.integers(1 << 40)), "n": 1}
        count = int(rng.integers(2, 4 * CHUNK))
        if kind == "samples":
            options["n"] = 2
        elif kind == "beams":
            options["beam"], options["n"], count = BeamSearch(2), 2, min(count, 10)
        elif kind == "penalties":
            options["history"] = True
        elif kind == "cuts" and len(prompt) > 2 * CHUNK:
            options["drops"] = ((CHUNK, 2 * CHUNK),)
        elif kind == "modules":
            prompt, options["layout"] = schemas.prompt()
            if not prompt:
                return
        simulation.submit(prompt, count, **options)


def got(stream: Stream) -> tuple[Any, ...]:
    found = [(h.tokens, h.reason) for h in stream.hypotheses or []]
    return stream.reason, stream.outputs, found


class KnownDrafts(RandomDrafts):
    """Guesses what a request said without drafts, and other things."""

    def __init__(self, simulation: Simulation, said: dict[int, tuple[Any, ...]]) -> None:
        super().__init__(simulation, 0, right=0.8)
        self._said = said

    def _expected(self, sequence: Sequence) -> list[int]:
        expected: list[int] = self._said[sequence.request_id][1][sequence.sample]
        return expected
