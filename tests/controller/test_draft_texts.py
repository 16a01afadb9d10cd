"""Where drafts are found: indexes of texts, the radix tree, and the place that a follower holds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from seeds import seeds

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.drafts import text_index
from trunkline.controller.drafts.acceptance import Acceptance, Others, Source
from trunkline.controller.drafts.drafter import LONG_RUNS
from trunkline.controller.drafts.follower import INTERVAL_LEAST, INTERVAL_MAX, LEARNT_MAX, Follower
from trunkline.controller.drafts.tenant_texts import Tenant
from trunkline.controller.drafts.text_index import MATCH_MAX, NO_TOKEN, RUNS, RunHashes, TextIndex
from trunkline.controller.drafts.tree_texts import text_behind
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup, Stem
from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.kvstore.tier_policy import DirectoryConfig
from trunkline.worker.messages import Sampling

CHUNK = 8
ALL = len(RUNS)


def sequence_of(prompt: list[int], number: int = 1, salt: bytes = b"") -> Sequence:
    submit = Submit(number, pack_int32(prompt), len(prompt), 10_000, Sampling(), salt=salt)
    return SequenceGroup(Request.of(number, submit), number, 100_000, submit.sampling).members[0]


def text_of(rng: random.Random, length: int, words: int = 20) -> list[int]:
    """Return tokens that repeat themselves, as texts do."""
    dictionary = [[rng.randrange(30) for _ in range(rng.randint(1, 9))] for _ in range(words)]
    text: list[int] = []
    while len(text) < length:
        text += rng.choice(dictionary)
    return text[:length]


def agreeing(text: list[int], place: int, tail: list[int], kept: int) -> int:
    most, agreed = min(MATCH_MAX, place, len(tail), place - len(text) + kept), 0
    while agreed < most and text[place - 1 - agreed] == tail[-1 - agreed]:
        agreed += 1
    return agreed


@pytest.mark.parametrize("seed", seeds(8))
def test_what_is_found_agrees_as_far_as_it_says(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([256, 1024])
    index, hashes, text = TextIndex(capacity), RunHashes(), text_of(rng, 3 * capacity)
    found = missed = 0
    for at, token in enumerate(text):
        hashes.push(token)
        mixed = hashes.mixed()
        places, agreed = index.find(hashes, mixed)
        past, tail = text[:at], text[: at + 1]
        assert len(set(places)) == len(places)
        for nth, place in enumerate(places):
            assert RUNS[-1] <= (agreement := agreeing(past, place, tail, capacity))
            assert nth or agreement == agreed
            assert place <= at
            assert index.token(place) == (past[place] if place < at else NO_TOKEN)
        found += agreed >= 2
        if agreed < 2 and any(past[i - 2 : i] == tail[-2:] for i in range(max(2, at - 100), at + 1)):
            missed += 1
        long, agreed = index.find(hashes, mixed, 1)
        assert long == (places[:1] if agreed >= RUNS[0] else [])
        index.push(token, mixed)
    assert found > 0.4 * len(text)
    assert missed < 0.15 * len(text), "only what has the same hash hides a run"


@pytest.mark.sanitized
@pytest.mark.skipif(text_index._index_runs is None, reason="there is no compiled library")
@pytest.mark.parametrize("seed", seeds(8))
def test_the_library_writes_what_numpy_writes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([256, 512])
    both = [TextIndex(capacity), TextIndex(capacity)]
    for _ in range(60):
        count = rng.choice([0, 1, rng.randint(2, 40), rng.randint(1, 3 * capacity)])
        tokens = np.array(
            [rng.choice([NO_TOKEN, rng.randrange(30), rng.randrange(1 << 31)]) for _ in range(count)]
        )
        tokens = tokens.astype(np.int32).repeat(2)[::2]  # with a stride
        for index, indexer in zip(both, (text_index._index_runs, None), strict=True):
            with monkeypatch.context() as patched:
                patched.setattr(text_index, "_index_runs", indexer)
                index.extend(tokens)
        assert both[0].count == both[1].count
        assert np.array_equal(both[0]._tokens, both[1]._tokens)
        assert np.array_equal(both[0]._tables, both[1]._tables)


@pytest.mark.parametrize("seed", seeds(8))
def test_many_tokens_at_once_are_as_many_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    text = text_of(rng, rng.randint(1, 1500))
    one, many, hashes = TextIndex(500), TextIndex(500), RunHashes()
    rest = text
    while rest:
        size = rng.choice([1, 2, 7, 300])
        many.extend(np.array(rest[:size], np.int32))
        rest = rest[size:]
    for token in text:
        hashes.push(token)
        one.push(token, hashes.mixed())
    assert one.count == many.count == len(text)
    for _ in range(50):
        cut = rng.randrange(len(text))
        tail = RunHashes(text[:cut] if rng.random() < 0.8 else text_of(rng, 10))
        assert one.find(tail, tail.mixed()) == many.find(tail, tail.mixed())
    assert one.nbytes == TextIndex.bytes_for(500)


def test_hashes_go_on_from_any_beginning() -> None:
    text = text_of(random.Random(1), 900)
    rolled = RunHashes()
    for at, token in enumerate(text):
        assert rolled.mixed() == RunHashes(text[max(0, at - 200) : at]).mixed()
        rolled.push(token)


def test_what_repeats_at_the_end_goes_on_repeating() -> None:
    index = TextIndex(100)
    index.extend(np.array([9, 1, 2, 3], np.int32))
    assert index.tokens(1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert index.tokens(4, 8) == []
    index.extend(np.array([NO_TOKEN, 5], np.int32))
    assert index.tokens(1, 8) == [1, 2, 3], "another text is no continuation"


def test_overwritten_tokens_are_not_found() -> None:
    index, hashes = TextIndex(256), RunHashes()
    index.extend(np.arange(1000, dtype=np.int32))
    for token in (100, 101, 102, 103, 104):
        hashes.push(token)
    assert index.find(hashes, hashes.mixed()) == ([], 0)
    assert index.token(100) == NO_TOKEN
    assert index.tokens(100, 4) == []
    assert index.tokens(990, 4) == [990, 991, 992, 993]


# The tree


def tree_with(*paths: list[int], salt: bytes = b"") -> RadixCache:
    """Return a tree with these paths, cut into chunks."""
    pool = BlockPool(200)
    tree = RadixCache(pool, CHUNK, b"", "float32", DirectoryConfig())
    for path in paths:
        node = tree.root(salt)
        for start in range(0, len(path), CHUNK):
            key = np.array(path[start : start + CHUNK], "<i4").tobytes()
            child = node.children.get(key)
            node = child or tree.insert(node, key, pool.allocate(), 1, 0.0)
    return tree


def test_the_tree_knows_how_others_went_on() -> None:
    first, second = list(range(100, 130)), [*range(100, 112), *range(200, 210)]
    root = tree_with(first, second).root(b"")
    chunk = root.children[np.arange(100, 108, dtype="<i4").tobytes()]
    text = text_behind(chunk, [108, 109, 110, 111, 112])
    assert text is not None
    assert text.tokens(0, 100) == list(range(113, 124)), "the rest of this chunk, and the next one"
    other = text_behind(chunk, [108, 109, 110, 111, 200])
    assert other is not None
    assert [other.token(i) for i in range(3)] == [201, 202, 203]
    assert text_behind(chunk, [108, 109, 7]) is None
    assert text_behind(chunk, list(range(108, 117))) is None, "longer than a chunk"


def test_of_several_texts_behind_a_path_the_one_used_most_counts() -> None:
    root = tree_with([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8]).root(b"")
    root.children[np.array([1, 2, 5, 6], "<i4").tobytes()].uses = 3
    text = text_behind(root, [1, 2])
    assert text is not None
    assert text.tokens(0, 9) == [5, 6]


def test_a_follower_goes_along_a_path_of_the_tree() -> None:
    answer = list(range(300, 340))
    tree = tree_with([*range(16), *answer])
    sequence = sequence_of(list(range(16)))
    root = tree.root(b"")
    sequence.stem = Stem(root)
    node = root
    for start in (0, CHUNK):
        node = node.children[np.arange(start, start + CHUNK, dtype="<i4").tobytes()]
        sequence.path.append(node)
    follower = Follower(sequence, Tenant(), CHUNK)
    foreseen = 0
    for token in answer:
        tokens, _ = follower.draft(1, 0.0, thorough=True)
        foreseen += tokens.tolist() == [token]
        see(follower, token)
        if follower.count % CHUNK == 0:  # as `enter_filled` does
            node = node.children[
                np.array(answer[follower.count - 16 - CHUNK : follower.count - 16], "<i4").tobytes()
            ]
            sequence.path.append(node)
    assert foreseen == len(answer) - 1 - 2, "all but the first, and the first ones behind what a text held"


# Followers


def indexed(prompt: list[int], prediction: Int32Array | None = None, tenant: Tenant | None = None) -> Follower:
    packed = b"" if prediction is None else pack_int32(prediction)
    follower = Follower(sequence_of(prompt), tenant or Tenant(), 0, packed)
    follower.context = TextIndex(len(prompt) + 500)
    while not follower.is_indexed:
        follower.index_some(50)
    return follower


def see(follower: Follower, token: int, runs: int = ALL) -> None:
    if follower.extend([token]):
        follower.advance(runs)


def test_an_answer_that_repeats_its_prompt_is_foreseen() -> None:
    text = list(range(50, 250))
    tenant = Tenant()
    follower = indexed([1, 2, *text, 3, 4], tenant=tenant)
    right = 0
    for at, token in enumerate(text):
        tokens, chances = follower.draft(8, 0.001, thorough=True)
        assert len(tokens) == len(chances)
        assert tokens.tolist() == [*text, 3, 4, *text][at : at + len(tokens)] or at < RUNS[-1]
        assert chances == sorted(chances, reverse=True)
        right += bool(len(tokens))
        see(follower, token)
    assert right == len(text) - RUNS[-1]
    assert tenant.acceptance.chance(Source.CONTEXT, MATCH_MAX, Others.NONE) > 0.95


def test_a_prediction_is_followed_from_its_first_token_and_found_again() -> None:
    predicted = list(range(50, 150))
    follower = indexed([1, 2, 3], np.array(predicted, np.int32))
    answer = [*predicted[:30], 7, 8, 9, *predicted[40:]]
    wrong = []
    for at, token in enumerate(answer):
        if follower.draft(1, 0.0, thorough=True)[0].tolist() != [token]:
            wrong.append(at)
        see(follower, token)
    assert wrong == [30, 31, 32, 33], "the part that is new, and one run behind it"
    assert follower.place is None, "the prediction has ended"


def test_a_single_token_that_repeats_is_foreseen() -> None:
    follower = indexed([1, 2, 3])
    for token in [5] * 6:
        see(follower, token)
    assert follower.draft(4, 0.0, thorough=True)[0].tolist() == [5, 5, 5, 5]


def test_a_draft_goes_from_one_text_to_another_that_agrees_longer() -> None:
    """The last text that has 3, 4 goes on with 5, 70; but one that has 1, 2, 3, 4, 5 goes on with 60."""
    follower = indexed([1, 2, 3, 4, 5, 60, 61, 62, 0, 3, 4, 5, 70, 71, 1, 2, 3])
    see(follower, 4)
    assert follower.place is not None
    assert follower.place.match == 2
    tokens, chances = follower.draft(4, 0.0, thorough=True)
    assert tokens.tolist() == [5, 60, 61, 62]
    assert chances == sorted(chances, reverse=True)


@pytest.mark.parametrize(
    ("prompt", "others"),
    [
        ([1, 2, 3, 8], Others.NONE),
        ([1, 2, 3, 8, 5, 3, 9], Others.DIFFER),
        ([1, 2, 3, 8, 5, 3, 8], Others.ALL_AGREE),
        ([0, 6, 1, 2, 3, 8, 0, 2, 3, 8, 5, 3, 9], Others.SOME_AGREE),
    ],
)
def test_what_other_places_say(prompt: list[int], others: Others) -> None:
    """Behind 0, 6, 1, 2, 3 comes 8; other places are those behind 2, 3 and behind 3."""
    follower = indexed(prompt)
    for token in (0, 6, 1, 2, 3):
        see(follower, token)
    assert follower.place is not None
    assert follower.draft(1, 0.0, thorough=True)[0].tolist() == [8]
    assert follower.place.others == others


@pytest.mark.parametrize("seed", seeds(8))
def test_what_is_looked_at_rarely_is_indexed_all_the_same(seed: int) -> None:
    rng = random.Random(seed)
    text = text_of(rng, 400)
    tenant = Tenant()
    rarely, always = (indexed(text[:100], tenant=tenant) for _ in range(2))
    for token in text[100:]:
        see(rarely, token, rng.choice([ALL, LONG_RUNS, LONG_RUNS, 0]))
        if rarely.can_draft:
            rarely.draft(3, 0.0, thorough=rng.random() < 0.5)
        see(always, token)
    rarely.extend([7])
    rarely.advance(ALL)
    see(always, 7)
    assert rarely.output.tolist() == always.output.tolist() == [*text[100:], 7]
    assert rarely.context is not None
    assert always.context is not None
    assert rarely.context.tokens(0, 401) == always.context.tokens(0, 401) == [*text, 7]
    followed = rarely.place
    assert (
        followed is None
        or followed.text is not rarely.context
        or followed.match == agreeing(text, followed.at, [*text, 7], 512)
    )


@pytest.mark.parametrize(("before", "within"), [(20, INTERVAL_LEAST), (300, INTERVAL_MAX)])
def test_a_copy_is_found_where_it_is_looked_for_rarely(before: int, within: int) -> None:
    """The more rarely, the longer nothing was found."""
    text = list(range(50, 250))
    follower = indexed(text)
    for token in range(1000, 1000 + before):
        see(follower, token, LONG_RUNS)
    for token in text[: 2 * within + RUNS[0]]:
        see(follower, token, LONG_RUNS)
    assert follower.can_draft
    guessed, _ = follower.draft(1, 0.0, thorough=False)
    assert guessed.tolist() == [text[2 * within + RUNS[0]]]


@pytest.mark.parametrize("wrong", [None, 2, 20, 38])
def test_tokens_that_waited_together_lead_to_the_place_to_which_each_leads(wrong: int | None) -> None:
    text = list(range(50, 250))
    together, one_by_one = indexed([1, 2, *text, 3]), indexed([1, 2, *text, 3])
    for follower in (together, one_by_one):
        for token in text[:10]:
            see(follower, token, LONG_RUNS)
    went_on = text[10:50]
    if wrong is not None:
        went_on[wrong] = 7
    together.extend(went_on)
    together.advance(LONG_RUNS)
    for token in went_on:
        see(one_by_one, token, LONG_RUNS)
    if wrong is None:
        assert together.place is not None
        assert one_by_one.place is not None
        assert together.place[1:] == one_by_one.place[1:]
        assert together.draft(3, 0.0, thorough=False)[0].tolist() == text[50:53]
    elif wrong == 38:
        assert together.place is None, "too few tokens agree again"
    else:
        assert together.draft(3, 0.0, thorough=False)[0].tolist() == text[50:53], "it was found anew"


@pytest.mark.parametrize(("drafted", "learnt"), [(False, LEARNT_MAX), (True, 16)])
def test_of_tokens_that_waited_the_last_teach_and_of_those_behind_drafts_all(
    drafted: bool, learnt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = list(range(50, 250))
    follower = indexed([1, 2, *text, 3])
    for token in text[:10]:
        see(follower, token, LONG_RUNS)
    taught: list[bool] = []
    learn = Acceptance.learn

    def counting(self: Acceptance, source: Source, match: int, others: Others, *, is_right: bool) -> None:
        taught.append(is_right)
        learn(self, source, match, others, is_right=is_right)

    monkeypatch.setattr(Acceptance, "learn", counting)
    follower.extend([*text[10:25], 7])
    follower.advance(LONG_RUNS, drafted=drafted)
    assert taught == [True] * (learnt - 1) + [False]


@pytest.mark.parametrize("wrong", [5, 19, 23])
def test_what_was_foreseen_counts_though_the_place_is_lost_among_what_is_skipped(wrong: int) -> None:
    text = list(range(50, 250))
    one, other = indexed([1, 2, *text, 3]), indexed([1, 2, *text, 3])
    tokens = text[10:34]
    tokens[wrong] = 7
    for follower in (one, other):
        for token in text[:10]:
            see(follower, token, LONG_RUNS)
        follower.extend(tokens)
    one.advance(LONG_RUNS)
    other.advance(LONG_RUNS, drafted=True)
    assert one._foreseen == pytest.approx(other._foreseen)


def test_looks_become_rare_where_nothing_is_found() -> None:
    follower = indexed(list(range(50)))
    due = []
    for at in range(1000):
        due.append(follower.extend([1000 + at]))
        if due[-1]:
            follower.advance(LONG_RUNS)
    gaps = np.diff(np.flatnonzero(due)).tolist()
    assert gaps[:4] == [INTERVAL_LEAST, 2 * INTERVAL_LEAST, 4 * INTERVAL_LEAST, INTERVAL_MAX]
    assert set(gaps[4:]) == {INTERVAL_MAX}


@pytest.mark.parametrize("seed", seeds(8))
def test_the_tokens_behind_drafts_may_come_together(seed: int) -> None:
    """What is drafted next, and how sure it is, is the same as if they had come one by one."""
    rng = random.Random(seed)
    text = text_of(rng, 1200, rng.choice([3, 20, 80]))
    together, singly = (indexed(text[:400]) for _ in range(2))
    at = 400
    while at < len(text) - 24:
        drafts, chances = together.draft(rng.choice([3, 8, 24]), 0.01, thorough=True)
        other, others = singly.draft(len(drafts), 0.01, thorough=True)
        assert other.tolist() == drafts.tolist()
        assert others == pytest.approx(chances[: len(others)])
        right = next((i for i, token in enumerate(drafts.tolist()) if token != text[at + i]), len(drafts))
        came = text[at : at + right + 1]
        for token in came:
            see(singly, token)
        if together.extend(came):
            together.advance(ALL, drafted=True)
        at += len(came)
        assert together.place is None or singly.place is None or together.place[1:] == singly.place[1:]
        assert (together.place is None) == (singly.place is None)


def test_a_long_prompt_is_indexed_part_by_part_while_tokens_come() -> None:
    prompt = list(range(10_000))
    follower = Follower(sequence_of(prompt), Tenant(), 0)
    follower.context = TextIndex(12_000)
    for token in range(500, 520):
        assert follower.index_some(100) == 100
        see(follower, token)
    assert not follower.is_indexed
    assert follower.draft(3, 0.0, thorough=True)[0].tolist() == [520, 521, 522], "from the part that is indexed"
    while not follower.is_indexed:
        follower.index_some(3000)
    assert follower.context.count == 10_020
    assert follower.context.tokens(9_998, 5) == [9998, 9999, 500, 501, 502]
