"""How much prefill a step takes in beside running streams. Pure.

Prompt tokens that share a step with decoding rows make every stream wait for them. A target for the time between
two tokens turns the budget of prompt tokens from a constant into what the costs learned so far
(`trunkline.controller.tiers.costs`) leave room for:

      |── base + rows ──|──── prompt tokens ────|
      0                                         target

The target is soft: prompts always get on, by `least` tokens in every step, or a full batch would starve them.
"""

from __future__ import annotations

from trunkline.controller.tiers.costs import StepCosts


def prefill_budget(costs: StepCosts, rows: int, target_us: float, budget_max: int, least: int) -> int:
    """Prompt tokens for a step with `rows` decoding rows, so that it takes about `target_us`.

    Args:
        target_us: 0 for no target.
        budget_max: what the step can take at most, whatever it costs.
        least: tokens below which no target takes the budget.
    """
    if rows == 0 or target_us <= 0.0:
        return budget_max
    room = target_us - costs.step_us(rows, 0)
    least = min(least, budget_max)
    if room <= 0.0:
        return least
    if room >= costs.token_us * budget_max:
        return budget_max
    return max(int(room / costs.token_us), least)
