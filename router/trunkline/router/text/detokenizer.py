"""Turn tokens into text one by one, and find stop strings in that text. Pure.

Each piece of text is final and never ends inside a character. Two families of tokenizers cover nearly every model,
and the text of both can be streamed exactly:

- *Byte-level* (GPT-2, Llama 3, Qwen, …): each token is a string of bytes; text is their concatenation
  read as UTF-8, undecodable parts replaced by U+FFFD.
- *Spaces* (SentencePiece: Llama 2, Mistral, Gemma, …): each token is text in which `▁` is a space, or one
  raw byte `<0x..>`. Some strip the space in front of the very first word.

A `TokenVocabulary` knows the bytes of each token. A `Detokenizer` holds the state of one text: at most three bytes
of an unfinished character. The cost per token is constant, while decoding a window again and again, the usual way,
is quadratic when a model emits undecodable bytes. Other decoders use such a window, of bounded length.

In the spaces family, `tokenizers.decode` replaces a whole run of byte tokens if one of its bytes is bad. Text that
was sent cannot be changed, so here good characters of such a run stay and only bad bytes are replaced. Valid runs
give the same text.

A `StopMatcher` finds stop strings and expressions across boundaries of tokens. Its result does not depend on how
the text is cut into pieces. The match with the smallest end position wins; of several that end there, the longest.
Text is held back only while it may be the beginning of a match.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from trunkline.router.text.stop_expressions import ExpressionScanner, StopExpression

REPLACEMENT: Final = "\ufffd"
_SPACE_MARK: Final = "▁"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW_TOKENS_MAX: Final = 16
"""Largest number of tokens of a window. After them its text is shown although it cannot be decoded completely
yet."""


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for the 256 bytes: printable Latin-1 stands for itself, and the other
    bytes follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_LEVEL: Final = _byte_level_alphabet()

Family = Literal["byte_level", "spaces", "other"]


class DecoderKind(NamedTuple):
    """The way in which a tokenizer's `decoder` joins tokens to text."""

    family: Family
    strip_leading_spaces: int = 0
    """Largest number of spaces that are removed from the front of a text (spaces family)."""
    drop_first_marks: bool = False
    """Whether the first token loses all its space marks (the `Metaspace` decoder)."""
    byte_tokens: bool = False
    """Whether tokens like `<0x0A>` are raw bytes."""


def classify_decoder(decoder: dict[str, Any] | None) -> DecoderKind:
    """Return the kind of a decoder, given the `decoder` section of a `tokenizer.json`."""
    if decoder is None:
        return DecoderKind("other")
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"]:
        return DecoderKind("byte_level")
    if types == ["Metaspace"] and parts[0].get("replacement", _SPACE_MARK) == _SPACE_MARK:
        never = parts[0].get("prepend_scheme", "always") == "never" or parts[0].get("add_prefix_space") is False
        return DecoderKind("spaces", drop_first_marks=not never)
    strip = 0
    for part in parts:
        if part["type"] == "Replace":
            if part.get("pattern") != {"String": _SPACE_MARK} or part.get("content") != " ":
                return DecoderKind("other")
        elif part["type"] == "Strip":
            if part.get("content") != " " or part.get("stop", 0) != 0:
                return DecoderKind("other")
            strip += part.get("start", 0)
        elif part["type"] not in ("ByteFallback", "Fuse"):
            return DecoderKind("other")
    if "Replace" not in types or (strip and types[-2:] != ["Fuse", "Strip"]):
        return DecoderKind("other")
    return DecoderKind("spaces", strip_leading_spaces=strip, byte_tokens="ByteFallback" in types)


class TokenPiece(NamedTuple):
    """The bytes of one token."""

    data: bytes
    raw: bool
    """Whether `data` may be a part of a character. False: it is whole UTF-8 text."""
    text: str | None = None
    """The text of a raw token whose bytes are whole characters, as nearly all are; None: another one."""


class TokenStrings(Protocol):
    """The part of `tokenizers.Tokenizer` that detokenizers need."""

    def id_to_token(self, id: int) -> str | None: ...
    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str: ...


