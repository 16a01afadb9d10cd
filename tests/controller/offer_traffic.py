"""Traffic whose KV a group offers to others, and lists of what it offers."""

from __future__ import annotations

from msgspec.structs import replace
from simulation.traffic import Mix, Traffic

from trunkline.controller.cache.radix_tree import RadixTree
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.service.offers import OfferList
from trunkline.router.messages import OfferedPath

CHUNK = 4
TINY = EngineConfig(num_blocks=40, chunk_size=CHUNK, max_context=80, token_budget=24, max_rows=8)
TIERED = replace(TINY, host_slots=20, disk_slots=60, remote=True, ranks=2)
TRAFFIC = {
    "salts": (TINY, Mix(preempts=0.01, salts=0.3)),
    "tiers": (TIERED, Mix(ttl=0.2, preempts=0.01)),
    "cuts": (replace(TINY, host_slots=6, disk_slots=30), Mix(cuts=0.5)),
    "modules": (replace(TIERED, session_ttl_s=300.0), Mix(modules=0.7, calls=0.05)),
}


def traffic_steps(traffic: Traffic, mix: Mix, acts: int) -> None:
    while traffic.live >= mix.crowd:
        traffic.act()
    traffic.submit()
    for _ in range(acts):
        traffic.act()


def listed(tree: RadixTree, kind: str, now: float, *, units: int = 1000) -> list[OfferedPath]:
    found = OfferList(tree, kind, now)
    while not found.advance(units):
        pass
    paths: list[OfferedPath] = []
    page = 0
    while True:
        answer = found.page(page, 9)
        assert answer.ticket == 9
        assert answer == found.page(page, 9), "a page that is asked for again is another one"
        paths += answer.paths
        page += 1
        if not answer.more:
            return paths
        assert answer.paths
