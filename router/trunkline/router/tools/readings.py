"""Whether two texts of an answer read the same: the one that the model wrote, and the one that a template wrote
when the answer came back. Pure.

Clients take an answer apart and send it back in parts, and the template puts these together in its own way. Both
texts are read with the parser that the answer was read with. They are the same if these agree, in this order:

- texts and thoughts, character by character, but for white space at their ends;
- the names of calls, and their arguments as JSON: white space, the form of characters in strings and the order of
  fields do not count. `1` and `1.0` are not the same.

A thought that the template leaves out makes another message. So does anything else that the model would not see.
"""

from __future__ import annotations

import json

from pydantic_core import from_json

from trunkline.router.text.prompt_memory import ReadsSame
from trunkline.router.tools.pieces import AnswerParser, CallArguments, CallStart, TextPiece, joined
from trunkline.router.tools.plan import ToolPlan

Reading = list[tuple[str, str]]


def reading(text: str, parser: AnswerParser | None) -> Reading:
    """Return what counts of an answer: pairs of a kind ("text", "thought", "call", "arguments") and a text."""
    if parser is None:
        return [("text", text.strip())] if text.strip() else []
    found: Reading = []
    for piece in joined([*parser.feed(text), *parser.finish()]):
        if isinstance(piece, CallStart):
            found.append(("call", piece.name))
        elif isinstance(piece, CallArguments):
            found.append(("arguments", _canonical(piece.text)))
        elif piece.text.strip():
            found.append(("text" if isinstance(piece, TextPiece) else "thought", piece.text.strip()))
    return found


def _canonical(arguments: str) -> str:
    try:
        value = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments
    return json.dumps(value, sort_keys=True)


def reads_same(plan: ToolPlan) -> ReadsSame:
    """Return the comparison for the answers of a request's conversation."""

    def make(prompt: str) -> AnswerParser | None:
        # Mistral's templates write ids of calls, to which results refer; a parser does not tell them.
        return None if plan.style.name == "mistral" else plan.make_parser(lambda: "", plan.thought_behind(prompt))

    def same(prompt: str, one: str, other: str) -> bool:
        return reading(one, make(prompt)) == reading(other, make(prompt))

    return same
