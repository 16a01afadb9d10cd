"""Schemas, and calls about them, that tests against real clusters make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import httpx
from cluster.harness import Cluster

MODEL: Final = "trunkline-demo"
TOKENS: Final = 16
GREEDY: Final[dict[str, Any]] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
SAME: Final = 1e-3
"""Of log-probabilities: ranks and steps add in another order."""
SENTENCES: Final = (
    "The following functions are part of the standard library and are described here in turn. ",
    "Every one of them takes a list of numbers and returns another list, in the same order. ",
    "Nothing is said here about what happens if the list is empty, since nobody has asked. ",
    "Some of the names are older than the library, and some of the library is older than its names. ",
)


def module_text(name: str, repeats: int) -> str:
    """Some hundreds of tokens that no other name begins with."""
    return f"This is about {name}. " + "".join(SENTENCES[(len(name) + i) % len(SENTENCES)] for i in range(repeats))


def schema_source(name: str, modules: Sequence[str] = "abc", repeats: int = 6, extra: str = "") -> str:
    """A schema with modules of some chunks each; the first has a parameter."""
    param = 'It has <param name="what" len="8"/> in it. '
    body = "".join(
        f'<module name="{module}">{module_text(f"{name} and {module}", repeats)}{param * (not index)}</module>'
        for index, module in enumerate(modules)
    )
    return f'<schema name="{name}">You know what {name} is. {body}{extra}</schema>'


def prompt_source(name: str, modules: Sequence[str] = "abc", question: str = "What is it?") -> str:
    """A prompt that imports these."""
    first, *others = modules
    return (
        f'<prompt schema="{name}"><{first} what="a value"/>'
        f"{''.join(f'<{module}/>' for module in others)}{question}</prompt>"
    )


def post(cluster: Cluster, source: str, **fields: Any) -> dict[str, Any]:
    """Make a schema."""
    answer = httpx.post(f"{cluster.url}/v1/schemas", json={"pml": source, **fields}, timeout=60.0)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def look(cluster: Cluster, name: str) -> dict[str, Any]:
    """What the cluster says of a schema."""
    answer = httpx.get(f"{cluster.url}/v1/schemas/{name}", timeout=60.0)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tiers_of(cluster: Cluster, name: str) -> set[str | None]:
    """Where the modules of a schema are."""
    return {module["tier"] for module in look(cluster, name)["modules"]}


def ask(cluster: Cluster, source: str, **fields: Any) -> dict[str, Any]:
    """A greedy completion of modules."""
    return cluster.post("/v1/completions", {**GREEDY, "logprobs": 1, "pml": source, **fields})


def ask_plain(cluster: Cluster, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    """A greedy completion without any."""
    return cluster.post("/v1/completions", {**GREEDY, "logprobs": 1, "prompt": prompt, **fields})


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    """Of a completion's tokens."""
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def same(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two completions say the same, and as surely."""
    pairs = zip(logprobs_of(actual), logprobs_of(expected), strict=True)
    return text_of(actual) == text_of(expected) and all(abs(a - b) < SAME for a, b in pairs)


def details_of(answer: dict[str, Any]) -> tuple[int, int]:
    """Cached tokens and modules' tokens of a prompt."""
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], details["module_tokens"]
