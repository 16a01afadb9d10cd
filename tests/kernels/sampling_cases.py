"""Random rows of logits and how tokens are drawn from them, to test every implementation of sampling with."""

from __future__ import annotations

import torch
from torch import Tensor

from trunkline.kernels.reference_sampling import weights
from trunkline.kernels.sampling import Biases, Draws, LogitEdits, Masks, Penalties

INFINITY = float("inf")


def choice(values: tuple[float, ...], rows: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=generator)]


def make_logits(rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Rows of all kinds: bell-shaped, peaked, with many ties, all equal, with infinities and what is no number."""
    x = torch.randn(rows, vocab_size, generator=generator) * 3
    kind = torch.randint(0, 6, (rows,), generator=generator).tolist()
    for row, number in enumerate(kind):
        some = torch.randint(0, vocab_size, (3,), generator=generator)
        if number == 1:
            x[row, some] += torch.tensor([40.0, 39.0, 38.5])
        elif number == 2:
            x[row] = x[row].round()
        elif number == 3:
            x[row] = -1.5
        elif number == 4:
            x[row, some] = torch.tensor([-INFINITY, float("nan"), -INFINITY])
        elif number == 5:
            x[row, some[0]] = INFINITY
    return x


def make_draws(rows: int, vocab_size: int, generator: torch.Generator) -> Draws:
    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows,), generator=generator)

    top_k = choice((0, 0, 0, 1, 5, 50, 999, vocab_size, vocab_size + 3), rows, generator)
    top_p = choice((1, 1, 1, 0.99, 0.9, 0.5, 0.05, 0), rows, generator)
    min_p = choice((0, 0, 0, 1e-4, 0.05, 0.7, 1), rows, generator)
    temperature = choice((0, 0.3, 0.7, 1, 1, 2, 30), rows, generator)
    return Draws(
        whole(-(1 << 62), 1 << 62),
        whole(0, 100_000),
        top_k.int(),
        torch.stack((temperature, top_p, min_p.log())),
        limited=True,
    )


def make_edits(rows: int, vocab_size: int, generator: torch.Generator) -> LogitEdits:
    def some(count: int) -> Tensor:
        return torch.randperm(vocab_size, generator=generator)[:count].int()

    bias_rows = torch.tensor([0, 0, rows - 1], dtype=torch.int32)[: 3 if vocab_size > 2 and rows > 1 else 1]
    masked = torch.arange(0, rows, 2, dtype=torch.int32)
    words = torch.randint(-(1 << 31), 1 << 31, (len(masked), -(-vocab_size // 32)), generator=generator).int()
    penalised = torch.arange(1, rows, 3, dtype=torch.int32)
    tokens = [some(int(count)) for count in torch.randint(0, 900, (len(penalised),), generator=generator)]
    flat = torch.cat([*tokens, torch.empty(0, dtype=torch.int32)])
    return LogitEdits(
        Biases(bias_rows, some(3)[: len(bias_rows)], torch.tensor([5.0, -100.0, 0.3])[: len(bias_rows)]),
        Masks(masked, words),
        Penalties(
            penalised,
            torch.tensor([0, *(len(part) for part in tokens)]).cumsum(0),
            flat,
            torch.randint(0, 4, (len(flat),), generator=generator).int(),
            torch.rand(len(penalised), 3, generator=generator) + 0.5,
        ),
    )


def cut_at_weights(rows: int, vocab_size: int) -> tuple[Tensor, Draws]:
    """Logits, and draws whose top-p is the share, rounded, of the tokens before one of them."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, vocab_size, generator=generator)
    best = logits.sort(descending=True).values
    own = weights(best, best[:, :1]).double()
    before = (own.cumsum(1) - own) / own.sum(1, keepdim=True)
    top_p = before.gather(1, torch.randint(1, vocab_size, (rows, 1), generator=generator)).squeeze(1).float()
    factors = torch.stack((torch.ones(rows), top_p, torch.full((rows,), -INFINITY)))
    draws = make_draws(rows, vocab_size, generator)._replace(top_k=torch.zeros(rows).int(), factors=factors)
    return logits, draws
