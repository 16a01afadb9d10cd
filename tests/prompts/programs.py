"""Prompt programs for tests."""

from __future__ import annotations

from typing import Annotated

from trunkline.prompts import MaxTokens, prompt

CLOSING = "Answer in one sentence."
LEVELS = ("beginner", "expert")


def is_long(text: str) -> bool:
    """For conditions."""
    return len(text) > 6


@prompt
def rules(subject: Annotated[str, MaxTokens(6)] = "everything") -> None:
    "Rules about"
    f" {subject}: be brief. "


@prompt
def trip(
    city: Annotated[str, MaxTokens(8)],
    days: Annotated[int, MaxTokens(3)] = 2,
    *,
    budget: bool = False,
    style: str = "food",
    level: str = "beginner",
) -> None:
    "You plan trips.\n"
    f"The traveller goes to {city} for {days} days; {city} is far. "
    if budget:
        f"Whatever is free in {city}. "
    elif days > 3 and style != "none":
        "A long stay. "
        if is_long(city):
            "A long name, too. "
    else:
        "Money is no object. "
    match style:
        case "food" | "wine":
            "Restaurants first. "
        case "museum" if level in LEVELS:
            "Museums first. "
            rules("museums")
        case "nothing":
            pass
        case _:
            "Walk around. "
    if level == "expert":
        "No explanations. "
    rules(f"{city}!")
    rules(subject=city)
    f"{CLOSING}"


@prompt(role="system")
def instructions(name: Annotated[str, MaxTokens(8)]) -> None:
    "You are"
    f" {name}. "


@prompt(role="user")
def formal_tone() -> None:
    "Be formal."


@prompt(name="chat")
def conversation(name: Annotated[str, MaxTokens(8)], formal: bool = False) -> None:
    instructions(name)
    if formal:
        formal_tone()
