"""`PromptLayout.relocate`: whether a text serves at another distance from the texts above it."""

from __future__ import annotations

from controller.module_harness import ROOMY, jobs_of, verify_all, words
from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.module_prompts import layout, text


def cached(simulation: Simulation, root: int, city: int, *, relocate: bool) -> int:
    """Tokens found of a text below another, which stand at these positions."""
    texts = [text(words(0, 10), root), text(words(20, 7), city, parent=0)]
    asked = replace(layout(texts, [(city + 7, 1)]), relocate=relocate)
    request = simulation.submit([500], 2, layout=asked)
    simulation.run()
    verify_all(simulation)
    found = simulation.streams[request].cached_tokens
    assert found is not None
    return found


def test_a_text_moves_with_its_parent_only() -> None:
    simulation = Simulation(ROOMY)
    assert cached(simulation, 0, 10, relocate=False) == 0
    assert cached(simulation, 0, 10, relocate=False) == 17
    assert cached(simulation, 0, 30, relocate=False) == 10, "its parent is further away"
    assert cached(simulation, 20, 30, relocate=False) == 17, "both have moved"
    assert jobs_of(simulation).encoded_texts == 3


def test_who_lets_texts_move_has_texts_of_its_own() -> None:
    simulation = Simulation(ROOMY)
    assert cached(simulation, 0, 10, relocate=True) == 0
    assert cached(simulation, 0, 30, relocate=True) == 17
    # A text above all others moves freely; one below is another's if distances count.
    assert cached(simulation, 0, 30, relocate=False) < 17
