"""Parse XML from untrusted clients strictly: no recovery from errors, no custom entities, bounded size.

A DOCTYPE is refused as soon as it begins, so no entity can expand (billion laughs) or be fetched (external
entities); expat itself knows only the five entities of XML. Processing instructions are refused and comments are
skipped. Every element and text has its line and column.
"""

from __future__ import annotations

from typing import Final, NoReturn
from xml.parsers import expat

from trunkline.router.pml.pml_error import ErrorCode, Mark, PmlError
from trunkline.router.pml.tree import DEPTH_MAX, NODES_MAX, SOURCE_BYTES_MAX

BLANKS: Final = " \t\n\r"
"""White space of XML. All other blanks are ordinary characters."""
_TEXT_BUFFER_BYTES: Final = 1 << 16
"""Size of expat's buffer for text, without which it reports text line by line. With it, a document of nothing but
line ends is read 30 times faster."""
_MARKUP_IN_TEXT: Final = frozenset(
    expat.errors.codes[text]
    for text in (
        expat.errors.XML_ERROR_INVALID_TOKEN,
        expat.errors.XML_ERROR_UNDEFINED_ENTITY,
        expat.errors.XML_ERROR_TAG_MISMATCH,
    )
)
"""Codes of expat's errors that a `<` or `&` in a text leads to."""
_MARKUP_HINT: Final = (
    ' (in text, write "&lt;" for "<" and "&amp;" for "&", or use a CDATA section or the JSON form)'
)


class Chars:
    """A text between two tags, without comments and the marks of CDATA sections."""

    __slots__ = ("mark", "text")

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        """Place of the first character, including white space."""
        self.text = ""

    def visible_mark(self) -> Mark:
        """Return the place of the first character other than white space."""
        blank = self.text[: len(self.text) - len(self.text.lstrip(BLANKS))]
        lines = blank.count("\n")
        if not lines:
            return Mark(self.mark.line, self.mark.column + len(blank))
        return Mark(self.mark.line + lines, len(blank) - blank.rindex("\n"))


class Element:
    """An element with its attributes and content."""

    __slots__ = ("attributes", "children", "mark", "tag")

    def __init__(self, tag: str, attributes: dict[str, str], mark: Mark) -> None:
        self.tag = tag
        self.attributes = attributes
        self.children: list[Element | Chars] = []
        self.mark = mark
        """Place of the element's `<`."""


def parse_markup(source: str | bytes) -> Element:
    """Parse a document in UTF-8; return its root element.

    Raises:
        PmlError: E_XML.
    """
    try:
        data = source.encode() if isinstance(source, str) else source
        data.decode()
    except UnicodeEncodeError as error:
        mark = _end_mark(error.object[: error.start])
        raise PmlError(ErrorCode.XML, f"the document is not Unicode text: {error.reason}", mark) from None
    except UnicodeDecodeError as error:
        mark = _end_mark(error.object[: error.start].decode())
        raise PmlError(ErrorCode.XML, f"the document is not text in UTF-8: {error.reason}", mark) from None
    if (zero := data.find(b"\0")) >= 0:
        # Expat would take a document that begins like UTF-16 for that.
        raise PmlError(ErrorCode.XML, "U+0000 is not allowed; remove it", _end_mark(data[:zero].decode()))
    if len(data) > SOURCE_BYTES_MAX:
        limit = f"allowed are {SOURCE_BYTES_MAX}; split the schema"
        raise PmlError(ErrorCode.XML, f"the document has {len(data)} bytes; {limit}")
    return _XmlReader(data).read()


def _end_mark(before: str) -> Mark:
    """Return the place after the first part of a document."""
    return Mark(before.count("\n") + 1, len(before) - before.rfind("\n"))


class _XmlReader:
    """Builds elements from the events of expat."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        # The encoding is given, so that no declaration can choose another one.
        parser = expat.ParserCreate(encoding="UTF-8")
        parser.buffer_size = _TEXT_BUFFER_BYTES
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.XmlDeclHandler = self._declaration
        parser.StartDoctypeDeclHandler = self._doctype
        parser.ProcessingInstructionHandler = self._instruction
        self._parser = parser
        self._root: Element | None = None
        self._open: list[Element] = []
        self._text: Chars | None = None
        self._parts: list[str] = []
        self._nodes = 0

    def read(self) -> Element:
        """Parse the whole document; return its root element."""
        try:
            self._parser.Parse(self._source, True)
        except expat.ExpatError as error:
            reason = expat.errors.messages[error.code]
            mark = Mark(error.lineno, error.offset + 1)
            hint = _MARKUP_HINT if error.code in _MARKUP_IN_TEXT else ""
            raise PmlError(ErrorCode.XML, f"not well-formed XML: {reason}{hint}", mark) from None
        assert self._root is not None, "expat takes no document without a root"
        return self._root

    def _mark(self) -> Mark:
        return Mark(self._parser.CurrentLineNumber, self._parser.CurrentColumnNumber + 1)

    def _refuse(self, message: str, mark: Mark | None = None) -> NoReturn:
        raise PmlError(ErrorCode.XML, message, mark or self._mark())

    def _count_node(self) -> None:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            self._refuse(f"the document has more than {NODES_MAX} elements and texts; split the schema")

    def _finish_text(self) -> None:
        if self._text is not None:
            self._text.text = "".join(self._parts)
            self._text = None
            self._parts = []
        self._parser.buffer_text = False

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._finish_text()
        self._count_node()
        if len(self._open) == DEPTH_MAX:
            self._refuse(f"<{tag}> is nested too deep; allowed are {DEPTH_MAX} elements within each other")
        element = Element(tag, attributes, self._mark())
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, tag: str) -> None:
        self._finish_text()
        self._open.pop()

    def _characters(self, data: str) -> None:
        if self._text is None:
            self._count_node()
            self._text = Chars(self._mark())
            self._open[-1].children.append(self._text)
            # From here to the next tag only the characters are needed, not the place of each one.
            self._parser.buffer_text = True
        self._parts.append(data)

    def _declaration(self, version: str, encoding: str | None, standalone: int) -> None:
        if version != "1.0":
            self._refuse(f"XML {version} is not allowed; write XML 1.0")
        if encoding is not None and encoding.upper() != "UTF-8":
            self._refuse(f'the encoding "{encoding}" is not allowed; write the document in UTF-8')

    def _doctype(self, name: str, system_id: str | None, public_id: str | None, has_subset: bool) -> None:
        # Expat reports it where its name ends, not where it begins.
        start = self._source.rindex(b"<!DOCTYPE", 0, self._parser.CurrentByteIndex)
        mark = _end_mark(self._source[:start].decode())
        self._refuse("a DOCTYPE is not allowed; remove it (there are no entities but the five of XML)", mark)

    def _instruction(self, target: str, data: str) -> None:
        self._refuse(f"the processing instruction <?{target} …?> is not allowed; remove it")


def normalise(text: str, preserve: bool) -> str:
    """Return a text between two tags without layout; "" if it was nothing but layout.

    White space that includes a line end is layout. In other texts, leading and trailing white space each become
    one blank, and the rest stays. `preserve` (`xml:space`) keeps everything.
    """
    if preserve or not text:
        return text
    core = text.strip(BLANKS)
    if not core:
        return "" if "\n" in text else " "
    before = " " if text[0] in BLANKS else ""
    behind = " " if text[-1] in BLANKS else ""
    return f"{before}{core}{behind}"
