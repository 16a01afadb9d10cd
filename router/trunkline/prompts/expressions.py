"""Compile conditions and arguments: the parts of a program's body that run when the program is called.

They become small functions of the program's parameters with its global names. They keep their lines of the file,
so an error in a condition shows the condition. The rest of the body never runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from trunkline.prompts.items import Values


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
