"""Latency, KV memory and batch under Poisson arrivals; chunk sizes; how seldom the decode plan is copied.

    python benchmarks/load_latency.py [--quick] [--json PATH] [--parts load,chunks,plan] [--rates 2,4,8]
                                      [--model small] [--dtype bfloat16] [--tp 2]

Starts `trunkline serve` (the demo model in float32, `--model small` for the random model of small_model.py in
bfloat16, or a folder) on loopback as often as it needs it and stops it. The client runs on the same cores. Prompts
are a system prompt of 1,000 tokens and a user's part (log-normal, mean 64, clipped to 8 to 256); outputs are
log-normal, mean 128, clipped to 16 to 512 tokens, greedy, regardless of end tokens. load_workload.py says how they
and the arrivals are drawn.

- load (PagedAttention §6.1; ChunkAttention §4.2, table 4): two servers, one with and one without the prefix cache,
  get the same requests in turn. `shared` is the fraction of requests that have the common system prompt. The cache
  is empty when a trace begins. The limit beside it, `unloaded`: requests of the same kind, each alone.
- chunks (PagedAttention §7.2): chunk sizes at the middle rate, with the prefix cache; half of the requests share.
- plan (ChunkAttention §3.3): steps before which rows or tables of the workers' decode plan changed, in a long
  decode whose rows fill their chunks at different steps.

Metrics of a trace (load_client.py):

- normalised_latency: mean over requests of end-to-end latency / output tokens. ttft: time to first token.
- achieved_rate: requests / time from the start of the window to the end of the last stream, so that a server that
  keeps up still shows a little less than the rate. output_rate: likewise, in tokens.
- kv_peak, kv_mean: KV blocks that running requests hold, in bytes of all ranks, sampled 20 times a second (the
  mean while requests arrive); batch_peak: running requests. kv_peak_saved, kv_mean_saved: against the server
  without the prefix cache. cached_share: of the prompt tokens.
- kv_waste: of the token slots in these blocks, the share that holds no token of a running request: not filled,
  copied, or reserved by a prompt that is still being computed. Mean while requests arrive.
- send_delay_max: how late the client was at worst. Times count from when a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, Final, Self

from load_client import Target, decode_steadily, serve_one_by_one, serve_trace
from load_observer import find_cluster
from load_workload import Trace, Workload
from report import Report, argument_parser
from serving import Prompts, Server, model_name, stream
from small_model import VOCABULARY, small_model

PARTS: Final = ("load", "chunks", "plan")
QUICK_RATE: Final = "4"
RATES: Final = {"demo": "2,4,8", "small": "1,2,4"}
DEMO_VOCABULARY: Final = 4096
WARM_UP_TOKENS: Final = 8

UNITS: Final = {
    "normalised_latency": "ms/token",
    "ttft_p50": "ms",
    "ttft_p90": "ms",
    "achieved_rate": "1/s",
    "output_rate": "tokens/s",
    "kv_peak": "MiB",
    "kv_peak_saved": "%",
    "kv_mean": "MiB",
    "kv_mean_saved": "%",
    "batch_peak": "requests",
    "cached_share": "%",
    "kv_waste": "%",
    "send_delay_max": "ms",
    "decode_rate": "tokens/s",
    "plan_copies": "1/step",
}
"""Of all metrics, in the order of the tables."""

Figures = dict[str, float]


class Bench:
    """The parts, with what they share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.report = Report("load_latency")
        self.workload = Workload(arguments.vocab, arguments.system_tokens, arguments.seed)
        self.rounds = arguments.rounds or (1 if arguments.quick else 2)
        self.window_seconds = arguments.window_seconds or (3.0 if arguments.quick else 12.0)
        self.rates = sorted(float(rate) for rate in arguments.rates.split(","))
        self.middle_rate = self.rates[len(self.rates) // 2]
        self._servers = ExitStack()
        self._kept: dict[bool, Target] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()

    def kept_server(self, *, reuses: bool) -> Target:
        """A server of the usual chunk size; it stays until the end, for the other parts to use."""
        if reuses not in self._kept:
            server = self.server(chunk_size=self.arguments.chunk_size, reuses=reuses)
            self._kept[reuses] = self._servers.enter_context(server)
        return self._kept[reuses]

    @contextmanager
    def server(self, *, chunk_size: int, reuses: bool = True) -> Iterator[Target]:
        """A server of its own, warmed up."""
        cache = "" if reuses else "--no-prefix-cache"
        serve_args = f"{self.arguments.serve_args} --chunk-size {chunk_size} {cache}"
        with Server(argparse.Namespace(**{**vars(self.arguments), "serve_args": serve_args})) as server:
            target = Target(server.url, model_name(server.url), find_cluster(server.process.pid), reuses)
            asyncio.run(self._warm_up(target))
            yield target

    async def _warm_up(self, target: Target) -> None:
        prompts = Prompts(self.arguments.vocab, self.arguments.seed + 1)
        async with target.client() as client:
            for batch in (1, 4):
                batched = [prompts.take(self.workload.system_tokens) for _ in range(batch)]
                await asyncio.gather(*(stream(client, target.model, p, WARM_UP_TOKENS) for p in batched))

    def trace(self, rate: float, shared: float) -> Trace:
        count = max(2, round(rate * self.window_seconds))
        return self.workload.trace(count, count / rate, shared)

    def add(self, case: dict[str, Any], runs: list[Figures]) -> None:
        """The medians of runs of one case."""
        arguments = self.arguments
        case = {**case, "model": arguments.name, "dtype": arguments.dtype, "tp": arguments.tp}
        for metric, unit in UNITS.items():
            if metric in runs[0]:
                self.report.add(case, metric, median(run[metric] for run in runs), unit, len(runs))

    def load(self) -> None:
        """Part load: the arms take turns, and who is first changes, so that a noisy moment hits both."""
        cells = [(rate, shared) for rate in self.rates for shared in (0.0, 1.0)]
        if not self.arguments.quick:
            cells.append((self.middle_rate, 0.5))
        figures: dict[tuple[float, float, bool], list[Figures]] = {}
        arms = [self.kept_server(reuses=reuses) for reuses in (True, False)]
        for shared in (0.0, 1.0):
            alone = self.workload.trace(2 if self.arguments.quick else 8, 1.0, shared)
            self.add({"impl": "unloaded", "shared": shared}, [asyncio.run(serve_one_by_one(arms[0], alone))])
        for round_ in range(self.rounds):
            for i, (rate, shared) in enumerate(cells):
                for target in arms if (round_ + i) % 2 == 0 else reversed(arms):
                    run = asyncio.run(serve_trace(target, self.trace(rate, shared)))
                    figures.setdefault((rate, shared, target.reuses), []).append(run.metrics())
        for rate, shared in cells:
            off, on = figures[rate, shared, False], figures[rate, shared, True]
            for mine, other in zip(on, off, strict=True):
                for metric in ("kv_peak", "kv_mean"):
                    mine[f"{metric}_saved"] = 100 * (1 - mine[metric] / other[metric])
            for reuses, runs in ((True, on), (False, off)):
                self.add({"impl": "load", "prefix_cache": reuses, "shared": shared, "rate": rate}, runs)

    def chunks(self) -> None:
        """Part chunks: a server each, one after the other, all of them once per round."""
        sizes = (16, 256) if self.arguments.quick else (1, 4, 16, 64, 256)
        rate, shared = self.middle_rate, 0.5
        figures: dict[int, list[Figures]] = {size: [] for size in sizes}
        for _ in range(self.rounds):
            for size, runs in figures.items():
                with self.server(chunk_size=size) as target:
                    run = asyncio.run(serve_trace(target, self.trace(rate, shared)))
                    runs.append(run.metrics())
        for size, runs in figures.items():
            self.add({"impl": "chunks", "chunk_size": size, "shared": shared, "rate": rate}, runs)

    def plan(self) -> None:
        """Part plan: prompts whose tails begin at different places of a chunk."""
        chunk_size = self.arguments.chunk_size
        prompts = Prompts(self.arguments.vocab, self.arguments.seed + 2)
        figures: dict[int, list[Figures]] = {1: [], 8: []}
        target = self.kept_server(reuses=True)
        for _ in range(self.rounds):
            for batch, runs in figures.items():
                lengths = [chunk_size + i * chunk_size // batch for i in range(batch)]
                texts = [prompts.take(length) for length in lengths]
                runs.append(asyncio.run(decode_steadily(target, texts, self.arguments.decode_tokens)))
        for batch, runs in figures.items():
            self.add({"impl": "plan", "batch": batch, "chunk_size": chunk_size}, runs)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--model", default="", help="folder to serve, or small; default: the demo model")
    parser.add_argument("--vocab", type=int, default=0, help="token ids are drawn below; default: the model's")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="", help="default: float32; small: bfloat16")
    parser.add_argument("--rates", default="", help="requests per second, separated by commas")
    parser.add_argument("--window-seconds", type=float, default=0.0, help="in which a trace's requests arrive")
    parser.add_argument("--rounds", type=int, default=0, help="how often each trace is served")
    parser.add_argument("--system-tokens", type=int, default=1000, help="length of the system prompts")
    parser.add_argument("--chunk-size", type=int, default=64, help="of the parts load and plan")
    parser.add_argument("--decode-tokens", type=int, default=0, help="per stream in part plan")
    parser.add_argument("--serve-args", default="", help="more arguments for `trunkline serve`")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    small = arguments.model == "small"
    arguments.name = arguments.model or "demo"
    arguments.vocab = arguments.vocab or (VOCABULARY if small else DEMO_VOCABULARY)
    arguments.dtype = arguments.dtype or ("bfloat16" if small else "float32")
    arguments.rates = arguments.rates or (QUICK_RATE if arguments.quick else RATES["small" if small else "demo"])
    arguments.decode_tokens = arguments.decode_tokens or (256 if arguments.quick else 768)
    if small:
        arguments.model = str(small_model())
    return arguments


def main() -> None:
    arguments = parse_arguments()
    with Bench(arguments) as bench:
        parts = {"load": bench.load, "chunks": bench.chunks, "plan": bench.plan}
        for part in arguments.parts:
            parts[part]()
    bench.report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
