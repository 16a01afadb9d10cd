"""How a mixture of experts chooses the experts of a token. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a router's scores become the experts of a token and their shares of the sum."""

    per_token: int
    """Experts that a token goes to: those of the largest scores."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's outputs become scores."""
    normalised: bool = True
    """Whether the shares of the chosen ones are divided by their sum."""
    factor: float = 1.0
    """Factor of the shares, behind the division."""
    groups: int = 1
    """Groups of neighbouring experts, all of one size."""
    groups_per_token: int = 1
    """Groups that a token's experts come from: those whose best scores have the largest sum."""
    group_best: int = 2
    """How many of a group's scores are in that sum: 2, or 1."""
    scales_inputs: bool = False
    """Whether the shares multiply what the experts read, and their results are just summed."""
