"""Random schemas and prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from trunkline.router.pml.tree import (
    Item,
    Module,
    Param,
    PromptDocument,
    PromptItem,
    Ref,
    RoleItem,
    Scaffold,
    SchemaDocument,
    Text,
    Union,
    modules_below,
)

SCHEMA = "random"


class Maker:
    """Makes documents from a random number generator, so that a seed says it all."""

    def __init__(self, rng: random.Random, texts: Sequence[str], *, roles: bool = False) -> None:
        self._rng = rng
        self._texts = texts
        self._roles = roles

    def schema(self, *, scaffolds: bool = True, first: int = 0) -> SchemaDocument:
        """A schema with modules within modules. `first`: number of its first module."""
        items = self._items(3, "", [first], [0])
        document = SchemaDocument(SCHEMA, items)
        if not scaffolds:
            return document
        places = [path for path, module in modules_below(items) if module.cache]
        found = []
        for number in range(self._rng.randrange(8)):
            chosen = self._rng.sample(places, min(len(places), self._rng.randint(1, 4)))
            if chosen and self._compatible(items, chosen):
                found.append(Scaffold(f"s{number}", tuple(chosen)))
        return replace(document, scaffolds=tuple(found))

    def _compatible(self, items: tuple[Item, ...], paths: list[str]) -> bool:
        """Whether a prompt can have all of these modules, and all are cached."""
        choices = choices_of(items)
        uncached = [path for path, module in modules_below(items) if not module.cache]
        if any(path == other or path.startswith(f"{other}/") for path in paths for other in uncached):
            return False
        return all(
            choices[one][union] == choices[other][union]
            for one in paths
            for other in paths
            for union in choices[one].keys() & choices[other].keys()
        )

    def _text(self) -> Text:
        return Text(self._rng.choice(self._texts))

    def _items(
        self, depth: int, path: str, modules: list[int], params: list[int], role: bool = False
    ) -> tuple[Item, ...]:
        items: list[Item] = []
        for _ in range(self._rng.randint(0, 4) if depth < 3 else self._rng.randint(4, 8)):
            kind = self._rng.choice(["text", "text", "param", "module", "union", "role"])
            if kind == "text" and not (items and isinstance(items[-1], Text)):
                items.append(self._text())
            elif kind == "param" and path:
                default = self._rng.choice([None, None, "one"])
                fill = self._rng.choice([None, "x"])
                length = self._rng.randint(1, 5)
                items.append(
                    Param(f"p{params[0]}", length, default, fill, default is None and self._rng.random() < 0.1)
                )
                params[0] += 1
            elif kind == "module" and depth:
                items.append(self._module(depth, modules, role))
            elif kind == "union" and depth:
                members = tuple(self._module(depth, modules, role) for _ in range(self._rng.randint(1, 3)))
                default = self._rng.choice([None, self._rng.choice(members).name])
                items.append(Union(members, default))
            elif kind == "role" and self._roles and not role:
                name = self._rng.choice(["system", "user", "assistant"])
                items.append(RoleItem(name, self._items(depth, path, modules, params, True)))  # type: ignore[arg-type]
        return tuple(items)

    def _module(self, depth: int, modules: list[int], role: bool) -> Module:
        name = f"m{modules[0]}"
        modules[0] += 1
        return Module(name, self._items(depth - 1, name, [0], [0], role), self._rng.random() < 0.85)

    def prompt(self, schema: SchemaDocument, *, gaps: bool = False) -> PromptDocument:
        """A prompt that imports some of a schema's modules, in any order; `gaps`: with text in between."""
        items = list(self._refs(schema.items, gaps))
        if gaps or self._rng.random() < 0.5:
            items.append(Text("And what now?"))
        return PromptDocument(schema.name, merged(items))

    def _refs(self, items: Sequence[Item], gaps: bool) -> list[PromptItem]:
        found: list[PromptItem] = []
        skipped = self._rng.choice([0.0, 0.1, 0.5])
        for choice in namespace(items):
            if self._rng.random() < skipped:
                continue
            module = self._rng.choice(choice)
            args = tuple(
                (item.name, " ".join(["word"] * self._rng.randint(0, item.length)))
                for item in own_items(module.items)
                if isinstance(item, Param) and (item.required or self._rng.random() < 0.5)
            )
            found.append(Ref(module.name, args, merged(self._refs(module.items, gaps))))
            if gaps and self._rng.random() < 0.3:
                found.append(Text("gap"))
        if not gaps:
            self._rng.shuffle(found)
        return found


def merged(items: Sequence[PromptItem]) -> tuple[PromptItem, ...]:
    """The items, of which no two are texts side by side."""
    out: list[PromptItem] = []
    for item in items:
        if isinstance(item, Text) and out and isinstance(out[-1], Text):
            out[-1] = Text(out[-1].text + item.text)
        else:
            out.append(item)
    return tuple(out)


def own_items(items: Sequence[Item]) -> list[Text | Param]:
    """A module's own texts and parameters, those in its roles included."""
    found: list[Text | Param] = []
    for item in items:
        if isinstance(item, Text | Param):
            found.append(item)
        elif isinstance(item, RoleItem):
            found += own_items(item.items)
    return found


def namespace(items: Sequence[Item]) -> list[list[Module]]:
    """What a module consists of: each entry is a module, or those of a union."""
    found: list[list[Module]] = []
    for item in items:
        match item:
            case Module():
                found.append([item])
            case Union():
                found.append(list(item.members))
            case RoleItem():
                found += namespace(item.items)
            case _:
                pass
    return found


def choices_of(items: Sequence[Item]) -> dict[str, dict[str, str]]:
    """Of each module's path: the unions that it is in, by what tells them apart, and its member of each."""
    found: dict[str, dict[str, str]] = {}

    def walk(items: Sequence[Item], path: str, choices: dict[str, str]) -> None:
        for entry in namespace(items):
            union = f"{path}:{entry[0].name}"
            for module in entry:
                own = f"{path}/{module.name}" if path else module.name
                inner = {**choices, union: module.name} if len(entry) > 1 else choices
                found[own] = inner
                walk(module.items, own, inner)

    walk(items, "", {})
    return found


WORD_TEXTS = ("One two three.", " four ", "five six seven eight nine ten", "x")
ODD_TEXTS = (
    "a < b & c > d",
    " \n\t ",
    "]]>",
    "\r\n",
    "<!-- no -->",
    "é😀\u2028",
    "\"quoted\" 'twice'",
    "&amp;",
    " ",
)

seeds = st.integers(0, 2**32)
