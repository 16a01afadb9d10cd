"""Check the rules of schemas and prompts beyond their grammar: names, unions, roles, scaffolds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from typing import Final, NamedTuple, NoReturn

from trunkline.router.pml.pml_error import ErrorCode, Mark, PmlError
from trunkline.router.pml.tree import (
    MODULE_PATH_CHARACTERS_MAX,
    NAME,
    NAME_CHARACTERS_MAX,
    TAGS,
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
    Turn,
    Union,
    join_path,
)

LENGTH_MAX: Final = 2**31 - 1
"""Largest length of a parameter: positions have 32 bits."""
SCHEMAS_MAX: Final = 16
"""Largest number of schemas of a prompt."""
_SHOWN_MAX: Final = 60
"""Largest number of characters of a wrong name that a message shows."""
_LISTED_MAX: Final = 10
"""Largest number of existing names that a message lists."""
_COMPARED_MAX: Final = 1000
"""Largest number of known names among which the right one is looked for when a name is wrong: a comparison takes
10 µs."""


def check_name(name: str, what: str, mark: Mark | None, path: str) -> None:
    """Raise PmlError (E_NAME) if `name` is not allowed. `what`: the thing that has the name."""
    if not name:
        raise PmlError(ErrorCode.NAME, f'{what} has no name; give it one (name="…")', mark, path)
    if len(name) > NAME_CHARACTERS_MAX:
        message = f"{what} has a name of {len(name)} characters; allowed are {NAME_CHARACTERS_MAX}"
        raise PmlError(ErrorCode.NAME, message, mark, path)
    if NAME.fullmatch(name) is None:
        rule = 'letters, digits, "_", "." and "-" are allowed, a letter or "_" first'
        raise PmlError(ErrorCode.NAME, f'{what} has the name "{short(name)}"; {rule}', mark, path)
    if name in TAGS:
        raise PmlError(ErrorCode.NAME, f'{what} has the name "{name}", which is a tag; choose another', mark, path)


def _inner_path(outer: str, item: Module | Ref) -> str:
    """Return the path of a module, whose name has been checked, or of its import.

    Raises:
        PmlError: E_NAME, the path is too long.
    """
    path = join_path(outer, item.name)
    if len(path) > MODULE_PATH_CHARACTERS_MAX:
        message = f"the path of a module has {len(path)} characters; allowed are {MODULE_PATH_CHARACTERS_MAX}"
        raise PmlError(ErrorCode.NAME, f"{message}; shorten the names in it", item.mark, path)
    return path


def check_schema(document: SchemaDocument) -> SchemaDocument:
    """Return a schema after checking it.

    Raises:
        PmlError: E_NAME, E_DUP, E_TAG, E_PARAM_ROOT, E_UNION_EMPTY, E_ROLE_ORDER, E_SCAFFOLD_PATH,
            E_SCHEMA_TOO_LONG (a parameter of more than 2³¹ tokens).
    """
    check_name(document.name, "the schema", document.mark, "")
    _check_items(document.items, "", _Names(set(), set()), in_role=False)
    _check_open_roles(document.items, None)
    places = _places(document.items, "", True, ()) if document.scaffolds else {}
    names: set[str] = set()
    for scaffold in document.scaffolds:
        check_name(scaffold.name, "a scaffold", scaffold.mark, "")
        _add(names, scaffold.name, "scaffolds", scaffold.mark, "")
        _check_scaffold(scaffold, places)
    return document


class _Names(NamedTuple):
    """Names that are already taken in one module."""

    modules: set[str]
    params: set[str]


def _add(names: set[str], name: str, what: str, mark: Mark | None, path: str) -> None:
    if name in names:
        where = f'in module "{path}"' if path else "in the schema"
        message = f'there are two {what} with the name "{name}" {where}; rename one'
        raise PmlError(ErrorCode.DUP, message, mark, join_path(path, name) if what == "modules" else path)
    names.add(name)


def _check_items(items: Sequence[Item], path: str, names: _Names, *, in_role: bool) -> None:
    for item in items:
        match item:
            case Text():
                pass
            case Param():
                _check_param(item, path)
                _add(names.params, item.name, "parameters", item.mark, path)
            case Module():
                check_name(item.name, "a module", item.mark, path)
                _add(names.modules, item.name, "modules", item.mark, path)
                _check_items(item.items, _inner_path(path, item), _Names(set(), set()), in_role=in_role)
            case Union():
                if not item.members:
                    message = "a union needs modules to choose from; put some in it or remove it"
                    raise PmlError(ErrorCode.UNION_EMPTY, message, item.mark, path)
                _check_items(item.members, path, names, in_role=in_role)
                _check_default(item, path)
            case RoleItem():
                if in_role:
                    message = f"<{item.role}> stands in another role; end that one first"
                    raise PmlError(ErrorCode.ROLE_ORDER, message, item.mark, path)
                _check_items(item.items, path, names, in_role=True)


def _check_param(param: Param, path: str) -> None:
    if not path:
        message = f'the parameter "{param.name}" is in no module; only modules have parameters'
        raise PmlError(ErrorCode.PARAM_ROOT, message, param.mark)
    check_name(param.name, "a parameter", param.mark, path)
    what = f'the parameter "{param.name}"'
    if param.length < 1:
        message = f"{what} has a length of {param.length} tokens; allowed are 1 and more"
        raise PmlError(ErrorCode.TAG, message, param.mark, path)
    if param.length > LENGTH_MAX:
        message = f"{what} has a length of more than {LENGTH_MAX} tokens, and no model has so many positions"
        raise PmlError(ErrorCode.SCHEMA_TOO_LONG, message, param.mark, path)
    if param.required and param.default is not None:
        message = f"{what} is required and has a default; it can have only one of the two"
        raise PmlError(ErrorCode.TAG, message, param.mark, path)


def _check_default(union: Union, path: str) -> None:
    members = [member.name for member in union.members]
    if union.default is not None and union.default not in members:
        message = f'the union has the default "{short(union.default)}"; its modules are {listed(members)}'
        raise PmlError(ErrorCode.TAG, message, union.mark, path)


def _check_open_roles(items: Sequence[Item], opened: RoleItem | None) -> RoleItem | None:
    """Return the role that is open after `items`, given the one that is open before them."""
    for item in items:
        match item:
            case RoleItem():
                if opened is not None:
                    message = f"<{opened.role}> is open, but another role follows; only the last one can be open"
                    raise PmlError(ErrorCode.ROLE_ORDER, message, opened.mark)
                opened = item if item.open else _check_open_roles(item.items, None)
            case Module():
                opened = _check_open_roles(item.items, opened)
            case Union():
                # Members never follow one another.
                ends = [_check_open_roles(member.items, opened) for member in item.members]
                opened = next((end for end in ends if end is not None), None)
            case _:
                pass
    return opened


class _Place(NamedTuple):
    """Properties that decide whether a module can be in a scaffold with others."""

    cached: bool
    choices: tuple[tuple[int, str], ...]
    """The unions around the module, each with the member that contains the module."""


def _places(
    items: Sequence[Item], path: str, cached: bool, choices: tuple[tuple[int, str], ...]
) -> dict[str, _Place]:
    """Return the properties of all modules by path."""
    found: dict[str, _Place] = {}
    for item in items:
        match item:
            case Module():
                own = join_path(path, item.name)
                found[own] = _Place(cached and item.cache, choices)
                found |= _places(item.items, own, cached and item.cache, choices)
            case Union():
                for member in item.members:
                    found |= _places([member], path, cached, (*choices, (id(item), member.name)))
            case RoleItem():
                found |= _places(item.items, path, cached, choices)
            case _:
                pass
    return found


def _check_scaffold(scaffold: Scaffold, places: dict[str, _Place]) -> None:
    def refuse(problem: str, path: str = "") -> NoReturn:
        message = f'the scaffold "{scaffold.name}" {problem}'
        raise PmlError(ErrorCode.SCAFFOLD_PATH, message, scaffold.mark, path)

    if not scaffold.modules:
        refuse('names no modules; list their paths (modules="a a/b")')
    chosen: dict[int, tuple[str, str]] = {}
    named: set[str] = set()
    for path in scaffold.modules:
        place = places.get(path)
        if place is None:
            refuse(f'names the module "{short(path)}", which is not in the schema{likely(path, places)}', path)
        if path in named:
            refuse(f'names the module "{path}" twice', path)
        named.add(path)
        if not place.cached:
            refuse(f'names the module "{path}", which is not cached (cache="false")', path)
        for union, member in place.choices:
            other = chosen.setdefault(union, (member, path))
            if other[0] != member:
                refuse(f'names "{other[1]}" and "{path}", of which a prompt can have only one (a union)', path)


def check_prompt(document: PromptDocument) -> PromptDocument:
    """Return a prompt after checking what can be checked without its schemas.

    Raises:
        PmlError: E_NAME, E_DUP_IMPORT, E_ROLE_ORDER.
    """
    names = document.schemas
    for name in names or [""]:
        check_name(name, "the prompt's schema", document.mark, "")
    if len(names) > SCHEMAS_MAX:
        message = f"the prompt is for {len(names)} schemas; allowed are {SCHEMAS_MAX}"
        raise PmlError(ErrorCode.NAME, message, document.mark)
    if len(set(names)) < len(names):
        message = f'the prompt names a schema twice: "{document.schema}"; name it once'
        raise PmlError(ErrorCode.DUP_IMPORT, message, document.mark)
    document = replace(document, schema=" ".join(names))
    _check_prompt_items(document.items, "", None)
    for turn in document.items[:-1]:
        if isinstance(turn, Turn) and turn.open:
            message = f"<{turn.role}> is open, but something follows; only the prompt's last part can be open"
            raise PmlError(ErrorCode.ROLE_ORDER, message, turn.mark)
    return document


def _check_prompt_items(items: Sequence[PromptItem], path: str, role: Turn | None) -> None:
    for item in items:
        match item:
            case Text():
                pass
            case Ref():
                check_name(item.name, "an import", item.mark, path)
                own = _inner_path(path, item)
                for name, _ in item.args:
                    check_name(name, "an argument", item.mark, own)
                _check_prompt_items(item.items, own, role)
            case Turn():
                if role is not None:
                    message = f"<{item.role}> stands in <{role.role}>; end that one first"
                    raise PmlError(ErrorCode.ROLE_ORDER, message, item.mark, path)
                if item.open and path:
                    message = (
                        f'<{item.role}> is open in the module "{path}"; only the prompt\'s last part can be open'
                    )
                    raise PmlError(ErrorCode.ROLE_ORDER, message, item.mark, path)
                _check_prompt_items(item.items, path, item)


def short(text: str) -> str:
    """Return a text as a message shows it: whole, or its beginning if it is long."""
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def listed(names: Collection[str]) -> str:
    """Return names as the list that a message shows, at most `_LISTED_MAX` of them."""
    shown = ", ".join(f'"{name}"' for name in islice(names, _LISTED_MAX))
    return f"{shown}, … ({len(names)} in all)" if len(names) > _LISTED_MAX else shown


def likely(name: str, names: Collection[str]) -> str:
    """Return the end of a message: the name that was probably meant, or the existing names."""
    if not names:
        return "; there are none"
    if len(name) <= _SHOWN_MAX and len(names) <= _COMPARED_MAX:
        close = get_close_matches(name, names, 1)
        if close:
            return f'; did you mean "{close[0]}"?'
    return f"; there are {listed(names)}"
