"""The history of a stored session, and how the next prompt reuses its token ids. Pure.

A session keeps its messages. Of its last turn it also keeps the text of prompt and answer, with the token ids that
the engine saw. The next prompt is rendered from all messages. Where it begins with the stored text, the stored ids
are used, and only the rest is tokenised. This way an answer hits the cache even if tokenising its text would give
other tokens than the model chose, which is common.

A template may rewrite what it showed before, for example the reasoning of earlier turns. Then the texts differ
from some place on, and the tokens up to that place are reused. *Marks* and the text of the tokens after the last
mark show where that place is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router.text.detokenizer import TokenVocabulary, make_detokenizer
from trunkline.router.text.truncation import RetentionPolicy, TokenSpan, clip_spans

Form = Literal["", "chat", "text"]
"""The kind of requests that a session is used for: "chat" conversations, "text" plain completions, "" not decided
yet."""
_MARKS_MAX = 4096
"""Largest number of marks in a history. If there are more, every second mark of the older half is dropped."""
_TAKE_BACK_MAX = 256 << 10
"""Largest number of characters and token bytes stored for undoing a turn. A turn that needs more cannot be undone,
because the size of records is bounded."""


class HistoryMark(NamedTuple):
    """A place in a history where a token begins exactly where a character does."""

    characters: int
    tokens: int


class SessionModules(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prompt of modules that precedes every turn of a session."""

    source: str | dict[str, Any]
    """PML, or the equivalent JSON object."""
    trailing: Literal["fixed", "compact"] = "fixed"
    salt: str = ""
    """`cache_salt` under which the schema is found and KV is shared."""
    schema: str = ""
    """Name of the schema, for answers to clients."""


class LastTurn(msgspec.Struct, frozen=True, array_like=True):
    """The data for undoing a session's last turn: the state before the turn, as a difference to the state after
    it."""

    request: bytes
    """Name of the turn's request (`request_context.py`)."""
    form: Form
    vocabulary: str
    messages: int
    """Number of messages before the turn."""
    characters: int
    """Number of characters at the beginning that the texts before and after the turn have in common."""
    text: str
    """The rest of the text before the turn, after the common beginning."""
    tokens: int
    """Number of tokens at the beginning that the token lists before and after the turn have in common."""
    rest: bytes
    """The rest of the tokens before the turn, after the common beginning, as int32."""
    marks: list[HistoryMark]
    discards: list[TokenSpan]


class SessionState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A stored session: the value of its record, in MessagePack. New fields need a default: old records lack
    them."""

    model: str
    form: Form = ""
    messages: list[dict[str, Any]] = []
    """Messages in OpenAI's form, answers included. Empty for plain completions."""
    text: str = ""
    """Text of the last prompt and its answer, with special tokens written out and without the text of
    `modules`."""
    tokens: bytes = b""
    """Token ids of `text`, as int32."""
    vocabulary: str = ""
    """Fingerprint of the tokenizer that `tokens` belong to."""
    marks: list[HistoryMark] = []
    """Ends of prompts and answers, ascending."""
    discards: list[TokenSpan] = []
    """Tokens that no later request sees, merged."""
    truncation: RetentionPolicy | None = None
    """How to cut a prompt that does not fit; None: it is refused."""
    ttl: float = 0.0
    """Seconds without use after which the session is deleted; 0: the client gave none."""
    metadata: dict[str, str] = {}
    turns: int = 0
    parent: str = ""
    """Id of the session that this one was forked from."""
    modules: SessionModules | None = None
    last: LastTurn | None = None
    """The last turn, if its request has a name under which it may be sent again."""

    @property
    def token_count(self) -> int:
        """Tokens of the history."""
        return len(self.tokens) // 4

    def ids(self) -> list[int]:
        """Return the token ids of the history."""
        ids: list[int] = unpack_int32(self.tokens).tolist()
        return ids

    def remember(self, prompt: KnownPrompt, answer: Sequence[int], vocabulary: TokenVocabulary) -> None:
        """Replace the history by a prompt and its answer. Discards within the reused tokens are kept."""
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
        """Replace the history by `text`: the same tokens up to `mark`, then the tokens `rest`."""
        self.tokens = self.tokens[: 4 * mark.tokens] + pack_int32(list(rest))
        self.text = text
        self.marks = [each for each in self.marks if each.tokens <= mark.tokens]
        self.marks.append(HistoryMark(len(text), self.token_count))

    def begin_turn(self, request: bytes) -> None:
        """Prepare for a request's turn. If the request was sent before and made the last turn, undo that turn.

        Args:
            request: The request's name; b"" if it has none.
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
        """Count a turn that was answered, and store how to undo it. `before`: the session as `begin_turn` left
        it."""
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
        """Drop token ids of another tokenizer. Messages and text stay."""
        self.tokens, self.marks, self.discards = b"", [], []


class KnownPrompt(msgspec.Struct):
    """A prompt whose first tokens come from a history."""

    text: str
    tokens: list[int]
    reused_tokens: int
    """Number of first tokens taken from the history."""


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


def _thinned(marks: list[HistoryMark]) -> list[HistoryMark]:
    unique = list(dict.fromkeys(marks))
    if len(unique) <= _MARKS_MAX:
        return unique
    half = len(unique) // 2
    return unique[:half:2] + unique[half:]


def text_of(tokens: Sequence[int], vocabulary: TokenVocabulary) -> str:
    """Return the text of tokens that follow other tokens, special tokens included."""
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=False, at_start=False)
    return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()


def common_length(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_tokens(one: bytes, other: bytes) -> int:
    """Return the number of tokens in the common beginning of two packed lists."""
    length = min(len(one), len(other)) // 4
    differing = (unpack_int32(one)[:length] != unpack_int32(other)[:length]).nonzero()[0]
    return int(differing[0]) if len(differing) else length


def common_mark(session: SessionState, text: str, vocabulary: TokenVocabulary) -> HistoryMark:
    """Return how much of the beginning of `text` the history's tokens can replace."""
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
    """Return the last place between two marks, within `agreed` characters, where a token ends between
    characters."""
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
    """Return the index of the first token whose text begins at `characters` or later; None if text and tokens
    differ."""
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
    """Return a session as the value of a record."""
    return msgspec.msgpack.encode(session)


def unpack_session(value: bytes) -> SessionState:
    """Return the session in the value of a record.

    Raises:
        ValueError: The value is not a session.
    """
    try:
        return msgspec.msgpack.decode(value, type=SessionState)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a session: {error}") from error
