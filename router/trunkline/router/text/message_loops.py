"""Loops of a chat template over a conversation's messages: those that were written before are not written again.

    {% for message in messages %} BODY {% endfor %}         as the template has it
    {{ known }}{% for message in rest %}{{ mark }} BODY {% endfor %}         as it is compiled

In Jinja nothing that a turn of a loop does outlives it, but for its text and for what it sets in namespaces. So a
turn's text depends on the message, on the number of the turn, on namespaces as they are before it, and on
variables from outside that its body names. If all of these are what they were in a rendering before, up to a
message, then so are the text and the namespaces behind it, and the loop begins there. The last message of the
rendering before is always written again: it may have been the last one of its loop.

Which loops these are is found when a template is compiled (`loop_compiler.py`).
"""

from __future__ import annotations

import marshal
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Final

from jinja2.runtime import Undefined
from jinja2.utils import Namespace

_SCALARS: Final = (str, int, float, bool, type(None))
_State = list[dict[str, tuple[type, Any]]]


@dataclass(slots=True)
class _Written:
    """What a loop has written in a rendering."""

    items: list[Any]
    """The items that it went through."""
    values: list[Any]
    """The variables that its body names."""
    start: int = 0
    """Number of the text's characters before the loop."""
    places: list[int] = field(default_factory=list)
    """Number of the loop's characters before each turn."""
    states: list[_State] = field(default_factory=list)
    """The namespaces that the body changes, before each turn."""
    skipped: int = 0
    """Number of turns that were not written again."""


class Rendered:
    """A rendering as far as another one may begin with it. The values that were given to the template must not
    change any more."""

    def __init__(self) -> None:
        self.text = ""
        self.loops: dict[int, _Written] = {}
        """What each loop has written, by its number."""

    @property
    def skipped(self) -> int:
        """Number of turns of loops that were not written again."""
        return sum(written.skipped for written in self.loops.values())


class Rendering:
    """A rendering that is going on. Its loops call it."""

    def __init__(self, before: Rendered | None) -> None:
        """`before`: a rendering of the same template."""
        self.made = Rendered()
        self._before = before
        self._characters = 0
        self._rest: Sequence[Any] = ()

    def counted(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of the text, as the template writes them."""
        for piece in pieces:
            self._characters += len(piece)
            yield piece

    def known(self, number: int, items: Any, values: list[Any], spaces: list[Any]) -> str:
        """Begin a loop; return what it begins with.

        Args:
            number: That of the loop.
            items: What it goes through.
            values: The variables that its body names.
            spaces: The namespaces that its body changes.
        """
        self._rest = items
        self.made.loops.pop(number, None)
        if not isinstance(items, list) or not all(isinstance(space, Namespace) for space in spaces):
            return ""
        frozen = [_frozen(value) for value in values]
        state = _state(spaces)
        if state is None or _CHANGING in frozen:
            return ""
        made = self.made.loops[number] = _Written(items, frozen, self._characters)
        old = None if self._before is None else self._before.loops.get(number)
        if old is None or old.values != frozen or not old.states or old.states[0] != state:
            return ""
        agreed = min(len(old.items), len(items))
        if not all(map(operator.is_, old.items, items)):
            agreed = list(map(operator.is_, old.items, items)).index(False)
        turns = min(agreed, len(old.places)) - 1  # the text of the last one may depend on what follows it
        if turns <= 0:
            return ""
        made.skipped = turns
        assert self._before is not None
        made.places, made.states = old.places[:turns], old.states[:turns]
        for space, known in zip(spaces, old.states[turns], strict=True):
            for name, (_, value) in known.items():
                space[name] = value
        self._rest = items[turns:]
        return self._before.text[old.start : old.start + old.places[turns]]

    def rest(self) -> Sequence[Any]:
        """Return what the loop that has begun has still to go through."""
        return self._rest

    def mark(self, number: int, spaces: list[Any]) -> str:
        """Note that a turn of a loop begins. Return nothing to write."""
        made = self.made.loops.get(number)
        if made is not None:
            state = _state(spaces)
            if state is None:
                del self.made.loops[number]
            else:
                made.places.append(self._characters - made.start)
                made.states.append(state)
        return ""

    def moved(self, number: int, index: int) -> int:
        """Return the number of a turn, counted from the first one of the whole loop."""
        made = self.made.loops.get(number)
        return index if made is None else index + made.skipped

    def is_first(self, number: int, is_first: bool) -> bool:
        """Return whether a turn is the first one of the whole loop."""
        made = self.made.loops.get(number)
        return is_first and (made is None or not made.skipped)


_rendering: ContextVar[Rendering | None] = ContextVar("rendering", default=None)


@contextmanager
def rendering(before: Rendered | None) -> Iterator[Rendering]:
    """Note what the loops of a template write. `before`: a rendering of the same template, to begin with."""
    made = Rendering(before)
    token = _rendering.set(made)
    try:
        yield made
    finally:
        _rendering.reset(token)


class LoopCalls:
    """What compiled loops call, as methods of their environment."""

    def loop_known(self, number: int, items: Any, values: list[Any], spaces: list[Any]) -> str:
        """See `Rendering.known`."""
        return _now().known(number, items, values, spaces)

    def loop_rest(self) -> Sequence[Any]:
        """See `Rendering.rest`."""
        return _now().rest()

    def loop_mark(self, number: int, spaces: list[Any]) -> str:
        """See `Rendering.mark`."""
        return _now().mark(number, spaces)

    def loop_moved(self, number: int, index: int) -> int:
        """See `Rendering.moved`."""
        return _now().moved(number, index)

    def loop_is_first(self, number: int, is_first: bool) -> bool:
        """See `Rendering.is_first`."""
        return _now().is_first(number, is_first)


def _now() -> Rendering:
    found = _rendering.get()
    assert found is not None, "a template is rendered without `rendering`"
    return found


_CHANGING: Final = "a value that may change"


def _frozen(value: Any) -> Any:
    """Return a copy of a value that equals the copy of another one only if templates write the same for both."""
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, Undefined):
        return "undefined"
    if isinstance(value, Namespace):
        return _CHANGING if (scalars := _scalars(value)) is None else ("namespace", scalars)
    if isinstance(value, FunctionType | MethodType | type):
        return "function", value
    try:
        return "data", marshal.dumps(value, 2)
    except ValueError:
        return _CHANGING


def _state(spaces: list[Any]) -> _State | None:
    """Return what is in namespaces; None: it cannot be told apart."""
    found: _State = []
    for space in spaces:
        scalars = _scalars(space)
        if scalars is None:
            return None
        found.append(scalars)
    return found


def _scalars(space: Namespace) -> dict[str, tuple[type, Any]] | None:
    values: dict[str, Any] = space._Namespace__attrs
    if not all(isinstance(value, _SCALARS) for value in values.values()):
        return None
    return {name: (type(value), value) for name, value in values.items()}
