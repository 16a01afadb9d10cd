"""Find the syntax tree of a function, with the line numbers of its file, without running the function."""

from __future__ import annotations

import ast
import functools
import inspect
from types import FunctionType

from trunkline.prompts.errors import PromptProgramError


def definition(function: FunctionType) -> ast.FunctionDef:
    """Return the `def` statement of `function`.

    The whole file is parsed, since a method's text alone may not be Python (strings that end left of it) and since
    error messages and tracebacks then have the file's own lines.

    Raises:
        PromptProgramError: its source is not there or has changed, or it is a lambda or asynchronous.
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
    """As code objects count it: a function begins at its first decorator."""
    if isinstance(node, ast.Lambda) or not node.decorator_list:
        return node.lineno
    return node.decorator_list[0].lineno
