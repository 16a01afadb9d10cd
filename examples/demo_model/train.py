"""The training loop: one process, bfloat16 products, float32 weights, resumable.

Muon drives the matrices (it needs about half the tokens AdamW needs, which on a CPU is half
the wait), AdamW the embedding and the norms. The learning rate is flat and then falls
linearly. Most of the run uses short rows; the last part uses rows of the whole context.
Progress is a share of the steps or of the minutes granted, so a slower machine still
finishes every phase.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from mixture import IGNORED, Mixture, Shares
from model import LeanLlama
from torch import nn


@dataclass(frozen=True)
class Plan:
    """What to spend and how; minutes apply when ``steps`` is 0."""

    steps: int = 0
    minutes: float = 60.0
    threads: int = 2
    batch_tokens: int = 2048
    short_tokens: int = 512
    long_tokens: int = 2048
    long_from: float = 0.85
    long_batch_tokens: int = 4096
    decay_from: float = 0.5
    warmup_steps: int = 30
    matrix_rate: float = 0.01
    other_rate: float = 0.006
    matrix_decay: float = 0.1
    seed: int = 20
    save_seconds: float = 120.0
    check_steps: int = 150


@dataclass
class Tally:
    """What was spent so far; travels with the checkpoint."""

    step: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    seconds: float = 0.0


def progress_of(plan: Plan, tally: Tally) -> float:
    """Share of the run that is done."""
    if plan.steps:
        return tally.step / plan.steps
    return tally.seconds / (60 * plan.minutes)


def rate_factor(plan: Plan, progress: float, step: int) -> float:
    """Warm-up by steps, then flat, then a straight line to nearly nothing."""
    warm = min(1.0, (step + 1) / plan.warmup_steps)
    if progress <= plan.decay_from:
        return warm
    return warm * max(0.01, (1 - progress) / (1 - plan.decay_from))


def shares_at(progress: float) -> Shares:
    """The mixture over the run.

    Pure copying first, because recall builds on it; then questions, until most are known; then
    recall, which by now is quick to learn.
    """
    if progress < 0.2:
        return Shares(library=0.24, recall=0.16, copying=0.10)
    if progress < 0.75:
        return Shares(library=0.26, recall=0.14, copying=0.04)
    return Shares(library=0.22, recall=0.36, copying=0.05)


class Trainer:
    """Model, optimisers, data and tally of one run."""

    def __init__(self, model: LeanLlama, mixture: Mixture, plan: Plan, checkpoint: Path) -> None:
        self.model, self.mixture, self.plan, self.checkpoint = model, mixture, plan, checkpoint
        self.tally = Tally()
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.optimisers: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.Muon(matrices, lr=plan.matrix_rate, momentum=0.95, weight_decay=plan.matrix_decay),
                plan.matrix_rate,
            ),
            (
                torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
                plan.other_rate,
            ),
        ]

    def save(self) -> None:
        """Write a checkpoint beside the old one, then swap: a kill never leaves half a file."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser, _ in self.optimisers],
            "tally": asdict(self.tally),
            "mixture": self.mixture.state(),
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)

    def resume(self) -> None:
        """Continue from the checkpoint if there is one."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=False)
        self.model.load_state_dict(state["model"])
        for (optimiser, _), saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.tally = Tally(**state["tally"])
        self.mixture.restore(state["mixture"])

    def step(self, progress: float) -> float:
        """One optimiser step; returns its loss."""
        plan, tally = self.plan, self.tally
        long = progress >= plan.long_from
        length = plan.long_tokens if long else plan.short_tokens
        rows = (plan.long_batch_tokens if long else plan.batch_tokens) // length
        ids, targets = self.mixture.batch(rows, length, shares_at(progress), progress)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model.loss(ids, targets, IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = rate_factor(plan, progress, tally.step)
        for optimiser, rate in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        tally.step += 1
        tally.tokens += ids.numel()
        tally.learned_tokens += int((targets != IGNORED).sum())
        return loss.item()

    def run(self, check: Callable[[LeanLlama], dict[str, float]]) -> Tally:
        """Train until the plan is spent; logs one JSON line every 20 steps."""
        torch.set_num_threads(self.plan.threads)
        self.resume()
        last_save = time.monotonic()
        recent: list[float] = []
        mark, mark_tokens = time.monotonic(), self.tally.tokens
        while (progress := progress_of(self.plan, self.tally)) < 1:
            begun = time.monotonic()
            recent.append(self.step(progress))
            now = time.monotonic()
            self.tally.seconds += now - begun
            if self.tally.step % 20 == 0:
                speed = (self.tally.tokens - mark_tokens) / (now - mark)
                line = {
                    **asdict(self.tally),
                    "progress": round(progress, 4),
                    "loss": round(sum(recent) / len(recent), 4),
                    "tokens_per_s": round(speed),
                }
                print(json.dumps(line), flush=True)
                recent, mark, mark_tokens = [], now, self.tally.tokens
            if self.tally.step % self.plan.check_steps == 0:
                print(json.dumps(check(self.model)), flush=True)
                mark, mark_tokens = time.monotonic(), self.tally.tokens
            if now - last_save > self.plan.save_seconds:
                self.save()
                last_save = now
        self.save()
        return self.tally
