"""The tree of recurrent states (benchmarks/state_tree.py): chunks live for the sake of snapshots, and what a
prompt finds is what stands on its path."""

from __future__ import annotations

from random import Random

import pytest
from agent_sim import Setting, talks_of
from agent_traces import synthetic
from hybrid_states import RULES, simulate
from seeds import seeds
from state_tree import ANSWER, BRANCH, Oldest, RecencyAndSavings, Returns, Sizes, StateTree, ends_and_branches


def names_of(text: str) -> list[bytes]:
    """One chunk for each letter; a name tells what stands before."""
    return [text[:end].encode() for end in range(1, len(text) + 1)]


def plain(room: float) -> StateTree:
    return StateTree(Sizes(chunk=1, state=10), room, Oldest())


def test_a_prompt_goes_on_from_the_deepest_snapshot() -> None:
    tree = plain(1000)
    tree.add(names_of("abcdef"), {3: ANSWER, 6: ANSWER}, 0.0)
    assert tree.find(names_of("abcdefgh"), 1.0) == (6, 6)
    assert tree.find(names_of("abcdx"), 1.0) == (4, 3), "chunk 4 is there, but no state"
    assert tree.find(names_of("x"), 1.0) == (0, 0)


def test_chunks_behind_the_last_snapshot_are_not_kept() -> None:
    tree = plain(1000)
    tree.add(names_of("abcdef"), {4: ANSWER}, 0.0)
    assert len(tree.nodes) == 4


def test_with_a_snapshot_go_the_chunks_that_only_it_holds() -> None:
    tree = plain(1000)
    tree.add(names_of("abcdef"), {6: ANSWER}, 0.0)
    tree.add(names_of("abcxyz"), {3: BRANCH, 6: ANSWER}, 1.0)
    first = tree.nodes[b"abcdef"].snapshot
    inner = tree.nodes[b"abc"].snapshot
    assert first
    assert inner
    assert (tree.saved(first), tree.freed(first)) == (3, 13)
    assert (tree.saved(inner), tree.freed(inner)) == (3, 10), "chunks go on behind it"
    tree.drop(inner)
    assert (tree.saved(first), tree.freed(first)) == (6, 13)
    tree.drop(first)
    assert set(tree.nodes) == set(names_of("abcxyz"))
    tree.check()


def test_the_third_prompt_profits_from_the_branch_of_the_second() -> None:
    tree = plain(1000)
    for now, text in enumerate(("system one", "system two", "system three")):
        names = names_of(text)
        known, start = tree.find(names, now)
        assert start == (7 if text.endswith("three") else 0)
        tree.add(names, ends_and_branches(len(names), len(names), start, known), now)


@pytest.mark.parametrize("seed", seeds(5))
def test_random_prompts(seed: int) -> None:
    rng = Random(seed)
    order = rng.choice((Oldest, RecencyAndSavings, Returns))()
    tree = StateTree(Sizes(chunk=rng.choice((1, 4)), state=rng.choice((1, 30))), rng.choice((50, 400)), order)
    texts = [""]
    for step in range(600):
        now = step + rng.random() * 0.9
        text = rng.choice(texts[-20:])[: rng.randrange(30)] + "".join(rng.choices("ab", k=rng.randrange(1, 6)))
        texts.append(text)
        names = names_of(text)
        has = [name in tree.nodes for name in names]
        states = [depth for depth, name in enumerate(names, 1) if has[depth - 1] and tree.nodes[name].snapshot]
        known, start = tree.find(names, now)
        assert has == [depth < known for depth in range(len(names))]
        assert start == max(states, default=0)
        prompt = rng.randint(1, len(names))
        places = ends_and_branches(prompt, len(names), start, known)
        assert all(start < depth <= len(names) for depth in places)
        tree.add(names, places, now)
        tree.check()
        assert tree.held <= tree.room
    assert tree.counts.taken == tree.counts.evicted + len(tree.snapshots)


@pytest.mark.parametrize("rule", RULES)
def test_with_room_most_is_found(rule: str) -> None:
    talks = talks_of(synthetic(3, seed=1), Setting(blocks=1))
    places, order = RULES[rule]
    tree = StateTree(Sizes(chunk=64, state=100), 1e12, order())
    result = simulate(talks, tree, places)
    tree.check()
    assert not tree.counts.evicted
    assert 0.8 * result.ideal < result.found <= result.ideal <= result.prompt
