"""Changes of histories: what a turn adds, and that all changes together make the history."""

from __future__ import annotations

import random

import msgspec
import pytest
from msgspec.structs import replace
from seeds import seeds

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.stores.session_changes import (
    HistoryChange,
    change_between,
    fold,
    read_segments,
    segments_of,
)
from trunkline.router.stores.session_history import History, HistoryMark
from trunkline.router.stores.session_state import (
    LastTurn,
    SessionModules,
    SessionState,
    pack_header,
    unpack_header,
)
from trunkline.router.text.truncation import RetentionPolicy, TokenSpan

CHARACTERS = "ab é😀\n"


def stepped(history: History, rng: random.Random) -> History:
    """The history after a random step: most steps add, some rewrite the end, a few everything."""

    def kept(length: int) -> int:
        return length if rng.random() < 0.6 else rng.randint(max(0, length - 10), length)

    if rng.random() < 0.05:
        history = rng.choice([History(), replace(history, tokens=b"", marks=[], vocabulary=rng.choice("vw"))])
    messages = history.messages[: kept(len(history.messages))]
    text = history.text[: kept(len(history.text))]
    tokens = history.ids()[: kept(history.token_count)]
    marks = history.marks[: kept(len(history.marks))]
    return History(
        form=rng.choice(["", "chat", "text"]),
        messages=messages + [{"content": rng.choice(CHARACTERS)} for _ in range(rng.randint(0, 3))],
        text=text + "".join(rng.choices(CHARACTERS, k=rng.randint(0, 20))),
        tokens=pack_int32(tokens + [rng.randint(0, 3) << rng.randint(0, 29) for _ in range(rng.randint(0, 9))]),
        vocabulary=history.vocabulary,
        marks=marks + [HistoryMark(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(rng.randint(0, 2))],
        discards=rng.choice([history.discards, [], [TokenSpan(1, rng.randint(2, 5))]]),
    )


@pytest.mark.parametrize("seed", seeds(3))
def test_changes_lead_from_one_history_to_the_next(seed: int) -> None:
    rng = random.Random(seed)
    history, segments = History(), []
    for _ in range(2000):
        after = stepped(history, rng)
        change = change_between(history, after)
        packed = segments_of(change, rng.choice([10, 60, 1 << 20]))
        assert fold(history, [change]) == after
        assert read_segments(history, packed) == after
        segments += packed
        history = after
    read = read_segments(History(), segments)
    assert read == history
    assert all(isinstance(mark, HistoryMark) for mark in read.marks)


def test_a_turn_adds_what_is_new() -> None:
    history = History(text="long " * 20_000, tokens=pack_int32(range(20_000)), messages=[{"content": "x"}] * 500)
    after = replace(
        history,
        text=history.text[:-3] + "end of it",
        tokens=history.tokens[:-8] + pack_int32([7, 8, 9]),
        messages=[*history.messages, {"content": "y"}],
    )
    change = change_between(history, after)
    assert (change.kept_tokens, change.kept_messages) == (19_998, 500)
    assert (change.messages, change.discards) == ([{"content": "y"}], None)
    assert len(segments_of(change)[0]) < 100
    assert fold(history, [change]) == after
    assert history.text.endswith("long "), "the history before is as it was"


def test_tokens_that_agree_in_some_bytes_are_replaced() -> None:
    before = History(tokens=pack_int32([1, 0x01020304]))
    after = History(tokens=pack_int32([1, 0x05020304, 9]))
    change = change_between(before, after)
    assert (change.kept_tokens, change.tokens) == (1, pack_int32([0x05020304, 9]))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 1000])
def test_long_changes_are_split(length: int) -> None:
    messages = [{"content": "x" * (50 * number % 300)} for number in range(length)]
    marks = [HistoryMark(number, number) for number in range(1, length)]
    whole = History(
        form="chat",
        messages=messages,
        text="é" * 3 * length,
        tokens=pack_int32(range(length)),
        marks=marks,
        vocabulary="v",
        discards=[TokenSpan(1, 2)],
    )
    segments = segments_of(change_between(History(), whole), 500)
    assert max(map(len, segments)) <= 500
    assert read_segments(History(), segments) == whole


