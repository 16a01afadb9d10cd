"""Regular expressions that end an answer (`stop_regex`), looked for in linear time. Pure.

    expression ── parse ──► tree ── _Builder ──► StopExpression ──► ExpressionScanner ──Match──► StopMatcher

The expressions come from clients, so nothing here backtracks. An expression becomes a position automaton
(Glushkov): one state for each character or class in it, and edges to the states that may come next. A scanner
follows all of them at once, and remembers for each active state where its match began. Its work for a character
is bounded by the number of edges, `EDGES_MAX`.

The syntax is that of Python's `re`, without what a text that still grows cannot decide or an automaton cannot
express: looking ahead or back, references to groups, word boundaries, atomic groups and possessive repeats. The
end of the text is the end of what there is so far: `[.!?]\\s*$` ends an answer with its first sentence. As with
stop strings, the match with the smallest end wins; of several that end there, the longest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

EXPRESSION_CHARACTERS_MAX: Final = 1024
EDGES_MAX: Final = 1024
"""Largest number of edges of a request's expressions together; the work for a character of the answer."""
_NODES_MAX: Final = 8192
"""Largest number of parts of an expression, with repeats written out."""
_DEPTH_MAX: Final = 32
"""Largest number of groups within each other."""
_CACHE_MAX: Final = 1024
"""Number of distinct characters for which a scanner remembers the states that they lead to."""
_FLAGS: Final = re.compile(r"\(\?([is]+)\)")
_GROUP: Final = re.compile(r"\((\?:|\?P<\w+>|(?!\?))")
_REPEAT: Final = re.compile(r"\{(?:(\d+)(?:(,)(\d*))?|(,)(\d*))\}")
_SET_OPERATIONS: Final = re.compile(r"\[|--|&&|~~|\|\|")
"""Texts within a class that Python may give a meaning to."""
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPE: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[dDsSwW]|[afnrtv]|[^a-zA-Z0-9])"
)


class _Repeat(NamedTuple):
    part: _Node
    least: int
    most: int | None
    """None: any number of times."""


class _Sequence(NamedTuple):
    parts: list[_Node]


class _Choice(NamedTuple):
    parts: list[_Node]


_Node = str | _Repeat | _Sequence | _Choice
"""A part of an expression; a text is a character or a class as it is written."""


class StopExpression(msgspec.Struct, frozen=True):
    """An expression as an automaton. Its states are numbers from 0 on."""

    text: str
    """The expression as the client wrote it."""
    classes: tuple[re.Pattern[str], ...]
    """For each state what its character must match."""
    follow: tuple[tuple[int, ...], ...]
    """For each state the states that may come next."""
    first: tuple[int, ...]
    """States with which a match begins anywhere."""
    opening: tuple[int, ...]
    """States with which a match begins at the answer's beginning only (`^`)."""
    last: frozenset[int]
    """States with which a match ends."""

    @property
    def edges(self) -> int:
        """Number of edges, those from the beginning included."""
        return sum(map(len, self.follow)) + len(self.first) + len(self.opening)


