"""A token's time in two programs, by pairs of streams: which decodes faster on a machine whose speed changes.

    python benchmarks/token_pairs.py --programs BEFORE,NOW [--quick] [--pairs 30] [--tokens 200] [--ranks 2]
                                     [--model small] [--dtype bfloat16] [--json PATH]

Runs `trunkline serve` of both programs at once, and asks them by turns for one stream of a new short prompt. A
pair is a stream of each, a second or two apart, and which comes first alternates. The ratio is the median of the
pairs' ratios: the host's bandwidth changes by a half within seconds to minutes, so medians of all streams of one
program and of all of the other may come from two states of it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from statistics import median, quantiles, stdev
from typing import Final

from cached_prompt import Client
from report import Report, argument_parser
from server_start import serving
from small_model import small_model

PROMPT: Final = 64
SETTLED: Final = 4
"""Number of first tokens whose steps are not counted: the prompt's, and those behind which calm steps begin."""


def step_ms(client: Client, tokens: int) -> float:
    """Return the mean time between two tokens of a stream, in milliseconds."""
    times = client.times(client.prompt(PROMPT), tokens)
    return 1e3 * (times[-1] - times[SETTLED]) / (len(times) - 1 - SETTLED)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--programs", required=True, help="two commands `trunkline`, the earlier one first")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of each server (%(default)s)")
    parser.add_argument("--model", default="small", help="what to serve; small: the model of small_model.py")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    programs, pairs = arguments.programs.split(","), 4 if arguments.quick else arguments.pairs
    if len(programs) != 2 or pairs < 2:
        parser.error("two programs are compared, by two pairs or more")
    model = str(small_model()) if arguments.model == "small" else arguments.model
    times: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        os.environ["TRUNKLINE_DTYPE"] = arguments.dtype
        servers = [
            stack.enter_context(serving(program, model, arguments.ranks, "--disk-tier", "0"))
            for program in programs
        ]
        for server in servers:
            server.wait_until_it_serves()
            server.wait_for_a_token()
        clients = [Client(server, 1) for server in servers]
        for client in clients:
            step_ms(client, arguments.tokens)
        for pair in range(pairs):
            for index in (0, 1) if pair % 2 else (1, 0):
                times[index].append(step_ms(clients[index], arguments.tokens))
    ratios = [before / now for before, now in zip(*times, strict=True)]
    lower, middle, upper = quantiles(ratios, n=4)
    report = Report("token_pairs")
    for program, values in zip(programs, times, strict=True):
        case = {"program": program, "model": arguments.model, "ranks": arguments.ranks}
        report.add(case, "a token", median(values), "ms", pairs)
        report.add(case, "a token, least", min(values), "ms", pairs)
    case = {"program": "before / now", "model": arguments.model, "ranks": arguments.ranks}
    report.add(case, "ratio", middle, "x", pairs)
    report.add(case, "±", 1.2533 * stdev(ratios) / pairs**0.5, "x", pairs)
    report.add(case, "lower quartile", lower, "x", pairs)
    report.add(case, "upper quartile", upper, "x", pairs)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