def test_a_message_that_cannot_be_split_stays_whole() -> None:
    whole = History(messages=[{"content": "x" * 900}], text="y" * 900)
    segments = segments_of(change_between(History(), whole), 500)
    assert sum(len(segment) > 500 for segment in segments) == 1
    assert read_segments(History(), segments) == whole


def test_segments_of_another_history_are_refused() -> None:
    before = History(text="abc", messages=[{"content": "x"}], tokens=pack_int32([1, 2]), marks=[HistoryMark(3, 2)])
    change = change_between(before, before)
    for name in ("kept_messages", "kept_characters", "kept_tokens", "kept_marks"):
        for count in (-1, 9):
            with pytest.raises(ValueError, match="another history"):
                fold(before, [replace(change, **{name: count})])
    for bad in (b"", b"\x00", msgspec.msgpack.encode([1, 2])):
        with pytest.raises(ValueError, match="not a change"):
            read_segments(before, [bad])


def test_later_versions_may_add_fields() -> None:
    change = change_between(History(), History(text="abc"))
    fields = [*msgspec.to_builtins(change, builtin_types=(bytes,)), "more"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=HistoryChange) == change


def test_headers() -> None:
    session = SessionState(
        model="m",
        truncation=RetentionPolicy(0.25, False, 7),
        ttl=60.0,
        metadata={"a": "b"},
        turns=3,
        parent="sess_1",
        modules=SessionModules("<prompt/>", "compact"),
        last_turn=LastTurn(b"name", b"base"),
        history=History(messages=[{"content": "é"}], text="one", tokens=pack_int32([1, 2])),
    )
    read, is_whole = unpack_header(pack_header(session))
    assert not is_whole
    assert (read.token_count, read.message_count, read.history) == (2, 1, History())
    expected = replace(session, format=read.format, token_count=2, message_count=1, history=History())
    assert read == expected
    assert len(pack_header(replace(session, history=History(text="x" * 1000)))) <= len(pack_header(session))
    for bad in (b"", b"\x00", pack_int32([1, 2])):
        with pytest.raises(ValueError, match="not a session"):
            unpack_header(bad)


def test_whole_sessions_of_earlier_versions_are_read() -> None:
    old = {
        "model": "m",
        "form": "chat",
        "messages": [{"role": "user", "content": "é"}],
        "text": "one two",
        "tokens": pack_int32([5, 6, 7]),
        "vocabulary": "v",
        "marks": [[3, 2], [7, 3]],
        "discards": [[1, 2]],
        "truncation": {"retention_ratio": 0.25, "keep_instructions": False, "sink_tokens": 7},
        "ttl": 60.0,
        "metadata": {"a": "b"},
        "turns": 3,
        "parent": "sess_1",
        "modules": {"source": "<prompt/>", "schema": "s"},
        "last": [b"request", "chat", "v", 1, 0, "", 0, b"", [], []],
    }
    read, is_whole = unpack_header(msgspec.msgpack.encode(old))
    assert is_whole
    assert read == SessionState(
        model="m",
        truncation=RetentionPolicy(0.25, False, 7),
        ttl=60.0,
        metadata={"a": "b"},
        turns=3,
        parent="sess_1",
        modules=SessionModules("<prompt/>", schema="s"),
        token_count=3,
        message_count=1,
        history=History(
            form="chat",
            messages=[{"role": "user", "content": "é"}],
            text="one two",
            tokens=pack_int32([5, 6, 7]),
            vocabulary="v",
            marks=[HistoryMark(3, 2), HistoryMark(7, 3)],
            discards=[TokenSpan(1, 2)],
        ),
    )
    smallest, is_whole = unpack_header(msgspec.msgpack.encode({"model": "m"}))
    assert (smallest, is_whole) == (SessionState(model="m"), True)
