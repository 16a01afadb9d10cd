"""Parse YAML strictly, and keep the line of each value, so that messages can name it.

Plain words are strings, but for `true`, `false`, `null` and numbers as JSON writes them: `on`, `no` and `22:30`
mean what they say. Keys are strings, and none comes twice. Tags and merge keys are refused; aliases are allowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Final

import yaml

from trunkline.deploy.errors import UserError

_NODES_MAX: Final = 100_000
"""Largest number of values in a file, aliases resolved. With aliases a small file can be a large tree."""
_DEPTH_MAX: Final = 20
_FILE_BYTES_MAX: Final = 4 << 20
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?")
_WORDS: Final = {"true": True, "false": False, "null": None, "~": None, "": None}
_TAGS: Final = ("str", "map", "seq")

Path = tuple[str | int, ...]
"""The path of a value: keys and indices from the root on."""


class FileError(UserError):
    """A file of settings cannot be read, or is wrong."""


@dataclass
class Document:
    """The contents of a file, with line numbers."""

    source: str
    """The file's name, for errors."""
    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    """Line numbers, from 1, of keys in mappings and of items in lists."""

    def error(self, path: Path, problem: str) -> FileError:
        """Return the error about a value, with the nearest line that is known."""
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        return FileError(f"{self.source}:{self.lines.get(known, 1)}: {shown(path)}{problem}")


def shown(path: Path) -> str:
    """Return a path as in `groups[0].tp: `; "" for the root."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"{text.removeprefix('.')}: " if text else ""


def load(path: FilePath) -> Document:
    """Return the document in a file.

    Raises:
        FileError: The file cannot be read, or its text is wrong.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1).decode()
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is no UTF-8 text") from error
    return parse(text, str(path))


def parse(text: str, source: str) -> Document:
    """Return the document in a text.

    Args:
        source: The file's name, for messages.

    Raises:
        FileError: The text is not YAML, or uses more of it than is allowed here.
    """
    document = Document(source)
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise FileError(f"{source}{line}: this is no YAML: {problem}") from error
    except RecursionError as error:
        raise FileError(f"{source}: is nested too deeply") from error
    if node is None:
        raise FileError(f"{source}: is empty")
    document.value = _Builder(document).build(node, ())
    return document


class _Builder:
    """Builds a document's value from YAML's nodes, and notes the lines."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._count = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._count += 1
        if self._count > _NODES_MAX or len(path) > _DEPTH_MAX:
            raise self._document.error(path[:_DEPTH_MAX], "is too large a tree")
        if path not in self._document.lines:  # else it is a key's value, and the key's line counts
            self._document.lines[path] = node.start_mark.line + 1
        if node.tag not in {f"tag:yaml.org,2002:{tag}" for tag in _TAGS}:
            raise self._document.error(path, f"tags such as {node.tag!r} are not allowed")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return node.value if node.style is not None else _plain(node.value)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self._document.error(path, f"has a key that is no word, in line {line}")
            inside = (*path, key.value)
            if key.value in found:
                first, self._document.lines[path] = self._document.lines[inside], line
                raise self._document.error(path, f"has {key.value!r} twice, in lines {first} and {line}")
            self._document.lines[inside] = line
            if key.value == "<<":
                raise self._document.error(inside, "merge keys are not allowed; write the values out")
            found[key.value] = self.build(value, inside)
        return found


def _plain(text: str) -> bool | int | float | str | None:
    """Return the value of a word without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
