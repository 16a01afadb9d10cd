"""The prompts and answers that a router remembers, so that a conversation that comes back whole costs only what
is new in it. Pure.

      remembered   text ──────────────┤ answer: "…{"path":"a"}"        tokens, as the engine had them
      comes back   text ──────────────┤ "…{"path": "a"}" <end> new ──┤
      its tokens   ── remembered ─────┤─ the answer's ──┤── encoded ─┤

A text is compared with what is remembered, character by character; nothing is trusted. Where they part, the
tokens before the last border (`borders.py`) are used again, and what follows is encoded: the tokens are those that
the whole text would have. There is one exception: behind a remembered prompt, the answer that the model wrote
stands for what the template wrote in its place, if the caller says that both read the same. Then the tokens of the
answer are used. Their text may differ from the template's, for instance in the white space of a call's arguments.

Who may see an entry is its *scope*: model and salt. A scope's entries are kept in the order of their texts, so the
one with the longest common beginning stands beside the place where a text would be put. An entry is replaced by
one that continues it. All entries together have a bound; the one that was not used for the longest time goes.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from trunkline.kvstore.adapters import without_adapter
from trunkline.kvstore.chunks import Int32Array
from trunkline.router.text.borders import NO_PLACES, BorderTokens, Places, agreed_length, joined, starts
from trunkline.router.text.growing_tokens import GrowingTokens

Scope = tuple[str, bytes]
"""Main name of a model, and the salt of the KV: who may know what the entries hold."""
ChunkNames = dict[tuple[bytes, int], list[bytes]]
"""Names of a prompt's first whole chunks, as far as they are known, by the name of their root and the tokens of a
chunk."""
ReadsSame = Callable[[str, str, str], bool]
"""Whether, behind a prompt that ends with the first text, an answer with the second one and what a template wrote
for it, the third one, are the same message."""
PROMPT_END_CHARACTERS: Final = 256
"""Number of a prompt's last characters that are shown to `ReadsSame`."""
ANSWERS_MAX: Final = 16
"""Largest number of answers of an entry; the latest ones stay."""
_ENDS_MAX: Final = 16
"""Largest number of places where an answer is looked for to end."""
_LONGER_MAX: Final = 8
"""How many times longer than an answer the template's form of it may be: escapes take six characters for one."""
READ_CHARACTERS_MAX: Final = 32 << 10
"""Largest number of characters of texts that are read to compare one answer, for which streams must wait: parsers
take 2 to 4 microseconds for each. Beyond it only the ends of an answer may differ."""
_END_TOKENS_MAX: Final = 64
"""Largest number of an entry's special tokens that an answer is looked for to end with."""
_NEIGHBOURS: Final = 4
"""Number of entries on each side of a text whose answers are looked at: other branches of the conversation."""
_ENTRIES_LEAST: Final = 4
"""Number of entries of the largest size that the memory holds. A larger prompt is not remembered."""
_NAME_BYTES: Final = 60
"""Memory of the name of a chunk, about."""
_SLICE_TOKENS: Final = 1 << 16
"""Number of tokens that one step converts."""
_ENTRY_BYTES: Final = 1000
"""Memory that an entry takes besides texts and arrays, about."""
_NO_TOKENS: Final[Int32Array] = np.zeros(0, np.int32)


class Border(NamedTuple):
    """A place where a text can be split."""

    characters: int
    tokens: int


_BEGINNING: Final = Border(0, 0)


class Answer(NamedTuple):
    """What a model wrote behind a prompt."""

    start: Border
    """The prompt's last border."""
    prompt: int
    """Characters of the prompt."""
    text: str
    """Text of the answer, special tokens included, without a token that ended it."""
    tokens: Int32Array
    """The prompt's tokens from `start` on, and the answer's."""
    written: int
    """Number of the answer's tokens."""

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return sys.getsizeof(self.text) + self.tokens.nbytes + _ENTRY_BYTES // 4


