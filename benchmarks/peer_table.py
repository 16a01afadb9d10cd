"""The table of servers side by side (peers.py): their figures, ratios, and the machine's limits beside them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final, Literal, NamedTuple

import torch
from linear import Arm, LimitMeter
from peer_servers import BEFORE, CORES, TRUNKLINE
from report import Report

LIMIT_S: Final = 0.1
"""Seconds for which a limit is measured beside a figure."""
CHANGED: Final = 1.1
"""Limits that differ by more are of two states of the machine."""


class Cell(NamedTuple):
    """A line of the table."""

    name: str
    unit: str
    faster: bool
    """More is better."""
    bound: Literal["", "read", "product"] = ""
    """What of the machine limits it, if that is known."""


def shown(value: float) -> str:
    """Return a figure with three digits that say something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Table:
    """Values of all cells and servers."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._found: dict[Cell, dict[str, list[float]]] = {}
        self._shares: dict[Cell, dict[str, list[float]]] = {}
        """What each figure is of the limit beside it."""
        self.rates = ""
        """What all cores read and multiply, for people."""

    def add(self, cell: Cell, name: str, value: float, limit: float | None = None) -> None:
        """Add a figure.

        Args:
            limit: what the machine allowed at that time, in the cell's unit; None: not known.
        """
        self._found.setdefault(cell, {}).setdefault(name, []).append(value)
        if limit is not None:
            share = value / limit if cell.faster else limit / value
            self._shares.setdefault(cell, {}).setdefault(name, []).append(share)

    def markdown(self) -> list[str]:
        """A row for each cell, a column for each server."""
        heads = [
            "",
            *self._names,
            *self._before("ours / before"),
            "ours / best peer",
            "of limit",
            "best peer of limit",
        ]
        lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for cell, found in self._found.items():
            middle = {name: median(values) for name, values in found.items()}
            cells = [f"{shown(middle[name])} {cell.unit}" if name in middle else "" for name in self._names]
            lines.append(f"| {' | '.join([cell.name, *cells, *self._ratios(cell, middle)])} |")
        return lines

    def _before(self, text: str) -> list[str]:
        """Return the text of the column that compares us with another commit, if there is one."""
        return [text] if BEFORE.name in self._names else []

    def _ratios(self, cell: Cell, middle: dict[str, float]) -> list[str]:
        ours, before = middle.pop(TRUNKLINE.name, None), middle.pop(BEFORE.name, None)
        best = (max if cell.faster else min)(middle, key=lambda name: middle[name], default="")

        def times(other: float | None) -> str:
            """How many times as good ours is; nothing if one is unknown."""
            return f"{ours / other if cell.faster else other / ours:.2f}" if ours and other else ""

        def share(name: str) -> str:
            shares = self._shares.get(cell, {}).get(name)
            return f"{100 * median(shares):.0f} %" if shares else ""

        past = self._before(times(before))
        return [*past, times(middle.get(best)), share(TRUNKLINE.name), share(best)]

    def add_to(self, report: Report, case: dict[str, Any]) -> None:
        for cell, found in self._found.items():
            for name, values in found.items():
                report.add({"impl": name, **case}, cell.name, median(values), cell.unit, len(values))
        for cell, found in self._shares.items():
            for name, shares in found.items():
                report.add(
                    {"impl": name, **case}, f"{cell.name}, of limit", 100 * median(shares), "%", len(shares)
                )


class Bounds:
    """What the machine allows of a cell at this moment, measured beside a figure."""

    def __init__(self, dtype: torch.dtype, token_bytes: float, prompt_flop: float) -> None:
        """
        Args:
            dtype: of the matrix product.
            token_bytes: that a token reads at batch 1.
            prompt_flop: floating-point operations of a cold prompt.
        """
        self._meter = LimitMeter(Arm(CORES), dtype)
        self._token_bytes, self._prompt_flop = token_bytes, prompt_flop
        self._rates: dict[str, list[float]] = {}

    def measure(self, cells: Sequence[Cell]) -> dict[Cell, float]:
        """Return the limit of each cell that has one, in its unit."""
        found = {}
        for cell in cells:
            if cell.bound == "read":
                rate, _ = self._meter.read(LIMIT_S)
                found[cell] = rate / self._token_bytes
            elif cell.bound == "product":
                rates, _ = self._meter.multiply(LIMIT_S)
                rate = max(rates)
                found[cell] = 1e3 * self._prompt_flop / rate
            else:
                continue
            self._rates.setdefault(cell.bound, []).append(rate)
        return found

    def __str__(self) -> str:
        """What all cores read and multiply, for people: deciles 1, 5 and 9."""
        units = {"read": "GB/s read", "product": "GFLOP/s"}
        return ", ".join(
            f"{' / '.join(f'{rate / 1e9:.3g}' for rate in tenths(rates))} {units[bound]}"
            for bound, rates in sorted(self._rates.items(), reverse=True)
        )


def tenths(values: Sequence[float]) -> tuple[float, float, float]:
    """Return deciles 1, 5 and 9."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(last / 10)], median(ordered), ordered[round(last * 9 / 10)]


def steady(front: float, behind: float) -> float | None:
    """Return the limit that held between two measurements; None if the machine changed in between."""
    low, high = sorted((front, behind))
    return (low + high) / 2 if high <= CHANGED * low else None
