"""What the examples share: where the server is, and how an answer is shown."""

from __future__ import annotations

import argparse

from trunkline.prompts import Client, Completion


def connect(description: str | None) -> Client:
    """A client of the server that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is")
    parser.add_argument("--model", help="a served name; the first one if left out")
    given = parser.parse_args()
    return Client(given.url, model=given.model)


def show(title: str, answer: Completion) -> None:
    """Print an answer, its time to the first token, and what of its prompt was cached."""
    details = answer.usage.get("prompt_tokens_details") or {}
    first_ms = 1000 * (answer.first_token_s or answer.seconds)
    cached, tokens = details.get("cached_tokens", 0), answer.usage.get("prompt_tokens", 0)
    print(f"{title}\n  {answer.text.strip()}")
    print(
        f"  first token after {first_ms:.1f} ms; {cached} of {tokens} prompt tokens cached, "
        f"{details.get('module_tokens', 0)} in modules"
    )
    print(f"  cache: {answer.cache}\n")
