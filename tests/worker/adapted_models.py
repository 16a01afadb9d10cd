"""Checkpoints with adapters, and what their sequences must be equal to: `transformers` with merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from worker.checkpoints import assert_greedy, largest_difference
from worker.driver import VOCAB_SIZE, Driver, Stream, run_config
from worker.peft_folders import load
from worker.ranks import Rank

from trunkline.worker.errors import PlanError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling
from trunkline.worker.runner import Runner

GREEDY: Final = Sampling(temperature=0, logprobs=VOCAB_SIZE)


class Adapted(NamedTuple):
    """A checkpoint with two adapters, and the two merged checkpoints."""

    base: Path
    folders: tuple[Path, Path]
    merged: tuple[Path, Path]


AdaptedModels = Callable[[str], Adapted]


def generate_mixed(runner: Runner, keys: list[bytes]) -> list[Stream]:
    """Streams of the base model and of two adapters beside each other, some on top of others' blocks."""
    driver = Driver(runner.execute, num_blocks=96, chunk_size=8, seed=1)
    rng = np.random.default_rng(2)
    prefix = rng.integers(VOCAB_SIZE, size=17).tolist()
    first = []
    for key in (b"", *keys):
        first.append(driver.add(prefix, GREEDY))
        first[-1].adapter = key
    driver.run(first, 3)
    second: list[Stream] = []
    for like in (first[1], first[2], first[0], first[1]):
        tail = rng.integers(VOCAB_SIZE, size=1 + len(second)).tolist()
        second.append(driver.add(prefix[:16] + tail, GREEDY, like=like, shared=16))
        second[-1].adapter = like.adapter
    driver.run(second, 7)
    return first + second


def check(streams: list[Stream], model: Adapted, keys: list[bytes]) -> None:
    folders = dict(zip((b"", *keys), (model.base, *model.merged), strict=True))
    for stream in streams:
        assert largest_difference(folders[stream.adapter], stream) <= 1e-4, folders[stream.adapter].name
        assert_greedy(folders[stream.adapter], stream)


def load_all(runner: Runner, model: Adapted) -> list[bytes]:
    """Load the adapters of a model; return their keys."""
    reports = [load(runner, f"adapter-{number}", folder) for number, folder in enumerate(model.folders)]
    assert not any(report.problem for report in reports)
    return [report.key for report in reports]


def check_merged(model: Adapted, kernels: str) -> None:
    """Check rows with and without adapters beside each other."""
    config = run_config(model.base, kernels=kernels, pool_blocks=96, threads=2)
    runner = load_runner(config, lambda *_: None)
    runner.pool.data.fill_(float("nan"))
    keys = load_all(runner, model)
    streams = generate_mixed(runner, keys)
    check(streams, model, keys)
    assert streams[0].output != streams[1].output or streams[0].output != streams[2].output
    runner.close()


def generate_on(rank: Rank, cases: list[Adapted], **fields: Any) -> list[tuple[list[Stream], list[bytes]]]:
    """On one rank: streams of each case, and the keys of its adapters."""
    found = []
    for case in cases:
        runner = rank.load(case.base, pool_blocks=96, **fields)
        keys = load_all(runner, case)
        found.append((generate_mixed(runner, keys), keys))
        runner.close()
    return found


def logits_beside_adapters(model: Adapted, **fields: Any) -> tuple[list[Any], list[Any]]:
    """The log-probabilities of each stream where some have adapters, and where none has."""
    texts = []
    for with_adapters in (True, False):
        runner = load_runner(run_config(model.base, pool_blocks=96, **fields), lambda *_: None)
        keys = load_all(runner, model)
        streams = generate_mixed(runner, keys if with_adapters else [b"", b""])
        texts.append([[report.top_logprobs for report in stream.logprobs] for stream in streams])
        runner.close()
    return texts[0], texts[1]


def check_unloading(model: Adapted) -> None:
    """Check that an adapter which was unloaded is refused, and that one loaded in its place is used."""
    runner = load_runner(run_config(model.base, pool_blocks=96), lambda *_: None)
    keys = load_all(runner, model)
    runner.adapters.unload(keys[0])
    driver = Driver(runner.execute, num_blocks=96, chunk_size=8, seed=1)
    stream = driver.add([1, 2, 3], GREEDY)
    stream.adapter = keys[0]
    with pytest.raises(PlanError, match="not loaded"):
        driver.run([stream], 1)
    runner.close()
    runner = load_runner(run_config(model.base, pool_blocks=96), lambda *_: None)
    for folder in model.folders:  # the first number is used again
        runner.adapters.unload(load(runner, "x", folder).key)
    assert load_all(runner, model) == keys
    check(generate_mixed(runner, keys), model, keys)
    runner.close()
