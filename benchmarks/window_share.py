"""What `--window-share` brings where some layers have a window: texts that fit, hits under pressure, batches.

    python benchmarks/window_share.py [--quick] [--json PATH] [--parts room,sessions,batch,calm] [--rounds 3]

A random Gemma 3 of the small benchmark model's width (768, 12 heads over 4 KV heads, bfloat16), cut to six
layers: five with a window of 512 tokens, one without. A real engine and a real rank in one process
(engine_loop.py), chunks of 64, steps of 512 tokens, one thread, so all times are CPU time. Arms with different
shares (1: no thin blocks) have the same memory, get the same questions, and take turns by pieces. In bfloat16
their greedy answers part now and then, as prompts are computed in other pieces; each goes on with its own.

- room: tokens that a GiB holds, and whole blocks among them; for this model and for others as published, bfloat16.
- sessions: conversations that come back in turn, four turns each, in memory that holds half of their KV
  if all layers keep everything. `hits`: prompt tokens that were found, of those that had been computed before.
- batch: prompts that come at once. `rows`: sequences that decode in a step, mean.
- calm: the sessions again with as many blocks as there are chunks, so nothing leaves without a share, and thin
  blocks cost what they cost. There an arm's memory is smaller by its share.

`rate`: output tokens per second of CPU time, prompts included; `ratio`: that over the arm's with share 1, median
of the rounds' ratios. `computed`: prompt tokens that were computed.
"""

from __future__ import annotations

import argparse
import mmap
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from engine_loop import EngineLoop
from models import SHAPE, write_random
from report import Report, argument_parser

from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.engine_config import EngineConfig
from trunkline.kvstore.chunk_format import kv_format
from trunkline.kvstore.window_share import blocks_within, whole_blocks
from trunkline.worker.messages import Sampling

PARTS: Final = ("room", "sessions", "batch", "calm")
SHARES: Final = (1.0, 0.25, 0.125)
CALM_SHARES: Final = (1.0, 0.5)
"""Half of the blocks hold the last windows of all sessions."""
CHUNK: Final = 64
WINDOW: Final = 512
WINDOWED: Final = (True, True, True, False, True, True)
"""Which layers of the measured model have a window."""
CONFIG: Final[dict[str, Any]] = {
    **SHAPE,
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": len(WINDOWED),
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in WINDOWED],
    "query_pre_attn_scalar": 64,
    "rope_local_base_freq": 10000.0,
}
MEMORY: Final = 40 << 20
"""Bytes for KV: 106 chunks with all layers, 6,784 tokens."""
SLICE_STEPS: Final = 16
"""Steps that an arm does before the next one has its turn."""


class Shape(NamedTuple):
    """What counts of a model."""

    whole: int
    """Layers without a window."""
    windowed: int
    kv_heads: int
    head_dim: int


PUBLISHED: Final = {
    "measured here": Shape(1, 5, 4, 64),
    "OLMo 3 7B": Shape(8, 24, 32, 128),
    "Gemma 3 27B": Shape(10, 52, 16, 128),
    "gpt-oss 20B": Shape(12, 12, 8, 64),
}


class Arm(EngineLoop):
    """An engine and a rank with a share, and what they have said and spent."""

    def __init__(self, model: Path, share: float, blocks: int) -> None:
        engine = EngineConfig(
            num_blocks=blocks, chunk_size=CHUNK, token_budget=512, max_context=8192, dtype="bfloat16"
        )
        super().__init__(model, engine, {"dtype": "bfloat16", "threads": 1, "window_share": share})
        self.share = share
        self.seconds = 0.0
        """CPU time."""
        self.answers: dict[int, list[int]] = {}
        self.found = 0
        """Prompt tokens whose KV was found."""
        self.rows: list[int] = []
        """Of each step, the requests that got a token."""

    def ask(self, prompt: list[int], tokens: int) -> int:
        """Submit a prompt to be continued greedily; return the request."""
        request = self.submit(prompt, tokens, sampling=Sampling(temperature=0.0))
        self.answers[request] = []
        return request

    def go_on(self) -> bool:
        """Do some steps; return whether there is more to do."""
        start = time.process_time()
        for _ in range(SLICE_STEPS):
            self.step()
        self.seconds += time.process_time() - start
        return not self.engine.is_idle

    def _count(self, outputs: EngineOutputs) -> None:
        super()._count(outputs)
        self.found += sum(started.cached_tokens for started in outputs.started)
        for requests, tokens in zip(outputs.requests, outputs.tokens, strict=True):
            self.rows.append(len(requests))
            for request, token in zip(requests.tolist(), tokens.tolist(), strict=True):
                self.answers[request].append(token)

    @property
    def output(self) -> int:
        return sum(map(len, self.answers.values()))


