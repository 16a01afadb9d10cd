"""Time to the first token of prompts of cached modules, as a client of the HTTP API sees it (Prompt Cache §5.2).

    python benchmarks/prompt_cache_http.py [--quick] [--json PATH] [--tp 1,2] [--dtype bfloat16]

Starts `trunkline serve` with the small model, one server for each number of ranks; router, controller, workers and
client share the cores. A schema of a text and eight modules, together n tokens, is posted; prompts are PML that
imports all modules, with u words of their own behind. In turn:

- full: as many tokens that nobody has sent before, as ids.
- prefix: a prompt of ids whose first n tokens the server has seen.
- modules: PML; the schema has been encoded.

`ttft`: from the request to the first streamed token; `speedup`: how many times longer `full` took; `cached`:
tokens of the prompt that were not computed for it. `encode`: until the post of the schema is answered. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from statistics import median
from typing import Any, Final, NamedTuple

import httpx
from report import Report, argument_parser
from serving import Prompts, Server, model_name
from small_model import VOCABULARY, small_model

MODULES: Final = 8
ROOT: Final = 40


class Sample(NamedTuple):
    """One request."""

    seconds: float
    cached: int
    prompt: int


class Asker:
    """A client of one server."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self._prompts = Prompts(VOCABULARY, 0)
        self._schemas = 0

    def words(self, count: int) -> str:
        """Text of so many tokens, all new."""
        return " ".join(f"w{token}" for token in self._prompts.take(count))

    def ids(self, count: int) -> list[int]:
        """Likewise as ids."""
        return self._prompts.take(count)

    async def post_schema(self, n: int) -> tuple[str, float]:
        """The name of a new schema of n tokens, whose modules have been computed, and the seconds this took."""
        self._schemas += 1
        name = f"schema-{self._schemas}"
        size, rest = divmod(n - ROOT, MODULES)
        modules = "".join(f'<module name="m{index}">{self.words(size)}</module>' for index in range(MODULES))
        pml = f'<schema name="{name}">{self.words(ROOT + rest)}{modules}</schema>'
        started = time.perf_counter()
        response = await self._client.post("/v1/schemas", json={"model": self._model, "pml": pml})
        if response.status_code >= 300:
            raise SystemExit(f"the schema was refused: {response.status_code}: {response.text}")
        return name, time.perf_counter() - started

    async def ask(self, prompt: dict[str, Any]) -> Sample:
        """Time to the first token of a completion."""
        body = {
            "model": self._model,
            **prompt,
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage: dict[str, Any] = {}
        started, first = time.perf_counter(), 0.0
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(
                    f"the server answered {response.status_code}: {(await response.aread()).decode()}"
                )
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    first = first or time.perf_counter() - started
                    usage = json.loads(line[6:]).get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Sample(first, details.get("cached_tokens") or 0, usage["prompt_tokens"])


async def measure(url: str, arguments: argparse.Namespace, tp: int, report: Report) -> None:
    """All cases on one server."""
    n, owns, runs = (1000, (50,), 2) if arguments.quick else (5000, (250, 100, 50), 5)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        asker = Asker(client, model_name(url))
        await asker.ask({"prompt": asker.ids(64)})  # what comes first is slow
        encodes = []
        for _ in range(2):
            schema, seconds = await asker.post_schema(n)
            encodes.append(seconds)
        imports = "".join(f"<m{index}/>" for index in range(MODULES))
        seen = asker.ids(n)
        await asker.ask({"prompt": seen})
        found: dict[tuple[int, str], list[Sample]] = {}
        for _ in range(runs):
            for own in owns:
                pml = f'<prompt schema="{schema}">{imports} {asker.words(own)}</prompt>'
                prompts: dict[str, dict[str, Any]] = {
                    "full": {"prompt": asker.ids(n + own)},
                    "prefix": {"prompt": seen + asker.ids(own)},
                    "modules": {"pml": pml},
                }
                for impl, prompt in prompts.items():
                    found.setdefault((own, impl), []).append(await asker.ask(prompt))
        for (own, impl), samples in found.items():
            case = {"tp": tp, "dtype": arguments.dtype, "n": n, "u": own, "impl": impl}
            ratios = [full.seconds / s.seconds for full, s in zip(found[own, "full"], samples, strict=True)]
            report.add(case, "ttft", 1e3 * median(sample.seconds for sample in samples), "ms", runs)
            report.add(case, "speedup", median(ratios), "x", runs)
            report.add(case, "prompt", median(sample.prompt for sample in samples), "tokens", runs)
            report.add(case, "cached", median(sample.cached for sample in samples), "tokens", runs)
        report.add(
            {"tp": tp, "dtype": arguments.dtype, "n": n}, "encode", 1e3 * median(encodes), "ms", len(encodes)
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tp", default="1,2", help="ranks of the servers, in turn")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--serve-args", default="--kv-memory 4GiB --disk-tier 0", help="more arguments for `trunkline serve`"
    )
    arguments = parser.parse_args()
    arguments.model = str(small_model())
    report = Report("prompt_cache_http")
    for tp in (int(number) for number in arguments.tp.split(",")):
        with Server(argparse.Namespace(**{**vars(arguments), "tp": tp})) as server:
            asyncio.run(measure(server.url, arguments, tp, report))
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
