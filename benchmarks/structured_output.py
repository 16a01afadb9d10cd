"""What structured output costs the rows of a batch: the sampling of a decode step, plain and with grammars.

    python benchmarks/structured_output.py [--quick] [--json PATH] [--rows 8]

Sampling alone, on one thread and random logits, without the forward pass: 8 plain rows; the same with 1 and with
all 8 of them following a grammar; 8 rows with other options (`options`). A step with k grammars less a step
without is what k grammars add. Besides, what one row's mask costs without applying it (`fill`: accept the last
token, fill the next mask), what handing that work to another thread would cost (`hand_over`), and how long a
grammar takes from its text until it is ready (`compile`: trial and compilation, the first one with the start of
the trial process).

Two vocabularies: the demo model's of 4,096 tokens, and one of 128,000 that is made here by training BPE on made-up
words.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import numpy as np
import torch
from report import Report, argument_parser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.kernels.cpu_sampling import CpuSampling
from trunkline.kernels.native import NativeContext
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.grammar.compiler import GrammarStore
from trunkline.worker.messages import Join, Sampling
from trunkline.worker.sampling.sampler import Sampler

STOP: Final = 1
PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}
WIDE: Final = {
    "type": "object",
    "properties": {
        f"p{i}": {"type": "object", "properties": {f"q{j}": {"type": "string", "maxLength": 30} for j in range(5)}}
        for i in range(10)
    },
}
GRAMMARS: Final = {
    "person": ("json_schema", json.dumps(PERSON)),
    "json_object": ("json_object", ""),
    "wide schema": ("json_schema", json.dumps(WIDE)),
    "regex": ("regex", r"[A-Z][a-z ]{10,2000}-\d+"),
}


def made_up_tokenizer(folder: Path, size: int) -> Path:
    """A byte-level BPE tokenizer of `size` tokens."""
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfghjklmnpqrstvwxyz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "st")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 5))) for _ in range(size)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (" ".join(words[i : i + 1000]) + ' {"key": [1, 22, 333.5]}' for i in range(0, size, 1000))
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Bench:
    """A vocabulary with its grammars, and sequences to sample."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.size = vocab_size
        self.store = GrammarStore(folder, vocab_size)
        self.compile_s: dict[str, float] = {}
        self._next = 0

    def compile(self, name: str) -> int:
        """Wait until a grammar is ready; its id."""
        start = time.perf_counter()
        grammar = list(GRAMMARS).index(name) + 1
        self.store.compile(grammar, *GRAMMARS[name])
        while not (ready := self.store.poll()):
            time.sleep(0.0005)
        if ready[0].problem:
            raise SystemExit(f"{name}: {ready[0].problem}")
        self.compile_s[name] = time.perf_counter() - start
        return grammar

    def rows(
        self, count: int, constrained: int, grammar: int, temperature: float, **options: Any
    ) -> list[BatchSequence]:
        """`count` sequences, the first of which follow a grammar."""
        found = []
        for row in range(count):
            self._next += 1
            followed: dict[str, Any] = (
                {"grammar": grammar, "stop_ids": pack_int32([STOP])} if row < constrained else {}
            )
            sampling = Sampling(temperature=temperature, seed=row, **followed, **options)
            join = Join(self._next, pack_int32([*range(2, 1002)]), 0, 1000, pack_int32([0]), sampling)
            found.append(BatchSequence(join))
        return found


def steps(bench: Bench, rows: list[BatchSequence]) -> Callable[[], float]:
    """One step at each call: seconds of CPU time of `Sampler.sample`."""
    sampler = Sampler(bench.size, torch.device("cpu"), bench.store, CpuSampling(NativeContext(None, 1)))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(rows), bench.size, generator=generator) * 3
    state = {"step": 0}

    def step() -> float:
        logits = noise.roll(state["step"] * 37, dims=1)
        logits[:, STOP] = -50.0  # an end only where the grammar has one
        fresh = state["step"] == 0
        start = time.thread_time()
        ids, _ = sampler.sample(logits, rows, changed=fresh)
        spent = time.thread_time() - start
        state["step"] += 1
        for row, token in zip(rows, ids.tolist(), strict=True):
            row.append(token)
        return spent

    for _ in range(3):
        step()
    return step


def fills(bench: Bench, row: BatchSequence, count: int) -> list[float]:
    """Seconds per mask: a random output of the grammar, walked."""
    rng, found = random.Random(0), []
    words = np.zeros(-(-bench.size // 32), dtype=np.int32)
    for _ in range(count):
        start = time.perf_counter()
        bench.store.fill(row, words)
        found.append(time.perf_counter() - start)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: bench.size])
        going_on = ids[ids != STOP]
        if len(going_on) == 0:
            break
        row.append(int(rng.choice(going_on.tolist())))
    return found


def hand_over(count: int) -> float:
    """Seconds to give a task to a waiting thread and to hear that it is done."""
    found = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(count):
            start = time.perf_counter()
            pool.submit(int).result()
            found.append(time.perf_counter() - start)
    return median(found)


def measure(report: Report, bench: Bench, quick: bool, count: int) -> None:
    runs = 40 if quick else 150
    names = list(GRAMMARS)[:2] if quick else list(GRAMMARS)
    for name in names:
        grammar = bench.compile(name)
        spent = fills(bench, bench.rows(1, 1, grammar, 1.0)[0], 2 * runs)
        case: dict[str, Any] = {"vocabulary": bench.size, "grammar": name}
        report.add(case, "compile", bench.compile_s[name] * 1e3, "ms", 1)
        report.add(case, "fill", median(spent) * 1e6, "us", len(spent))
        report.add(case, "fill_p99", quantiles(spent, n=100)[-1] * 1e6, "us", len(spent))
        for temperature in (0.0, 1.0):
            variants = [(k, steps(bench, bench.rows(count, k, grammar, temperature))) for k in (0, 1, count)]
            times: dict[int, list[float]] = {k: [] for k, _ in variants}
            for _ in range(runs):
                for k, step in variants:
                    times[k].append(step())
            for k, found in times.items():
                case = {
                    "vocabulary": bench.size,
                    "grammar": name,
                    "temperature": temperature,
                    "rows": count,
                    "constrained": k,
                }
                report.add(case, "sample", median(found) * 1e3, "ms", runs)


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "three penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bias of 300 tokens": {"logit_bias": dict.fromkeys(range(5, 305), 1.0)},
    "5 log-probabilities": {"logprobs": 5},
}


def measure_options(report: Report, bench: Bench, quick: bool, count: int) -> None:
    """The sampling of `count` rows at temperature 0.7, all with the same options."""
    runs = 40 if quick else 150
    variants = {name: steps(bench, bench.rows(count, 0, 0, 0.7, **chosen)) for name, chosen in OPTIONS.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(runs):
        for name, step in variants.items():
            times[name].append(step())
    for name, found in times.items():
        case = {"vocabulary": bench.size, "temperature": 0.7, "rows": count, "options": name}
        report.add(case, "sample", median(found) * 1e3, "ms", runs)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("structured_output")
    report.add({"vocabulary": ""}, "hand_over", hand_over(500) * 1e6, "us", 500)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for path, size in ((DEMO_FOLDER, 4096), (made_up_tokenizer(Path(folder), 128_000), 128_000)):
            bench = Bench(path, size)
            measure_options(report, bench, arguments.quick, arguments.rows)
            measure(report, bench, arguments.quick, arguments.rows)
            bench.store.close()
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
