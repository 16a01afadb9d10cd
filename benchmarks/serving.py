"""A server as its clients see it: time to first token, cold and with a cached prefix; tokens per second; start.

    python benchmarks/serving.py [--quick] [--json PATH] [--tp 2] [--dtype float32] [--model small]
                                 [--base-url URL --vocab N]

Without `--base-url` it starts `trunkline serve` (the demo model, `--model FOLDER`, or `--model small` for the
random model of small_model.py) on a free loopback port, measures and stops it. With a URL it measures any server
that speaks OpenAI's `/v1/completions` with prompts of token ids; start-up is then not measured. Prompts are random
token ids from a seed.

- ttft_cold: a prompt nobody has sent before (1,500 tokens; small: 2,048), until the first streamed token.
- ttft_hit: the same prompt again, its last token exchanged, so that all but one token can be reused.
- decode rate at batch b: b streams that share a cached prefix (1,000 tokens; small: 1,024) and have 16 tokens of
  their own; tokens after the first ones, divided by the time from the first token of any stream to the end of the
  last. whole_rate: all tokens by the time from the first request to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
import numpy as np
from report import Report, argument_parser, server_environment
from small_model import VOCABULARY, small_model

OWN_TOKENS = 16
START_SECONDS_MAX = 120.0


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """One streamed completion: seconds since the request was sent."""

    first: float
    end: float
    tokens: int
    cached: int
    started_at: float


def body_of(model: str, prompt: list[int] | str, max_tokens: int, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the body of a completion that is streamed, and greedy."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if ignore_eos else {}),
    }


async def stream(
    client: httpx.AsyncClient, model: str, prompt: list[int] | str, max_tokens: int, *, ignore_eos: bool = True
) -> StreamTimes:
    """Send a completion of exactly `max_tokens` tokens and time its stream.

    Args:
        ignore_eos: An end that the model says is no end; False: the server knows no such parameter.
    """
    body = body_of(model, prompt, max_tokens, ignore_eos=ignore_eos)
    start, first, usage = time.perf_counter(), 0.0, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            first = first or time.perf_counter() - start
            usage = json.loads(line[6:]).get("usage") or usage
    if usage is None:
        raise SystemExit("the server sent no usage; it must support stream_options.include_usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return StreamTimes(first, time.perf_counter() - start, usage["completion_tokens"], cached, start)


class Prompts:
    """Random token ids; every prompt is new, so that nothing is cached by accident."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.low, self.high = min(300, vocabulary // 4), vocabulary

    def take(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(self.low, self.high, count)]


async def measure_ttft(
    client: httpx.AsyncClient, model: str, prompts: Prompts, tokens: int, runs: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"ttft_cold": [], "ttft_hit": []}
    for _ in range(runs):
        prompt = prompts.take(tokens)
        cold = await stream(client, model, prompt, 2)
        hit = await stream(client, model, [*prompt[:-1], prompts.take(1)[0]], 2)
        times["ttft_cold"].append(cold.first * 1e3)
        times["ttft_hit"].append(hit.first * 1e3)
        if cold.cached > 64 or (hit.cached and hit.cached < tokens - 64):
            print(f"unexpected cache hits: cold {cold.cached}, hit {hit.cached} tokens", file=sys.stderr)
    return times


