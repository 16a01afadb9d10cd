"""What a step leaves of other programs in the caches.

    python benchmarks/cache_left.py [--quick] [--rounds 20] [--json PATH]

Between two steps the router and the controller run Python whose code and objects were in the caches before the
step. Here a chain of Python objects, 2.75 MiB, stands for them: it is followed from end to end three times, so
that it is cached; then the linear layers of a step run (those of linear.py's model, two threads, weights in
bfloat16); then the chain is followed again, and each object costs what finding it takes. `alone` is the chain
without a step. `first` is the first step of a batch size, `later` the median of the others: a processor may learn
from repeated steps that what they read is not read again soon.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise
from statistics import median
from typing import Any, Final

import torch
from linear import BLOCKS, Arm, Layer, shapes
from report import Report, argument_parser

OBJECTS: Final = 1 << 15
"""Lists of one element: a head of 72 bytes and, elsewhere, 16 for the next; 2.75 MiB in all."""
THREADS: Final = 2

Link = list[Any]


def chain(rng: random.Random) -> Link:
    """Return the first of objects that lie all over their memory."""
    links: list[Link] = [[] for _ in range(OBJECTS)]
    rng.shuffle(links)
    for link, behind in pairwise(links):
        link.append(behind)
    return links[0]


def follow(link: Link) -> float:
    """Return the nanoseconds of CPU time that an object takes."""
    started = time.thread_time_ns()
    while link:
        link = link[0]
    return (time.thread_time_ns() - started) / OBJECTS


def step_calls(arm: Arm, rows: int, layers: list[Layer]) -> list[tuple[Layer, torch.Tensor, int]]:
    """Return each layer of a step with its input and which of its weights it takes, in order."""
    x = {width: torch.randn(rows, width).bfloat16() for width in {layer.shape.width for layer in layers}}
    ordered = [(layer, block) for block in range(BLOCKS) for layer in layers[:-1]] + [(layers[-1], 0)]
    return [(layer, x[layer.shape.width], block) for layer, block in ordered]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    rounds = 6 if arguments.quick else arguments.rounds
    report = Report("cache_left")
    torch.manual_seed(0)
    arm = Arm(THREADS)
    layers = [Layer(arm, shape, torch.bfloat16, 1 if shape.name == "head" else BLOCKS) for shape in shapes(1)]
    first = chain(random.Random(0))
    for rows in (0, 1, 4, 8, 32):
        calls = step_calls(arm, rows, layers) if rows else []
        left, steps = [], []
        for _ in range(rounds):
            for _ in range(3):
                follow(first)
            started = time.perf_counter_ns()
            for layer, x, block in calls:
                layer.own_call(arm, x, block)
            steps.append((time.perf_counter_ns() - started) / 1e6)
            left.append(follow(first))
        case = {"rows": rows or "alone"}
        report.add(case, "first", left[0], "ns/object", 1)
        report.add(case, "later", median(left[1:]), "ns/object", rounds - 1)
        if rows:
            report.add(case, "step", median(steps), "ms", rounds)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
