"""What a session remembers, and how its next prompt is put together from it. Pure.

A session keeps its messages and, of its last turn, the text of prompt and answer with the very token ids that the
engine saw. The next prompt's text is rendered anew from all messages; as far as it begins with the remembered text
its tokens are the remembered ones, and only the rest is tokenised. So an answer whose tokens are not the ones that
tokenising its text would give (they often are not) still hits the cache.

Where a template rewrites what it showed before (the reasoning of earlier turns, say), the texts part; then the
tokens up to that place are kept, found by *marks* and by the text of the tokens behind the last mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from trunkline.kvstore.int32_codec import pack_int32, unpack_int32
from trunkline.router.text.detokenizer import TokenVocabulary, make_detokenizer
from trunkline.router.text.truncation import RetentionPolicy, TokenSpan, clip_spans

Form = Literal["", "chat", "text"]
"""What a session is used for: not decided yet, conversations, plain completions."""
_MARKS_MAX = 4096
"""Of a longer history the oldest are thinned out."""
_TAKE_BACK_MAX = 256 << 10
"""A turn that replaced more characters and bytes of tokens than this cannot be taken back: records have limits."""


class HistoryMark(NamedTuple):
    """A place in a history where its text and its tokens can be parted."""

    characters: int
    tokens: int


class SessionModules(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt of a schema's modules, which stands in front of every turn."""

    source: str | dict[str, Any]
    """PML, or the object that says the same."""
    trailing: Literal["fixed", "compact"] = "fixed"
    salt: str = ""
    """With which the schema is found, and KV shared."""
    schema: str = ""
    """Its name, as it is told."""


class LastTurn(msgspec.Struct, frozen=True, array_like=True):
    """How a session's last turn is taken back: what its request found. The history mostly only grew, so most of
    that is still there."""

    request: bytes
    """The request's name (`request_context.py`)."""
    form: Form
    vocabulary: str
    messages: int
    """There were so many."""
    characters: int
    """The text's first ones that are the same …"""
    text: str
    """… and what followed them."""
    tokens: int
    """Likewise."""
    rest: bytes
    marks: list[HistoryMark]
    discards: list[TokenSpan]


class SessionState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A stored session: the value of its record, in MessagePack. Fields may be added, with defaults."""

    model: str
    form: Form = ""
    messages: list[dict[str, Any]] = []
    """In OpenAI's form, answers included; of a conversation only."""
    text: str = ""
    """Of the last prompt and its answer, special tokens written out; what `modules` bring is not part of it."""
    tokens: bytes = b""
    """The same as int32 ids."""
    vocabulary: str = ""
    """Fingerprint of the tokenizer that `tokens` belong to."""
    marks: list[HistoryMark] = []
    """Ascending: where prompts and answers ended."""
    discards: list[TokenSpan] = []
    """Tokens that no later request sees, merged."""
    truncation: RetentionPolicy | None = None
    """None: requests that do not fit are refused."""
    ttl: float = 0.0
    """Seconds without use after which it is forgotten, as the client wanted it; 0: it did not say."""
    metadata: dict[str, str] = {}
    turns: int = 0
    parent: str = ""
    """The session that it was forked from."""
    modules: SessionModules | None = None
    last: LastTurn | None = None
    """Of a request that may come again."""

    @property
    def token_count(self) -> int:
        """Of the history."""
        return len(self.tokens) // 4

    def ids(self) -> list[int]:
        """The history's tokens."""
        ids: list[int] = unpack_int32(self.tokens).tolist()
        return ids

    def remember(self, prompt: KnownPrompt, answer: Sequence[int], vocabulary: TokenVocabulary) -> None:
        """The history is now a prompt and the answer to it. Discards stay where the prompt kept the tokens."""
        self.discards = list(clip_spans(self.discards, prompt.reused_tokens))
        kept = [mark for mark in self.marks if mark.tokens <= prompt.reused_tokens]
        self.text = prompt.text + text_of(answer, vocabulary)
        self.tokens = pack_int32([*prompt.tokens, *answer])
        marks = [
            *kept,
            HistoryMark(len(prompt.text), len(prompt.tokens)),
            HistoryMark(len(self.text), self.token_count),
        ]
        self.marks = _thinned([mark for mark in marks if mark.tokens])

    def show(self, mark: HistoryMark, text: str, rest: Sequence[int]) -> None:
        """The history ends in `text` instead: the same up to `mark`, then `rest`, which is its tokens."""
        self.tokens = self.tokens[: 4 * mark.tokens] + pack_int32(list(rest))
        self.text = text
        self.marks = [each for each in self.marks if each.tokens <= mark.tokens]
        self.marks.append(HistoryMark(len(text), self.token_count))

    def begin_turn(self, request: bytes) -> None:
        """A request is to be answered. If the last turn is its own, made when it came before, that is taken back.

        Args:
            request: its name; b"": it has none.
        """
        last = self.last
        if last is None or not request or last.request != request:
            return
        self.form, self.vocabulary, self.last = last.form, last.vocabulary, None
        self.messages = self.messages[: last.messages]
        self.text = self.text[: last.characters] + last.text
        self.tokens = self.tokens[: 4 * last.tokens] + last.rest
        self.marks, self.discards = last.marks, last.discards
        self.turns -= 1

    def end_turn(self, request: bytes, before: SessionState) -> None:
        """It was answered. `before`: the session as `begin_turn` left it."""
        self.turns += 1
        self.last = None
        characters = common_length(before.text, self.text)
        tokens = _common_tokens(before.tokens, self.tokens)
        text, rest = before.text[characters:], before.tokens[4 * tokens :]
        if request and len(text) + len(rest) <= _TAKE_BACK_MAX:
            self.last = LastTurn(
                request,
                before.form,
                before.vocabulary,
                len(before.messages),
                characters,
                text,
                tokens,
                rest,
                before.marks,
                before.discards,
            )

    def forget_tokens(self) -> None:
        """They are another tokenizer's: only messages and text stay."""
        self.tokens, self.marks, self.discards = b"", [], []


