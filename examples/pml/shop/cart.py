"""What a customer is about to buy."""

from collections import Counter


class Cart:
    """Articles with their counts."""

    def __init__(self) -> None:
        self._articles: Counter[str] = Counter()

    def add(self, article: str, count: int = 1) -> None:
        """Put some in."""
        self._articles[article] += count

    def total(self, prices: dict[str, int]) -> int:
        """In cents."""
        return sum(prices[article] * count for article, count in self._articles.items())