@dataclass(eq=False, slots=True)
class Entry:
    """A prompt whose tokens are known."""

    scope: Scope
    text: str
    memory: GrowingTokens
    """What has its tokens, and perhaps more behind them."""
    tokens: Int32Array
    places: Places
    names: ChunkNames
    answers: list[Answer] = field(default_factory=list)
    size: int = 0
    """Bytes that it counts for."""

    def measured(self) -> int:
        """Return the bytes of memory that it takes, about."""
        arrays = self.memory.nbytes + self.places.nbytes + _NAME_BYTES * sum(map(len, self.names.values()))
        return sys.getsizeof(self.text) + arrays + sum(answer.size for answer in self.answers) + _ENTRY_BYTES

    def first_names(self, tokens: int) -> ChunkNames:
        """Return the known names of the chunks within the first `tokens` tokens."""
        return {key: names[: tokens // key[1]] for key, names in self.names.items()}


class Reuse(NamedTuple):
    """The part of a text whose tokens are known."""

    characters: int = 0
    tokens: Int32Array = _NO_TOKENS
    places: Places = NO_PLACES
    """Borders within the part."""
    answer_tokens: int = 0
    """Those of `tokens` that a model wrote, and that were not part of a remembered prompt before."""
    names: ChunkNames = {}  # noqa: RUF012 (never changed)
    """Names of the part's chunks."""
    memory: GrowingTokens | None = None
    """What begins with `tokens`; None: they stand nowhere else."""


NOTHING: Final = Reuse()


@dataclass(slots=True)
class MemoryCounts:
    """Tokens of prompts since the start."""

    remembered: int = 0
    """Tokens that were known from prompts before."""
    answers: int = 0
    """Tokens of answers that came back."""
    encoded: int = 0
    """Tokens of texts that were new."""

    def add(self, reuse: Reuse, encoded: int) -> None:
        """Count a prompt."""
        self.remembered += len(reuse.tokens) - reuse.answer_tokens
        self.answers += reuse.answer_tokens
        self.encoded += encoded


class Prompt(NamedTuple):
    """A prompt that was remembered, for the answers to it."""

    scope: Scope
    text: str
    tokens: Int32Array
    start: Border
    """The last border of the text."""
    names: ChunkNames
    """Names of its chunks. The caller may add more."""


class Part(NamedTuple):
    """The end of a text that was encoded."""

    tokens: Int32Array
    places: Places
    """Borders within the text."""


def part_of(text: str, ids: Sequence[int], borders: BorderTokens) -> Part:
    """Return the end of a text as arrays. May run in a thread: no step of it is long. `ids`: its tokens."""
    parts = [np.array(ids[at : at + _SLICE_TOKENS], np.int32) for at in range(0, len(ids), _SLICE_TOKENS)]
    tokens = np.concatenate([_NO_TOKENS, *parts])
    return Part(tokens, borders.places(text, tokens))


class PromptMemory:
    """The remembered prompts and answers of a router."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: bound of the memory, in bytes; 0: nothing is remembered."""
        self.bytes_max = bytes_max
        self.bytes = 0
        """Bytes that the entries take, about."""
        self.counts = MemoryCounts()
        self._scopes: dict[Scope, list[Entry]] = {}
        """The entries of each scope, in the order of their texts."""
        self._used: dict[Entry, None] = {}
        """All entries; the one that was used last stands last."""

    def __len__(self) -> int:
        return len(self._used)

    def reuse(self, scope: Scope, text: str, borders: BorderTokens, same: ReadsSame) -> Reuse:
        """Return the tokens that are known of a text: those of its longest beginning that is remembered.

        Args:
            borders: Those of the model's tokenizer.
            same: Whether an answer and what a template wrote for it are the same message.
        """
        entries = self._scopes.get(scope, [])
        at = bisect_right(entries, text, key=_text_of)
        entry, agreed = _longest(entries[max(0, at - 1) : at + 1], text)
        if entry is None:
            return NOTHING
        self._use(entry)
        count = _agreed_places(entry, agreed, borders)
        characters, tokens = entry.places[count - 1].tolist() if count else _BEGINNING
        near = entries[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
        for other in (entry, *(each for each in near if each is not entry)):
            alike = agreed if other is entry else 0
            found = _spliced(other, text, characters, agreed, borders, same, alike=alike)
            if found is not None:
                self._use(other)
                return found
        names = entry.first_names(tokens)
        return Reuse(characters, entry.tokens[:tokens], entry.places[:count], names=names, memory=entry.memory)

    def remember(
        self, scope: Scope, text: str, reuse: Reuse, rest: Sequence[int], borders: BorderTokens
    ) -> Prompt:
        """Remember a prompt and return it with its tokens.

        Args:
            reuse: What was known of it.
            rest: Tokens of `text[reuse.characters:]`.
        """
        return self.remember_part(scope, text, reuse, part_of(text[reuse.characters :], rest, borders))

    def remember_part(self, scope: Scope, text: str, reuse: Reuse, rest: Part) -> Prompt:
        """Remember a prompt and return it with its tokens, as `remember` does."""
        self.counts.add(reuse, len(rest.tokens))
        known = len(reuse.tokens)
        memory = (reuse.memory or GrowingTokens(reuse.tokens)).extended(known, rest.tokens)
        tokens = memory.first(known + len(rest.tokens))
        places = joined(reuse.places, rest.places, reuse.characters, known)
        start = Border(*places[-1].tolist()) if len(places) else _BEGINNING
        names = dict(reuse.names)
        entry = Entry(scope, text, memory, tokens, places, names)
        if entry.measured() * _ENTRIES_LEAST <= self.bytes_max:
            self._put(entry, start)
        return Prompt(scope, text, tokens, start, names)

    def answered(self, prompt: Prompt, text: str, tokens: Sequence[int]) -> None:
        """Remember an answer to a prompt, unless the prompt is forgotten already.

        Args:
            text: Text of the answer, special tokens included.
            tokens: Its tokens, both without a token that ended it.
        """
        entries = self._scopes.get(prompt.scope, [])
        at = bisect_right(entries, prompt.text, key=_text_of)
        entry, agreed = _longest(entries[max(0, at - 1) : at + 1], prompt.text)
        if entry is None or agreed < len(prompt.text) or not tokens:
            return
        known = prompt.start.tokens
        if not np.array_equal(entry.tokens[:known], prompt.tokens[:known]):
            return
        ids = np.concatenate((prompt.tokens[known:], np.array(tokens, np.int32)))
        answer = Answer(prompt.start, len(prompt.text), text, ids, len(tokens))
        entry.answers = [*entry.answers, answer][-ANSWERS_MAX:]
        self._use(entry)
        self._count(entry)

    def forget(self, salt: bytes) -> None:
        """Forget all prompts whose salt begins with `salt`, of all models and adapters."""
        for scope in [scope for scope in self._scopes if without_adapter(scope[1]).startswith(salt)]:
            for entry in self._scopes.pop(scope):
                del self._used[entry]
                self.bytes -= entry.size

    def _put(self, new: Entry, start: Border) -> None:
        """Keep an entry, unless another one continues it. `start`: its last border."""
        entries = self._scopes.setdefault(new.scope, [])
        at = bisect_right(entries, new.text, key=_text_of)
        after = entries[at] if at < len(entries) else None
        if (
            after is not None
            and after.text.startswith(new.text)
            and agreed_tokens(after.tokens, new.tokens) >= start.tokens
        ):
            self._use(after)
            return
        before = entries[at - 1] if at else None
        if before is not None and new.text.startswith(before.text):
            agreed = agreed_tokens(before.tokens, new.tokens)
            new.answers = [answer for answer in before.answers if answer.start.tokens <= agreed]
            entries[at - 1] = new
            self._used.pop(before)
            self.bytes -= before.size
        else:
            entries.insert(at, new)
        self._used[new] = None
        self._count(new)

    def _use(self, entry: Entry) -> None:
        del self._used[entry]
        self._used[entry] = None

    def _count(self, entry: Entry) -> None:
        """Count an entry that is new or has grown, and forget others, or even this one, if there is no room."""
        size = entry.measured()
        self.bytes += size - entry.size
        entry.size = size
        while self.bytes > self.bytes_max:
            self._drop(next(iter(self._used)))

    def _drop(self, entry: Entry) -> None:
        entries = self._scopes[entry.scope]
        at = bisect_right(entries, entry.text, key=_text_of)
        while entries[at - 1] is not entry:
            at -= 1
        del entries[at - 1]
        if not entries:
            del self._scopes[entry.scope]
        del self._used[entry]
        self.bytes -= entry.size


def _text_of(entry: Entry) -> str:
    return entry.text


def _longest(entries: Sequence[Entry], text: str) -> tuple[Entry | None, int]:
    """Return the entry that has the longest beginning in common with a text, and the length of that."""
    found: Entry | None = None
    longest = 0
    for entry in entries:
        agreed = agreed_length(entry.text, text)
        if agreed > longest:
            found, longest = entry, agreed
    return found, longest


def _agreed_places(entry: Entry, agreed: int, borders: BorderTokens) -> int:
    """Return how many of an entry's borders are borders of a text that agrees with it so far, too: the special
    token must be whole."""
    count = int(np.searchsorted(entry.places[:, 0], agreed, "right"))
    while count:
        characters, tokens = entry.places[count - 1].tolist()
        if characters + len(borders.contents[int(entry.tokens[tokens])]) <= agreed:
            break
        count -= 1
    return count


def agreed_tokens(one: Int32Array, other: Int32Array) -> int:
    """Return how many first tokens of two texts agree. Nothing is compared where both are the same memory."""
    length = min(len(one), len(other))
    if length and one.ctypes.data == other.ctypes.data:
        return length
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _spliced(
    entry: Entry,
    text: str,
    least: int,
    most: int,
    borders: BorderTokens,
    same: ReadsSame,
    *,
    alike: int,
) -> Reuse | None:
    """Return what is known of a text with one of an entry's answers; None: none of them is in it.

    Args:
        least: Answers whose prompts are not longer than this are not looked at.
        most: Neither are those whose prompts are longer: the text begins like no entry so far.
        alike: Number of first characters that the text is known to have in common with the entry's.
    """
    contents: frozenset[str] | None = None
    for answer in reversed(entry.answers):
        if not least < answer.prompt <= most:
            continue
        if answer.prompt > alike and not text.startswith(entry.text[: answer.prompt]):
            continue
        if contents is None:
            ids = np.sort(entry.tokens[entry.places[:, 1]])  # `np.unique` would import much of NumPy first
            marks = ids[np.flatnonzero(np.diff(ids, prepend=-1))][:_END_TOKENS_MAX].tolist()
            contents = borders.ends | borders.of(marks)
        end = _end_of(answer, text, contents | borders.of(answer.tokens.tolist()), same)
        if end:
            before = int(np.searchsorted(entry.places[:, 0], answer.start.characters, "right"))
            start = answer.start.tokens
            memory = entry.memory.extended(start, answer.tokens)
            tokens, names = memory.first(start + len(answer.tokens)), entry.first_names(start)
            return Reuse(end, tokens, entry.places[:before], answer.written, names, memory)
    return None


def _end_of(answer: Answer, text: str, contents: frozenset[str], same: ReadsSame) -> int:
    """Return where the template's form of an answer ends in a text; 0: it is not there."""
    exact = answer.prompt + len(answer.text)
    if text.startswith(answer.text, answer.prompt) and (
        exact == len(text) or any(text.startswith(content, exact) for content in contents)
    ):
        return exact
    before = text[max(0, answer.prompt - PROMPT_END_CHARACTERS) : answer.prompt]
    said, room = answer.text.strip(), READ_CHARACTERS_MAX
    for end in islice(starts(text, contents, answer.prompt), _ENDS_MAX):
        if end - answer.prompt > _LONGER_MAX * len(answer.text) + PROMPT_END_CHARACTERS:
            break
        shown = text[answer.prompt : end]
        room -= len(answer.text) + len(shown)
        if shown.strip() == said or (room >= 0 and same(before, answer.text, shown)):
            return end
    return 0
