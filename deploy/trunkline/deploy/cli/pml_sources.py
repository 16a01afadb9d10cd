"""Read PML files for the command line, count their tokens, and show where they are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from trunkline.deploy.config import models
from trunkline.deploy.errors import DeployError, UserError
from trunkline.router import pml

T = TypeVar("T")

_SHOWN_BEFORE: Final = 60
_SHOWN_CHARACTERS: Final = 100
"""Largest number of characters that are shown of a line with a mistake."""
_NO_LIMIT: Final = 1 << 30


class SourceError(DeployError):
    """A PML file is wrong. The text says where, with the line, as compilers do. Exit code 1."""


@dataclass(frozen=True)
class Source:
    """A file with a schema or a prompt: JSON if its name ends in .json, else XML."""

    path: str
    text: str

    @property
    def is_json(self) -> bool:
        """Whether the file is in the JSON form."""
        return self.path.endswith(".json")

    def schema(self) -> pml.SchemaDocument:
        """Return the schema in the file.

        Raises:
            SourceError: It holds none.
        """
        return self._read(pml.parse_schema, pml.schema_from_json)

    def prompt(self) -> pml.PromptDocument:
        """Return the prompt in the file.

        Raises:
            SourceError: It holds none.
        """
        return self._read(pml.parse_prompt, pml.prompt_from_json)

    def value(self) -> Any:
        """Return the decoded JSON of the file.

        Raises:
            SourceError: It is not JSON.
        """
        try:
            return json.loads(self.text)
        except json.JSONDecodeError as error:
            raise self.error("E_XML", f"this is not JSON: {error.msg}", error.lineno, error.colno) from None
        except RecursionError:
            raise self.error("E_XML", "this JSON is nested too deeply") from None

    def _read(self, from_xml: Callable[[str], T], from_json: Callable[[object], T]) -> T:
        with self.errors():
            return from_json(self.value()) if self.is_json else from_xml(self.text)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of PML into errors of this file.

        Raises:
            SourceError: PML raised an error, which this error replaces.
        """
        try:
            yield
        except pml.PmlError as error:
            raise self.error(error.code, error.message, error.line, error.column, error.path) from None

    def error(
        self, code: str, message: str, line: int | None = None, column: int | None = None, path: str = ""
    ) -> SourceError:
        """Return an error in this file. Lines and columns count from 1; a module's path is shown without a
        line."""
        place = self.path
        if line is not None:
            place += f":{line}" if column is None else f":{line}:{column}"
        elif path:
            place += f" ({path})"
        return SourceError(f"{place}: {code}: {message}{self._excerpt(line, column)}")

    def _excerpt(self, line: int | None, column: int | None) -> str:
        """Return the line with a caret under the column."""
        # As XML and JSON count lines: not at each of the separators that `splitlines` knows.
        lines = self.text.split("\n")
        if line is None or not 1 <= line <= len(lines):
            return ""
        text = "".join(character if character.isprintable() else " " for character in lines[line - 1])
        at = min((column or 1) - 1, len(text))
        start = max(0, at - _SHOWN_BEFORE)
        number = f"{line:>5} | "
        excerpt = f"\n{number}{text[start : start + _SHOWN_CHARACTERS]}"
        return excerpt if column is None else f"{excerpt}\n{' ' * (len(number) - 2)}| {' ' * (at - start)}^"


def read_source(path: str) -> Source:
    """Read a file.

    Raises:
        UserError: It cannot be read as text.
    """
    try:
        return Source(path, Path(path).expanduser().read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Counting:
    """The unit of counting: tokens of a model, or words if no model was named."""

    tokenizer: pml.PmlTokenizer
    context: int
    """Largest number of tokens, or of words, of a prompt and its answer together."""
    unit: str
    """The thing that is counted, in plain words."""


def counting(model: str | None) -> Counting:
    """Return how to count.

    Args:
        model: The model, as for `trunkline serve`; None to count words.

    Raises:
        UserError: It is not a checkpoint, or its tokenizer cannot be read.
    """
    if model is None:
        return Counting(WordTokenizer(), _NO_LIMIT, "words")
    folder = models.resolve(model)
    # Too slow to import for commands that need no tokenizer.
    from trunkline.router.stores.model_text import ModelText  # noqa: PLC0415
    from trunkline.router.text.tokenizer import Tokenizer  # noqa: PLC0415

    try:
        tokenizer = Tokenizer(folder)
    except ValueError as error:
        raise UserError(str(error)) from error
    return Counting(ModelText(tokenizer), tokenizer.files.max_context, f"tokens of {models.default_name(model)}")


class WordTokenizer:
    """A stand-in for a model's tokenizer: every word is a token."""

    bos_ids: list[int] = []  # noqa: RUF012 (as the protocol has it; it never changes)
    has_chat_template = True

    def encode_plain(self, text: str) -> list[int]:
        """Return a token for each word, and one for text that is only blanks."""
        return [0] * (len(text.split()) or min(len(text), 1))

    def encode_special(self, text: str) -> list[int]:
        """Return the same tokens as for plain text."""
        return self.encode_plain(text)

    def placeholder_ids(self, fill: str | None, count: int) -> list[int]:
        """Return `count` tokens."""
        return [0] * count

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Return the messages in a form that many models use."""
        text = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in messages)
        return f"{text}<|assistant|>" if add_generation_prompt else text