class KnownPrompt(msgspec.Struct):
    """A prompt made from a history."""

    text: str
    tokens: list[int]
    reused_tokens: int
    """First ones that are the history's own."""


class PromptPart(NamedTuple):
    """A piece of a prompt that is tokenised by itself."""

    text: str
    tokens: list[int]
    plain: bool
    """Whether special tokens that are written in it are text."""


class Split(NamedTuple):
    """A part of which a history holds the beginning."""

    rest: str
    plain: bool


def parts_behind(parts: Sequence[PromptPart], mark: HistoryMark) -> tuple[Split | None, list[int]]:
    """What follows a mark in the text of `parts`: the rest of one that it splits, and the others' tokens."""
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


def _thinned(marks: list[HistoryMark]) -> list[HistoryMark]:
    unique = list(dict.fromkeys(marks))
    if len(unique) <= _MARKS_MAX:
        return unique
    half = len(unique) // 2
    return unique[:half:2] + unique[half:]


def text_of(tokens: Sequence[int], vocabulary: TokenVocabulary) -> str:
    """What tokens write behind other tokens, special ones included."""
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=False, at_start=False)
    return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()


def common_length(one: str, other: str) -> int:
    """Length of the longest text with which both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_tokens(one: bytes, other: bytes) -> int:
    """With how many tokens both begin."""
    length = min(len(one), len(other)) // 4
    differing = (unpack_int32(one)[:length] != unpack_int32(other)[:length]).nonzero()[0]
    return int(differing[0]) if len(differing) else length


def common_mark(session: SessionState, text: str, vocabulary: TokenVocabulary) -> HistoryMark:
    """As far as a history's tokens can stand for the beginning of `text`."""
    end = HistoryMark(len(session.text), session.token_count)
    if text.startswith(session.text):
        return end
    agreed = common_length(session.text, text)
    marks = [HistoryMark(0, 0), *session.marks, end]
    last = max(index for index, mark in enumerate(marks) if mark.characters <= agreed)
    return _within(session, marks[last], marks[last + 1], agreed, vocabulary)


def _within(
    session: SessionState, start: HistoryMark, stop: HistoryMark, agreed: int, vocabulary: TokenVocabulary
) -> HistoryMark:
    """The last place between two marks, and before `agreed` characters, where a token's text ends whole."""
    ids = unpack_int32(session.tokens)[start.tokens : stop.tokens].tolist()
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=False, at_start=start.tokens == 0)
    found, characters = start, start.characters
    for index, token in enumerate(ids):
        piece = detokenizer.feed(token)
        if not session.text.startswith(piece, characters) or characters + len(piece) > agreed:
            break
        characters += len(piece)
        if piece:
            found = HistoryMark(characters, start.tokens + index + 1)
    # A token may end in the middle of a character: its text is not whole.
    whole = ids[: found.tokens - start.tokens]
    if text_of(whole, vocabulary).lstrip() != session.text[start.characters : found.characters].lstrip():
        return start
    return found


def token_at(session: SessionState, characters: int, vocabulary: TokenVocabulary) -> int | None:
    """Index of the first of a history's tokens whose text begins at `characters` or later; None: there is none."""
    if characters >= len(session.text):
        return session.token_count
    marks = [HistoryMark(0, 0), *session.marks]
    start = max((mark for mark in marks if mark.characters <= characters), key=lambda mark: mark.characters)
    position, ids = start.characters, unpack_int32(session.tokens)[start.tokens :].tolist()
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=False, at_start=start.tokens == 0)
    for index, token in enumerate(ids):
        if position >= characters:
            return start.tokens + index
        piece = detokenizer.feed(token)
        if not session.text.startswith(piece, position):
            return None
        position += len(piece)
    return session.token_count


def pack_session(session: SessionState) -> bytes:
    """The record's value."""
    return msgspec.msgpack.encode(session)


def unpack_session(value: bytes) -> SessionState:
    """From a record's value.

    Raises:
        ValueError: it is none (any more).
    """
    try:
        return msgspec.msgpack.decode(value, type=SessionState)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a session: {error}") from error
