"""Drafts (`--speculation auto`): tokens per step and speed on recorded texts, and on a real server.

    python benchmarks/speculation.py [--quick] [--json PATH] [--texts FILE] [--skip-server | --skip-replay]

**Replay.** Texts are replayed as the model's choice through the controller's drafter; steps take the time of a
model (`MACHINES`: base, per row, pause behind a step that is waited for). Nothing is computed, so the figures say
how well texts are foreseen and what the policy makes of it, not how fast a machine is. `cpu` is the drafter's own
CPU time per token, measured. With 32 rows the texts are repeated, by another tenant each time.

- edits: files of this repository before and after a commit: the prompt has the old one, the answer is the new one.
- tools: a loop of calls as JSON; each reads a part of a file, and answers quote from it.
- code: the last two thirds of test files behind the first third.
- prose: the same of pages of the documentation.

`--texts`: JSON lines `{"prompt": …, "answer": …}` instead of these.

**Server.** Two servers with the demo model, with and without speculation, answer the same requests in turn, each
with salts of their own: *copies* go on with a text that the prompt has already (temperature 0), *prose* follows
pages of the documentation (temperature 1, with seeds), *code* tests and *tools* calls of tools (temperature 0:
whatever the demo model writes there). Texts are compared, too. Given are the median and the quartiles of the
ratios of pairs of answers (`--rounds`), and how far such a median is from that of many pairs (`±`): a single pair
says little, as an answer of 64 tokens takes 0.1 s, of which one stall is 5 %. A shared machine reads at another
bandwidth from one second to the next, so it is measured between pairs; one in which it has changed by more than a
tenth counts in `all` only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import time
from collections.abc import Sequence as Items
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch
from linear import Arm, LimitMeter
from peer_servers import CORES
from peer_table import steady
from report import Report, argument_parser, some_of
from serving import Server
from tokenizers import Tokenizer

from trunkline.controller.drafts.drafter import Drafter
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.worker.messages import Sampling

ROOT: Final = Path(__file__).parents[1]
DEMO: Final = ROOT / "deploy/trunkline/deploy/demo_model"
PAGES: Final = ("routing", "operating", "survival", "security", "kernels", "internals/tiers", "internals/cuts")
MACHINES: Final = {"16 ms": (16_000.0, 400.0, 500.0), "4 ms": (4000.0, 1000.0, 500.0)}
"""By name: µs of a step, of each row, and of the pause behind a step that is waited for."""
KINDS: Final = ("copies", "prose", "code", "tools")
SETTLE_S: Final = 0.1
"""Pause before each answer, as the controller of the one before indexes its texts; and how long the bandwidth is
measured."""
STEADY_MIN: Final = 3
"""Smallest number of pairs without a change of the bandwidth of which the ratio is taken."""
COPIED: Final = 40
"""Tokens of a copy that the prompt begins itself."""

Case = tuple[Int32Array, Int32Array]
"""Prompt and answer."""


class Texts:
    """Recorded texts as tokens of the demo model."""

    def __init__(self, seed: int = 1) -> None:
        self._tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        self._random = random.Random(seed)

    def encode(self, text: str) -> Int32Array:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def edits(self, count: int) -> list[Case]:
        """Files of the repository before and after a commit; none without its history."""
        commits = _git("log", "--no-merges", "--format=%h", "-n", "2000").split()
        self._random.shuffle(commits)
        cases: list[Case] = []
        for commit in commits:
            lines = (
                line.split("\t")
                for line in _git("show", "--numstat", "--format=", commit, "--", "*.py").splitlines()
            )
            names = [
                each[2] for each in lines if each[0].isdigit() and 3 <= int(each[0]) <= 40 and "=>" not in each[2]
            ]
            old, new = (_git("show", f"{commit}{at}:{names[0]}") for at in ("^", "")) if names else ("", "")
            if 2000 < len(old) < 30_000 and new:
                subject = _git("show", "-s", "--format=%s", commit)
                cases.append((self.encode(f"Change this file: {subject}\n{old}\nThe file:\n"), self.encode(new)))
            if len(cases) == count:
                break
        return cases

    def tools(self, count: int) -> list[Case]:
        """Agents that read files by calls, and quote lines of what they have read."""
        cases: list[Case] = []
        for _ in range(count):
            path = self._random.choice(sorted((ROOT / "controller").rglob("*.py")))
            lines = path.read_text().splitlines()
            name = str(path.relative_to(ROOT))
            prompt = [
                self.encode(f"Tools: read_file(path, first, last), edit_file(path, old, new). File: {name}\n")
            ]
            for first in range(0, min(len(lines), 200), 40):
                call = {"name": "read_file", "arguments": {"path": name, "first": first, "last": first + 40}}
                part = lines[first : first + 40]
                at = self._random.randrange(max(1, len(part) - 6))
                old = "\n".join(part[at : at + 6])
                edit = {"name": "edit_file", "arguments": {"path": name, "old": old, "new": f"# note\n{old}"}}
                for answer, result in ((call, "\n".join(part)), (edit, "done")):
                    written = self.encode(json.dumps(answer) + "\n")
                    cases.append((np.concatenate(prompt), written))
                    prompt += [written, self.encode(f"<result>{result}</result>\n")]
        return cases

    def halves(self, paths: Items[Path]) -> list[Case]:
        """The last two thirds of files behind the first third."""
        texts = [self.encode(path.read_text()) for path in paths]
        return [(text[: len(text) // 3], text[len(text) // 3 :][:2000]) for text in texts]

    def sets(self, quick: bool) -> dict[str, list[Case]]:
        tests = sorted((ROOT / "tests").rglob("test_*.py"))
        few = 4 if quick else 16
        return {
            "edits": self.edits(few),
            "tools": self.tools(few // 2),
            "code": self.halves(self._random.sample(tests, few)),
            "prose": self.halves([ROOT / "docs" / f"{page}.md" for page in PAGES[: few // 2]]),
        }

    def given(self, path: Path) -> dict[str, list[Case]]:
        lines = map(json.loads, path.read_text().splitlines())
        return {path.stem: [(self.encode(line["prompt"]), self.encode(line["answer"])) for line in lines]}


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout


class Replay:
    """Decodes recorded answers on a modelled machine, `rows` at once, with or without drafts."""

    def __init__(self, machine: tuple[float, float, float], rows: int) -> None:
        self.machine, self.rows = machine, rows
        self.costs = StepCosts(0.0)
        self.drafter = Drafter(EngineConfig(num_blocks=100, prefix_cache=False), self.costs)
        self.now_us = self.plain_us = self.cpu_s = 0.0
        self.tokens = self.steps = self.row_steps = 0

    def run(self, cases: list[tuple[Int32Array, Int32Array, bytes]]) -> None:
        """Decode cases of (prompt, answer, salt of its tenant)."""
        waiting, running, waits = list(cases), dict[int, tuple[Sequence, list[int]]](), False
        while waiting or running:
            while waiting and len(running) < self.rows:
                slot = next(slot for slot in range(self.rows) if slot not in running)
                running[slot] = self._begin(*waiting.pop(0), slot)
            waits = self._step(running, waits=waits)
            for slot in [slot for slot, (_, left) in running.items() if not left]:
                self.drafter.remove(running.pop(slot)[0])

    def _begin(self, prompt: Int32Array, answer: Int32Array, salt: bytes, slot: int) -> tuple[Sequence, list[int]]:
        submit = Submit(slot, pack_int32(prompt), len(prompt), len(answer), Sampling(), salt=salt)
        sequence = SequenceGroup(Request.of(slot, submit), slot, 1 << 20, submit.sampling).members[0]
        sequence.slot = slot
        begun = time.process_time()
        self.drafter.add(sequence)
        self.cpu_s += time.process_time() - begun
        return sequence, answer.tolist()

    def _step(self, running: dict[int, tuple[Sequence, list[int]]], *, waits: bool) -> bool:
        """Compute a step; return whether the next one waits for its result."""
        base, row, pause = self.machine
        slots, before = np.array(sorted(running), np.intp), self.tokens
        begun = time.process_time()
        room = np.array([len(running[slot][1]) - 1 for slot in slots])
        drafts = (self.drafter.propose(slots, room, 0) if waits else None) or [np.empty(0, np.int32)] * len(slots)
        drafted = sum(map(len, drafts))
        elapsed = base + row * (len(slots) + drafted)
        self.steps += 1
        self.row_steps += len(slots)
        self.drafter.planned(self.steps, self.now_us / 1e6, drafted)
        self.drafter.study(is_idle=False)
        self.now_us += elapsed + pause * waits
        self.drafter.answered(self.steps, self.now_us / 1e6, int(elapsed))
        self.costs.observe(rows=len(slots) + drafted, prefill_tokens=0, elapsed_us=elapsed)
        waits = drafted > 0 or self.drafter.waits(slots)
        drawn = {slot: _drawn(running[slot][1], chain) for slot, chain in zip(slots.tolist(), drafts, strict=True)}
        self.tokens += sum(map(len, drawn.values()))
        ends = sorted(set(map(len, drawn.values())))
        for start, stop in zip([0, *ends], ends, strict=False):  # as the engine tells it: `stretches_of`
            going = {slot: tokens[start:stop] for slot, tokens in drawn.items() if len(tokens) >= stop}
            self.drafter.extend(np.array(list(going), np.intp), np.array(list(going.values()), np.int32).T)
        self.cpu_s += time.process_time() - begun
        self.plain_us += (self.tokens - before) * (base + row * len(slots)) / len(slots)
        return waits


def _drawn(left: list[int], drafts: Int32Array) -> list[int]:
    """Take the tokens from a recorded text that a step with these drafts draws."""
    right = 0
    while right < len(drafts) and right + 1 < len(left) and drafts[right] == left[right]:
        right += 1
    found, left[:] = left[: right + 1], left[right + 1 :]
    return found


def measure_replay(arguments: argparse.Namespace, report: Report) -> None:
    texts = Texts()
    sets = texts.given(arguments.texts) if arguments.texts else texts.sets(arguments.quick)
    for name, cases in sets.items():
        for machine, costs in MACHINES.items():
            for rows in (1, 32):
                replay = Replay(costs, rows)
                times = 1 if rows == 1 else -(-2 * rows // max(1, len(cases)))
                replay.run([(*case, b"%d" % number) for number in range(times) for case in cases])
                case = {"texts": name, "step": machine, "rows": rows}
                report.add(case, "tokens_per_step", replay.tokens / max(1, replay.row_steps), "", 1)
                report.add(case, "speedup", replay.plain_us / max(1.0, replay.now_us), "x", 1)
                report.add(case, "cpu", 1e6 * replay.cpu_s / max(1, replay.tokens), "µs/token", 1)


# A real server


async def answers(url: str, bodies: list[dict[str, Any]]) -> tuple[float, list[str], int, int]:
    """Send requests at once; return the seconds that they took, their texts, and how many drafts were tried and
    right."""
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        begun = time.perf_counter()
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        seconds = time.perf_counter() - begun
    found = [reply.raise_for_status().json() for reply in replies]
    details = [each["usage"].get("completion_tokens_details") or {} for each in found]
    drafted, accepted = (
        sum(each.get(name, 0) for each in details) for name in ("drafted_tokens", "accepted_drafts")
    )
    return seconds, [each["choices"][0]["text"] for each in found], drafted, accepted


def server_texts(texts: Texts) -> dict[str, list[Int32Array]]:
    """Return the texts behind which a server writes, by kind of request."""
    pages = [texts.encode((ROOT / "docs" / f"{page}.md").read_text()) for page in PAGES]
    tests = [texts.encode(path.read_text()) for path in sorted((ROOT / "tests/controller").glob("test_*.py"))]
    calls = [prompt for prompt, _ in texts.tools(8)]
    return {"copies": pages, "prose": pages, "code": tests, "tools": [text for text in calls if len(text) > 600]}


def bodies_of(kind: str, texts: Items[Int32Array], batch: int, number: int, tokens: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{kind} {batch} {number}")
    bodies = []
    for index in range(batch):
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 500))
        prompt = [0, *text[start : start + 500].tolist()]
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": 1000 * number + index}
        if kind != "prose":
            sampling = {"temperature": 0}
        if kind == "copies":
            prompt += prompt[1 : 1 + COPIED]
        salt = f"{kind} {batch} {number}"
        bodies.append({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "cache_salt": salt, **sampling})
    return bodies


class Pairs:
    """The same requests, answered by two servers in turn."""

    def __init__(self, urls: Items[str], meter: LimitMeter) -> None:
        self._urls = urls
        """With and without speculation."""
        self._meter = meter
        self._rates = [meter.read(SETTLE_S)[0]]
        """Bytes per second before the first pair, and behind each."""
        self._seconds: list[list[float]] = []
        self._drafted = self._accepted = self._differ = 0

    def run(self, bodies: list[dict[str, Any]], number: int) -> None:
        """Let both servers answer. Which one is the first changes from pair to pair."""
        found = {}
        for url in self._urls if number % 2 else self._urls[::-1]:
            time.sleep(SETTLE_S)
            found[url] = asyncio.run(answers(url, bodies))
        time.sleep(SETTLE_S)
        self._rates.append(self._meter.read(SETTLE_S)[0])
        self._seconds.append([found[url][0] for url in self._urls])
        _, texts, drafted, accepted = found[self._urls[0]]
        self._drafted += drafted
        self._accepted += accepted
        self._differ += texts != found[self._urls[1]][1]

    def report(self, report: Report, case: dict[str, Any], tokens: int) -> None:
        limits = [steady(front, behind) for front, behind in pairwise(self._rates)]
        kept = [index for index, limit in enumerate(limits) if limit is not None]
        if len(kept) < STEADY_MIN:
            print(f"{case}: the bandwidth changed in nearly all pairs, so they all count")
            kept = list(range(len(limits)))
        seconds, count = np.array(self._seconds), len(kept)
        ratios = (seconds[:, 1] / seconds[:, 0])[kept]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
        for name, middle_s in zip(("with", "without"), np.median(seconds[kept], axis=0).tolist(), strict=True):
            report.add(case, name, tokens / middle_s, "tokens/s", count)
        report.add(case, "ratio", middle, "x", count)
        # Of normal values, whose quartiles are 1.35 deviations apart, a median strays 1.25 times as far as a mean.
        report.add(case, "±", 1.25 * (high - low) / 1.35 / count**0.5, "x", count)
        report.add(case, "lower quartile", low, "x", count)
        report.add(case, "upper quartile", high, "x", count)
        whole = seconds.sum(axis=0)
        report.add(case, "all", float(whole[1] / whole[0]), "x", len(limits))
        report.add(case, "bandwidth", float(np.median(self._rates)) / 1e9, "GB/s", count)
        report.add(case, "drafted", self._drafted / len(limits), "per pair", len(limits))
        report.add(case, "accepted", self._accepted / len(limits), "per pair", len(limits))
        if self._differ:
            print(f"{case}: texts of {self._differ} pairs differ")


def measure_server(arguments: argparse.Namespace, report: Report) -> None:
    kinds, meter = server_texts(Texts()), LimitMeter(Arm(CORES), torch.float32)
    tokens = 64 if arguments.quick else arguments.tokens
    rounds = {1: arguments.rounds, 32: arguments.rounds_of_32 or -(-arguments.rounds // 4)}
    with ExitStack() as stack:
        urls = []
        for mode in ("auto", "off"):
            options = argparse.Namespace(
                model="", tp=1, dtype="auto", serve_args=f"--speculation {mode} --host-tier 0"
            )
            urls.append(stack.enter_context(Server(options)).url)
        for kind in arguments.kinds:
            for batch in arguments.batches:
                Pairs(urls, meter).run(bodies_of(kind, kinds[kind], batch, 0, tokens), 0)  # warms up
                pairs = Pairs(urls, meter)
                for number in range(1, (3 if arguments.quick else rounds[batch]) + 1):
                    pairs.run(bodies_of(kind, kinds[kind], batch, number, tokens), number)
                pairs.report(report, {"requests": kind, "batch": batch}, batch * tokens)


def batches_of(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in some_of(("1", "32"))(text))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--texts", type=Path, help="JSON lines with prompt and answer, to be replayed")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of answers of the servers (default: 40)")
    parser.add_argument("--rounds-of-32", type=int, default=0, help="pairs of batches (default: a quarter)")
    parser.add_argument("--kinds", type=some_of(KINDS), default=KINDS, metavar="KIND,…", help=", ".join(KINDS))
    parser.add_argument("--batches", type=batches_of, default=(1, 32), metavar="1,32", help="some of 1 and 32")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer of a server (default: 256)")
    parser.add_argument("--skip-server", action="store_true", help="only replay")
    parser.add_argument("--skip-replay", action="store_true", help="only the server")
    arguments = parser.parse_args()
    report = Report("speculation")
    if not arguments.skip_replay:
        measure_replay(arguments, report)
    if not arguments.skip_server:
        measure_server(arguments, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
