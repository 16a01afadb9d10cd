"""Prices of the shop, in cents."""

import json
from pathlib import Path


def load(path: Path) -> dict[str, int]:
    """Prices by article, from a JSON file."""
    prices = json.loads(path.read_text())
    return {str(article): int(cents) for article, cents in prices.items()}


def save(path: Path, prices: dict[str, int]) -> None:
    """Write them back, in order."""
    path.write_text(json.dumps(prices, indent=2, sort_keys=True))


def shown(cents: int) -> str:
    """As a customer reads it."""
    return f"{cents // 100}.{cents % 100:02}"
