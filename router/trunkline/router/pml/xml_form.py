"""PML as XML: read and write documents.

    schema   = <schema name> item* scaffold* </schema>
    item     = TEXT | module | union | role | param (inside a module only)
    module   = <module name [cache="false"]> item* </module>
    union    = <union [default]> module+ </union>
    param    = <param name len [default] [fill] [required]/>, also <parameter name length scaffold/>
    role     = <system> | <user> | <assistant>  item*            open="true" only on the schema's last role
    scaffold = <scaffold name modules="a a/b"/>
    prompt   = <prompt schema> (TEXT | ref | role)* </prompt>
    ref      = <NAME arg="value"*> (TEXT | ref | role)* </NAME>

Every element may have `xml:space`, which also applies to the elements in it. White space that is only layout is
dropped (`normalise`); between a union's modules and after scaffolds all white space is. In a prompt, the last role
may be open, too: the answer continues it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NoReturn, cast

from trunkline.router.pml.markup import BLANKS, Chars, Element, normalise, parse_markup
from trunkline.router.pml.pml_error import ErrorCode, PmlError
from trunkline.router.pml.tree import (
    ROLES,
    TAGS,
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
    join_path,
)
from trunkline.router.pml.validation import check_name, check_prompt, check_schema, listed, short

_SPACE: Final = "xml:space"
_LENGTH: Final = re.compile(r"0*([0-9]{1,12})", re.ASCII)
_LENGTH_TOO_LONG: Final = 10**12
"""Value that stands for a length with so many digits that it is not read as a number; no model has as many
positions."""
_TRUTH: Final = {"true": True, "false": False}


def parse_schema(source: str | bytes) -> SchemaDocument:
    """Read a schema.

    Raises:
        PmlError: The document is not a schema, or a rule is broken. The code is one of `ErrorCode`'s from E_XML to
            E_ROLE_ORDER, but not E_TEMPLATE.
    """
    root = parse_markup(source)
    if root.tag != "schema":
        _refuse_tag(root, f"the document is a <{short(root.tag)}>, not a <schema>")
    _attributes(root, {"name"})
    return check_schema(_SchemaReader().schema(root))


def parse_prompt(source: str | bytes) -> PromptDocument:
    """Read a prompt.

    Raises:
        PmlError: The document is not a prompt, or a rule is broken: E_XML, E_TAG, E_NAME, E_ROLE_ORDER.
    """
    root = parse_markup(source)
    if root.tag != "prompt":
        _refuse_tag(root, f"the document is a <{short(root.tag)}>, not a <prompt>")
    _attributes(root, {"schema"})
    items = _prompt_items(root, _preserves(root, False), "")
    return check_prompt(PromptDocument(root.attributes.get("schema", ""), items, root.mark))


def _refuse_tag(element: Element, message: str, path: str = "") -> NoReturn:
    raise PmlError(ErrorCode.TAG, message, element.mark, path)


def _attributes(element: Element, allowed: set[str], path: str = "") -> None:
    """Refuse an element that has other attributes than the allowed ones."""
    for name in element.attributes:
        if name not in allowed and name != _SPACE:
            which = f"allowed are {listed(sorted(allowed))}" if allowed else "it has none"
            _refuse_tag(element, f'<{element.tag}> has an attribute "{short(name)}"; {which}', path)


def _preserves(element: Element, inherited: bool) -> bool:
    """Return whether white space in an element is kept."""
    value = element.attributes.get(_SPACE)
    if value is None:
        return inherited
    if value not in ("preserve", "default"):
        _refuse_tag(element, f'{_SPACE} is "{short(value)}"; allowed are "preserve" and "default"')
    return value == "preserve"


def _truth(element: Element, name: str, otherwise: bool, path: str) -> bool:
    value = element.attributes.get(name)
    if value is None:
        return otherwise
    if value not in _TRUTH:
        message = f'<{element.tag}> has {name}="{short(value)}"; allowed are "true" and "false"'
        _refuse_tag(element, message, path)
    return _TRUTH[value]


def _text(chars: Chars, preserve: bool) -> Text | None:
    text = normalise(chars.text, preserve)
    return Text(text, chars.mark if preserve or _is_blank(chars) else chars.visible_mark()) if text else None


class _SchemaReader:
    """Turns elements into a schema's tree.

    In all methods `path` is the path of the module around, and `preserve` tells whether white space is kept.
    """

    def schema(self, root: Element) -> SchemaDocument:
        """Read the whole schema."""
        preserve = _preserves(root, False)
        children = root.children
        tags = [child.tag if isinstance(child, Element) else "" for child in children]
        end = tags.index("scaffold") if "scaffold" in tags else len(children)
        scaffolds = [self._scaffold(child) for child in children[end:] if not _is_blank(child)]
        items = self._items(children[:end], preserve, "")
        return SchemaDocument(root.attributes.get("name", ""), items, tuple(scaffolds), root.mark)

    def _scaffold(self, child: Element | Chars) -> Scaffold:
        if isinstance(child, Chars):
            message = "text stands behind a scaffold; scaffolds are the last in a schema"
            raise PmlError(ErrorCode.TAG, message, child.visible_mark())
        if child.tag != "scaffold":
            _refuse_tag(
                child, f"<{short(child.tag)}> stands behind a scaffold; scaffolds are the last in a schema"
            )
        _attributes(child, {"name", "modules"})
        _check_empty(child, "")
        modules = tuple(child.attributes.get("modules", "").split())
        return Scaffold(child.attributes.get("name", ""), modules, child.mark)

    def _items(self, children: list[Element | Chars], preserve: bool, path: str) -> tuple[Item, ...]:
        items: list[Item] = []
        for child in children:
            if isinstance(child, Chars):
                text = _text(child, preserve)
                if text is not None:
                    items.append(text)
            else:
                items.append(self._item(child, preserve, path))
        return tuple(items)

    def _item(self, element: Element, preserve: bool, path: str) -> Item:
        tag = element.tag
        if tag == "module":
            return self._module(element, preserve, path)
        if tag == "union":
            return self._union(element, preserve, path)
        if tag in ("param", "parameter"):
            return _param(element, path)
        if tag in ROLES:
            _attributes(element, {"open"}, path)
            items = self._items(element.children, _preserves(element, preserve), path)
            return RoleItem(cast(RoleName, tag), items, _truth(element, "open", False, path), element.mark)
        if tag == "scaffold":
            _refuse_tag(element, "a scaffold stands in another element; scaffolds are the last in a schema", path)
        allowed = "<module>, <union>, <param>, <system>, <user>, <assistant> and, at the schema's end, <scaffold>"
        _refuse_tag(element, f"<{short(tag)}> has no meaning in a schema; allowed are {allowed}", path)

    def _module(self, element: Element, preserve: bool, path: str) -> Module:
        _attributes(element, {"name", "cache"}, path)
        name = element.attributes.get("name", "")
        check_name(name, "a module", element.mark, path)  # before paths are made of it
        own = join_path(path, name)
        items = self._items(element.children, _preserves(element, preserve), own)
        return Module(name, items, _truth(element, "cache", True, own), element.mark)

    def _union(self, element: Element, preserve: bool, path: str) -> Union:
        _attributes(element, {"default"}, path)
        preserve = _preserves(element, preserve)
        members: list[Module] = []
        for child in element.children:
            if isinstance(child, Chars):
                if _is_blank(child):
                    continue
                message = "text stands in a union; put it into one of its modules"
                raise PmlError(ErrorCode.UNION_CONTENT, message, child.visible_mark(), path)
            item = self._item(child, preserve, path)
            if not isinstance(item, Module):
                message = f"<{child.tag}> stands in a union; only modules can"
                raise PmlError(ErrorCode.UNION_CONTENT, message, child.mark, path)
            members.append(item)
        return Union(tuple(members), element.attributes.get("default"), element.mark)


def _is_blank(child: Element | Chars) -> bool:
    return isinstance(child, Chars) and not child.text.strip(BLANKS)


def _check_empty(element: Element, path: str) -> None:
    for child in element.children:
        if not _is_blank(child):
            _refuse_tag(element, f"<{element.tag}> is not empty; it cannot contain anything", path)


def _param(element: Element, path: str) -> Param:
    is_alias = element.tag == "parameter"
    length_name, fill_name = ("length", "scaffold") if is_alias else ("len", "fill")
    _attributes(element, {"name", length_name, fill_name, "default", "required"}, path)
    _check_empty(element, path)
    given = element.attributes.get(length_name)
    if given is None:
        _refuse_tag(element, f'<{element.tag}> has no {length_name}; say how many tokens it may have ("16")', path)
    number = _LENGTH.fullmatch(given)
    if number is None and not (given.isascii() and given.isdigit()):
        message = f'<{element.tag}> has {length_name}="{short(given)}"; allowed are whole numbers from 1 on'
        _refuse_tag(element, message, path)
    return Param(
        element.attributes.get("name", ""),
        int(number[1]) if number else _LENGTH_TOO_LONG,
        element.attributes.get("default"),
        element.attributes.get(fill_name),
        _truth(element, "required", False, path),
        element.mark,
    )


def _prompt_items(element: Element, preserve: bool, path: str) -> tuple[PromptItem, ...]:
    items: list[PromptItem] = []
    for child in element.children:
        if isinstance(child, Chars):
            text = _text(child, preserve)
            if text is not None:
                items.append(text)
            continue
        inner = _preserves(child, preserve)
        if child.tag in ROLES:
            _attributes(child, {"open"}, path)
            role = cast(RoleName, child.tag)
            is_open = _truth(child, "open", False, path)
            items.append(Turn(role, _prompt_items(child, inner, path), is_open, child.mark))
        elif child.tag in TAGS:
            allowed = "imported modules (by their names), <system>, <user> and <assistant>"
            _refuse_tag(child, f"<{child.tag}> has no meaning in a prompt; allowed are {allowed}", path)
        else:
            args = tuple((name, value) for name, value in child.attributes.items() if name != _SPACE)
            check_name(child.tag, "an import", child.mark, path)  # before paths are made of it
            own = join_path(path, child.tag)
            items.append(Ref(child.tag, args, _prompt_items(child, inner, own), child.mark))
    return tuple(items)


_TEXT_ESCAPES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#13;"}
_VALUE_ESCAPES: Final = {**_TEXT_ESCAPES, '"': "&quot;", "\n": "&#10;", "\t": "&#9;"}
_ESCAPES: Final = (str.maketrans(_TEXT_ESCAPES), str.maketrans(_VALUE_ESCAPES))
UNWRITABLE: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Matches a character that XML 1.0 cannot write."""


