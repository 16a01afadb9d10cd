"""Texts of tenants: what is indexed of prompts and outputs, once, within bounds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from seeds import seeds

from trunkline.controller.drafts import tenant_texts
from trunkline.controller.drafts.acceptance import Acceptance
from trunkline.controller.drafts.tenant_texts import BLOCK, TenantTexts, pieces_unknown
from trunkline.controller.drafts.text_index import MOVED_FIRST, NO_TOKEN, RUNS, RunHashes, TextIndex
from trunkline.kvstore.chunks import Int32Array


def text_of(rng: random.Random, length: int) -> Int32Array:
    return np.array([rng.randrange(1 << 20) for _ in range(length)], np.int32)


def follows(index: TextIndex | None, text: Int32Array, at: int) -> bool:
    """Return whether the index goes on behind the tokens before `at` as the text does."""
    assert index is not None
    hashes = RunHashes(text[max(0, at - 20) : at].tolist())
    places, _ = index.find(hashes, hashes.mixed())
    return any(index.token(place) == text[at] for place in places)


def indexed(texts: TenantTexts, salt: bytes, prompt: Int32Array, most: int = 1 << 20) -> TextIndex:
    texts.add(salt, prompt, np.empty(0, np.int32))
    while texts.waits:
        assert 0 < texts.index_some(most) <= most
    index = texts.of(salt).index
    assert index is not None
    return index


@pytest.mark.parametrize("seed", seeds(6))
def test_only_what_is_new_of_a_prompt_is_added(seed: int) -> None:
    """Turns of a session repeat what was said before, with new parts anywhere; nearly all of it is found then."""
    rng = random.Random(seed)
    texts, session = TenantTexts(), text_of(rng, rng.randint(100, 3000))
    new, most = len(session), rng.choice([300, 1 << 20])
    for _ in range(8):
        at = rng.randint(0, len(session)) if rng.random() < 0.5 else len(session)
        part = text_of(rng, rng.randint(1, 500))
        session = np.concatenate([session[:at], part, session[at:]])
        new += len(part)
        before = index.count if (index := texts.of(b"").index) is not None else 0
        index = indexed(texts, b"", session, most)
        assert index.count - before <= new + 20 * (BLOCK + RUNS[0] + 1) + (len(session) if most < 1000 else 0)
        new = 0
        found = [follows(index, session, at) for at in range(RUNS[0], len(session), 7)]
        assert sum(found) > 0.9 * len(found), "all but some runs over the borders of what was skipped"


@pytest.mark.parametrize("seed", seeds(6))
def test_what_is_left_out_stands_in_the_index(seed: int) -> None:
    rng = random.Random(seed)
    known, index = text_of(rng, 5000), TextIndex(8192)
    index.extend(known)
    text = np.empty(0, np.int32)
    while len(text) < 3000:
        start = rng.randrange(4000)
        text = np.concatenate([text, known[start : start + rng.randint(1, 900)], text_of(rng, rng.randrange(90))])
    pieces = pieces_unknown(index, text)
    assert sum(map(len, pieces)) < 0.8 * len(text)
    told = b"".join(piece.tobytes() for piece in pieces)
    for start in range(0, len(text), BLOCK):
        block = text[start : start + BLOCK].tobytes()
        assert block in told or block in known.tobytes()
    again = pieces_unknown(index, known[: len(known) // BLOCK * BLOCK])
    assert sum(map(len, again)) < 0.1 * len(known), "all but blocks whose every entry has been overwritten"
    assert not pieces_unknown(index, known[:0])


@pytest.mark.parametrize("seed", seeds(6))
def test_an_index_grows_in_steps_without_forgetting(seed: int) -> None:
    """Tokens come meanwhile, fewer than are indexed again."""
    rng = random.Random(seed)
    text, small = text_of(rng, 3000), TextIndex(256)
    large = TextIndex(4096)
    count = 0

    def add(length: int) -> None:
        nonlocal count
        for index in (small, large):
            index.extend(text[count : count + length])
        count += length

    add(200)
    small.grow(100)
    assert not small.grows
    for capacity in (512, 4096):
        small.grow(capacity)
        assert small.grows
        assert small.nbytes > TextIndex.bytes_for(capacity), "both, while it grows"
        while small.grows:
            assert 0 < small.grow_some(rng.randint(20, 60)) <= 60
            add(rng.randint(1, 20))
            small.grow_some(20)
        assert small.count == count
        assert small.nbytes == TextIndex.bytes_for(capacity)
        assert [small.token(place) for place in range(count)] == text[:count].tolist()
        add(500 - count if capacity == 512 else 0)
    add(3000 - count)
    for at in range(RUNS[0], 3000, 11):
        hashes = RunHashes(text[:at].tolist())
        assert small.find(hashes, hashes.mixed()) == large.find(hashes, hashes.mixed())


def test_what_is_overwritten_while_an_index_grows_is_forgotten() -> None:
    rng, full = random.Random(3), TextIndex(256)
    text = text_of(rng, 2000)
    full.extend(text[:1000])
    full.grow(512)
    assert full.grow_some(100) == 100
    full.extend(text[1000:1200])  # more than was indexed again
    assert full.grows
    while full.grows:
        full.grow_some(100)
    assert full.count == 1200
    assert [full.token(place) for place in (943, 944, 1199, 1200)] == [NO_TOKEN, text[944], text[1199], NO_TOKEN]
    for at in range(944 + RUNS[0], 1200):
        assert follows(full, text, at)
    full.grow(1024)
    full.clear()
    assert not full.grows


def test_growing_is_bounded_by_step() -> None:
    """No call indexes more again than it may, and a tenant that is forgotten meanwhile is not gone on with."""
    rng, texts = random.Random(4), TenantTexts()
    text = text_of(rng, tenant_texts.FIRST_TOKENS - 10)
    index = indexed(texts, b"a", text)
    texts.add(b"a", np.empty(0, np.int32), text[:20])
    assert texts.waits
    assert texts.index_some(1000) == 20
    assert index.grows
    done = []
    while texts.waits:
        done.append(texts.index_some(1000))
    assert sum(done) == tenant_texts.FIRST_TOKENS, "all that is kept"
    assert done[:5] == [MOVED_FIRST, MOVED_FIRST, 2 * MOVED_FIRST, 4 * MOVED_FIRST, 1000], "little at first"
    assert max(done) == 1000
    assert index.nbytes == TextIndex.bytes_for(2 * tenant_texts.FIRST_TOKENS)
    for number in range(4):  # grows again, and is forgotten
        texts.add(b"a", np.empty(0, np.int32), text[number * 2048 : (number + 1) * 2048])
    assert texts.index_some(10_000) == 8182
    assert index.grows
    for number in range(tenant_texts.TENANTS_MAX):
        texts.of(b"%d" % number)
    assert not texts.waits


def test_memory_of_tenants_and_of_waiting_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tenant_texts, "TENANT_BYTES_MAX", 4 * (TextIndex.bytes_for(tenant_texts.FIRST_TOKENS) + Acceptance.nbytes)
    )
    monkeypatch.setattr(tenant_texts, "WAITING_MAX", 30_000)
    rng, texts = random.Random(1), TenantTexts()
    for number in range(12):
        index = indexed(texts, b"%d" % number, text_of(rng, 5000))
        assert index.count > 5000
    assert [number for number in range(12) if b"%d" % number in texts._tenants] == [8, 9, 10, 11]
    indexed(texts, b"9", text_of(rng, 20_000))
    assert [number for number in range(12) if b"%d" % number in texts._tenants] == [9], "it has grown"
    for number in range(5):
        texts.add(b"%d" % number, text_of(rng, 12_000), np.empty(0, np.int32))
    assert texts.index_some(1 << 20) == 24_000, "the oldest were given up"


def test_outputs_are_indexed_before_their_prompts() -> None:
    rng, texts = random.Random(2), TenantTexts()
    prompt, output = text_of(rng, 300), text_of(rng, 50)
    texts.add(b"a", prompt, output)
    assert texts.of(b"a").index is None
    assert texts.index_some(50) == 50
    assert follows(texts.of(b"a").index, output, 20)
    assert not follows(texts.of(b"a").index, prompt, 20)
    assert texts.index_some(100) == 100
    assert follows(texts.of(b"a").index, prompt, 90)
    assert not follows(texts.of(b"a").index, prompt, 190)
    assert texts.index_some(1000) == 200
    assert not texts.waits
    assert follows(texts.of(b"a").index, prompt, 290)
    assert texts.of(b"b").index is None