class _Parser:
    """Reads an expression from the left; `place` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0

    def choice(self, depth: int) -> _Choice:
        """Return alternatives, up to the end of their group or of the text."""
        if depth > _DEPTH_MAX:
            raise ValueError(f"has more than {_DEPTH_MAX} groups within each other")
        parts: list[_Node] = [self._sequence(depth)]
        while self.text.startswith("|", self.place):
            self.place += 1
            parts.append(self._sequence(depth))
        return _Choice(parts)

    def _sequence(self, depth: int) -> _Sequence:
        parts: list[_Node] = []
        while self.place < len(self.text) and self.text[self.place] not in "|)":
            if self.text[self.place] in "^$":
                parts.append(self._anchor(depth, first=not parts))
                continue
            parts.append(self._repeated(self._atom(depth)))
        return _Sequence(parts)

    def _anchor(self, depth: int, *, first: bool) -> str:
        """Return `^` or `$` where it may stand: at an end of an alternative outside of groups."""
        anchor = self.text[self.place]
        self.place += 1
        outside = depth == 0 and (first if anchor == "^" else self.text[self.place : self.place + 1] in ("", "|"))
        if not outside:
            raise ValueError(f"has `{anchor}` within it; it may only stand at an end of an alternative")
        return anchor

    def _atom(self, depth: int) -> _Node:
        text, place = self.text, self.place
        if text[place] == "(":
            group = _GROUP.match(text, place)
            if group is None:
                raise ValueError(f"has a group that is not supported: `{text[place : place + 4]}`")
            self.place = group.end()
            inner = self.choice(depth + 1)
            if not text.startswith(")", self.place):
                raise ValueError("has a group that does not end")
            self.place += 1
            return inner
        form = {"[": _CLASS, "\\": _ESCAPE}.get(text[place])
        if form is None:
            self.place += 1
            return text[place]
        found = form.match(text, place)
        if found is None:
            raise ValueError(f"has something that is not supported: `{text[place : place + 4]}`")
        if text[place] == "[" and _SET_OPERATIONS.search(re.sub(r"\\.", "", found[0][1:], flags=re.DOTALL)):
            raise ValueError("has a class in which `[`, `--`, `&&`, `~~` or `||` needs a backslash")
        self.place = found.end()
        return found[0]

    def _repeated(self, part: _Node) -> _Node:
        """Return a part with the repeat behind it, if there is one."""
        ranges: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        bounds = ranges.get(self.text[self.place : self.place + 1])
        if bounds is not None:
            self.place += 1
        else:
            found = _REPEAT.match(self.text, self.place)
            if found is None:
                return part
            self.place = found.end()
            least, comma, most = found[1] or "0", found[2] or found[4], found[3] or found[5]
            bounds = int(least), (int(most) if most else None) if comma else int(least)
        if self.text.startswith("?", self.place):  # lazy: which match is taken does not depend on it
            self.place += 1
        elif self.text.startswith("+", self.place):
            raise ValueError("has a possessive repeat, which is not supported")
        if max(bounds[0], bounds[1] or 0) > EDGES_MAX:
            raise ValueError(f"repeats a part more than {EDGES_MAX} times")
        return _Repeat(part, *bounds)


class _Fragment(NamedTuple):
    """A part of an automaton."""

    empty: bool
    """Whether it matches the empty text."""
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


_EMPTY: Final = _Fragment(empty=True)


class _Builder:
    """Makes the states and edges of one expression."""

    def __init__(self, flags: re.RegexFlag) -> None:
        self._flags = flags
        self._parts = 0
        self._edges = 0
        self.classes: list[re.Pattern[str]] = []
        self.follow: list[set[int]] = []

    def build(self, node: _Node) -> _Fragment:
        """Return a part's automaton.

        Raises:
            ValueError: The automaton becomes too large.
        """
        self._parts += 1
        if self._parts > _NODES_MAX:
            raise ValueError("is too large, with its repeats written out")
        if isinstance(node, str):
            return self._state(node)
        if isinstance(node, _Sequence):
            whole = _EMPTY
            for part in node.parts:
                whole = self._join(whole, self.build(part))
            return whole
        if isinstance(node, _Choice):
            fragments = [self.build(part) for part in node.parts]
            return _Fragment(
                any(each.empty for each in fragments),
                frozenset().union(*(each.first for each in fragments)),
                frozenset().union(*(each.last for each in fragments)),
            )
        return self._repeat(node)

    def _state(self, text: str) -> _Fragment:
        self.classes.append(re.compile(text if len(text) > 1 or text == "." else re.escape(text), self._flags))
        self.follow.append(set())
        only = frozenset([len(self.classes) - 1])
        return _Fragment(empty=False, first=only, last=only)

    def _repeat(self, node: _Repeat) -> _Fragment:
        behind = _EMPTY
        if node.most is None:
            behind = self.build(node.part)
            self._link(behind.last, behind.first)
            behind = behind._replace(empty=True)
        else:
            for _ in range(node.most - node.least):  # x{0,3} is (x(x(x)?)?)?, which has the fewest edges
                behind = self._join(self.build(node.part), behind)._replace(empty=True)
        whole = _EMPTY
        for _ in range(node.least):
            whole = self._join(whole, self.build(node.part))
        return self._join(whole, behind)

    def _join(self, left: _Fragment, right: _Fragment) -> _Fragment:
        self._link(left.last, right.first)
        return _Fragment(
            left.empty and right.empty,
            left.first | right.first if left.empty else left.first,
            left.last | right.last if right.empty else right.last,
        )

    def _link(self, sources: Iterable[int], targets: frozenset[int]) -> None:
        for source in sources:
            self._edges += len(targets - self.follow[source])
            self.follow[source] |= targets
        if self._edges > EDGES_MAX:
            raise ValueError("is too large, with its repeats written out")


@lru_cache(maxsize=256)
def compile_expression(text: str) -> StopExpression:
    """Return an expression's automaton.

    Raises:
        ValueError: The expression is wrong, too large, not supported, or matches an empty text.
    """
    if len(text) > EXPRESSION_CHARACTERS_MAX:
        raise ValueError(f"has more than {EXPRESSION_CHARACTERS_MAX} characters")
    flags = _FLAGS.match(text)
    parser = _Parser(text)
    parser.place = 0 if flags is None else flags.end()
    tree = parser.choice(0)
    if parser.place < len(text):
        raise ValueError("has a `)` too many")
    try:
        re.compile(text)
    except (re.error, OverflowError) as error:
        raise ValueError(f"is not an expression: {error}") from None
    builder = _Builder(re.RegexFlag(sum(re.RegexFlag[flag.upper()] for flag in set(flags[1] if flags else ""))))
    first: list[int] = []
    opening: list[int] = []
    last: set[int] = set()
    for part in tree.parts:
        assert isinstance(part, _Sequence)
        anchored = part.parts[:1] == ["^"]
        inner = [each for each in part.parts if each not in ("^", "$")]
        fragment = builder.build(_Sequence(inner))
        if fragment.empty:
            raise ValueError("matches an empty text, so that every answer would be empty")
        (opening if anchored else first).extend(sorted(fragment.first))
        last |= fragment.last
    made = StopExpression(
        text=text,
        classes=tuple(builder.classes),
        follow=tuple(tuple(sorted(each)) for each in builder.follow),
        first=tuple(first),
        opening=tuple(opening),
        last=frozenset(last),
    )
    check_edges([made])
    return made


def check_edges(expressions: Iterable[StopExpression]) -> None:
    """Refuse expressions that are too large together.

    Raises:
        ValueError: They have more than `EDGES_MAX` edges.
    """
    if sum(each.edges for each in expressions) > EDGES_MAX:
        raise ValueError("is too large, with its repeats written out")


class Match(NamedTuple):
    """Where an expression was found: indices of characters of the answer."""

    start: int
    end: int
    expression: str


class ExpressionScanner:
    """Looks for several expressions in one text that grows."""

    def __init__(self, expressions: Sequence[StopExpression]) -> None:
        self._expressions = expressions
        self._active: list[dict[int, int]] = [{} for _ in expressions]
        """For each expression its active states, and where the longest match through each began."""
        self._matching: dict[str, list[frozenset[int]]] = {}
        self.position = 0
        """Number of characters so far."""

    @property
    def open_from(self) -> int:
        """Index of the first character that may belong to a match which has not ended yet."""
        return min((start for active in self._active for start in active.values()), default=self.position)

    def feed(self, text: str) -> Match | None:
        """Take the next characters; return the first match that ends in them. Behind it nothing is taken."""
        for character in text:
            matching = self._matching_states(character)
            best: Match | None = None
            for index, expression in enumerate(self._expressions):
                after = self._step(expression, self._active[index], matching[index])
                self._active[index] = after
                starts = [start for state, start in after.items() if state in expression.last]
                if starts and (best is None or min(starts) < best.start):
                    best = Match(min(starts), self.position + 1, expression.text)
            self.position += 1
            if best is not None:
                return best
        return None

    def _step(
        self, expression: StopExpression, active: dict[int, int], matching: frozenset[int]
    ) -> dict[int, int]:
        """Return the active states behind a character. `matching`: states that it matches."""
        after: dict[int, int] = {}
        if not matching:
            return after
        for state, start in active.items():
            for following in expression.follow[state]:
                if following in matching and start < after.get(following, self.position):
                    after[following] = start
        begun = expression.first if self.position else (*expression.first, *expression.opening)
        for state in begun:
            if state in matching:
                after.setdefault(state, self.position)
        return after

    def _matching_states(self, character: str) -> list[frozenset[int]]:
        found = self._matching.get(character)
        if found is None:
            if len(self._matching) >= _CACHE_MAX:
                self._matching.clear()
            found = self._matching[character] = [
                frozenset(
                    state for state, form in enumerate(expression.classes) if form.fullmatch(character) is not None
                )
                for expression in self._expressions
            ]
        return found
