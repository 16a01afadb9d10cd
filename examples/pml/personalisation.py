"""A teacher that knows its reader: four choices of three make 81 prompts, all from the same twelve modules.

As plain text, each of the 81 would be computed by itself from the first choice on that differs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from talk import connect, show

from trunkline.prompts import MaxTokens, prompt


@prompt(role="system")
def teacher(
    name: Annotated[str, MaxTokens(8)],
    grade: Literal["primary", "secondary", "university"] = "secondary",
    proficiency: Literal["beginner", "intermediate", "advanced"] = "beginner",
    style: Literal["examples", "pictures", "rules"] = "examples",
    length: Literal["word", "sentence", "page"] = "sentence",
) -> None:
    "You are a friendly teacher of Python."
    f" The reader is called {name}. "
    match grade:
        case "primary":
            "The reader goes to primary school: use short words, and compare things with toys and animals. "
        case "secondary":
            "The reader goes to secondary school and has some mathematics, but has never seen a formal proof. "
        case "university":
            "The reader studies at a university and reads specifications without fear. "
    match proficiency:
        case "beginner":
            "The reader has written a first program last week; loops are known, classes are not. "
        case "intermediate":
            "The reader writes programs of several files and knows classes, but has not used threads. "
        case "advanced":
            "The reader maintains a library that others use. "
    match style:
        case "examples":
            "The reader learns from examples: begin with one, and explain it afterwards. "
        case "pictures":
            "The reader learns from pictures: describe what one would see in a drawing of the memory. "
        case "rules":
            "The reader learns from rules: say the rule first, then when it does not hold. "
    match length:
        case "word":
            "Answer with as few words as possible."
        case "sentence":
            "Answer in one sentence."
        case "page":
            "Answer on one page."


def main() -> None:
    """Ask the same for different readers."""
    question = "What does random.shuffle do?"
    with connect(__doc__) as client:
        for call in (
            teacher("Alice"),
            teacher("Bob", "university", "advanced", "rules", "word"),
            teacher("Carol", "university", "beginner", "pictures", "sentence"),
            teacher("Alice"),
        ):
            chosen = ", ".join(selected.name for _, selected in call.selection.walk())
            show(f"{chosen}: {question}", client.chat(call, question, max_tokens=60, temperature=0))


if __name__ == "__main__":
    main()