def schema_to_xml(document: SchemaDocument) -> str:
    """Return a schema as a document from which `parse_schema` reads the same schema.

    Raises:
        PmlError: E_XML, a text has a character that XML cannot write. The JSON form can.
    """
    out: list[str] = []
    _open(out, "schema", {"name": document.name, _SPACE: "preserve"})
    _write_items(out, document.items)
    for scaffold in document.scaffolds:
        _open(out, "scaffold", {"name": scaffold.name, "modules": " ".join(scaffold.modules)}, empty=True)
    out.append("</schema>")
    return "".join(out)


def prompt_to_xml(document: PromptDocument) -> str:
    """Return a prompt as a document from which `parse_prompt` reads the same prompt.

    Raises:
        PmlError: E_XML, a text has a character that XML cannot write. The JSON form can.
    """
    out: list[str] = []
    _open(out, "prompt", {"schema": document.schema, _SPACE: "preserve"})
    _write_prompt_items(out, document.items)
    out.append("</prompt>")
    return "".join(out)


def _write_items(out: list[str], items: tuple[Item, ...]) -> None:
    for item in items:
        match item:
            case Text():
                out.append(_escape(item.text, is_value=False))
            case Param():
                values = {"name": item.name, "len": str(item.length), "fill": item.fill}
                required = "true" if item.required else None
                _open(out, "param", {**values, "required": required, "default": item.default}, empty=True)
            case Module():
                _open(out, "module", {"name": item.name, "cache": None if item.cache else "false"})
                _write_items(out, item.items)
                out.append("</module>")
            case Union():
                _open(out, "union", {"default": item.default})
                _write_items(out, item.members)
                out.append("</union>")
            case RoleItem():
                _open(out, item.role, {"open": "true" if item.open else None})
                _write_items(out, item.items)
                out.append(f"</{item.role}>")


def _write_prompt_items(out: list[str], items: tuple[PromptItem, ...]) -> None:
    for item in items:
        match item:
            case Text():
                out.append(_escape(item.text, is_value=False))
            case Ref():
                _open(out, item.name, dict(item.args))
                _write_prompt_items(out, item.items)
                out.append(f"</{item.name}>")
            case Turn():
                _open(out, item.role, {"open": "true" if item.open else None})
                _write_prompt_items(out, item.items)
                out.append(f"</{item.role}>")


def _open(out: list[str], tag: str, attributes: Mapping[str, str | None], *, empty: bool = False) -> None:
    """Write a start tag with the attributes that are not None."""
    out.append(f"<{tag}")
    out += [f' {name}="{_escape(text, is_value=True)}"' for name, text in attributes.items() if text is not None]
    out.append("/>" if empty else ">")


def _escape(text: str, *, is_value: bool) -> str:
    wrong = UNWRITABLE.search(text)
    if wrong is not None:
        message = f"XML cannot write U+{ord(wrong[0]):04X}; remove it or keep to the JSON form"
        raise PmlError(ErrorCode.XML, message)
    return text.translate(_ESCAPES[is_value])
