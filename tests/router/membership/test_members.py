"""Members, their changes, doubts about sources, and URLs of sources."""

from __future__ import annotations

import random

import pytest
from seeds import seeds

from trunkline.router.membership.member import Caution, Member, by_id, changes
from trunkline.router.membership.open_source import problem_of_members


def members(ids: str) -> dict[str, Member]:
    return by_id(Member(each, f"tcp://{each}:1") for each in ids)


def test_changes_are_what_differs() -> None:
    before, now = members("abc"), members("bcd")
    now["c"] = Member("c", "tcp://c:2")
    found = changes(before, now)
    assert [each.id for each in found.added] == ["d"]
    assert [each.id for each in found.removed] == ["a"]
    assert found.changed == [Member("c", "tcp://c:2")]
    assert changes(now, now) == ([], [], [])


@pytest.mark.parametrize("seed", seeds(3))
def test_changes_lead_from_one_set_to_the_other(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        before, now = (
            {
                each: Member(each, f"tcp://{each}:{rng.randrange(2)}")
                for each in rng.sample("abcdefgh", rng.randrange(9))
            }
            for _ in range(2)
        )
        found = changes(before, now)
        built = before | {each.id: each for each in (*found.added, *found.changed)}
        for each in found.removed:
            del built[each.id]
        assert built == now


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ([Member("a", "tcp://a:1"), Member("a", "tcp://b:1")], "two members have the id 'a'"),
        ([Member("", "tcp://a:1")], "'' is no id"),
        ([Member("a\n", "tcp://a:1")], "is no id"),
        ([Member("a", "a:1")], "'a:1' is no endpoint"),
        ([Member("a", "tcp://a:1", "http://a:2")], "'http://a:2' is no endpoint"),
    ],
)
def test_malformed_members_are_refused(listed: list[Member], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        by_id(listed)


def test_most_members_do_not_vanish_at_once() -> None:
    caution = Caution(hold_seconds=10.0)
    assert caution.accept(members("abcd"), 0.0) == (members("abcd"), "")
    assert caution.accept(members("ab"), 1.0) == (members("ab"), ""), "half of them may"
    held = caution.accept({}, 2.0)
    assert (held.members, held.problem) == (members("ab"), "2 of 2 members vanished at once: a, b")
    held = caution.accept(members("c"), 11.9)
    assert sorted(held.members) == ["a", "b", "c"], "what is new counts at once"
    assert caution.accept(members("abc"), 12.5) == (members("abc"), ""), "they are back"
    assert caution.accept(members("c"), 20.0).problem
    assert caution.accept(members("c"), 29.9).problem
    assert caution.accept(members("c"), 30.0) == (members("c"), ""), "they are gone"
    assert caution.accept({}, 31.0, left=["c"]) == ({}, ""), "it has said so"


def test_those_who_left_are_not_missed() -> None:
    caution = Caution(hold_seconds=10.0)
    caution.accept(members("abcdef"), 0.0)
    assert caution.accept(members("ef"), 1.0, left="abcd") == (members("ef"), "")
    assert caution.accept({}, 2.0, left="e") == (members("f"), "1 of 1 members vanished at once: f")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("records", ""),
        ("static:/run/members.json", ""),
        ("static:", "must be one of static:PATH, records, dns:"),
        ("dns://groups.models.svc:7400", ""),
        ("dns://groups:7400?events=7401", ""),
        ("dns://groups", "expected dns://NAME:PORT"),
        ("dns://groups:x", "x"),
        ("dns://groups:7400?events=no", "expected dns://NAME:PORT"),
        ("dns://groups:7400?event=1", "after '?' come only events"),
        ("kubernetes://models/groups?port=requests&events=events", ""),
        ("kubernetes://models/groups", "expected kubernetes://"),
        ("kubernetes://models?port=requests", "expected kubernetes://"),
        ("consul://x", "must be one of"),
        ("", "must be one of"),
    ],
)
def test_urls_of_sources(url: str, problem: str) -> None:
    found = problem_of_members(url)
    assert problem in found
    assert bool(problem) == bool(found)
