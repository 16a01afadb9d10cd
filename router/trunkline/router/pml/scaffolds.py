"""Compile scaffolds: versions of texts that see the other members (Prompt Cache §3.3, "attention masking effect").

A version is made only if the text's parent in the chain differs from its usual parent. Texts before the first
member, and the common beginning of two scaffolds' chains, need no new version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Final, NamedTuple

from trunkline.router.pml.compiled import CompiledModule, CompiledScaffold, CompiledText
from trunkline.router.pml.pml_error import ErrorCode, PmlError
from trunkline.router.pml.tree import Scaffold

CHAIN_TEXTS_MAX: Final = 1 << 20
"""Most texts in the chains of all scaffolds together, which bounds the time for walking through them."""


class Scaffolds(NamedTuple):
    """A schema's scaffolds."""

    scaffolds: tuple[CompiledScaffold, ...]
    texts: tuple[CompiledText, ...]
    """The new versions; their indexes follow the modules' own texts."""
    tokens: int
    """Number of tokens in the new versions."""


def compile_scaffolds(
    scaffolds: Sequence[Scaffold],
    modules: Sequence[CompiledModule],
    by_path: Mapping[str, int],
    texts: Sequence[CompiledText],
) -> Scaffolds:
    """Make the versions of `texts` that these scaffolds need.

    Raises:
        PmlError: E_SCHEMA_TOO_LONG: there are too many.
    """
    known = {(index, text.parent): index for index, text in enumerate(texts)}
    made: list[CompiledText] = []
    compiled: list[CompiledScaffold] = []
    steps = 0
    for scaffold in scaffolds:
        members = frozenset(by_path[path] for path in scaffold.modules)
        chain = sorted(text for module in _with_ancestors(members, modules) for text in modules[module].texts)
        steps += len(chain)
        if steps > CHAIN_TEXTS_MAX:
            message = (
                f"the schema's scaffolds have more than {CHAIN_TEXTS_MAX} texts in all; use fewer or smaller ones"
            )
            raise PmlError(ErrorCode.SCHEMA_TOO_LONG, message, scaffold.mark)
        member_texts: dict[int, int] = {}
        ancestor_texts: dict[int, int] = {}
        last = -1
        for index in chain:
            version = known.get((index, last))
            if version is None:
                text = texts[index]
                version = known[index, last] = len(texts) + len(made)
                made.append(CompiledText(text.module, text.segment, last, scaffold.name))
            if texts[index].module in members:
                member_texts[index] = version
            elif version != index:
                ancestor_texts[index] = version
            last = version
        tokens = sum(modules[member].tokens for member in members)
        compiled.append(CompiledScaffold(scaffold.name, members, tokens, member_texts, ancestor_texts))
    return Scaffolds(tuple(compiled), tuple(made), sum(len(text.tokens) for text in made))


def _with_ancestors(members: Set[int], modules: Sequence[CompiledModule]) -> set[int]:
    """Return these modules, their ancestors, and the schema."""
    found = {0}
    for member in members:
        while member not in found:
            found.add(member)
            member = modules[member].parent
    return found


def choose_versions(scaffolds: Sequence[CompiledScaffold], selected: Set[int]) -> dict[int, int]:
    """Return which texts are replaced in a prompt with these modules, and by which versions.

    Scaffolds whose members are all selected are considered by their number of tokens, largest first, then in the
    schema's order. A scaffold is used if it shares no member with one used before. Texts of its members get its
    versions. Other texts get the version of the first used scaffold that has one.
    """
    usable = [scaffold for scaffold in scaffolds if scaffold.members <= selected]
    usable.sort(key=lambda scaffold: -scaffold.tokens)
    taken: set[int] = set()
    chosen: list[CompiledScaffold] = []
    for scaffold in usable:
        if taken.isdisjoint(scaffold.members):
            taken |= scaffold.members
            chosen.append(scaffold)
    versions: dict[int, int] = {}
    for scaffold in chosen:
        versions |= scaffold.member_texts
    for scaffold in chosen:
        for text, version in scaffold.ancestor_texts.items():
            versions.setdefault(text, version)
    return versions
