"""Import xgrammar without what it brings along, but nothing here uses.

xgrammar imports `transformers` to read tokenizers, and torch for masks as tensors. `TokenizerFile` reads the one
kind of tokenizer that models have here, and masks are numpy arrays. Both libraries together take far longer to
import than xgrammar itself, while the first request with a grammar waits. So classes without content stand in for
theirs while xgrammar is imported; a process that has loaded torch already, as a rank has, keeps it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from tokenizers import Tokenizer

from trunkline.runtime.light_imports import other_modules


class TokenizerFile:
    """A `tokenizer.json`, with the methods by which xgrammar asks a tokenizer of `transformers`."""

    def __init__(self, path: Path) -> None:
        """`path`: of the file.

        Raises:
            Exception: `tokenizers` cannot read it.
        """
        self.backend_tokenizer: Tokenizer = Tokenizer.from_file(str(path))

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added ones included."""
        found: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text's tokens."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Return tokens as the file spells them; None: there is none with this id."""
        return [self.backend_tokenizer.id_to_token(one) for one in ids]


class _Nothing:
    """What stands in for a class: it can be a base class, and be called with anything."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take no notice of the arguments."""


class _StandIn(ModuleType):
    """A module that has a class for every name."""

    def __getattr__(self, name: str) -> type[_Nothing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


def import_xgrammar() -> None:
    """Import xgrammar. From then on `import xgrammar` finds it, with `TokenizerFile` for a class of tokenizers.

    Raises:
        ImportError: It is not installed, or needs more of the other libraries than classes.
    """
    if "xgrammar" in sys.modules:
        return
    transformers = _StandIn("transformers")
    transformers.PreTrainedTokenizerFast = TokenizerFile  # type: ignore[attr-defined]
    with other_modules({"transformers": transformers}):
        if "torch" in sys.modules:
            importlib.import_module("xgrammar")
            return
        with other_modules({"torch": None}):
            importlib.import_module("tvm_ffi")  # it looks for torch, but can do without
        with other_modules({"torch": _StandIn("torch")}):
            importlib.import_module("xgrammar")