class TokenVocabulary:
    """The bytes of each token of a tokenizer, looked up when a token is first met."""

    def __init__(self, tokens: TokenStrings, decoder: dict[str, Any] | None, special: Collection[int]) -> None:
        self.tokens = tokens
        self.kind = classify_decoder(decoder)
        self.special = frozenset(special)
        make: Callable[[str], TokenPiece] = {
            "byte_level": _byte_level_piece,
            "spaces": _spaces_piece_with_bytes if self.kind.byte_tokens else _spaces_piece,
            "other": _spaces_piece,
        }[self.kind.family]
        self.pieces = _Pieces(tokens, make)
        """Each token's bytes."""

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, as log-probabilities report them."""
        return self.pieces[token].data

    def token_text(self, token: int) -> str:
        """Return a single token as text; bytes that are no characters become U+FFFD."""
        return self.pieces[token].data.decode("utf-8", "replace")


class _Pieces(dict[int, TokenPiece]):
    """The bytes of tokens, made when a token is first met. An unknown id has none: embeddings are often padded."""

    def __init__(self, tokens: TokenStrings, make: Callable[[str], TokenPiece]) -> None:
        super().__init__()
        self._tokens = tokens
        self._make = make

    def __missing__(self, token: int) -> TokenPiece:
        text = self._tokens.id_to_token(token) if token >= 0 else None
        piece = self[token] = TokenPiece(b"", False) if text is None else self._make(text)
        return piece


def _byte_level_piece(text: str) -> TokenPiece:
    values = [_BYTE_LEVEL.get(character, -1) for character in text]
    if -1 in values:  # an added token with characters outside the alphabet stands for itself
        return _raw_piece(text.encode("utf-8", "replace"))
    return _raw_piece(bytes(values))


def _raw_piece(data: bytes) -> TokenPiece:
    try:
        return TokenPiece(data, True, data.decode())
    except UnicodeDecodeError:
        return TokenPiece(data, True)


def _spaces_piece(text: str) -> TokenPiece:
    return TokenPiece(text.replace(_SPACE_MARK, " ").encode("utf-8", "replace"), False)


def _spaces_piece_with_bytes(text: str) -> TokenPiece:
    match = _BYTE_TOKEN.fullmatch(text)
    return TokenPiece(bytes([int(match[1], 16)]), True) if match else _spaces_piece(text)


class Detokenizer(Protocol):
    """The state of one text that is made from tokens, one by one."""

    def feed(self, token: int) -> str:
        """Take the next token; return the text that is final now."""

    def flush(self) -> str:
        """Return the text of an unfinished character at the end of the tokens."""


class _ByteLevelDetokenizer:
    """Concatenates bytes and decodes them as UTF-8."""

    __slots__ = ("_decoder", "_is_inside", "_pieces", "_skip")

    def __init__(self, vocabulary: TokenVocabulary, skip: frozenset[int]) -> None:
        self._pieces = vocabulary.pieces
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False
        """Whether the text ends inside a character."""

    def feed(self, token: int) -> str:
        if token in self._skip:
            return ""
        piece = self._pieces[token]
        if piece.text is not None and not self._is_inside:
            return piece.text
        text = self._decoder.decode(piece.data)
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _SpacesDetokenizer:
    """Joins whole texts with runs of raw bytes between them."""

    def __init__(self, vocabulary: TokenVocabulary, skip: frozenset[int], *, at_start: bool) -> None:
        self._pieces = vocabulary.pieces
        self._skip = skip
        self._pending = b""
        self._strip = vocabulary.kind.strip_leading_spaces if at_start else 0
        self._drop_marks = vocabulary.kind.drop_first_marks and at_start

    def feed(self, token: int) -> str:
        if token in self._skip:
            return ""
        data, raw, _ = self._pieces[token]
        if raw:
            self._pending += data
            text = self._take_characters()
        else:
            text = self.flush() + data.decode()
        if self._drop_marks:
            self._drop_marks = False
            text = text.replace(" ", "")
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text

    def _take_characters(self) -> str:
        text = ""
        while self._pending:
            try:
                text += self._pending.decode()
                self._pending = b""
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text += REPLACEMENT
                self._pending = self._pending[1:]
        return text

    def flush(self) -> str:
        text = REPLACEMENT * len(self._pending)  # one per byte, as `tokenizers` does
        self._pending = b""
        return text


class _WindowDetokenizer:
    """Works with any decoder: decodes the last few tokens again and again and shows text that no longer
    changes."""

    def __init__(self, vocabulary: TokenVocabulary, skip: frozenset[int]) -> None:
        self._decode = vocabulary.tokens.decode
        self._skip = skip
        self._context: list[int] = []
        self._window: list[int] = []

    def feed(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._window.append(token)
        return self._advance(force=len(self._window) >= _WINDOW_TOKENS_MAX)

    def flush(self) -> str:
        return self._advance(force=True) if self._window else ""

    def _advance(self, *, force: bool) -> str:
        before = self._decode(self._context, skip_special_tokens=False) if self._context else ""
        after = self._decode(self._context + self._window, skip_special_tokens=False)
        if after.endswith(REPLACEMENT) and not force:
            return ""
        self._context, self._window = self._window, []
        return after[len(before) :]


def make_detokenizer(
    vocabulary: TokenVocabulary, *, skip_special_tokens: bool = True, at_start: bool = True
) -> Detokenizer:
    """Make the detokenizer for one text.

    Args:
        at_start: False if the text continues another one, as a completion does: then its leading space stays.
    """
    skip = vocabulary.special if skip_special_tokens else frozenset[int]()
    if vocabulary.kind.family == "byte_level":
        return _ByteLevelDetokenizer(vocabulary, skip)
    if vocabulary.kind.family == "spaces":
        return _SpacesDetokenizer(vocabulary, skip, at_start=at_start)
    return _WindowDetokenizer(vocabulary, skip)


class StopText(NamedTuple):
    """The result of `StopMatcher.feed`."""

    text: str
    """Text that may be shown now."""
    stop: str | None
    """The stop string or expression that was found; after that the matcher must not be fed again."""


class StopMatcher:
    """Looks for several stop strings and expressions in one text."""

    def __init__(
        self, stops: Sequence[str] = (), expressions: Sequence[StopExpression] = (), *, include: bool = False
    ) -> None:
        """Begin with an empty text. `include`: whether the text that is shown includes the match.

        Raises:
            ValueError: A stop string is empty; it would match everywhere.
        """
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._scanner = ExpressionScanner(expressions) if expressions else None
        self._include = include
        self._held = ""

    def feed(self, text: str) -> StopText:
        """Take the next piece of text; return the text that may be shown."""
        if not self._stops and self._scanner is None:
            return StopText(text, None)
        held, text = len(self._held), self._held + text
        found = self._find(text)
        keep = 0
        if self._scanner is not None:
            shown = self._scanner.position - held
            match = self._scanner.feed(text[held:])
            if match is not None:
                other = match.end - shown, match.start - shown, match.expression
                found = other if found is None or other[:2] < found[:2] else found
            keep = self._scanner.position - self._scanner.open_from
        if found is not None:
            end, start, stop = found
            self._held = ""
            return StopText(text[:end] if self._include else text[:start], stop)
        cut = len(text) - max(keep, self._held_length(text))
        self._held = text[cut:]
        return StopText(text[:cut], None)

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int, str] | None:
        """Return the end and the beginning of the first stop string, and the string."""
        best: tuple[int, int, str] | None = None
        best_end = len(text) + 1
        for stop in self._stops:  # longest first, so that a tie in the end goes to the longest
            start = text.find(stop, 0, min(best_end, len(text)))
            if start >= 0 and start + len(stop) < best_end:
                best_end = start + len(stop)
                best = best_end, start, stop
        return best

    def _held_length(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            position = len(text) - length
            if text[position] in self._first_characters and any(
                len(stop) > length and text.startswith(stop[:length], position) for stop in self._stops
            ):
                return length
        return 0
