"""What a session remembers, and how the next prompt is made from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from router.harness import VOCAB_SIZE
from tokenizers import decoders, models, normalizers

from trunkline.router.stores.session_history import (
    History,
    HistoryMark,
    KnownPrompt,
    common_mark,
    text_of,
    token_at,
)
from trunkline.router.text.conversation_memory import common_length
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.truncation import TokenSpan

quick = settings(max_examples=100, deadline=None)
ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
texts = st.text(st.sampled_from("ab é😀\n<|"), max_size=20)


def turn(history: History, tokenizer: Tokenizer, prompt: str, answer: list[int]) -> History:
    """The history after a turn whose prompt is tokenised as far as it is not known."""
    mark = common_mark(history, prompt, tokenizer.vocabulary)
    rest = tokenizer.encode(prompt[mark.characters :], add_special_tokens=False)
    known = KnownPrompt(prompt, history.ids()[: mark.tokens] + rest, mark.tokens)
    return history.answered(known, answer, tokenizer.vocabulary)


@quick
@given(turns=st.lists(st.tuples(texts, ids), min_size=1, max_size=4), cut=st.integers(0, 60), rest=texts)
def test_known_tokens_write_what_they_stand_for(
    tokenizer: Tokenizer, turns: list[tuple[str, list[int]]], cut: int, rest: str
) -> None:
    history = History()
    for text, answer in turns:
        history = turn(history, tokenizer, history.text + text, answer)
    new = history.text[:cut] + rest
    mark = common_mark(history, new, tokenizer.vocabulary)
    common = common_length(history.text, new)
    assert history.text[:common] == new[:common]
    assert history.text[common : common + 1] != new[common : common + 1] or common == len(history.text)
    assert mark.characters <= common
    if new.startswith(history.text):
        assert mark == HistoryMark(len(history.text), history.token_count)
    else:
        assert text_of(history.ids()[: mark.tokens], tokenizer.vocabulary) == new[: mark.characters]
    reached = [each for each in history.marks if each.characters <= common]
    assert all(each.tokens <= mark.tokens for each in reached), "no mark that agrees is given up"


def test_discards_stay_where_their_tokens_stay(tokenizer: Tokenizer) -> None:
    history = turn(History(), tokenizer, "one two three four five", [])
    history = replace(history, discards=[TokenSpan(1, 3), TokenSpan(4, history.token_count)])
    history = turn(history, tokenizer, history.text + " six", [])
    assert history.discards[0] == TokenSpan(1, 3)
    assert len(history.discards) == 2
    history = turn(history, tokenizer, "one two other", [])
    assert all(span.stop <= 2 for span in history.discards), "what is gone cannot be discarded"


def test_token_at(tokenizer: Tokenizer) -> None:
    you = tokenizer.encode("you", add_special_tokens=False)
    history = turn(History(), tokenizer, "<|bos|><|user|>hi 😀<|end|>", you)
    history = turn(history, tokenizer, history.text + "<|user|>and", [])
    for characters in range(len(history.text) + 1):
        token = token_at(history, characters, tokenizer.vocabulary)
        assert token is not None
        before = text_of(history.ids()[:token], tokenizer.vocabulary)
        assert history.text.startswith(before) or before.endswith("\ufffd")
        assert len(before) >= characters
    assert token_at(replace(history, text="something else"), 5, tokenizer.vocabulary) is None


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
    session = History()
    text = "<s>[q] hi [/q]"
    for question in ("more", "and", "é"):
        mark = common_mark(session, text, spaces.vocabulary)
        whole = spaces.encode(text, add_special_tokens=False)
        rest = asyncio.run(spaces.encode_rest(text[mark.characters :])) if mark.tokens else whole
        tokens = session.ids()[: mark.tokens] + rest
        assert tokens == whole, "as if it had been written at once"
        assert mark.tokens == 0 or mark.tokens == session.token_count - 1
        answer = spaces.encode("yo", add_special_tokens=False) + spaces.encode("</s>", add_special_tokens=False)
        session = session.answered(KnownPrompt(text, tokens, mark.tokens), answer, spaces.vocabulary)
        assert session.text == text + " yo</s>"
        text += f" yo </s><s>[q] {question} [/q]"
