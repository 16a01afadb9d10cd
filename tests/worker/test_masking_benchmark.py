"""What `benchmarks/masking_quality.py` rests on: its own forward, and its ways of making a context."""

from __future__ import annotations

import numpy as np
import pytest
from cut_texts import DEMO_MODEL
from edit_quality import Way as Edited
from edit_quality import build as build_edited
from edit_texts import EditTask
from masking_model import MaskedModel
from masking_quality import DIFFERENCE_MAX
from masking_rank import Rank
from masking_texts import Target, Task
from masking_ways import MOVED_BACK, WAYS, Way, build
from numpy.typing import NDArray

ROOT = 5
LENGTHS = (70, 40, 90)
Said = NDArray[np.float64]


@pytest.fixture(scope="module")
def model() -> MaskedModel:
    return MaskedModel(DEMO_MODEL)


@pytest.fixture(scope="module")
def task() -> Task:
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        return list(rng.integers(6, 4096, count).tolist())

    return Task(draw(ROOT), [draw(length) for length in LENGTHS], [Target(draw(30), 1, -1)])


def said(model: MaskedModel, task: Task, way: Way) -> Said:
    context = build(model.read, task, way, seed=1)
    return model.read(task.targets[0].tokens, context.end, context.seen)[1].logprobs


def test_a_rank_says_the_same(model: MaskedModel, task: Task) -> None:
    rank = Rank(DEMO_MODEL, blocks=32, threads=1)
    for way in WAYS:
        if way.is_wrong:
            continue
        context = build(rank.read, task, way, seed=1)
        _, logprobs = rank.read(task.targets[0].tokens, context.end, context.seen)
        np.testing.assert_allclose(logprobs, said(model, task, way), rtol=0, atol=DIFFERENCE_MAX)
        rank.forget()
    rank.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Way("scaffold"), Way("plain")),
        # What has seen nothing else does not know where it stands.
        (Way("self", places="moved on"), Way("self")),
        # A scaffold's documents have seen all before them: computed again, their tokens are the same.
        (Way("scaffold", renewed=30), Way("plain")),
    ],
)
def test_ways_that_are_the_same(one: Way, other: Way, model: MaskedModel, task: Task) -> None:
    np.testing.assert_allclose(said(model, task, one), said(model, task, other), rtol=0, atol=DIFFERENCE_MAX)


class Length(int):
    """What is kept of a text: its length."""

    def behind(self, count: int) -> Length:
        return Length(self - count)


class Notes:
    """A reader that only writes down what it is asked; a text is known by its length."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[int, list[tuple[Length, int]]]] = {}
        """Position and what is seen, by length."""

    def read(self, tokens: list[int], position: int, seen: list[tuple[Length, int]]) -> tuple[Length, None]:
        self.texts[len(tokens)] = (position, list(seen))
        return Length(len(tokens)), None


@pytest.mark.parametrize(
    ("way", "computed", "acting", "end"),
    [
        (Way("ancestors"), [5, 75, 115], [5, 75, 115], 205),
        (Way("self", "modules"), [75, 185, 315], [75, 185, 315], 405),
        (Way("ancestors", places="moved on"), [5, 5, 5], [5, 75, 115], 205),
        (Way("ancestors", places="moved back"), [p + MOVED_BACK for p in (5, 75, 115)], [5, 75, 115], 205),
        (Way("ancestors", places="stacked"), [5, 5, 5], [5, 5, 5], 205),
        (Way("ancestors", places="stacked, near"), [5, 5, 5], [5, 5, 5], 95),
        (Way("ancestors", places="restarted"), [5, 75, 115], [5, 75, 115], 5),
    ],
)
def test_where_documents_stand(way: Way, computed: list[int], acting: list[int], end: int, task: Task) -> None:
    notes = Notes()
    context = build(notes.read, task, way, seed=0)
    assert [notes.texts[length][0] for length in LENGTHS] == computed
    assert context.seen == [(ROOT, 0), *zip(LENGTHS, acting, strict=True)]
    assert context.end == end


def test_first_tokens_are_computed_again_in_their_place(task: Task) -> None:
    notes = Notes()
    context = build(notes.read, task, Way("ancestors", places="moved on", renewed=8), seed=0)
    assert context.seen == [(ROOT, 0), (8, 5), (62, 13), (8, 75), (32, 83), (8, 115), (82, 123)]
    assert notes.texts[8] == (115, context.seen[:5]), "they see all before them"


def test_who_sees_whom(task: Task) -> None:
    above = {}
    for scope in ("self", "ancestors", "scaffold"):
        notes = Notes()
        build(notes.read, task, Way(scope), seed=0)
        above[scope] = [[text for text, _ in notes.texts[length][1]] for length in LENGTHS]
    assert above == {
        "self": [[], [], []],
        "ancestors": [[ROOT], [ROOT], [ROOT]],
        "scaffold": [[ROOT], [ROOT, 70], [ROOT, 70, 40]],
    }


def test_all_tokens_behind_edits_computed_anew_are_a_plain_prompt(model: MaskedModel) -> None:
    """And a window that leaves some of them kept is not."""
    rng = np.random.default_rng(2)
    pieces = [rng.integers(6, 4096, count).tolist() for count in (5, 30, 20, 7, 25)]
    task, target = EditTask(pieces, []), rng.integers(6, 4096, 10).tolist()
    whole, _ = model.read([token for piece in pieces for token in piece], 0)

    def said(way: Edited) -> Said:
        seen, end = build_edited(model, task, way, whole)
        return model.read(target, end, seen)[1].logprobs

    full = said(Edited("full"))
    np.testing.assert_allclose(said(Edited("kept", 25)), full, rtol=0, atol=DIFFERENCE_MAX)
    assert np.abs(said(Edited("kept", 19)) - full).max() > DIFFERENCE_MAX
