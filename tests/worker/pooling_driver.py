"""Prompts whose hidden states are pooled, on one rank or several, and what `transformers` says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from worker.checkpoints import transformers_model
from worker.driver import VOCAB_SIZE, Driver, Stream
from worker.ranks import Rank

from trunkline.worker.messages import POOL_LAST, POOL_MEAN, Sampling
from trunkline.worker.runner import Runner

Float32Array = np.ndarray[tuple[int], np.dtype[np.float32]]


def pool_prompts(runner: Runner) -> list[Stream]:
    """Prompts in pieces, beside rows that decode; two of them share whole blocks with another, two are sampled."""
    driver = Driver(runner.execute, num_blocks=64, chunk_size=8, seed=1)
    driver.step = runner.steps
    rng = np.random.default_rng(4)
    last, mean = Sampling(temperature=0, pooling=POOL_LAST), Sampling(temperature=0, pooling=POOL_MEAN)
    drawn = Sampling(temperature=0.8, seed=3, logprobs=2, pooling=POOL_MEAN)
    prefix = rng.integers(VOCAB_SIZE, size=24).tolist()
    first = driver.add(prefix + rng.integers(VOCAB_SIZE, size=5).tolist(), last)
    driver.run([first], 2)
    streams = [driver.add(prefix, last, like=first, shared=24)]
    streams.append(driver.add([*prefix, 5, 7], last, like=first, shared=24))
    for length in (1, 7, 19, 33):
        prompt = rng.integers(VOCAB_SIZE, size=length).tolist()
        streams += [driver.add(prompt, sampling) for sampling in (last, mean)]
    streams.append(driver.add(rng.integers(VOCAB_SIZE, size=12).tolist(), drawn))
    streams.append(driver.add(rng.integers(VOCAB_SIZE, size=12).tolist(), Sampling(temperature=0)))
    driver.run(streams, 3)
    return [first, *streams[:-1]]


def pool_on_rank(rank: Rank, folders: list[Path]) -> list[list[Stream]]:
    """Return what a group pools with each of some checkpoints; ranks other than 0 report nothing."""
    results = []
    for folder in folders:
        runner = rank.load(folder)
        results.append(pool_prompts(runner))
        runner.close()
    return results


def pooled(stream: Stream) -> Float32Array:
    """Return what was reported of a prompt, with its first token and only then."""
    reports = [report.pooled for report in stream.logprobs]
    assert reports[0]
    assert not any(reports[1:])
    return np.frombuffer(reports[0], "<f4")


def expected(folder: Path, stream: Stream) -> Float32Array:
    """Return what `transformers` computes."""
    with torch.inference_mode():
        states = transformers_model(folder).base_model(torch.tensor([stream.prompt])).last_hidden_state[0]
    state = states.mean(dim=0) if stream.sampling.pools_all else states[-1]
    found: Float32Array = state.float().numpy()
    return found
