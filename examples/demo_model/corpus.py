"""Text the demo model learns from: the running interpreter's own standard library.

Every machine that can run Trunkline has these files, and their licence (PSF) lets a
derived model ship. Two kinds of documents: source files (code with docstrings) and the
language reference topics that ``help()`` prints. The order is sorted and the held-out
choice is a hash of the name, so two machines with one Python version see one corpus.

Invariant: no held-out document is a source of a question, an answer or training text.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics as reference_topics

# Tests and generated tables teach a small model nothing but noise; ensurepip carries
# other people's wheels under other licences.
EXCLUDED_FOLDERS = frozenset(
    "test tests idle_test idlelib lib2to3 encodings site-packages dist-packages ensurepip "
    "turtledemo lib-dynload __pycache__ pydoc_data".split()
)
EXCLUDED_FILES = frozenset({"html/entities.py", "__phello__.foo.py", "this.py", "antigravity.py"})
HELDOUT_PERCENT = 6
# Held-out files are at most this long: the sample that ships must hold several documents.
HELDOUT_CHARS_MAX = 40_000
PROSE_CHARS_MIN = 400


@dataclass(frozen=True)
class Document:
    """One file or reference topic; ``name`` decides order and split, ``prose`` its use."""

    name: str
    text: str
    prose: bool


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents never to train on."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]


def _percentile(name: str) -> int:
    """A number in 0..99 that depends on the name alone (``hash()`` differs per process)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100


def _tidy(text: str) -> str:
    """Drop trailing blanks and form feeds: they cost tokens and carry nothing."""
    lines = [line.rstrip() for line in text.replace("\f", "").splitlines()]
    return "\n".join(lines).strip() + "\n"


def source_documents() -> list[Document]:
    """All library sources that are worth reading, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if EXCLUDED_FOLDERS & set(name.split("/")[:-1]) or name in EXCLUDED_FILES:
            continue
        if path.name.startswith("_sysconfigdata"):
            continue
        text = _tidy(path.read_text(encoding="utf-8", errors="replace"))
        if len(text) > 200:
            documents.append(Document(name, text, prose=False))
    return documents


def topic_documents() -> list[Document]:
    """The language reference as ``help()`` shows it: the only long prose at hand."""
    topics: dict[str, str] = reference_topics.topics
    return [
        Document(f"topics/{name}", _tidy(text), prose=True)
        for name, text in sorted(topics.items())
        if len(text) >= PROSE_CHARS_MIN
    ]


def _is_heldout(document: Document, taught: frozenset[str]) -> bool:
    """Held out: chosen by hash, short enough, and no question is made from it."""
    stem = document.name.removesuffix(".py").removesuffix("/__init__")
    top = stem.split("/")[0]
    if stem.replace("/", ".") in taught or top in taught or f"_{top}" in taught:
        return False
    if top.lstrip("_") in taught or len(document.text) > HELDOUT_CHARS_MAX:
        return False
    # Files that question modules may not cover are few, so more of them are taken.
    percent = HELDOUT_PERCENT if document.prose else 3 * HELDOUT_PERCENT
    return _percentile(document.name) < percent


def load_corpus(taught_modules: frozenset[str]) -> Corpus:
    """Read and split the library; ``taught_modules`` have questions, so they stay in train."""
    train: list[Document] = []
    heldout: list[Document] = []
    for document in source_documents() + topic_documents():
        (heldout if _is_heldout(document, taught_modules) else train).append(document)
    return Corpus(tuple(train), tuple(heldout))
