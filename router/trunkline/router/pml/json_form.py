"""PML as JSON: the same trees as the XML form, for programs and for text that is full of `<` and `&`.

A schema; each part is a text, or an object whose first key is its tag and whose other keys are its attributes:

    {"schema": "trip",
     "items": [
       "You plan trips.",
       {"module": "plan", "items": [
         "A trip of ",
         {"param": "days", "len": 4, "default": "three", "fill": " ", "required": false},
         " days."]},
       {"union": [{"module": "miami", "items": ["…"]}, {"module": "paris", "cache": false, "items": ["…"]}],
        "default": "miami"},
       {"role": "user", "open": true, "items": ["Where to?"]}],
     "scaffolds": [{"scaffold": "both", "modules": ["plan", "miami"]}]}

A prompt; the second form is for prompts that only import modules and add a text at the end:

    {"schema": "trip", "items": [{"ref": "plan", "args": {"days": "two"}, "items": []}, "Hurry."]}
    {"schema": "trip", "modules": [{"path": "plan", "args": {"days": "two"}}, "cities/miami"], "text": "Hurry."}

Everything but tags, `len`, and a scaffold's `modules` may be left out. Texts keep their white space, and adjacent
texts are one text. A path also imports the modules that it goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar, cast

from trunkline.router.pml.pml_error import ErrorCode, PmlError
from trunkline.router.pml.tree import (
    DEPTH_MAX,
    NODES_MAX,
    ROLES,
    SOURCE_BYTES_MAX,
    Item,
    Module,
    Param,
    PromptDocument,
    PromptItem,
    Ref,
    RoleItem,
    RoleName,
    Scaffold,
    SchemaDocument,
    Text,
    Turn,
    Union,
)
from trunkline.router.pml.validation import check_prompt, check_schema, listed, short

_T = TypeVar("_T")
_KINDS: Final = {str: "a string", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}
_SCHEMA_TAGS: Final = ("module", "union", "param", "role")
_PROMPT_TAGS: Final = ("ref", "role")


def schema_from_json(value: object) -> SchemaDocument:
    """Read a schema from decoded JSON.

    Raises:
        PmlError: The schema is wrong; `path` names the wrong value, such as "items[2].len", or a module.
    """
    reader = _JsonReader()
    root = reader.object(value, "", {"schema", "items", "scaffolds"})
    name = reader.required(root, "schema", str, "")
    items = reader.items(root, "", reader.schema_item)
    scaffolds = reader.get(root, "scaffolds", list, "", [])
    read = tuple(reader.scaffold(scaffold, f"scaffolds[{n}]") for n, scaffold in enumerate(scaffolds))
    return check_schema(SchemaDocument(name, items, read))


def prompt_from_json(value: object) -> PromptDocument:
    """Read a prompt in either form from decoded JSON.

    Raises:
        PmlError: The prompt is wrong: E_XML, E_TAG, E_NAME, E_ROLE_ORDER, or E_DUP_IMPORT if a path is listed
        twice.
    """
    reader = _JsonReader()
    root = reader.object(value, "", {"schema", "items", "modules", "text"})
    name = reader.required(root, "schema", str, "")
    if "modules" not in root and "text" not in root:
        return check_prompt(PromptDocument(name, reader.items(root, "", reader.prompt_item)))
    if "items" in root:
        message = 'a prompt has either "items" or "modules" and "text"; it has both'
        raise PmlError(ErrorCode.TAG, message, path="items")
    items = _imports(reader, reader.get(root, "modules", list, "", []))
    text = reader.text(reader.get(root, "text", str, "", ""), "text")
    return check_prompt(PromptDocument(name, (*items, Text(text)) if text else items))


class _Import:
    """A module in the tree that the listed paths form."""

    def __init__(self) -> None:
        self.args: tuple[tuple[str, str], ...] | None = None
        """Arguments of the import; None if the module's own path is not listed."""
        self.children: dict[str, _Import] = {}

    def refs(self) -> tuple[Ref, ...]:
        """Return the imports below this node."""
        return tuple(Ref(name, child.args or (), child.refs()) for name, child in self.children.items())


def _imports(reader: _JsonReader, listed_modules: list[Any]) -> tuple[Ref, ...]:
    root = _Import()
    for number, value in enumerate(listed_modules):
        place = f"modules[{number}]"
        entry = {"path": value} if isinstance(value, str) else reader.object(value, place, {"path", "args"})
        path = reader.required(entry, "path", str, place)
        names = path.split("/")
        reader.nested(len(names), place)
        node = root
        for name in names:
            reader.node(place)
            node = node.children.setdefault(name, _Import())
        if node.args is not None:
            message = f'the module "{short(path)}" is imported twice; list it once'
            raise PmlError(ErrorCode.DUP_IMPORT, message, path=path)
        node.args = reader.args(entry, place)
    return root.refs()


