"""Load the file of a cluster, or the record of one that was launched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trunkline.deploy.errors import UserError
from trunkline.deploy.launch import records
from trunkline.deploy.launch.document import Document, parse
from trunkline.deploy.launch.fileformat import NAME, Cluster, read
from trunkline.deploy.launch.option_rules import command_rules
from trunkline.deploy.launch.plan import Plan, make_plan
from trunkline.deploy.launch.records import Launched
from trunkline.deploy.launch.shares import Facts

DEFAULT_FILE: Final = Path("cluster.yaml")
_SUFFIXES: Final = (".yaml", ".yml")
_FILE_BYTES_MAX: Final = 4 << 20


class Loaded:
    """A file of a cluster, loaded."""

    def __init__(self, path: Path) -> None:
        """Load a file.

        Raises:
            UserError: It cannot be read, or is wrong.
        """
        self.path = path.absolute()
        try:
            with path.open("rb") as file:
                text = file.read(_FILE_BYTES_MAX + 1).decode()
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror or error}; docs/launch.md says what a file may say"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is no UTF-8 text") from error
        self.document: Document = parse(text, str(path))
        self.cluster: Cluster = read(self.document)
        self.name = self.cluster.name or _name_from(path)

    def plan(self, facts: Mapping[str, Facts] | None = None) -> Plan:
        """Return the plan for the file.

        Raises:
            UserError: It cannot work.
        """
        return make_plan(self.document, self.cluster, command_rules(), facts, self.name, self.path.parent)


def is_file(word: str) -> bool:
    """Return whether a word on the command line means a file, and not a unit."""
    return word.endswith(_SUFFIXES) or "/" in word


def split(words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the file, if the first word is one, and the units."""
    if words and is_file(words[0]):
        return Path(words[0]), words[1:]
    return None, words


def launched(path: Path | None) -> Launched:
    """Return the cluster that a command is about: as it was launched, or else as the file describes it.

    Raises:
        UserError: It is not clear which cluster is meant.
    """
    if path is None and DEFAULT_FILE.is_file():
        path = DEFAULT_FILE
    if path is not None:
        loaded = Loaded(path)
        return records.load(loaded.name) or records.launched_from(loaded.plan(), loaded.path)
    known = records.all_launched()
    running = [each for each in known if not each.stopped] or known
    if not running:
        raise UserError(
            "nothing was launched from here; name a file, such as `trunkline launch status cluster.yaml`"
        )
    if len(running) > 1:
        files = ", ".join(each.file for each in running)
        raise UserError(f"several clusters were launched; say which by its file: {files}")
    return running[0]


def _name_from(path: Path) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:40].strip("-")
    if not NAME.fullmatch(name):
        raise UserError(f"{path}: its name cannot name the cluster; say `name:` in it")
    return name
