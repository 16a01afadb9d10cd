"""Starting weights that already hold the two heads which copying from the context needs.

To answer from the context a model must find where the present words occurred before and
read what followed: a head that marks each position with the token before it, and a later
head whose query (this token) matches that mark and copies the token found there. Larger runs
discover this pair by themselves; within the few million tokens of this one they did not (no
recall at all after a third of the run). So the pair is laid out at the start, roughly, and training
does the rest: all weights stay free.

    layer 0:   query, key = constant, turned by one position   -> attends to the token before
               value = R x, output = P                          -> writes P R (previous token)
    layers 2-5: query = G R x, key = G P^T x                    -> finds "previous = this token"
               value = S x, output = S^T                        -> raises the token found there

Rotary positions: the first head uses the constant part that every embedding shares (it adds
the same to all logits, so it does not disturb the tied head); the second head matches in the
slowly turning pairs, whose phase hardly changes over a few hundred tokens.
"""

from __future__ import annotations

import torch
from model import Block, LeanLlama
from torch import Tensor

CONSTANT_NORM = 4.5  # about the norm of the random part of an embedding
FAST_PAIRS = 6  # pairs that turn by a quarter radian or more per token tell neighbours apart
PREVIOUS_GAIN = 0.7
PREVIOUS_OUT = 0.5
MATCH_GAIN = 2.4
COPY_OUT = 0.75
SLOW_FROM = 18  # pairs from here on turn by less than 0.006 per token
MATCH_LAYERS = (2, 3, 4, 5)


def _orthogonal(rows: int, columns: int) -> Tensor:
    """Random orthonormal rows."""
    return torch.nn.init.orthogonal_(torch.empty(rows, columns))


def _set_previous_head(block: Block, constant: Tensor, read: Tensor, write: Tensor) -> None:
    """All heads of the first key-value group attend to the token before."""
    shape = block.shape
    size, half = shape.head_dim, shape.head_dim // 2
    group = shape.heads // shape.kv_heads
    angles = shape.rope_theta ** -(torch.arange(half) / half)
    key_row = shape.heads * size
    value_row = key_row + shape.kv_heads * size
    weight, out = block.qkv.weight, block.out.weight
    fast = torch.arange(FAST_PAIRS)
    weight[: group * size] *= 0.1
    weight[key_row : key_row + size] *= 0.1
    for head in range(group):
        weight[head * size + fast] = PREVIOUS_GAIN * constant
        weight[head * size + half + fast] = 0
        out[:, head * size : (head + 1) * size] = PREVIOUS_OUT * write / group
    weight[key_row + fast] = PREVIOUS_GAIN * angles[fast].cos()[:, None] * constant
    weight[key_row + half + fast] = PREVIOUS_GAIN * angles[fast].sin()[:, None] * constant
    weight[value_row : value_row + size] = read


def _set_match_heads(block: Block, read: Tensor, write: Tensor) -> None:
    """Heads of the second group look for the place where the previous token was this one."""
    shape = block.shape
    size, half = shape.head_dim, shape.head_dim // 2
    group = shape.heads // shape.kv_heads
    slow = torch.cat((torch.arange(SLOW_FROM, half), torch.arange(SLOW_FROM, half) + half))
    mix = _orthogonal(len(slow), size)
    weight, out = block.qkv.weight, block.out.weight
    copied = _orthogonal(size, shape.hidden)
    key_row = (shape.heads + shape.kv_heads - 1) * size
    value_row = key_row + shape.kv_heads * size
    for head in range(shape.heads - group, shape.heads):
        weight[head * size : (head + 1) * size] *= 0.1
        weight[head * size + slow] = MATCH_GAIN * mix @ read
        out[:, head * size : (head + 1) * size] = COPY_OUT * copied.T / group
    weight[key_row : key_row + size] *= 0.1
    weight[key_row + slow] = MATCH_GAIN * mix @ write.T
    weight[value_row : value_row + size] = copied


@torch.no_grad()
def lay_out_heads(model: LeanLlama) -> None:
    """Overwrite part of the random start of ``model`` with the heads described above."""
    shape = model.shape
    constant = torch.nn.functional.normalize(torch.randn(shape.hidden), dim=0)
    embedding = model.embedding.weight
    embedding += (CONSTANT_NORM - embedding @ constant)[:, None] * constant
    read = _orthogonal(shape.head_dim, shape.hidden)
    read -= (read @ constant)[:, None] * constant  # the mark tells tokens apart
    write = _orthogonal(shape.head_dim, shape.hidden).T
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if index == 0:
            _set_previous_head(block, constant, read, write)
        elif index in MATCH_LAYERS:
            _set_match_heads(block, read, write)