async def measure_decode(
    client: httpx.AsyncClient, model: str, prompts: Prompts, batch: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """(decode rate, whole rate) in tokens per second."""
    max_tokens = arguments.output_tokens
    prefix = prompts.take(arguments.prefix_tokens)
    await stream(client, model, prefix, 1)
    tasks = [stream(client, model, prefix + prompts.take(OWN_TOKENS), max_tokens) for _ in range(batch)]
    done = await asyncio.gather(*tasks)
    begin = min(times.started_at for times in done)
    first = min(times.started_at + times.first for times in done)
    end = max(times.started_at + times.end for times in done)
    tokens = sum(times.tokens for times in done)
    return (tokens - batch) / (end - first), tokens / (end - begin)


async def measure(url: str, model: str, vocabulary: int, report: Report, arguments: argparse.Namespace) -> None:
    runs = 3 if arguments.quick else 9
    case = {"impl": arguments.name, "tp": arguments.tp, "dtype": arguments.dtype}
    prompts = Prompts(vocabulary, arguments.seed)
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await stream(client, model, prompts.take(64), 8)  # warm-up
        for metric, values in (await measure_ttft(client, model, prompts, arguments.prompt_tokens, runs)).items():
            report.add({**case, "prompt_tokens": arguments.prompt_tokens}, metric, median(values), "ms", runs)
        rounds = 1 if arguments.quick else 3
        rates: dict[int, list[tuple[float, float]]] = {batch: [] for batch in (1, 8, 32)}
        for _ in range(rounds):
            for batch, pairs in rates.items():
                pairs.append(await measure_decode(client, model, prompts, batch, arguments))
        for batch, pairs in rates.items():
            shape = {**case, "batch": batch, "shared_prefix": arguments.prefix_tokens}
            report.add(shape, "decode_rate", median(pair[0] for pair in pairs), "tokens/s", rounds)
            report.add(shape, "whole_rate", median(pair[1] for pair in pairs), "tokens/s", rounds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`trunkline serve` on loopback for the time of a `with` block."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "trunkline.deploy.cli.app", "serve"]
        command += [arguments.model] if arguments.model else []
        command += ["--tp", str(arguments.tp), "--dtype", arguments.dtype, "--port", str(port)]
        self.command = command + arguments.serve_args.split()
        self.start_seconds = 0.0

    def __enter__(self) -> Server:
        begin = time.perf_counter()
        # With a disk tier of its own: what an earlier run has left there would be found.
        self.cache = tempfile.TemporaryDirectory()
        environment = server_environment(TRUNKLINE_LOG="console", XDG_CACHE_HOME=self.cache.name)
        # What it prints is of interest only if it fails, and then it is the end of it.
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)
        while True:
            if self.process.poll() is not None:
                self.log.seek(0)
                last = self.log.read().decode(errors="replace")[-2000:]
                raise SystemExit(f"the server ended with code {self.process.returncode}:\n{last}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if time.perf_counter() - begin > START_SECONDS_MAX:
                self.process.kill()
                raise SystemExit("the server did not become healthy")
            time.sleep(0.05)
        self.start_seconds = time.perf_counter() - begin
        while not all(each["ready"] for each in httpx.get(f"{self.url}/health", timeout=60).json()["controllers"]):
            time.sleep(0.05)  # a server is healthy when one of its groups is
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.cache.cleanup()


def model_name(url: str) -> str:
    return str(httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--base-url", default="", help="measure this server instead of starting one")
    parser.add_argument("--name", default="trunkline", help="`impl` in the results")
    parser.add_argument("--model", default="", help="folder to serve, or small; default: the demo model")
    parser.add_argument("--vocab", type=int, default=0, help="token ids are drawn below; default: the model's")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="of the time to first token")
    parser.add_argument("--prefix-tokens", type=int, default=0, help="shared in the decode rates")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--starts", type=int, default=3, help="how often start-up is measured")
    parser.add_argument("--serve-args", default="", help="more arguments for `trunkline serve`")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    small = arguments.model == "small"
    arguments.vocab = arguments.vocab or (VOCABULARY if small else 4096)
    arguments.prompt_tokens = arguments.prompt_tokens or (2048 if small else 1500)
    arguments.prefix_tokens = arguments.prefix_tokens or (1024 if small else 1000)
    if small and not arguments.base_url:
        arguments.model = str(small_model())
    report = Report("serving")
    if arguments.base_url:
        url = arguments.base_url.removesuffix("/v1").rstrip("/")
        asyncio.run(measure(url, model_name(url), arguments.vocab, report, arguments))
    else:
        starts = []
        for _ in range((1 if arguments.quick else arguments.starts) - 1):
            with Server(arguments) as server:
                starts.append(server.start_seconds)
        with Server(arguments) as server:
            starts.append(server.start_seconds)
            asyncio.run(measure(server.url, model_name(server.url), arguments.vocab, report, arguments))
        case = {"impl": arguments.name, "tp": arguments.tp, "dtype": arguments.dtype}
        report.add(case, "start_to_first_token", median(starts), "s", len(starts))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
