"""Incremental detokenisation equals decoding everything at once, in each family of tokenizers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from router.harness import VOCAB_SIZE
from tokenizers import decoders, models

from trunkline.router.text.detokenizer import REPLACEMENT, TokenVocabulary, classify_decoder, make_detokenizer
from trunkline.router.text.tokenizer import Tokenizer

quick = settings(max_examples=60, deadline=None)  # machines are shared


def stream(vocabulary: TokenVocabulary, ids: list[int], **options: bool) -> list[str]:
    detokenizer = make_detokenizer(vocabulary, **options)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


_PIECES = "▁ ▁a a ▁▁ ö ▁wörld <s> b▁c 😀 <0xZZ>".split() + [f"<0x{b:02X}>" for b in range(256)]


def spaces_tokenizer(*, strip: bool) -> tokenizers.Tokenizer:
    """A SentencePiece-style tokenizer, as Llama 2 (strip) and Gemma (not) have them."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(_PIECES)}, merges=[], byte_fallback=True)
    )
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def vocabulary_of(tokenizer: tokenizers.Tokenizer) -> TokenVocabulary:
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return TokenVocabulary(tokenizer, json.loads(tokenizer.to_str())["decoder"], special)


def runs_are_valid(ids: list[int]) -> bool:
    """Whether each run of consecutive byte tokens is UTF-8."""
    run = b""
    for piece in (*(_PIECES[i] for i in ids if _PIECES[i] != "<s>"), ""):
        match = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        if match:
            run += bytes([int(match[1], 16)])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@quick
@given(ids=st.lists(st.integers(0, VOCAB_SIZE + 4), max_size=80), skip=st.booleans())
def test_byte_level_equals_full_decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    parts = stream(tokenizer.vocabulary, ids, skip_special_tokens=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@quick
@given(text=st.text(max_size=60))
def test_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer.vocabulary, ids, skip_special_tokens=False)
    assert "".join(parts) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in part for part in parts)


_characters = st.text(st.sampled_from("é😀漢a "), max_size=3).map(
    lambda text: [_PIECES.index(f"<0x{byte:02X}>") for byte in text.encode()]
)
_words = st.lists(st.integers(0, 9), max_size=4)


@pytest.mark.parametrize("strip", [True, False])
@quick
@given(parts=st.lists(st.one_of(_characters, _words), max_size=12))
def test_spaces_family_equals_full_decode(strip: bool, parts: list[list[int]]) -> None:
    tokenizer = spaces_tokenizer(strip=strip)
    ids = [token for part in parts for token in part]
    assert runs_are_valid(ids)
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.kind.family == "spaces"
    for skip in (True, False):
        pieces = stream(vocabulary, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@quick
@given(ids=st.lists(st.integers(0, len(_PIECES) - 1), max_size=60))
def test_spaces_family_with_bad_bytes(ids: list[int]) -> None:
    """Good characters stay, each bad byte is one replacement: never fewer characters than bytes explain."""
    tokenizer = spaces_tokenizer(strip=False)
    text = "".join(stream(vocabulary_of(tokenizer), ids))
    if runs_are_valid(ids):
        assert text == tokenizer.decode(ids)
    else:
        assert REPLACEMENT in text
        assert len(text) <= len(tokenizer.decode(ids))


def test_spaces_family_shows_whole_characters_at_once_and_keeps_a_leading_space() -> None:
    vocabulary = vocabulary_of(spaces_tokenizer(strip=True))
    ids = [_PIECES.index(f"<0x{byte:02X}>") for byte in "😀é".encode()]
    assert stream(vocabulary, ids) == ["", "", "", "😀", "", "é", ""]
    word = [_PIECES.index("▁wörld")]
    assert "".join(stream(vocabulary, word, at_start=True)) == "wörld"
    assert "".join(stream(vocabulary, word, at_start=False)) == " wörld"


@pytest.mark.parametrize(
    ("words", "decoder", "family"),
    [
        (["▁a", "b", "▁", "▁c▁", "ö", "▁▁d", "x▁"], decoders.Metaspace(), "spaces"),
        (["hello", "##ing", "wörld", "x"], decoders.WordPiece(cleanup=False), "other"),
    ],
)
@quick
@given(data=st.data())
def test_other_decoders_equal_full_decode(
    words: list[str], decoder: Any, family: str, data: st.DataObject
) -> None:
    """Metaspace is of the family of spaces; what is not known goes through a window."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1])
    )
    tokenizer.decoder = decoder
    vocabulary = vocabulary_of(tokenizer)
    ids = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=30))
    assert vocabulary.kind.family == family
    assert "".join(stream(vocabulary, ids)) == tokenizer.decode(ids)


def test_unknown_ids_are_silent_and_undecodable_bytes_cost_no_more_than_text(tokenizer: Tokenizer) -> None:
    assert "".join(stream(tokenizer.vocabulary, [10**6, -1, VOCAB_SIZE + 3])) == ""
    continuation = next(i for i in range(VOCAB_SIZE) if tokenizer.vocabulary.token_bytes(i) == b"\xa9")
    parts = stream(tokenizer.vocabulary, [continuation] * 20_000)
    assert "".join(parts) == REPLACEMENT * 20_000


@pytest.mark.parametrize(
    ("decoder", "family"),
    [
        (None, "other"),
        ({"type": "ByteLevel"}, "byte_level"),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, "byte_level"),
        ({"type": "CTC"}, "other"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}]}, "other"),
        (
            {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}]},
            "other",
        ),
    ],
)
def test_classification(decoder: dict[str, Any] | None, family: str) -> None:
    assert classify_decoder(decoder).family == family
