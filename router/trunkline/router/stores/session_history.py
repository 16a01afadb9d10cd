"""The history of a stored session, and how the next prompt reuses its token ids. Pure.

A history has the session's messages. Of the last turn it also has the text of prompt and answer, with the token
ids that the engine saw. The next prompt is rendered from all messages. Where it begins with the stored text, the
stored ids are used, and only the rest is tokenised. This way an answer hits the cache even if tokenising its text
would give other tokens than the model chose, which is common.

A template may rewrite what it showed before, for example the reasoning of earlier turns. Then the texts differ
from some place on, and the tokens up to that place are reused. *Marks* and the text of the tokens after the last
mark show where that place is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router.text.borders import agreed_length
from trunkline.router.text.conversation_memory import common_length
from trunkline.router.text.detokenizer import TokenVocabulary, make_detokenizer
from trunkline.router.text.truncation import TokenSpan, clip_spans

Form = Literal["", "chat", "text", "items"]
"""The kind of requests that a history is used for: "chat" conversations, "text" plain completions, "items"
requests to `/v1/responses`, "" not decided yet."""
_MARKS_MAX: Final = 4096
"""Largest number of marks in a history. If there are more, every second mark of the older half is dropped."""


class HistoryMark(NamedTuple):
    """A place in a history where a token begins exactly where a character does."""

    characters: int
    tokens: int


class History(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The history of a session. It never changes: each turn makes another one, so histories may be shared."""

    form: Form = ""
    messages: list[dict[str, Any]] = []
    """Messages in OpenAI's form, answers included; of the form "items", items of `/v1/responses`. Empty for plain
    completions."""
    text: str = ""
    """Text of the last prompt and its answer, with special tokens written out and without the text of modules."""
    tokens: bytes = b""
    """Token ids of `text`, as int32."""
    vocabulary: str = ""
    """Fingerprint of the tokenizer that `tokens` belong to."""
    marks: list[HistoryMark] = []
    """Ends of prompts and answers, ascending."""
    discards: list[TokenSpan] = []
    """Tokens that no later request sees, merged."""

    @property
    def token_count(self) -> int:
        """Tokens of the history."""
        return len(self.tokens) // 4

    def ids(self) -> list[int]:
        """Return the token ids of the history."""
        ids: list[int] = unpack_int32(self.tokens).tolist()
        return ids

    def answered(self, prompt: KnownPrompt, answer: Sequence[int], vocabulary: TokenVocabulary) -> History:
        """Return the history of a prompt and its answer. Discards within the reused tokens are kept."""
        reused = prompt.reused_tokens
        agreed = prompt.agreed if prompt.agreed >= 0 else agreed_length(self.text, prompt.text)
        text = prompt.text + text_of(answer, vocabulary)
        new = pack_int32([*prompt.tokens[reused:], *answer])
        tokens = b"".join((memoryview(self.tokens)[: 4 * reused], new))
        kept = min(
            bisect_right(self.marks, reused, key=_tokens_of), bisect_right(self.marks, agreed, key=_characters_of)
        )
        ends = HistoryMark(len(prompt.text), len(prompt.tokens)), HistoryMark(len(text), len(tokens) // 4)
        return replace(
            self,
            text=text,
            tokens=tokens,
            marks=_joined(self.marks[:kept], (*prompt.marks, *ends)),
            discards=list(clip_spans(self.discards, reused)),
        )

    def shown(self, mark: HistoryMark, text: str, rest: Sequence[int]) -> History:
        """Return the history of `text`: the same tokens up to `mark`, then the tokens `rest`."""
        tokens = self.tokens[: 4 * mark.tokens] + pack_int32(list(rest))
        marks = [each for each in self.marks if each.tokens <= mark.tokens]
        return replace(self, text=text, tokens=tokens, marks=[*marks, HistoryMark(len(text), len(tokens) // 4)])

    def in_vocabulary(self, fingerprint: str) -> History:
        """Return the history for a tokenizer: without token ids, if they are another tokenizer's."""
        if self.vocabulary == fingerprint:
            return self
        return replace(self, vocabulary=fingerprint, tokens=b"", marks=[], discards=[])


class KnownPrompt(msgspec.Struct):
    """A prompt whose first tokens come from a history."""

    text: str
    tokens: Sequence[int]
    reused_tokens: int
    """Number of first tokens taken from the history."""
    marks: tuple[HistoryMark, ...] = ()
    """Places behind what a template has written otherwise than the history has it."""
    agreed: int = -1
    """Number of first characters that `text` and the history's text have in common; -1: not known."""


class PromptPart(NamedTuple):
    """A part of a prompt that is tokenised on its own."""

    text: str
    tokens: list[int]
    plain: bool
    """Whether special tokens written in `text` count as plain text."""


class Split(NamedTuple):
    """The rest of a prompt part whose beginning is in the history."""

    rest: str
    plain: bool


def parts_behind(parts: Sequence[PromptPart], mark: HistoryMark) -> tuple[Split | None, list[int]]:
    """Return what follows a mark in `parts`: the rest of the part that the mark splits, and the tokens of later
    ones."""
    split: Split | None = None
    tokens: list[int] = []
    place = 0
    for part in parts:
        end = place + len(part.text)
        if place >= mark.characters:
            tokens += part.tokens
        elif end > mark.characters:
            split = Split(part.text[mark.characters - place :], part.plain)
        place = end
    return split, tokens


_tokens_of, _characters_of = attrgetter("tokens"), attrgetter("characters")


def _joined(marks: list[HistoryMark], more: Iterable[HistoryMark]) -> list[HistoryMark]:
    """Return ascending marks with ascending ones behind them: each once, thinned out if there are too many."""
    for mark in more:
        last = marks[-1] if marks else HistoryMark(0, 0)
        if mark.tokens >= max(1, last.tokens) and mark.characters >= last.characters and mark != last:
            marks.append(mark)
    if len(marks) <= _MARKS_MAX:
        return marks
    half = len(marks) // 2
    return marks[:half:2] + marks[half:]


def text_of(tokens: Sequence[int], vocabulary: TokenVocabulary) -> str:
    """Return the text of tokens that follow other tokens, special tokens included."""
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=False, at_start=False)
    return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()


def common_mark(history: History, text: str, vocabulary: TokenVocabulary) -> HistoryMark:
    """Return how much of the beginning of `text` the history's tokens can replace."""
    end = HistoryMark(len(history.text), history.token_count)
    if text.startswith(history.text):
        return end
    agreed = common_length(history.text, text)
    marks = [HistoryMark(0, 0), *history.marks, end]
    last = max(index for index, mark in enumerate(marks) if mark.characters <= agreed)
    return _within(history, marks[last], marks[last + 1], agreed, vocabulary)


def _within(
    history: History, start: HistoryMark, stop: HistoryMark, agreed: int, vocabulary: TokenVocabulary
) -> HistoryMark:
    """Return the last place between two marks, within `agreed` characters, where a token ends between
    characters."""
    ids = unpack_int32(history.tokens)[start.tokens : stop.tokens].tolist()
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=False, at_start=start.tokens == 0)
    found, characters = start, start.characters
    for index, token in enumerate(ids):
        piece = detokenizer.feed(token)
        if not history.text.startswith(piece, characters) or characters + len(piece) > agreed:
            break
        characters += len(piece)
        if piece:
            found = HistoryMark(characters, start.tokens + index + 1)
    # A token may end in the middle of a character: its text is not whole.
    whole = ids[: found.tokens - start.tokens]
    if text_of(whole, vocabulary).lstrip() != history.text[start.characters : found.characters].lstrip():
        return start
    return found


def token_at(history: History, characters: int, vocabulary: TokenVocabulary) -> int | None:
    """Return the index of the first token whose text begins at `characters` or later; None if text and tokens
    differ."""
    if characters >= len(history.text):
        return history.token_count
    marks = [HistoryMark(0, 0), *history.marks]
    start = max((mark for mark in marks if mark.characters <= characters), key=lambda mark: mark.characters)
    position, ids = start.characters, unpack_int32(history.tokens)[start.tokens :].tolist()
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=False, at_start=start.tokens == 0)
    for index, token in enumerate(ids):
        if position >= characters:
            return start.tokens + index
        piece = detokenizer.feed(token)
        if not history.text.startswith(piece, position):
            return None
        position += len(piece)
    return history.token_count
