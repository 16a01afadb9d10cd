"""From a function's syntax tree to the items of a module (Prompt Cache §3.2.4, docs/pml.md, prompt programs).

Statements are text, branches, or calls of other programs. Everything else is refused with its line: whatever were
skipped silently would be missing in the prompt.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, NoReturn

from trunkline.prompts import names
from trunkline.prompts.errors import PromptProgramError
from trunkline.prompts.expressions import Scope
from trunkline.prompts.items import (
    ArgumentSlot,
    Branches,
    Item,
    MaxTokens,
    Nested,
    Program,
    ProgramModule,
    Role,
    Values,
)
from trunkline.prompts.markup import unwritable

_STATEMENTS: Final[dict[type[ast.stmt], str]] = {
    ast.For: "a loop has no fixed layout; write its texts out, or join them into one argument",
    ast.While: "a loop has no fixed layout; write its texts out, or join them into one argument",
    ast.AsyncFor: "a loop has no fixed layout; write its texts out, or join them into one argument",
    ast.Assign: "nothing is assigned in a prompt program; compute it before the call, pass it as an argument",
    ast.AugAssign: "nothing is assigned in a prompt program; compute it before the call, pass it as an argument",
    ast.AnnAssign: "nothing is assigned in a prompt program; compute it before the call, pass it as an argument",
    ast.Return: "there is no `return` in a prompt program; branch with `if`",
    ast.With: "`with` has no meaning in a prompt; for a role, write a function with @prompt(role=...) and call it",
    ast.Try: "`try` has no meaning in a prompt",
    ast.FunctionDef: "write the function outside and call it",
    ast.AsyncFunctionDef: "write the function outside and call it",
    ast.Import: "import outside of the function",
    ast.ImportFrom: "import outside of the function",
}
_EXPRESSIONS: Final[dict[type[ast.expr], str]] = {
    ast.NamedExpr: "`:=` assigns",
    ast.Lambda: "`lambda` is not allowed here; call a function that is defined outside",
    ast.Await: "`await` is not allowed here",
    ast.Yield: "`yield` is not allowed here",
    ast.YieldFrom: "`yield` is not allowed here",
}


def compile_function(function: FunctionType, tree: ast.FunctionDef, name: str, role: Role | None) -> Program:
    """Compile `function`, whose definition is `tree`.

    Raises:
        PromptProgramError: it says something that PML cannot express.
    """
    compiler = _Compiler(function, tree, role)
    return Program(name, role, compiler.signature, compiler.limits, compiler.items(tree.body, names.Namer()))


class _Compiler:
    """Compiles one function."""

    def __init__(self, function: FunctionType, tree: ast.FunctionDef, role: Role | None) -> None:
        self._filename = function.__code__.co_filename
        self._function = function
        self._role = role
        self._check_head(tree)
        self.signature = inspect.signature(function)
        self.limits = self._limits(tree)
        self._scope = Scope(
            self._filename, function.__name__, tuple(self.signature.parameters), function.__globals__
        )

    def items(self, body: Sequence[ast.stmt], children: names.Namer) -> tuple[Item, ...]:
        """Return the items of one module. `children`: makes names of nested modules."""
        slots = names.Namer()
        found: list[Item] = []
        for statement in body:
            for item in self._statement(statement, children, slots):
                if isinstance(item, str) and found and isinstance(found[-1], str):
                    found[-1] += item  # one text in the schema, which is tokenised as a whole
                elif item != "":
                    found.append(item)
        return tuple(found)

    def _statement(self, node: ast.stmt, children: names.Namer, slots: names.Namer) -> Iterator[Item]:
        match node:
            case ast.Pass():
                pass
            case ast.Expr(ast.Constant(str(text))):
                yield self._text(text, node)
            case ast.Expr(ast.JoinedStr(parts)):
                for part in parts:
                    yield self._part(part, slots)
            case ast.Expr(ast.Call() as call):
                yield self._nested(call, children)
            case ast.If():
                yield from self._if(node, children)
            case ast.Match():
                yield from self._match(node, children)
            case ast.Expr(value):
                self._fail(
                    value,
                    f"`{_short(value)}` is no text; a statement is a string, an f-string, `if`, `match`, or the "
                    "call of a prompt program",
                )
            case _:
                reason = _STATEMENTS.get(type(node), "it has no meaning in a prompt")
                self._fail(node, f"`{_short(node)}` cannot be compiled: {reason}")

    def _text(self, text: str, node: ast.AST) -> str:
        wrong = unwritable(text)
        if wrong is not None:
            self._fail(node, f"the text has the character {wrong!r}, which no PML document can hold")
        return text

    def _part(self, part: ast.expr, slots: names.Namer) -> str | ArgumentSlot:
        """Compile a piece of an f-string."""
        if isinstance(part, ast.Constant):
            return self._text(str(part.value), part)
        assert isinstance(part, ast.FormattedValue)
        if part.format_spec is not None or part.conversion != -1:
            self._fail(part, "a format (`:…`, `!r`, `=`) cannot be compiled; format the argument before the call")
        if not isinstance(part.value, ast.Name):
            self._fail(part, f"{{{_short(part.value)}}} cannot be compiled: only a name may stand in the braces")
        name = part.value.id
        if name in self.limits:
            default = self.signature.parameters[name].default
            shown = None if default is inspect.Parameter.empty else format(default, "")
            return ArgumentSlot(name, slots.take(names.readable(name)), self.limits[name], shown)
        if name in self.signature.parameters:
            self._fail(
                part,
                f"{{{name}}} has no length: annotate it with Annotated[str, MaxTokens(n)], or branch on it",
            )
        constant = self._function.__globals__.get(name)
        if not isinstance(constant, str):
            self._fail(
                part,
                f"{{{name}}} is neither an argument nor a text that the file has defined before this function",
            )
        return self._text(constant, part)

    def _if(self, node: ast.If, children: names.Namer) -> Iterator[Branches]:
        """Compile a chain of `if` and `elif` to one choice; `else: if` is the same as `elif`."""
        tests: list[ast.expr] = []
        branches: list[tuple[str, list[ast.stmt]]] = []
        rest: list[ast.stmt] = [node]
        while len(rest) == 1 and isinstance(rest[0], ast.If):
            tests.append(self._checked(rest[0].test))
            branches.append((names.from_expression(tests[-1]), rest[0].body))
            rest = rest[0].orelse
        if rest:
            branches.append((names.readable(f"else {ast.unparse(tests[0])}"), rest))
        # The last branch is taken when no test holds, and is then the one behind all tests.
        choose = self._scope.if_chain(tests, otherwise=len(tests) if rest else -1)
        yield from self._choice(branches, children, choose)

    def _match(self, node: ast.Match, children: names.Namer) -> Iterator[Branches]:
        subject = ast.unparse(self._checked(node.subject))
        branches = []
        for case in node.cases:
            for inner in ast.walk(case.pattern):
                if getattr(inner, "name", None) is not None or getattr(inner, "rest", None) is not None:
                    self._fail(inner, "a case that captures a name assigns it; compare with values")
                if isinstance(inner, ast.expr):
                    self._checked(inner)
            guard = "" if case.guard is None else f" if {ast.unparse(self._checked(case.guard))}"
            pattern = "other" if isinstance(case.pattern, ast.MatchAs) else ast.unparse(case.pattern)
            branches.append((names.readable(f"{subject} {pattern}{guard}"), case.body))
        yield from self._choice(branches, children, self._scope.match(node))

    def _choice(
        self,
        branches: list[tuple[str, list[ast.stmt]]],
        children: names.Namer,
        choose: Callable[[Values], int],
    ) -> Iterator[Branches]:
        members: list[ProgramModule | None] = []
        for wish, body in branches:
            items = self.items(body, names.Namer())
            members.append(ProgramModule(children.take(wish), items) if items else None)
        if any(members):
            yield Branches(tuple(members), choose)

    def _nested(self, call: ast.Call, children: names.Namer) -> Nested:
        program = self._callee(call.func)
        if self._role is not None and program.has_roles:
            self._fail(call, f"{program.name} has a role; it cannot stand inside of the role {self._role}")
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            if isinstance(value, ast.Starred):
                self._fail(value, "`*` arguments cannot be compiled; write them out")
            self._checked(value)
        if any(keyword.arg is None for keyword in call.keywords):
            self._fail(call, "`**` arguments cannot be compiled; write them out")
        try:
            program.signature.bind(*call.args, **{str(k.arg): k.value for k in call.keywords})
        except TypeError as error:
            self._fail(call, f"{program.name} cannot be called so: {error}")
        return Nested(children.take(program.name), program, self._scope.arguments(call))

    def _callee(self, node: ast.expr) -> Program:
        value = self._resolved(node)
        if not isinstance(value, Program):
            self._fail(
                node,
                f"{_short(node)} is no prompt program that is known here; decorate it with @prompt, and define it "
                "before the function that calls it",
            )
        return value

    def _resolved(self, node: ast.expr) -> Any:
        """Return the value of a dotted name in the function's module; None if it has none."""
        if isinstance(node, ast.Attribute):
            return getattr(self._resolved(node.value), node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.signature.parameters:
            return None
        if node.id == self._function.__name__:
            self._fail(node, f"{node.id} calls itself, so its layout has no end")
        return self._function.__globals__.get(node.id)

    def _checked(self, node: ast.expr) -> ast.expr:
        """Return an expression after checking that it assigns nothing, so it may run when the program is
        called."""
        for inner in ast.walk(node):
            reason = _EXPRESSIONS.get(type(inner)) if isinstance(inner, ast.expr) else None
            if reason is not None:
                self._fail(inner, f"`{_short(node)}` cannot be compiled: {reason}")
        return node

    def _check_head(self, tree: ast.FunctionDef) -> None:
        arguments = tree.args
        for starred in (arguments.vararg, arguments.kwarg):
            if starred is not None:
                self._fail(starred, f"`*{starred.arg}` cannot be compiled; name the arguments")
        free = self._function.__code__.co_freevars
        if free:
            self._fail(
                tree,
                f"{tree.name} uses {', '.join(free)} of the function around it; pass it as an argument, or define "
                "it at the top of the file",
            )

    def _limits(self, tree: ast.FunctionDef) -> Mapping[str, MaxTokens]:
        """Return the limits of parameters annotated with `MaxTokens`."""
        try:
            hints = typing.get_type_hints(self._function, include_extras=True)
        except (NameError, TypeError, AttributeError, SyntaxError) as error:
            self._fail(tree, f"the annotations of {tree.name} cannot be read: {error}")
        limits = {}
        for name in self.signature.parameters:
            marks = [mark for mark in getattr(hints.get(name), "__metadata__", ()) if isinstance(mark, MaxTokens)]
            if not marks:
                continue
            if len(marks) > 1 or hints[name].__origin__ not in (str, int):
                self._fail(tree, f"{name}: write Annotated[str, MaxTokens(n)], or int in the place of str")
            limits[name] = marks[0]
        return limits

    def _fail(self, node: ast.AST, message: str) -> NoReturn:
        raise PromptProgramError(message, self._filename, getattr(node, "lineno", 1))


def _short(node: ast.AST) -> str:
    """Return the beginning of a node's source, on one line."""
    text = ast.unparse(node).split("\n", 1)[0]
    return text if len(text) <= 60 else f"{text[:57]}..."
