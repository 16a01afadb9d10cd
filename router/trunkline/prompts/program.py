"""Prompt programs (Prompt Cache §3.2.4): a Python function as a schema, a call of it as a prompt.

    @prompt
    def trip(city: Annotated[str, MaxTokens(8)], budget: bool = False) -> None:
        "You plan trips."                        # text
        f" The traveller goes to {city}."        # text with a parameter
        if budget:                               # a module …
            " Suggest only what costs nothing."
        else:                                    # … or another in its place: a union
            " Money is no object."
        house_rules()                            # another program: a nested module

    client.complete(trip("Lisbon", budget=True).followed_by("Plan a Sunday."))

The body is compiled, never run. Only its conditions and the arguments of nested programs are evaluated, each time
the program is called. They may be any expressions over the function's parameters and the global names of its file
that assign nothing.

The prompt has the texts exactly as they are written, with blanks and line ends, and nothing between two texts. A
name in the braces of an f-string is either a parameter annotated with `MaxTokens`, or a string that the file
defined before, which becomes part of the schema. The first string is text too, not a docstring. Formatters take it
for a docstring and trim its ends, so begin the next string with a blank that is needed there.

A program is one module of its schema. Programs that it calls are modules within that module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Generic, ParamSpec, overload

from trunkline.prompts.compiler import compile_function, is_pml_name, readable_name
from trunkline.prompts.errors import PromptProgramError
from trunkline.prompts.items import ArgumentSlot, Branches, Item, ModuleSelection, Nested, Program, Role, select
from trunkline.router.pml import prompt_to_xml, schema_to_json, schema_to_xml, tree

P = ParamSpec("P")


@dataclass(frozen=True, eq=False)
class PromptProgram(Program, Generic[P]):
    """A function that was compiled to a schema. Calling it makes a prompt of that schema."""

    schema_name: str
    """Name of the schema on servers: the name given to `prompt`, or one with a digest of the program's text, so
    that two versions of a program can be used at the same time."""
    named_by_digest: bool
    """Whether the name has a digest, so that it always means the same text."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> PromptCall:
        """Make the prompt for these arguments.

        Raises:
            TypeError: The arguments do not fit the function.
            Exception: A condition of the program failed with this exception.
        """
        return PromptCall(self, select(self.name, self, self.values(*args, **kwargs)))

    def to_pml(self) -> str:
        """Return the schema in XML."""
        return schema_to_xml(_schema(self.schema_name, self))

    def to_json(self) -> dict[str, Any]:
        """Return the schema in PML's JSON form."""
        return schema_to_json(_schema(self.schema_name, self))


@dataclass(frozen=True)
class PromptCall:
    """The prompt that a call of a program makes: modules of its schema, arguments, and text that follows them."""

    program: PromptProgram[Any]
    selection: ModuleSelection
    trailing: str = ""

    @property
    def text(self) -> str:
        """Text that the model reads, without text that the chat template adds around roles."""
        return self.selection.text + self.trailing

    def followed_by(self, text: str) -> PromptCall:
        """Return the prompt with more text at its end, which is not cached as a module."""
        return replace(self, trailing=self.trailing + text)

    def to_pml(self) -> str:
        """Return the prompt in XML.

        Raises:
            PmlError: An argument has a character that XML cannot write. `to_json` can.
        """
        text = (tree.Text(self.trailing),) if self.trailing else ()
        return prompt_to_xml(tree.PromptDocument(self.program.schema_name, (_reference(self.selection), *text)))

    def to_json(self) -> dict[str, Any]:
        """Return the prompt as the HTTP API takes it (`prompt`)."""
        modules = []
        for path, selected in self.selection.walk():
            modules.append(
                {"path": path, "args": dict(selected.arguments)} if selected.arguments else {"path": path}
            )
        form: dict[str, Any] = {"schema": self.program.schema_name, "modules": modules}
        return {**form, "text": self.trailing} if self.trailing else form


@overload
def prompt(function: Callable[P, None], /) -> PromptProgram[P]: ...


@overload
def prompt(
    *, name: str | None = None, role: Role | None = None
) -> Callable[[Callable[P, None]], PromptProgram[P]]: ...


def prompt(
    function: Callable[P, None] | None = None, /, *, name: str | None = None, role: Role | None = None
) -> PromptProgram[P] | Callable[[Callable[P, None]], PromptProgram[P]]:
    """Compile a function to a prompt program.

    Args:
        function: A plain function; the docstring of `program.py` says what it may contain.
        name: Name of the schema and of its module. None: the module has the function's name, and the schema has
            that name with a digest of the program's text. With a given name, other clients that use the name get
            the changed text when the program changes.
        role: Makes all text of the program one message of this role in the model's chat template.

    Raises:
        PromptProgramError: The function cannot be compiled. The error has file and line.
    """
    if function is None:
        return lambda decorated: _compiled(decorated, name, role)
    return _compiled(function, name, role)


def _compiled(function: Callable[P, None], name: str | None, role: Role | None) -> PromptProgram[P]:
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"@prompt is for plain functions, not for {type(function).__name__}; put it directly above `def`"
        )
    line = function.__code__.co_firstlineno
    if name is not None and not is_pml_name(name):
        raise PromptProgramError(
            f"{name!r} is no name for a schema: letters, digits, `_`, `.`, `-`, with a letter or `_` first, "
            f"and none of {', '.join(sorted(tree.TAGS))}",
            function.__code__.co_filename,
            line,
        )
    if role not in (None, "system", "user", "assistant"):
        raise PromptProgramError(
            f"{role!r} is no role; there are system, user, assistant", function.__code__.co_filename, line
        )
    compiled = compile_function(function, name or readable_name(function.__name__), role)
    return PromptProgram(
        **vars(compiled),
        schema_name=name or f"{compiled.name}-{_digest(compiled)}",
        named_by_digest=name is None,
    )


def _digest(program: Program) -> str:
    """Return a digest of a program's text. Eight hexadecimal digits suffice for the versions of one function."""
    return hashlib.sha256(schema_to_xml(_schema("", program)).encode()).hexdigest()[:8]


def _schema(name: str, program: Program) -> tree.SchemaDocument:
    """Return the schema of a program: one module, which every call of the program selects.

    The module is needed because only modules can have parameters.
    """
    return tree.SchemaDocument(name, (_module(program.name, program),))


def _module(name: str, program: Program) -> tree.Module:
    items = _items(program.items)
    return tree.Module(name, items if program.role is None else (tree.RoleItem(program.role, items),))


def _items(items: tuple[Item, ...]) -> tuple[tree.Item, ...]:
    written: list[tree.Item] = []
    for item in items:
        match item:
            case str():
                written.append(tree.Text(item))
            case ArgumentSlot(limit=limit, default=default):
                written.append(tree.Param(item.name, limit.count, default or None, limit.fill, default is None))
            case Nested():
                written.append(_module(item.name, item.program))
            case Branches():
                modules = tuple(tree.Module(module.name, _items(module.items)) for module in item.modules)
                written.append(modules[0] if len(modules) == 1 else tree.Union(modules))
    return tuple(written)


def _reference(selection: ModuleSelection) -> tree.Ref:
    """Return the import of a selected module, with the imports in it."""
    children = tuple(_reference(child) for child in selection.children)
    return tree.Ref(selection.name, tuple(selection.arguments.items()), children)
