"""Latency against request rate until a server is overloaded, and who pays for it (PagedAttention §6.2, figure 12).

    python benchmarks/overload.py [--quick] [--json PATH] [--model small] [--dtype bfloat16] [--tp 2]
                                  [--alpaca 4,8,12,16,20] [--sharegpt 1,2,3,4,5] [--serve-args "…"]

Starts `trunkline serve` on loopback and stops it; the client runs on the same cores. Poisson arrivals in windows
of 20 seconds, unrelated prompts, lengths as in the paper's data sets (load_workload.py), greedy, regardless of end
tokens. Every request is served to its end, however late. Normalised latency: end-to-end latency / output tokens,
from the moment a request was due.

- `normalised_latency` is the mean over requests, `_p50`, `_p90`, `_p99` their quantiles.
- fairness: `short_prompts` and `long_prompts` are the means of the quarters of requests with the shortest and the
  longest prompts; `first_quarter` and `last_quarter` those that came first and last (a queue that grows shows
  there); first come, first served means that the TTFT of later requests grows, not that of large ones.
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import fmean
from typing import Final

import numpy as np
from load_client import Run, Target, serve_trace
from load_observer import find_cluster
from load_workload import Workload
from report import Report, argument_parser
from serving import Server, model_name
from small_model import VOCABULARY, small_model

WINDOW_SECONDS: Final = 20.0


def figures(run: Run) -> dict[str, tuple[float, str]]:
    """Metric → value and unit."""
    rows = []
    for times, arrival in zip(run.times, run.trace.arrivals, strict=True):
        late = times.started_at - run.begin - arrival.at_seconds
        rows.append((len(arrival.prompt), 1e3 * (times.end + late) / times.tokens, 1e3 * (times.first + late)))
    normalised = np.array([row[1] for row in rows])
    first = np.array([row[2] for row in rows])
    by_length = np.argsort([row[0] for row in rows], kind="stable")
    quarter = max(1, len(rows) // 4)
    spent = max(times.started_at + times.end for times in run.times) - run.begin
    return {
        "normalised_latency": (float(normalised.mean()), "ms/token"),
        "normalised_latency_p50": (float(np.quantile(normalised, 0.5)), "ms/token"),
        "normalised_latency_p90": (float(np.quantile(normalised, 0.9)), "ms/token"),
        "normalised_latency_p99": (float(np.quantile(normalised, 0.99)), "ms/token"),
        "ttft_p50": (float(np.quantile(first, 0.5)), "ms"),
        "ttft_p99": (float(np.quantile(first, 0.99)), "ms"),
        "short_prompts": (float(normalised[by_length[:quarter]].mean()), "ms/token"),
        "long_prompts": (float(normalised[by_length[-quarter:]].mean()), "ms/token"),
        "first_quarter": (float(normalised[:quarter].mean()), "ms/token"),
        "last_quarter": (float(normalised[-quarter:].mean()), "ms/token"),
        "output_rate": (sum(times.tokens for times in run.times) / spent, "tokens/s"),
        "batch_mean": (fmean(sample.state.running for sample in run.window), "requests"),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="small", help="folder to serve, or small")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--alpaca", default="", help="requests per second, separated by commas")
    parser.add_argument("--sharegpt", default="")
    parser.add_argument("--serve-args", default="", help="more arguments for `trunkline serve`")
    arguments = parser.parse_args()
    name = arguments.model
    if name == "small":
        arguments.model = str(small_model())
    rates = {
        "alpaca-like": arguments.alpaca or ("6" if arguments.quick else "4,8,12,16,20"),
        "sharegpt-like": arguments.sharegpt or ("1" if arguments.quick else "1,2,3,4,5"),
    }
    window = 5.0 if arguments.quick else WINDOW_SECONDS
    report = Report("overload")
    with Server(argparse.Namespace(**vars(arguments))) as server:
        target = Target(server.url, model_name(server.url), find_cluster(server.process.pid), reuses=True)
        workload = Workload(VOCABULARY, 0, 0)
        asyncio.run(serve_trace(target, workload.dataset_trace("alpaca-like", 4, 1.0)))  # warm up
        for dataset, given in rates.items():
            for rate in map(float, given.split(",")):
                trace = workload.dataset_trace(dataset, max(4, round(rate * window)), window)
                run = asyncio.run(serve_trace(target, trace))
                case = {
                    "dataset": dataset,
                    "rate": rate,
                    "model": name,
                    "dtype": arguments.dtype,
                    "tp": arguments.tp,
                }
                for metric, (value, unit) in figures(run).items():
                    report.add(case, metric, value, unit, 1)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
