"""Drawing tokens on the GPU beside torch's sorts (part `sampling`): the same tokens, and the time of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from gpu_device import Call, Gpu, Output, Visit
from torch import Tensor

from trunkline.kernels.reference_sampling import ReferenceSampling
from trunkline.kernels.sampling import Draws, LogitEdits, Masks, Penalties, SamplingOps

MINUS_INFINITY: Final = float("-inf")


@dataclass(frozen=True)
class Way:
    """How all rows of a batch draw."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    log_min_p: float = MINUS_INFINITY
    is_edited: bool = False
    """Masks and penalties come first."""

    @property
    def limited(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.log_min_p > MINUS_INFINITY


WAYS: Final = (
    Way("greedy", temperature=0.0),
    Way("temperature"),
    Way("top-p 0.9", top_p=0.9),
    Way("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    Way("min-p 0.05", log_min_p=-3.0),
    Way("masks, penalties", is_edited=True),
)
BATCHES: Final = (1, 32, 256)
VOCABULARY: Final = 128256


def make_draws(way: Way, rows: int, device: torch.device) -> Draws:
    factors = torch.tensor([way.temperature, way.top_p, way.log_min_p])[:, None].expand(3, rows)
    return Draws(
        torch.arange(rows, device=device),
        torch.full((rows,), 7, dtype=torch.int64, device=device),
        torch.full((rows,), way.top_k, dtype=torch.int32, device=device),
        factors.contiguous().to(device),
        way.limited,
    )


def make_edits(rows: int, vocabulary: int, device: torch.device, generator: torch.Generator) -> LogitEdits:
    """Every row is masked, and penalised for a hundred tokens."""
    numbers = torch.arange(rows, dtype=torch.int32)
    words = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocabulary // 32)), generator=generator).int()
    count = min(100, vocabulary)
    tokens = torch.randperm(vocabulary, generator=generator)[:count].int().repeat(rows)
    penalties = (
        numbers,
        torch.arange(rows + 1) * count,
        tokens,
        torch.ones_like(tokens),
        torch.full((rows, 3), 1.1),
    )
    return LogitEdits(
        masks=Masks(numbers.to(device), words.to(device)),
        penalties=Penalties(*(part.to(device) for part in penalties)),
    )


def make_logits(rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """About as a language model's: bell-shaped, with a few tokens far above the others."""
    x = torch.randn(rows, vocabulary, generator=generator) * 2.5
    x[:, : max(1, vocabulary // 4000)] += 9
    return x


def sample(ops: SamplingOps, logits: Tensor, edits: LogitEdits, draws: Draws) -> Tensor:
    """Edits change the logits: a second call edits them again, which takes as long."""
    ops.edit_logits(logits, edits)
    return ops.draw(logits, draws)


def measure_sampling(
    gpu: Gpu, out: Output, visit: Visit, batches: tuple[int, ...] = BATCHES, vocabulary: int = VOCABULARY
) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, reference = gpu.kernels().sampling(), ReferenceSampling()
    for rows in batches:
        if visit.has_used(0.9):
            out.note(f"no time was left for batches from {rows} on")
            return
        on_host = make_logits(rows, vocabulary, generator)
        logits = on_host.to(gpu.device)
        for way in WAYS:
            draws = make_draws(way, rows, gpu.device)
            edits = make_edits(rows, vocabulary, gpu.device, generator) if way.is_edited else LogitEdits()
            drawn = sample(ours, logits.clone(), edits, draws).cpu()
            # The reference on the host: what any device must draw.
            expected = sample(reference, on_host.clone(), edits, draws)
            if not torch.equal(drawn, expected):
                different = int((drawn != expected).sum())
                out.problem(f"{way.name}: {different} of {rows} rows drew other tokens than the reference")
            arguments = (logits.clone(), edits, draws)
            calls: dict[str, Call] = {
                "ours": partial(sample, ours, *arguments),
                "torch": partial(sample, reference, *arguments),
            }
            case = {"rows": rows, "vocabulary": vocabulary, "drawn": way.name}
            for name, value in gpu.interleaved_us(calls, runs=5).items():
                out.add(case, name, value, "us", 5)
