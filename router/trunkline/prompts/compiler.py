"""Compile a function's source to the items of a module (Prompt Cache §3.2.4, docs/pml.md, prompt programs).

    function ─► definition: its syntax tree ─► _FunctionCompiler: items ─► Program
                                                     └─ Scope: conditions and arguments, as small functions

Statements are text, branches, or calls of other programs. Every other statement is refused with its line: if it
were skipped, the prompt would lack it without a warning. Only conditions and the arguments of calls ever run. They
are compiled to small functions of the program's parameters. These functions keep the line numbers of the file, so
that the traceback of an error shows the condition.

Names of modules and parameters depend on the program's text only, never on addresses or seeded hashes. Every
process that decorates the same function makes the same schema, so the KV of its modules is found again by other
processes and after restarts.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final, NoReturn

from trunkline.prompts.errors import PromptProgramError
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
from trunkline.router.pml.tree import NAME, TAGS
from trunkline.router.pml.xml_form import UNWRITABLE

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


def compile_function(function: FunctionType, name: str, role: Role | None) -> Program:
    """Compile a function to the program `name`.

    Raises:
        PromptProgramError: The function has a part that PML cannot express.
    """
    tree = definition(function)
    compiler = _FunctionCompiler(function, tree, role)
    return Program(name, role, compiler.signature, compiler.limits, compiler.items(tree.body, Namer()))


class _FunctionCompiler:
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

    def items(self, body: Sequence[ast.stmt], children: Namer) -> tuple[Item, ...]:
        """Return the items of one module. `children`: makes names of nested modules."""
        slots = Namer()
        found: list[Item] = []
        for statement in body:
            for item in self._statement(statement, children, slots):
                if isinstance(item, str) and found and isinstance(found[-1], str):
                    found[-1] += item  # one text in the schema, which is tokenised as a whole
                elif item != "":
                    found.append(item)
        return tuple(found)

    def _statement(self, node: ast.stmt, children: Namer, slots: Namer) -> Iterator[Item]:
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
        wrong = UNWRITABLE.search(text)
        if wrong is not None:
            self._fail(node, f"the text has the character {wrong[0]!r}, which no PML document can hold")
        return text

    def _part(self, part: ast.expr, slots: Namer) -> str | ArgumentSlot:
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
            return ArgumentSlot(name, slots.take(readable_name(name)), self.limits[name], shown)
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

    def _if(self, node: ast.If, children: Namer) -> Iterator[Branches]:
        """Compile a chain of `if` and `elif` to one choice; `else: if` is the same as `elif`."""
        tests: list[ast.expr] = []
        branches: list[tuple[str, list[ast.stmt]]] = []
        rest: list[ast.stmt] = [node]
        while len(rest) == 1 and isinstance(rest[0], ast.If):
            tests.append(self._checked(rest[0].test))
            branches.append((readable_name(ast.unparse(tests[-1])), rest[0].body))
            rest = rest[0].orelse
        if rest:
            branches.append((readable_name(f"else {ast.unparse(tests[0])}"), rest))
        # If no test holds, the `else` branch is taken, whose index follows those of all tests.
        choose = self._scope.if_chain(tests, otherwise=len(tests) if rest else -1)
        yield from self._choice(branches, children, choose)

    def _match(self, node: ast.Match, children: Namer) -> Iterator[Branches]:
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
            branches.append((readable_name(f"{subject} {pattern}{guard}"), case.body))
        yield from self._choice(branches, children, self._scope.match(node))

    def _choice(
        self,
        branches: list[tuple[str, list[ast.stmt]]],
        children: Namer,
        choose: Callable[[Values], int],
    ) -> Iterator[Branches]:
        members: list[ProgramModule | None] = []
        for wish, body in branches:
            items = self.items(body, Namer())
            members.append(ProgramModule(children.take(wish), items) if items else None)
        if any(members):
            yield Branches(tuple(members), choose)

    def _nested(self, call: ast.Call, children: Namer) -> Nested:
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


@dataclass(frozen=True)
class Scope:
    """The names that a program's expressions can use."""

    filename: str
    function: str
    parameters: tuple[str, ...]
    names: dict[str, Any]
    """Globals of the program's module."""

    def if_chain(self, tests: Sequence[ast.expr], otherwise: int) -> Callable[[Values], int]:
        """Compile tests to a function that returns the index of the first true one; `otherwise` if none is
        true."""
        body: list[ast.stmt] = [ast.If(test, [_returned(index, test)], []) for index, test in enumerate(tests)]
        return self._compiled([*body, _returned(otherwise, tests[-1])])

    def match(self, statement: ast.Match) -> Callable[[Values], int]:
        """Compile a `match` to a function that returns the index of the case that matches; -1 if none does."""
        cases = [
            ast.match_case(case.pattern, case.guard, [_returned(index, case.pattern)])
            for index, case in enumerate(statement.cases)
        ]
        return self._compiled([ast.Match(statement.subject, cases), _returned(-1, statement)])

    def arguments(self, call: ast.Call) -> Callable[[Values], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Compile a call to a function that returns its positional and named arguments."""
        names: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in call.keywords]
        named = ast.Dict(names, [keyword.value for keyword in call.keywords])
        pair = ast.Tuple([ast.Tuple(list(call.args), ast.Load()), named], ast.Load())
        return self._compiled([ast.Return(pair)])

    def _compiled(self, body: list[ast.stmt]) -> Callable[[Values], Any]:
        tree = ast.parse(f"def {self.function}({', '.join(self.parameters)}): pass")
        assert isinstance(tree.body[0], ast.FunctionDef)
        tree.body[0].body = body
        code = compile(ast.fix_missing_locations(tree), self.filename, "exec", dont_inherit=True)
        [inner] = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        function = FunctionType(inner, self.names)
        return lambda values: function(*(values[name] for name in self.parameters))


def _returned(index: int, near: ast.AST) -> ast.Return:
    return ast.Return(ast.copy_location(ast.Constant(index), near))


def definition(function: FunctionType) -> ast.FunctionDef:
    """Return the `def` statement of a function.

    The whole file is parsed, so that error messages and tracebacks have its line numbers. A method's text alone
    may not be valid Python: a string in it may be indented less than the method.

    Raises:
        PromptProgramError: The source is missing or has changed, or the function is a lambda or asynchronous.
    """
    code = function.__code__
    try:
        # The lines come from the import system's cache: also of notebooks and of archives.
        lines, _ = inspect.findsource(function)
        tree = _parse("".join(lines))
    except (OSError, SyntaxError) as error:
        raise PromptProgramError(
            f"the source of {function.__name__} cannot be read ({error}); a prompt program is compiled from its "
            "source, so write it in a file or a notebook",
            code.co_filename,
            code.co_firstlineno,
        ) from error
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            and _first_line(node) == code.co_firstlineno
            and getattr(node, "name", "<lambda>") == code.co_name
        ):
            if isinstance(node, ast.FunctionDef):
                return node
            raise PromptProgramError(
                "a prompt program is a plain function: `def`, not `async def` or `lambda`",
                code.co_filename,
                node.lineno,
            )
    raise PromptProgramError(
        f"{function.__name__} is not in its file at this line: the file changed after it was imported",
        code.co_filename,
        code.co_firstlineno,
    )


@functools.lru_cache(maxsize=16)
def _parse(source: str) -> ast.Module:
    """Parse a file, which may have many programs. The cached tree must not be changed."""
    return ast.parse(source)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    """Return the first line of a function as code objects count it: that of its first decorator."""
    if isinstance(node, ast.Lambda) or not node.decorator_list:
        return node.lineno
    return node.decorator_list[0].lineno


NAME_CHARS_MAX: Final = 48
# Signs that cannot stand in a name are replaced by words, so that conditions that differ in them get other names.
_WORDS: Final = ((" != ", " ne "), (" <= ", " le "), (" >= ", " ge "), (" < ", " lt "), (" > ", " gt "))


def is_pml_name(text: str) -> bool:
    """Return whether PML allows a text as the name of a schema, module or parameter."""
    return NAME.fullmatch(text) is not None and text not in TAGS


def readable_name(source: str) -> str:
    """Return a name made from source code, with a digest if the code gives no name or a long one."""
    text = source
    for sign, word in _WORDS:
        text = text.replace(sign, word)
    name = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")
    if len(name) > NAME_CHARS_MAX or not name:
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:6]
        name = f"{name[: NAME_CHARS_MAX - 7].rstrip('-')}-{digest}".lstrip("-")
    return name if is_pml_name(name) else f"_{name}"


class Namer:
    """Makes names that are unique within a module."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, wish: str) -> str:
        """Return the name `wish` or, if the module has it already, `wish-2`, `wish-3`, …"""
        name, count = wish, 1
        while name in self._taken:
            count += 1
            name = f"{wish}-{count}"
        self._taken.add(name)
        return name
