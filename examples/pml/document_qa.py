"""Questions about documents: each is a module, whatever else is selected and in whatever order it is named.

First every question is asked with the documents as modules, each time another selection in another order. Then the
same as plain text, where a document is found only behind the very same documents as before. The answers are known,
so they are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from talk import connect, show

from trunkline.prompts import Client, Completion

FOLDER = Path(__file__).parent / "documents"
HEADING = "Use these notes.\n"


class Question(NamedTuple):
    """Which documents are given, in which order, and what is to come out."""

    documents: str
    text: str
    answer: str


QUESTIONS = (
    Question("harbor workshop garden", "What is the code of Harbor Gate?", "The code of Harbor Gate is 4821."),
    Question("garden harbor", "What is the code of Maple Tower?", "The code of Maple Tower is 7350."),
    Question("workshop archive harbor", "What is the code of Copper Two?", "The code of Copper Two is 1196."),
    Question("archive garden workshop", "What is the code of Raven Point?", "The code of Raven Point is 6042."),
    Question(
        "harbor archive garden workshop", "What is the code of Willow Five?", "The code of Willow Five is 2783."
    ),
    Question(
        "workshop garden archive harbor", "What is the code of Beacon West?", "The code of Beacon West is 9317."
    ),
)


def read(name: str) -> str:
    """A document's text."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def schema() -> dict[str, object]:
    """All documents, in PML's JSON form: nothing in a text has to be escaped there."""
    modules = [{"module": path.stem, "items": [read(path.stem)]} for path in sorted(FOLDER.glob("*.txt"))]
    return {"schema": "documents", "items": [{"role": "system", "items": [HEADING, *modules]}]}


def ask_modules(client: Client, question: Question) -> Completion:
    """With the documents as modules."""
    modules = [{"path": name} for name in question.documents.split()]
    return client.chat({"schema": "documents", "modules": modules}, question.text, max_tokens=40, temperature=0)


def ask_text(client: Client, question: Question) -> Completion:
    """With the documents as text."""
    notes = HEADING + "".join(read(name) for name in question.documents.split())
    messages = [{"role": "system", "content": notes}, {"role": "user", "content": question.text}]
    return client.chat(None, messages, max_tokens=40, temperature=0)


def main() -> None:
    """Ask everything both ways."""
    with connect(__doc__) as client:
        client.schemas.create(schema())
        for kind, ask in (("modules", ask_modules), ("text", ask_text)):
            right = 0
            for question in QUESTIONS:
                answer = ask(client, question)
                right += answer.text.strip() == question.answer
                show(f"[{kind}] {question.documents}: {question.text}", answer)
            print(f"[{kind}] {right} of {len(QUESTIONS)} answers are exact\n")


if __name__ == "__main__":
    main()
