"""How many drafts steps have tried for a request, and how many were right: for the field `usage`."""

from __future__ import annotations

from trunkline.router.messages import DraftsTried


class DraftCounts:
    """Sums of what a request's `DraftsTried` say, over all samples."""

    __slots__ = ("accepted", "predicted", "predicted_accepted", "tried")

    def __init__(self) -> None:
        self.tried = 0
        """Drafts that steps have tried …"""
        self.accepted = 0
        """… and those that were the tokens drawn."""
        self.predicted = 0
        """Of `tried`, drafts from the request's `prediction` …"""
        self.predicted_accepted = 0
        """… and those that were the tokens drawn."""

    def add(self, drafts: DraftsTried) -> None:
        """Count what a step has tried."""
        self.tried += drafts.tried
        self.accepted += drafts.accepted
        if drafts.is_prediction:
            self.predicted += drafts.tried
            self.predicted_accepted += drafts.accepted
