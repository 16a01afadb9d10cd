"""A GGUF file as a checkpoint: a folder of the user's cache with a link to it, and the configuration and tokenizer
that it holds in the forms that everything here reads.

Making them takes a second or more with large vocabularies, so the folder is kept; it is named by the file's place,
size and times, and by what this program makes of a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trunkline.deploy.config.made_folders import made_folder
from trunkline.deploy.errors import UserError
from trunkline.worker.errors import WorkerError
from trunkline.worker.model.gguf.folder import ENDING, describe, parts_of, stem_of

_FORM: Final = 1
"""Counts changes of what is made of the same file."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file's by its name."""
    return path.name.endswith(ENDING) and path.is_file()


def default_name(path: Path) -> str:
    """Return the name in the API of the model in a file."""
    return stem_of(path)


def folder_of(path: Path) -> Path:
    """Return the folder that stands for the model in a file, or in all parts of which the file is one.

    Raises:
        UserError: The file is damaged, or has what is not read. The message names it, and what would be.
    """
    try:
        parts = [part.resolve() for part in parts_of(path)]
        states = [part.stat() for part in parts]
    except WorkerError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    count = len(parts)
    names = [f"model-{number:05}-of-{count:05}{ENDING}" for number in range(1, count + 1)] if count > 1 else []
    links = dict(zip(names or [f"model{ENDING}"], parts, strict=True))
    name = repr(
        (_FORM, *((state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns) for state in states))
    )
    return made_folder("gguf", name, links, lambda: _texts(parts), "a GGUF file")


def _texts(parts: list[Path]) -> dict[str, str]:
    try:
        texts = describe(parts)
    except WorkerError as error:
        raise UserError(str(error)) from error
    from tokenizers import Tokenizer  # noqa: PLC0415 (needed for these files only)

    try:
        Tokenizer.from_str(texts["tokenizer.json"])
    except Exception as error:  # the class that the library raises
        raise UserError(f"{parts[0]} has a tokenizer that cannot be built: {error}") from error
    return texts
