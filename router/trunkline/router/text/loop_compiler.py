"""Compile a chat template so that its loops over messages can go on where another rendering was
(`message_loops.py`).

A loop is left as it is if it is not at the template's top, if its body asks how long the loop is, reads other
messages than its neighbours, or has anything in it whose value does not follow from the rendering's variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jinja2 import nodes

_BODY: Final = (
    nodes.Output,
    nodes.If,
    nodes.For,
    nodes.Assign,
    nodes.AssignBlock,
    nodes.ExprStmt,
    nodes.Continue,
    nodes.Break,
    nodes.Expr,
    nodes.Pair,
    nodes.Keyword,
    nodes.Operand,
)
"""What a body may be made of."""
_CHANCE: Final = frozenset({"strftime_now", "random"})
"""Functions and filters whose results do not follow from their arguments."""
_MESSAGES: Final = "messages"
_LOOP: Final = "loop"


def environment_call(method: str, arguments: list[nodes.Expr], near: nodes.Node) -> nodes.Call:
    """Return the call of a method of a template's environment. `near`: where it stands."""
    attribute = nodes.EnvironmentAttribute(method, lineno=near.lineno)
    made = nodes.Call(attribute, arguments, [], None, None, lineno=near.lineno)
    return made.set_environment(near.environment) if near.environment is not None else made  # type: ignore[return-value]


def with_known_loops(syntax: nodes.Template) -> int:
    """Change the loops of a template that can go on where another rendering was, in place. Return their number."""
    macros = {macro.name: macro for macro in syntax.find_all(nodes.Macro)}
    stored = {name.name for name in syntax.find_all(nodes.Name) if name.ctx != "load"}
    macros = {name: macro for name, macro in macros.items() if name not in stored}
    count = 0
    for statements, loop in list(_top_loops(syntax.body)):
        body = _Body(loop, macros)
        if body.fits:
            body.change(statements, count)
            count += 1
    return count


def _top_loops(statements: list[nodes.Node]) -> Iterator[tuple[list[nodes.Node], nodes.For]]:
    """Yield the loops that run at most once in a rendering, each with the statements that it is one of."""
    for statement in list(statements):
        if isinstance(statement, nodes.For):
            yield statements, statement
        elif isinstance(statement, nodes.If):
            for branch in (statement.body, *(other.body for other in statement.elif_), statement.else_):
                yield from _top_loops(branch)


class _Body:
    """The body of a loop."""

    def __init__(self, loop: nodes.For, macros: dict[str, nodes.Macro]) -> None:
        self._loop = loop
        self._macros = macros
        self._names: set[str] = set()
        """Variables that it reads."""
        self._spaces: set[str] = set()
        """Namespaces that it changes."""
        self._asked: list[nodes.Getattr] = []
        """Where it asks for the number of the turn."""
        self._seen: set[str] = set()
        """Macros that it calls."""
        self.fits = not (loop.recursive or loop.test or loop.else_)
        """Whether the loop can go on where another rendering was."""
        for statement in loop.body:
            self._walk(statement, is_own=True)
        targets = {
            name.name for name in (loop.target, *loop.target.find_all(nodes.Name)) if isinstance(name, nodes.Name)
        }
        self._names -= targets | self._seen | self._spaces
        whole = {_MESSAGES, loop.iter.name if isinstance(loop.iter, nodes.Name) else _MESSAGES}
        self.fits = self.fits and not self._names & whole

    def _walk(self, node: nodes.Node, *, is_own: bool) -> None:
        """Take in a part of the body. `is_own`: whether `loop` is this loop there."""
        if not isinstance(node, _BODY):
            self.fits = False
            return
        if isinstance(node, nodes.Getattr) and _is_loop(node.node):
            if is_own and node.attr != "last":
                self.fits = self.fits and node.attr in ("index", "index0", "first")
                self._asked.append(node)
            return
        if isinstance(node, nodes.Getitem) and is_own and self._is_neighbour(node):
            self._walk(node.arg, is_own=True)
            return
        if isinstance(node, nodes.NSRef):
            self._spaces.add(node.name)
        elif isinstance(node, nodes.Name):
            self._name(node, is_own=is_own)
        elif isinstance(node, nodes.Filter | nodes.Test):
            self.fits = self.fits and node.name not in _CHANCE
        if isinstance(node, nodes.For):
            self._walk(node.iter, is_own=is_own)
            self.fits = self.fits and not node.else_ and not node.test
            for statement in (node.target, *node.body):
                self._walk(statement, is_own=False)
            return
        for child in node.iter_child_nodes():
            self._walk(child, is_own=is_own)

    def _name(self, node: nodes.Name, *, is_own: bool) -> None:
        if node.name == _LOOP:
            self.fits = self.fits and not is_own
        elif node.name in _CHANCE:
            self.fits = False
        elif node.name in self._macros:
            if node.name not in self._seen:
                self._seen.add(node.name)
                macro = self._macros[node.name]
                for part in (*macro.args, *macro.defaults, *macro.body):
                    self._walk(part, is_own=False)
        elif node.ctx == "load":
            self._names.add(node.name)

    def _is_neighbour(self, node: nodes.Getitem) -> bool:
        """Return whether an expression is the message before or behind that of the turn."""
        items, place = self._loop.iter, node.arg
        return (
            isinstance(items, nodes.Name)
            and isinstance(node.node, nodes.Name)
            and node.node.name == items.name
            and isinstance(place, nodes.Sub | nodes.Add)
            and isinstance(place.left, nodes.Getattr)
            and _is_loop(place.left.node)
            and place.left.attr == "index0"
            and isinstance(place.right, nodes.Const)
            and place.right.value == 1
        )

    def change(self, statements: list[nodes.Node], number: int) -> None:
        """Change the loop. `statements`: those that it is one of; `number`: its own."""
        loop = self._loop

        def listed(names: set[str]) -> nodes.List:
            return nodes.List(
                [nodes.Name(name, "load", lineno=loop.lineno) for name in sorted(names)], lineno=loop.lineno
            )

        def call(method: str, *arguments: nodes.Expr) -> nodes.Call:
            return environment_call(method, list(arguments), loop)

        items = loop.iter
        assert isinstance(items, nodes.Expr)
        own = nodes.Const(number, lineno=loop.lineno)
        known = call("loop_known", own, items, listed(self._names), listed(self._spaces))
        statements.insert(_place(statements, loop), nodes.Output([known], lineno=loop.lineno))
        loop.iter = call("loop_rest")
        for asked in self._asked:
            plain = nodes.Getattr(asked.node, asked.attr, asked.ctx, lineno=asked.lineno)
            method = "loop_is_first" if asked.attr == "first" else "loop_moved"
            _replace(loop, asked, call(method, own, plain))
        loop.body.insert(0, nodes.ExprStmt(call("loop_mark", own, listed(self._spaces)), lineno=loop.lineno))


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == _LOOP


def _place(statements: list[nodes.Node], loop: nodes.For) -> int:
    return next(place for place, statement in enumerate(statements) if statement is loop)


def _replace(within: nodes.Node, old: nodes.Node, new: nodes.Node) -> None:
    """Replace a node, which stands once within another one."""
    for name in within.fields:
        value = getattr(within, name)
        if value is old:
            setattr(within, name, new)
        elif isinstance(value, nodes.Node):
            _replace(value, old, new)
        elif isinstance(value, list):
            for place, item in enumerate(value):
                if item is old:
                    value[place] = new
                elif isinstance(item, nodes.Node):
                    _replace(item, old, new)
