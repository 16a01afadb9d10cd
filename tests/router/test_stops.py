"""The stop matcher against a character-by-character model of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.router.text.detokenizer import StopMatcher

quick = settings(max_examples=200, deadline=None)  # machines are shared
_text = st.text("ab.", max_size=14)
_stops = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4)


def model(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The first prefix that ends with a stop string, cut at the longest such."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[:end] if include else text[: end - len(longest)], True
    return text, False


@quick
@given(pieces=st.lists(_text, max_size=8), stops=_stops, include=st.booleans())
def test_equals_the_model_however_text_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    said, shown, stopped = "", "", False
    for piece in pieces:
        result = matcher.feed(piece)
        said += piece
        shown += result.text
        if result.stop is not None:
            stopped = True
            break
        held = said[len(shown) :]
        assert said == shown + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops), "only what may stop"
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == model("".join(pieces), stops, include)


def test_empty_stop_strings() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
    assert StopMatcher().feed("abc") == ("abc", None)


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_stop_string_is_found_wherever_it_is_cut(cut: int) -> None:
    text = "x-abc"
    matcher = StopMatcher(["-abc"])
    assert (matcher.feed(text[:cut]).text, matcher.feed(text[cut:])) == ("x", ("", "-abc"))