def take_turns(arms: list[Arm]) -> None:
    """Let all arms end what they have been asked."""
    working = list(arms)
    while working:
        working = [arm for arm in working if arm.go_on()]


def converse(arms: list[Arm], sessions: int, turns: int, rng: np.random.Generator) -> int:
    """Let sessions have their turns, one by one; return the prompt tokens that had been computed before."""
    texts = [[list[int]() for _ in arms] for _ in range(sessions)]
    known = 0
    for _ in range(turns):
        for session in texts:
            known += max(0, len(session[0]) - 1)  # the last token's KV was never computed
            question = draw(rng, 512)
            prompts = [[*text, *question] for text in session]
            requests = [arm.ask(prompt, 32) for arm, prompt in zip(arms, prompts, strict=True)]
            take_turns(arms)
            for index, (arm, request) in enumerate(zip(arms, requests, strict=True)):
                session[index] = prompts[index] + arm.answers[request]
    return known


def crowd(arms: list[Arm], prompts: int, rng: np.random.Generator) -> int:
    """Ask everything at once."""
    for _ in range(prompts):
        prompt = draw(rng, 1024)
        for arm in arms:
            arm.ask(prompt, 256)
    take_turns(arms)
    return 0


def draw(rng: np.random.Generator, tokens: int) -> list[int]:
    return list(rng.integers(2, SHAPE["vocab_size"], tokens).tolist())


def room(report: Report) -> None:
    for name, shape in PUBLISHED.items():
        windowed = [True] * shape.windowed + [False] * shape.whole
        part = kv_format((len(windowed), shape.kv_heads, CHUNK, shape.head_dim), "bfloat16")
        for share in SHARES:
            blocks = blocks_within(1 << 30, part, windowed, share, mmap.PAGESIZE)
            case = {"model": name, "layers with a window": f"{shape.windowed} of {len(windowed)}", "share": share}
            report.add(case, "tokens in a GiB", blocks * CHUNK, "", 1)
            report.add(
                case, "of them whole", whole_blocks(blocks, share) * CHUNK if share < 1 else blocks * CHUNK, "", 1
            )


def shares_of(part: str) -> tuple[float, ...]:
    return CALM_SHARES if part == "calm" else SHARES


def arms_of(model: Path, part: str, chunks: int) -> Iterator[Arm]:
    form = kv_format((len(WINDOWED), SHAPE["num_key_value_heads"], CHUNK, SHAPE["head_dim"]), "bfloat16")
    for share in shares_of(part):
        blocks = chunks if part == "calm" else blocks_within(MEMORY, form, WINDOWED, share, mmap.PAGESIZE)
        yield Arm(model, share, blocks)


def measure(model: Path, part: str, arguments: argparse.Namespace, report: Report) -> None:
    """Run a part with all arms, and report of each."""
    sessions, turns, prompts = (6, 3, 8) if arguments.quick else (6, 4, 24)
    chunks = sessions * turns * 10  # with the outputs, and what chunks leave empty
    found: dict[float, list[dict[str, float]]] = {share: [] for share in shares_of(part)}
    for round_ in range(1 if arguments.quick else arguments.rounds):
        rng = np.random.default_rng(round_)
        arms = list(arms_of(model, part, chunks))
        known = crowd(arms, prompts, rng) if part == "batch" else converse(arms, sessions, turns, rng)
        plain = arms[0].output / arms[0].seconds
        for arm in arms:
            rate = arm.output / arm.seconds
            figures = {"blocks": arm.engine.config.num_blocks, "rate": rate, "ratio": rate / plain}
            figures["computed"] = arm.prefilled
            if known:
                figures["hits"] = 100 * arm.found / known
            else:
                figures["rows"] = float(np.mean(arm.rows))
                figures["preemptions"] = arm.engine.counters.preemptions
            found[arm.share].append(figures)
            arm.close()
    units = {"rate": "tokens/s", "ratio": "x", "hits": "%"}
    for share, rounds in found.items():
        for metric in rounds[0]:
            value = median(figures[metric] for figures in rounds)
            report.add({"part": part, "share": share}, metric, value, units.get(metric, ""), len(rounds))


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    parts = arguments.parts
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report = Report("window_share")
    if "room" in parts:
        room(report)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_random(Path(scratch) / "gemma3", CONFIG)
        for part in parts:
            if part != "room":
                measure(model, part, arguments, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
