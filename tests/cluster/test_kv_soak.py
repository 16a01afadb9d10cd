"""Clients of all kinds at three groups that pull from each other, drain, come back, freeze and die meanwhile.

Conversations have long beginnings and go to another group with each request, so that KV travels all the time.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from cluster.chaos import Trouble, View, flush
from cluster.crowd import COMPLETIONS, Crowd, Script, compare, scripts
from cluster.harness import Cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.area("survival")]

GROUPS = 3
CLIENTS = 12
CONVERSATIONS = 12
STREAMS = 40
TOKENS = 40
OPTIONS = (
    *("--groups", str(GROUPS), "--tp", "1", "--dtype", "float32", "--threads", "1", "--policy", "round-robin"),
    *("--kv-memory", "32MiB", "--host-tier", "24MiB", "--disk-tier", "0", "--drain-seconds", "5"),
)


def conversations() -> list[Script]:
    """Some whose beginnings are several chunks long; each request has what was said before it in its prompt."""
    made = []
    for number in range(CONVERSATIONS):
        facts = " ".join(f"Fact {fact} of story {number}: {fact * number % 97} apples." for fact in range(40))
        prompts = [facts, f"{facts} And then?", f"{facts} And then? {facts[:200]} What is next?"]
        body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        made.append(Script(f"story-{number}", COMPLETIONS, tuple(body | {"prompt": each} for each in prompts)))
    return made


async def play(cluster: Cluster, played: list[Script], trouble: Trouble, count: int) -> list[Crowd]:
    crowds: list[Crowd] = []
    reigning = asyncio.create_task(trouble.reign(count))
    while not reigning.done():
        crowds.append(Crowd(cluster.url))
        await crowds[-1].all(played, CLIENTS)
    await reigning
    return crowds


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("seed", "count"), [(1, 10), (2, 40)])
def test_kv_travels_while_groups_come_and_go(tmp_path: Path, seed: int, count: int) -> None:
    with Cluster(*OPTIONS, "--records", f"sqlite:{tmp_path / 'records.sqlite'}") as cluster:
        view = View(cluster)
        kinds = ("greedy", "sampled", "several", "schema", "shared", "session")
        played = conversations() + scripts(seed, STREAMS, TOKENS, kinds)
        random.Random(f"order {seed}").shuffle(played)
        expected = Crowd(cluster.url)
        asyncio.run(expected.all(played, CLIENTS))
        flush(cluster)
        trouble = Trouble(view, seed, GROUPS)
        crowds = asyncio.run(play(cluster, played, trouble, count))
        pulled = cluster.metric("tier_hit_tokens_total", tier="peer")
        handed = cluster.metric("handover_chunks_total")
        given_up = {why: cluster.metric("pulls_given_up_total", reason=why) for why in ("slow", "lost", "gone")}
        print(f"{len(crowds)} crowds; {pulled} tokens pulled, {handed} chunks handed over, given up: {given_up}")
        print("; ".join(trouble.done))
        wrong = [line for got in crowds for line in compare(played, expected, got)]
        assert not wrong, f"seed {seed}: {len(wrong)} are wrong:\n" + "\n".join(wrong)
        assert pulled > 0
        view.wait_for_no_leaks()
        wait_for(lambda: cluster.metric("tier_slots_used", tier="peer") == 0, 20)
        flush(cluster)
        wait_for(lambda: cluster.metric("tier_slots_used", tier="host") == 0, 20)
        assert cluster.stop() == 0
