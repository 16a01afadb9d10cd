"""What a prompt program says, found the plain way: its body is run, and its strings are collected.

Independent of the compiler: the source is rewritten so that each string that stands alone is said, and Python does
the rest.
"""

from __future__ import annotations

import ast
import linecache
from types import ModuleType
from typing import Any


class _Saying(ast.NodeTransformer):
    """Strings that stand alone become calls of `say`; decorators go, so that functions stay functions."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if not isinstance(node.value, ast.Constant | ast.JoinedStr):
            return node
        call = ast.Call(ast.Name("say", ast.Load()), [node.value], [])
        return ast.copy_location(ast.Expr(call), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        return self.generic_visit(node)


def spoken(source: str, function: str, *args: Any, **kwargs: Any) -> str:
    """All that a call says."""
    said: list[str] = []
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            _Saying().visit(node)
    names: dict[str, Any] = {"say": said.append, "__name__": "naive"}
    exec(compile(ast.fix_missing_locations(tree), "<naive>", "exec"), names)
    names[function](*args, **kwargs)
    return "".join(said)


def module_of(source: str, name: str = "<program>") -> ModuleType:
    """The module that a file with this source would be."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module