class _JsonReader:
    """Turns JSON values into trees and counts them, for the limits. `place`: path of a value, for errors."""

    def __init__(self) -> None:
        self._nodes = 1
        self._characters = 0

    def refuse(self, message: str, place: str) -> NoReturn:
        """Raise the error for a value of the wrong shape."""
        raise PmlError(ErrorCode.XML, f"{place or 'the document'} {message}", path=place)

    def node(self, place: str) -> None:
        """Count one part of the document, up to the limit."""
        self._nodes += 1
        if self._nodes > NODES_MAX:
            self.refuse(f"is one part too many; allowed are {NODES_MAX} in a document; split the schema", place)

    def nested(self, depth: int, place: str) -> None:
        """Refuse a part that is nested too deep."""
        if depth >= DEPTH_MAX:
            self.refuse(f"is nested too deep; allowed are {DEPTH_MAX} parts within each other", place)

    def text(self, text: str, place: str) -> str:
        """Return a string after checking that it is Unicode text of allowed length."""
        self._characters += len(text)
        if self._characters > SOURCE_BYTES_MAX:
            self.refuse(f"makes the document too large; allowed are {SOURCE_BYTES_MAX} characters of text", place)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            self.refuse("is not Unicode text: it has half of a surrogate pair", place)
        return text

    def object(self, value: object, place: str, allowed: set[str]) -> dict[str, Any]:
        """Return an object after checking that it has allowed keys only."""
        if not isinstance(value, dict):
            self.refuse(f"is {_kind(value)}, not an object", place)
        for key in value:
            if key not in allowed:
                where = place or "the document"
                message = f'{where} has a key "{short(str(key))}"; allowed are {listed(sorted(allowed))}'
                raise PmlError(ErrorCode.TAG, message, path=place)
        return value

    def get(self, entry: Mapping[str, Any], key: str, kind: type[_T], place: str, otherwise: _T) -> _T:
        """Return the value of a key after checking its type; `otherwise` if the key is missing."""
        if key not in entry:
            return otherwise
        value = entry[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(f"is {_kind(value)}, not {_KINDS[kind]}", _join(place, key))
        if isinstance(value, str):
            self.text(value, _join(place, key))
        return value

    def required(self, entry: Mapping[str, Any], key: str, kind: type[_T], place: str) -> _T:
        """Return the value of a required key."""
        if key not in entry:
            raise PmlError(ErrorCode.TAG, f'{place or "the document"} has no "{key}"; add it', path=place)
        return self.get(entry, key, kind, place, cast(_T, None))

    def args(self, entry: Mapping[str, Any], place: str) -> tuple[tuple[str, str], ...]:
        """Return the arguments of an import."""
        args = self.get(entry, "args", dict, place, {})
        where = _join(place, "args")
        return tuple((str(name), self.get(args, name, str, where, "")) for name in args)

    def items(
        self, entry: Mapping[str, Any], place: str, read: Callable[[Any, str, int], _T], depth: int = 1
    ) -> tuple[_T | Text, ...]:
        """Return the parts of an object, with adjacent texts joined."""
        self.nested(depth - 1, place)
        items: list[_T | Text] = []
        texts: list[str] = []
        for number, value in enumerate(self.get(entry, "items", list, place, [])):
            where = f"{_join(place, 'items')}[{number}]"
            if isinstance(value, str):
                texts.append(self.text(value, where))
                continue
            self._flush(texts, items, where)
            self.node(where)
            items.append(read(value, where, depth))
        self._flush(texts, items, place)
        return tuple(items)

    def _flush(self, texts: list[str], items: list[Any], place: str) -> None:
        text = "".join(texts)
        texts.clear()
        if text:
            self.node(place)
            items.append(Text(text))

    def tag(self, value: Any, place: str, tags: tuple[str, ...]) -> str:
        """Return the tag of an object, which says what kind of part it is."""
        if not isinstance(value, dict):
            self.refuse(f"is {_kind(value)}, not a string or an object", place)
        found = [tag for tag in tags if tag in value]
        if len(found) != 1:
            which = f"it has {listed(found)}" if found else "it has none of them"
            raise PmlError(ErrorCode.TAG, f"{place} must have just one of {listed(tags)}; {which}", path=place)
        return found[0]

    def schema_item(self, value: Any, place: str, depth: int) -> Item:
        """Read a module, union, parameter or role."""
        match self.tag(value, place, _SCHEMA_TAGS):
            case "module":
                return self._module(value, place, depth)
            case "union":
                return self._union(value, place, depth)
            case "param":
                return self._param(value, place)
            case _:
                entry = self.object(value, place, {"role", "open", "items"})
                items = self.items(entry, place, self.schema_item, depth + 1)
                return RoleItem(self._role(entry, place), items, self.get(entry, "open", bool, place, False))

    def _role(self, entry: Mapping[str, Any], place: str) -> RoleName:
        role = self.get(entry, "role", str, place, "")
        if role not in ROLES:
            message = f'{place} has the role "{short(role)}"; allowed are {listed(ROLES)}'
            raise PmlError(ErrorCode.TAG, message, path=place)
        return cast(RoleName, role)

    def _module(self, value: Any, place: str, depth: int) -> Module:
        entry = self.object(value, place, {"module", "cache", "items"})
        items = self.items(entry, place, self.schema_item, depth + 1)
        name = self.get(entry, "module", str, place, "")
        return Module(name, items, self.get(entry, "cache", bool, place, True))

    def _union(self, value: Any, place: str, depth: int) -> Union:
        entry = self.object(value, place, {"union", "default"})
        self.nested(depth, place)
        members: list[Module] = []
        for number, member in enumerate(self.get(entry, "union", list, place, [])):
            where = f"{_join(place, 'union')}[{number}]"
            if not isinstance(member, dict) or "module" not in member:
                raise PmlError(
                    ErrorCode.UNION_CONTENT, f"{where} is not a module; a union has only modules", path=where
                )
            self.node(where)
            members.append(self._module(member, where, depth + 1))
        default = self.get(entry, "default", str, place, "") if "default" in entry else None
        return Union(tuple(members), default)

    def _param(self, value: Any, place: str) -> Param:
        entry = self.object(value, place, {"param", "len", "default", "fill", "required"})
        return Param(
            self.get(entry, "param", str, place, ""),
            self.required(entry, "len", int, place),
            self.required(entry, "default", str, place) if "default" in entry else None,
            self.required(entry, "fill", str, place) if "fill" in entry else None,
            self.get(entry, "required", bool, place, False),
        )

    def scaffold(self, value: Any, place: str) -> Scaffold:
        """Read a scaffold."""
        self.node(place)
        entry = self.object(value, place, {"scaffold", "modules"})
        modules = self.required(entry, "modules", list, place)
        for number, path in enumerate(modules):
            if not isinstance(path, str):
                self.refuse(f"is {_kind(path)}, not a string", f"{_join(place, 'modules')}[{number}]")
            self.text(path, f"{_join(place, 'modules')}[{number}]")
        return Scaffold(self.required(entry, "scaffold", str, place), tuple(modules))

    def prompt_item(self, value: Any, place: str, depth: int) -> PromptItem:
        """Read an import or a role."""
        if self.tag(value, place, _PROMPT_TAGS) == "ref":
            entry = self.object(value, place, {"ref", "args", "items"})
            items = self.items(entry, place, self.prompt_item, depth + 1)
            return Ref(self.get(entry, "ref", str, place, ""), self.args(entry, place), items)
        entry = self.object(value, place, {"role", "open", "items"})
        items = self.items(entry, place, self.prompt_item, depth + 1)
        return Turn(self._role(entry, place), items, self.get(entry, "open", bool, place, False))


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return _KINDS.get(type(value), "a number")


def schema_to_json(document: SchemaDocument) -> dict[str, Any]:
    """Return a schema in the JSON form, from which `schema_from_json` reads the same schema."""
    value: dict[str, Any] = {"schema": document.name, "items": _items_to_json(document.items)}
    if document.scaffolds:
        value["scaffolds"] = [{"scaffold": s.name, "modules": list(s.modules)} for s in document.scaffolds]
    return value


def _items_to_json(items: tuple[Item, ...]) -> list[Any]:
    return [item.text if isinstance(item, Text) else _item_to_json(item) for item in items]


def _item_to_json(item: Module | Union | Param | RoleItem) -> dict[str, Any]:
    value: dict[str, Any]
    match item:
        case Module():
            value = {"module": item.name, "cache": None if item.cache else False}
            value["items"] = _items_to_json(item.items)
        case Union():
            value = {"union": _items_to_json(item.members), "default": item.default}
        case Param():
            value = {"param": item.name, "len": item.length, "default": item.default, "fill": item.fill}
            value["required"] = item.required or None
        case RoleItem():
            value = {"role": item.role, "open": item.open or None, "items": _items_to_json(item.items)}
    return {key: part for key, part in value.items() if part is not None}


def prompt_to_json(document: PromptDocument) -> dict[str, Any]:
    """Return a prompt in the JSON form, from which `prompt_from_json` reads the same prompt."""
    return {"schema": document.schema, "items": _prompt_items_to_json(document.items)}


def _prompt_items_to_json(items: tuple[PromptItem, ...]) -> list[Any]:
    return [item.text if isinstance(item, Text) else _prompt_item_to_json(item) for item in items]


def _prompt_item_to_json(item: Ref | Turn) -> dict[str, Any]:
    value: dict[str, Any]
    if isinstance(item, Ref):
        value = {"ref": item.name, "args": dict(item.args) or None}
    else:
        value = {"role": item.role, "open": item.open or None}
    value["items"] = _prompt_items_to_json(item.items) or None
    return {key: part for key, part in value.items() if part is not None}
