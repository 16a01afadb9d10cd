"""What is on the shelves."""

import heapq


class Stock:
    """Counts by article, and which article runs out first."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = dict(counts)

    def take(self, article: str, count: int) -> bool:
        """Whether there was enough of it."""
        if self._counts.get(article, 0) < count:
            return False
        self._counts[article] -= count
        return True

    def scarce(self, number: int) -> list[str]:
        """The articles with the smallest counts."""
        return heapq.nsmallest(number, self._counts, key=lambda article: self._counts[article])
