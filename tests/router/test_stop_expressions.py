"""Stop expressions against Python's own engine, which backtracks: the same match, however the text is cut."""

from __future__ import annotations

import random
import re
from typing import Any, Final

import httpx
import pytest
from router.harness import ANSWER, MESSAGES
from seeds import seeds

from trunkline.router.text.detokenizer import StopMatcher
from trunkline.router.text.stop_expressions import EDGES_MAX, StopExpression, compile_expression

LETTERS: Final = "ab."


def drawn(random_: random.Random, depth: int = 0) -> str:
    """An expression of every kind of part, or of words that overlap."""
    if depth == 0 and random_.random() < 0.4:
        words = ["".join(random_.choices(LETTERS, k=random_.randint(1, 4))) for _ in range(random_.randint(2, 4))]
        return "|".join(map(re.escape, words))
    parts = []
    for _ in range(random_.randint(1, 3)):
        kind = random_.randrange(5 if depth < 2 else 3)
        if kind == 0:
            part = random_.choice(["a", "b", r"\.", ".", r"\w", r"\W"])
        elif kind == 1:
            part = random_.choice(["[ab]", "[^a]", "[.]", r"[\w]"])
        elif kind == 2:
            part = "a"
        else:
            part = f"({random_.choice(['', '?:'])}{drawn(random_, depth + 1)}|{drawn(random_, depth + 1)})"
        repeats = ["", "", "", "?", "{2}", "{1,2}"]  # within groups: without end, Python's engine may not end
        parts.append(part + random_.choice(repeats if depth else [*repeats, "*", "+", "*?", "{,2}", "{2,}"]))
    return "".join(parts)


def compiled(text: str) -> StopExpression | None:
    """The expression; None: it is refused, as it has to be."""
    try:
        made = compile_expression(text)
    except ValueError as error:
        if re.fullmatch(text, "") or "too large" in str(error):
            return None
        raise
    assert not re.fullmatch(text, "")
    return made


def expected(text: str, expressions: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text that is shown, and what ended it: the first prefix that ends with a match, cut at its longest."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            for each in [*map(re.escape, stops), *expressions]:
                if re.compile(each).fullmatch(text, start, end):
                    return text[: end if include else start], text[start:end]
    return text, None


@pytest.mark.parametrize("seed", seeds(3))
def test_the_same_as_pythons_engine_however_text_is_cut(seed: int) -> None:
    random_ = random.Random(seed)
    found = 0
    for _ in range(250):
        texts = [drawn(random_) for _ in range(random_.randint(1, 2))]
        expressions = [made for made in map(compiled, texts) if made is not None]
        if len(expressions) < len(texts):
            continue
        stops = ["b.a"] if random_.random() < 0.3 else []
        include = random_.random() < 0.5
        text = "".join(random_.choices(LETTERS, k=random_.randint(0, 7)))
        matcher = StopMatcher(stops, expressions, include=include)
        shown, stopped, place = "", None, 0
        while place < len(text) and stopped is None:
            cut = place + random_.randint(1, 4)
            result = matcher.feed(text[place:cut])
            shown, stopped, place = shown + result.text, result.stop, cut
        if stopped is None:
            shown += matcher.flush()
        told, match = expected(text, texts, stops, include)
        assert (shown, stopped is not None) == (told, match is not None), (texts, stops, text)
        if stopped is not None and match is not None:
            found += 1
            assert stopped in [*stops, *texts]
            assert match == stopped or (stopped in texts and re.fullmatch(stopped, match))
    assert found > 20


@pytest.mark.parametrize(
    ("expression", "text", "shown"),
    [
        ("and|or", "salt and pepper", "salt "),
        (r"[.!?]\s*$", "One. Two.", "One"),
        ("^a|b", "cab", "ca"),
        ("ab|b", "xab", "x"),
        ("(?i)stop", "Now StOp here", "Now "),
        (r"\n\n+", "a\nb\n\nc", "a\nb"),
        (r"\d{3}-\d{2}", "tel 12-345-67", "tel 12-"),
        (r"[\]x]", "a]", "a"),
        ("a{b", "xa{b", "x"),
        (r"\x41\u0042", "xAB", "x"),
        ("(?s)a.b", "xa\nb", "x"),
        ("a.b", "xa\nb", "xa\nb"),
    ],
)
def test_what_expressions_mean(expression: str, text: str, shown: str) -> None:
    matcher = StopMatcher((), [compile_expression(expression)])
    result = matcher.feed(text)
    assert result.text + ("" if result.stop is not None else matcher.flush()) == shown
    assert (result.stop == expression) == (shown != text)


def test_only_what_may_still_become_a_match_is_held_back() -> None:
    matcher = StopMatcher((), [compile_expression("ab+c")])
    assert [matcher.feed(piece).text for piece in ("xx", "a", "bb", "x", "a")] == ["xx", "", "", "abbx", ""]
    assert matcher.flush() == "a"


REFUSED: Final = [
    *("a*", "", "a|", "^", "(a", "a)", "[a", "a**", "(?=a)b", r"(a)\1", r"\bword", "(?>a)", "a*+b", "a++b", "a^b"),
    *("a$b", "(a$)", "(?i:a)", r"\Aa", "x{2000}", "(((a{30}){30}){30})", "(" * 40 + "a" + ")" * 40, "a?" * 60),
    *("(|){999}" * 99 + "a", "(?x)a", "[[a]", "[a--b]", "x" * 1025, "a{2,1}", r"\N{DASH}", r"a\Z"),
]


@pytest.mark.parametrize("expression", REFUSED)
def test_what_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        compile_expression(expression)


def test_the_work_for_a_character_is_bounded() -> None:
    """These expressions never end in an engine that backtracks."""
    for expression, held in (("(a+)+b", 2000), ("(a|aa)+b", 2000), ("(a*)*b", 2000), ("a{1,500}b", 500)):
        made = compile_expression(expression)
        assert made.edges <= EDGES_MAX
        matcher = StopMatcher((), [made])
        assert matcher.feed("a" * 2000) == ("a" * (2000 - held), None)
        assert matcher.feed("b").stop == expression


@pytest.mark.parametrize("stream", [False, True])
def test_through_the_api(http: httpx.Client, stream: bool) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 100, "stream": stream, "stop_regex": "S[TO]+P"}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        assert '"stop_reason":"S[TO]+P"' in answer.text
        return
    [choice] = answer.json()["choices"]
    assert choice["message"]["content"] == ANSWER.split("STOP")[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "S[TO]+P")
    message = http.post("/v1/messages", json=body | {"stop_regex": ["zzz", "S[TO]+P"]}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "S[TO]+P")
    refused = http.post("/v1/chat/completions", json=body | {"stop_regex": ["a", "(?=b)"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex"), refused.text
    assert "(?=b" in refused.json()["error"]["message"]
