"""The interface of sampling: from rows of logits to tokens.

A row is a row of logits, a seed, an output index and options; it knows of no sequence and of no other row. The
PyTorch reference (`trunkline.kernels.reference_sampling`) defines what is drawn, to the bit: native versions find
the same tokens with less work.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Biases(NamedTuple):
    """Numbers that are added to single logits. A token occurs at most once per row."""

    rows: Tensor
    """Row of each number, int32 `[n]`."""
    tokens: Tensor
    """int32 `[n]`."""
    values: Tensor
    """float32 `[n]`."""


class Masks(NamedTuple):
    """The tokens that some rows may draw, one bit for each: bit i of word w is token 32 * w + i."""

    rows: Tensor
    """int32 `[n]`, distinct."""
    words: Tensor
    """int32 `[n, ceil(vocabulary / 32)]`, little-endian. Bits beyond the vocabulary are ignored."""


class Penalties(NamedTuple):
    """The tokens that some rows are penalised for; those of penalised row i are at `indptr[i] : indptr[i + 1]`."""

    rows: Tensor
    """int32 `[n]`, distinct."""
    indptr: Tensor
    """int64 `[n + 1]`."""
    tokens: Tensor
    """int32 `[m]`: tokens of prompt and output, each once per row."""
    counts: Tensor
    """int32 `[m]`: how often each occurs in the output."""
    factors: Tensor
    """float32 `[n, 3]`: repetition, frequency and presence penalty of each row."""


class LogitEdits(NamedTuple):
    """Changes of logits, in the order in which they are made."""

    biases: Biases | None = None
    masks: Masks | None = None
    penalties: Penalties | None = None


class Draws(NamedTuple):
    """How each row draws, by row."""

    seeds: Tensor
    """int64 `[rows]`: an unsigned seed's bits."""
    output_index: Tensor
    """int64 `[rows]`: number of output tokens before the one that is drawn."""
    top_k: Tensor
    """int32 `[rows]`: number of most likely tokens that may be drawn; 0: all."""
    factors: Tensor
    """float32 `[3, rows]`: temperature (0: the largest logit is taken), top-p (1: no limit), natural logarithm of
    min-p (-inf: no limit)."""
    limited: bool
    """Whether a row that draws has a limit."""


class Report(NamedTuple):
    """Natural logarithms of probabilities, of some rows."""

    chosen: Tensor
    """The logarithms of the chosen tokens, float32 `[n]`."""
    top_ids: Tensor
    """The most likely tokens, most likely first, int32 `[n, count]`."""
    top: Tensor
    """Their log-probabilities, float32 `[n, count]`."""


class SamplingOps(Protocol):
    """The ops of sampling on one device. Logits are float32 `[rows, vocabulary]`, each row contiguous.

    What is no number counts as -inf. Tensors of arguments may be in host memory.
    """

    def edit_logits(self, logits: Tensor, edits: LogitEdits) -> None:
        """Change logits in place: biases, masks, penalties.

        In masked rows forbidden logits become -inf, others are brought between ∓1e20: an allowed token then beats
        every forbidden one, also after penalties and temperature, whatever the model or a bias made of it.
        """
        ...

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return the token of each row, int64 `[rows]`.

        The logits are divided by the temperature; top-k, then top-p, then min-p leave the most likely tokens, at
        least one, of equal ones those with lower ids; of these the one with the largest sum of score and noise
        (`reference_sampling.gumbel`) is drawn. A row that can draw nothing, as all its logits are -inf, gives its
        first largest logit.
        """
        ...

    def report(self, logits: Tensor, rows: Tensor, chosen: Tensor, count: int) -> Report:
        """Return log-probabilities.

        Args:
            rows: int32 `[n]`, those to report of.
            chosen: int64 `[n]`, a token of each.
            count: number of most likely tokens to report of each row; at most the vocabulary.
        """
        ...
