"""Write programs and their calls as PML.

All texts are written with `xml:space="preserve"`: what the program says is what the model reads, blanks included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final
from xml.sax.saxutils import escape

from trunkline.prompts.items import ArgumentSlot, Branches, Item, ModuleSelection, Nested, Program, ProgramModule

# A parser reads a line end or tab in an attribute as a blank, and a carriage return as a line end.
_TEXT: Final = {"\r": "&#13;"}
_ATTRIBUTE: Final = {**_TEXT, "\n": "&#10;", "\t": "&#9;", '"': "&quot;"}
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def unwritable(text: str) -> str | None:
    """Return the first character that XML cannot contain; None if there is none."""
    found = _NOT_XML.search(text)
    return None if found is None else found[0]


def write_schema(name: str, program: Program) -> str:
    """Write the schema of a program: one module, which every call of it selects.

    It needs a module of its own because parameters stand in modules only.
    """
    body = "".join(_program(program.name, program))
    return f'<schema name="{_attribute(name)}" xml:space="preserve">{body}</schema>'


def write_prompt(schema: str, selection: ModuleSelection, text: str) -> str:
    """Write the prompt that selects these modules; `text` follows them.

    Raises:
        ValueError: an argument or the text has a character that XML cannot hold; the JSON form can.
    """
    body = "".join(_reference(selection))
    return f'<prompt schema="{_attribute(schema)}" xml:space="preserve">{body}{_text(text)}</prompt>'


def _program(name: str, program: Program) -> Iterator[str]:
    yield f'<module name="{name}">'
    if program.role is not None:
        yield f"<{program.role}>"
    yield from _items(program.items)
    if program.role is not None:
        yield f"</{program.role}>"
    yield "</module>"


def _items(items: tuple[Item, ...]) -> Iterator[str]:
    for item in items:
        match item:
            case str():
                yield _text(item)
            case ArgumentSlot():
                yield _param(item)
            case Nested():
                yield from _program(item.name, item.program)
            case Branches(modules=[single]):
                yield from _module(single)
            case Branches():
                yield "<union>"
                for module in item.modules:
                    yield from _module(module)
                yield "</union>"


def _module(module: ProgramModule) -> Iterator[str]:
    yield f'<module name="{module.name}">'
    yield from _items(module.items)
    yield "</module>"


def _param(slot: ArgumentSlot) -> str:
    attributes = {"name": slot.name, "len": str(slot.limit.count)}
    if slot.limit.fill is not None:
        attributes["fill"] = slot.limit.fill
    if slot.default is None:
        attributes["required"] = "true"
    elif slot.default:
        attributes["default"] = slot.default
    return f"<param{_attributes(attributes)}/>"


def _reference(selection: ModuleSelection) -> Iterator[str]:
    yield f"<{selection.name}{_attributes(selection.arguments)}"
    children = selection.children
    if not children:
        yield "/>"
        return
    yield ">"
    for child in children:
        yield from _reference(child)
    yield f"</{selection.name}>"


def _attributes(values: Mapping[str, str]) -> str:
    return "".join(f' {name}="{_attribute(value)}"' for name, value in values.items())


def _text(text: str) -> str:
    return escape(_checked(text), _TEXT)


def _attribute(text: str) -> str:
    return escape(_checked(text), _ATTRIBUTE)


def _checked(text: str) -> str:
    wrong = unwritable(text)
    if wrong is not None:
        raise ValueError(f"PML cannot hold the character {wrong!r}; send the JSON form (to_json)")
    return text
