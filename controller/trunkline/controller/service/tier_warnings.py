"""What the log says of tiers: once when one fails, once when it works again."""

from __future__ import annotations

import structlog

from trunkline.controller.engine.engine import Engine
from trunkline.kvstore.tier import TierKind

log = structlog.get_logger()


class TierWarnings:
    """Remembers what has been said."""

    def __init__(self) -> None:
        self._problems: dict[TierKind, str] = {}
        self._said_lost = False

    def look(self, engine: Engine) -> None:
        """Say what is new."""
        for tier, health in engine.scheduler.kv.tree.tiers.health.items():
            before, self._problems[tier] = self._problems.get(tier, ""), health.problem
            if health.problem and not before:
                log.warning(
                    "a tier fails; it is left alone for a while", tier=tier.name.lower(), problem=health.problem
                )
            elif before and not health.problem:
                log.info("a tier works again", tier=tier.name.lower())
        if engine.traffic.lost_chunks and not self._said_lost:
            self._said_lost = True
            log.warning("a tier did not hold a chunk whole, which is computed again; from now on only counted")
