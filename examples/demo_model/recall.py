"""Made-up facts and questions about them: teaches (and measures) reading the context.

Names and values are drawn at random, so nothing here can be memorised; an answer can come
from the conversation alone. Facts stand in a system or user message, between library prose,
and are asked for in later turns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from chat import Message, answer, question

FIRST_WORDS = (
    "Harbor Falcon Garden Copper Silver Maple Granite River Meadow Lantern Tiger Orchid Canyon "
    "Winter Summer Marble Velvet Thunder Willow Pepper Saffron Timber Arrow Beacon Cedar Coral "
    "Desert Eagle Ember Forest Glacier Hazel Island Jasper Kestrel Lotus Mango Nickel Ocean "
    "Pearl Quartz Raven Shadow Temple Umber Violet Walnut Yellow Zephyr Anchor Bridge Castle"
).split()
SECOND_WORDS = (
    "One Two Three Four Five Six Seven Eight Nine Ten Alpha Beta Gamma Delta Omega North South "
    "East West Prime Station Tower Gate Point"
).split()
SYLLABLES = "ka lo mi ren ta vo sel dar nu pe zin mor fa bel ti gro hu wex ya qui".split()
COLOURS = "red blue green black white orange purple brown pink grey gold yellow".split()
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Lisbon Dublin Prague Athens Cairo Tokyo Delhi "
    "Lima Boston Denver Geneva Milan Zurich"
).split()
PEOPLE = "Alice Bob Carol David Emma Frank Grace Henry Ivan Julia Kevin Laura Maria Nora".split()
WORD_VALUES = {"colour": COLOURS, "city": CITIES, "owner": PEOPLE}
NUMBERS = {"code": 4, "pin": 4, "room": 3, "key": 5, "price": 2}
FACT_FORMS = (
    "The {a} of {e} is {v}.",
    "The {a} of {e} is {v}.",
    "The {a} of {e} is {v}.",
    "Note that the {a} of {e} is {v}.",
    "{e} has the {a} {v}.",
)
QUESTION_FORMS = (
    "What is the {a} of {e}?",
    "What is the {a} of {e}?",
    "what is the {a} of {e}",
    "Tell me the {a} of {e}.",
    "Do you remember the {a} of {e}?",
    "{e}: what is the {a}?",
    "And the {a} of {e}?",
)
ANSWER_FORM = "The {a} of {e} is {v}."
INTRODUCTIONS = ("", "", "Facts to remember:\n", "Use these notes.\n", "Notes:\n", "Remember: ")
ACKNOWLEDGEMENTS = ("Noted.", "I will remember that.")


@dataclass(frozen=True)
class Memo:
    """One made-up fact: an attribute of an entity and its value."""

    attribute: str
    entity: str
    value: str

    def fill(self, form: str) -> str:
        """``form`` with this fact in it."""
        text = form.replace("{a}", self.attribute).replace("{e}", self.entity)
        return text.replace("{v}", self.value)


def _entity(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 3)))).capitalize()
    return f"{rng.choice(FIRST_WORDS)} {rng.choice(SECOND_WORDS)}"


def draw_memos(rng: random.Random, count: int) -> list[Memo]:
    """``count`` facts in which no pair of attribute and entity occurs twice."""
    memos: dict[tuple[str, str], Memo] = {}
    entities: list[str] = []
    # Half of the conversations use one kind of fact: then only the entity tells them apart.
    kinds = list(NUMBERS) + list(WORD_VALUES)
    if rng.random() < 0.5:
        kinds = ["code"] if rng.random() < 0.5 else [rng.choice(kinds)]
    while len(memos) < count:
        attribute = rng.choice(kinds)
        reuse = entities and len(kinds) > 1 and rng.random() < 0.2
        entity = rng.choice(entities) if reuse else _entity(rng)
        entities.append(entity)
        if attribute in NUMBERS:
            digits = NUMBERS[attribute]
            value = "".join(rng.choices("0123456789", k=digits))
        else:
            value = rng.choice(WORD_VALUES[attribute])
        memos.setdefault((attribute, entity), Memo(attribute, entity, value))
    return list(memos.values())


def notes(rng: random.Random, memos: list[Memo], filler: list[str]) -> str:
    """The facts in one text, with the filler sentences strewn between them."""
    parts = [memo.fill(rng.choice(FACT_FORMS)) for memo in memos]
    for sentence in filler:
        parts.insert(rng.randrange(len(parts) + 1), sentence)
    separator = rng.choice((" ", " ", "\n"))
    return rng.choice(INTRODUCTIONS) + separator.join(parts)


def ask_memo(rng: random.Random, memo: Memo) -> list[Message]:
    """One turn: the question and the answer that only the context gives."""
    return [question(memo.fill(rng.choice(QUESTION_FORMS))), answer(memo.fill(ANSWER_FORM))]


def recall_chat(rng: random.Random, fact_count: int, filler: list[str], question_count: int) -> list[Message]:
    """A conversation that states facts first and asks for some of them afterwards."""
    memos = draw_memos(rng, fact_count)
    text = notes(rng, memos, filler)
    if rng.random() < 0.6:
        messages = [Message("system", text)]
    else:
        messages = [question(text), answer(rng.choice(ACKNOWLEDGEMENTS))]
    for memo in rng.sample(memos, min(question_count, len(memos))):
        messages += ask_memo(rng, memo)
    return messages
