"""What a session remembers and how the next prompt is made from it; where sessions live."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from router.harness import VOCAB_SIZE
from tokenizers import decoders, models, normalizers

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.stores.session_history import (
    HistoryMark,
    KnownPrompt,
    SessionState,
    common_length,
    common_mark,
    pack_session,
    text_of,
    token_at,
    unpack_session,
)
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.truncation import RetentionPolicy, TokenSpan

quick = settings(max_examples=100, deadline=None)
ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
texts = st.text(st.sampled_from("ab é😀\n<|"), max_size=20)


def turn(session: SessionState, tokenizer: Tokenizer, prompt: str, answer: list[int]) -> KnownPrompt:
    """One turn whose prompt is tokenised as far as it is not known."""
    mark = common_mark(session, prompt, tokenizer.vocabulary)
    rest = tokenizer.encode(prompt[mark.characters :], add_special_tokens=False)
    known = KnownPrompt(prompt, session.ids()[: mark.tokens] + rest, mark.tokens)
    session.remember(known, answer, tokenizer.vocabulary)
    return known


@quick
@given(turns=st.lists(st.tuples(texts, ids), min_size=1, max_size=4), cut=st.integers(0, 60), rest=texts)
def test_known_tokens_write_what_they_stand_for(
    tokenizer: Tokenizer, turns: list[tuple[str, list[int]]], cut: int, rest: str
) -> None:
    session = SessionState(model="m")
    for text, answer in turns:
        turn(session, tokenizer, session.text + text, answer)
    new = session.text[:cut] + rest
    mark = common_mark(session, new, tokenizer.vocabulary)
    common = common_length(session.text, new)
    assert session.text[:common] == new[:common]
    assert session.text[common : common + 1] != new[common : common + 1] or common == len(session.text)
    assert mark.characters <= common
    if new.startswith(session.text):
        assert mark == HistoryMark(len(session.text), session.token_count)
    else:
        assert text_of(session.ids()[: mark.tokens], tokenizer.vocabulary) == new[: mark.characters]
    reached = [each for each in session.marks if each.characters <= common]
    assert all(each.tokens <= mark.tokens for each in reached), "no mark that agrees is given up"


def test_discards_stay_where_their_tokens_stay(tokenizer: Tokenizer) -> None:
    session = SessionState(model="m")
    turn(session, tokenizer, "one two three four five", [])
    session.discards = [TokenSpan(1, 3), TokenSpan(4, session.token_count)]
    turn(session, tokenizer, session.text + " six", [])
    assert session.discards[0] == TokenSpan(1, 3)
    assert len(session.discards) == 2
    turn(session, tokenizer, "one two other", [])
    assert all(span.stop <= 2 for span in session.discards), "what is gone cannot be discarded"


def test_token_at(tokenizer: Tokenizer) -> None:
    session = SessionState(model="m")
    turn(session, tokenizer, "<|bos|><|user|>hi 😀<|end|>", tokenizer.encode("you", add_special_tokens=False))
    turn(session, tokenizer, session.text + "<|user|>and", [])
    for characters in range(len(session.text) + 1):
        token = token_at(session, characters, tokenizer.vocabulary)
        assert token is not None
        before = text_of(session.ids()[:token], tokenizer.vocabulary)
        assert session.text.startswith(before) or before.endswith("\ufffd")
        assert len(before) >= characters
    session.text = "something else"
    assert token_at(session, 5, tokenizer.vocabulary) is None


def test_records_round_trip_and_old_ones_are_read(tokenizer: Tokenizer) -> None:
    session = SessionState(
        model="m",
        form="chat",
        messages=[{"role": "user", "content": "é"}],
        discards=[TokenSpan(1, 4)],
        truncation=RetentionPolicy(0.25, False, 7),
        metadata={"a": "b"},
        turns=3,
    )
    turn(session, tokenizer, "one two three", [5, 6])
    read = unpack_session(pack_session(session))
    assert read == session
    assert isinstance(read.marks[0], HistoryMark)
    assert unpack_session(pack_session(SessionState(model="m"))) == SessionState(model="m")
    for bad in (b"", b"\x00", pack_int32([1, 2])):
        with pytest.raises(ValueError, match="not a session"):
            unpack_session(bad)


@pytest.mark.parametrize("text", ["", " leading", "x", "\n\nlines", "<|user|>hi", "é😀"])
def test_the_rest_is_tokenised_without_a_beginning(tokenizer: Tokenizer, text: str) -> None:
    rest = asyncio.run(tokenizer.encode_rest(text))
    assert tokenizer.decode(rest, skip_special_tokens=False) == text


@pytest.fixture
def spaces(tmp_path: Path) -> Iterator[Tokenizer]:
    """A tokenizer of Llama 2's kind: spaces are marks, and one stands before every text."""
    pieces = ["<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz[]/", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    bpe = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = tokenizers.Tokenizer(bpe)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(spaces)
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": made.get_vocab_size()}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    loaded = Tokenizer(tmp_path)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("rest", ["x", " x", "\nx", "</s>x", "é"])
def test_no_space_is_put_in_front_of_the_rest(spaces: Tokenizer, rest: str) -> None:
    before = spaces.encode("<s>ab", add_special_tokens=False)
    whole = spaces.encode("<s>ab" + rest, add_special_tokens=False)
    assert before + asyncio.run(spaces.encode_rest(rest)) == whole


def test_a_conversation_in_a_template_that_adds_a_space(spaces: Tokenizer) -> None:
    session = SessionState(model="m")
    text = "<s>[q] hi [/q]"
    for question in ("more", "and", "é"):
        mark = common_mark(session, text, spaces.vocabulary)
        whole = spaces.encode(text, add_special_tokens=False)
        rest = asyncio.run(spaces.encode_rest(text[mark.characters :])) if mark.tokens else whole
        tokens = session.ids()[: mark.tokens] + rest
        assert tokens == whole, "as if it had been written at once"
        assert mark.tokens == 0 or mark.tokens == session.token_count - 1
        answer = spaces.encode("yo", add_special_tokens=False) + spaces.encode("</s>", add_special_tokens=False)
        session.remember(KnownPrompt(text, tokens, mark.tokens), answer, spaces.vocabulary)
        assert session.text == text + " yo</s>"
        text += f" yo </s><s>[q] {question} [/q]"
