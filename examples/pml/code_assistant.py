"""An assistant that reads source files: each is a module, and a question brings the files that it needs.

The files become part of the schema when this program starts. If one changes, the schema has another name, so
nobody gets an answer from the old text; the modules of the files that did not change are still cached.
"""

from __future__ import annotations

from pathlib import Path

from talk import connect, show

from trunkline.prompts import prompt

FOLDER = Path(__file__).parent / "shop"
PRICES = (FOLDER / "prices.py").read_text(encoding="utf-8")
CART = (FOLDER / "cart.py").read_text(encoding="utf-8")
STOCK = (FOLDER / "stock.py").read_text(encoding="utf-8")


@prompt(role="system")
def code_assistant(files: tuple[str, ...], terse: bool = True) -> None:
    "You are an expert in Python's standard library.\n"
    if "prices" in files:
        f"File prices.py:\n{PRICES}\n"
    if "cart" in files:
        f"File cart.py:\n{CART}\n"
    if "stock" in files:
        f"File stock.py:\n{STOCK}\n"
    if terse:
        "Answer briefly."
    else:
        "Explain every step."


def main() -> None:
    """Ask about the files, in changing company."""
    with connect(__doc__) as client:
        for files, question in (
            (("prices",), "What is pathlib.Path?"),
            (("cart", "prices"), "What is collections.Counter?"),
            (("stock",), "What does heapq.nsmallest do?"),
            (("prices", "cart", "stock"), "What does json.loads do?"),
            (("stock",), "What does heapq.nsmallest do?"),
        ):
            answer = client.chat(code_assistant(files), question, max_tokens=60, temperature=0)
            show(f"{', '.join(files)}: {question}", answer)


if __name__ == "__main__":
    main()
