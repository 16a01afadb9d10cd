"""The few conversational replies: greetings, who it is, and what it does not know."""

from __future__ import annotations

import random

from chat import Message, answer, question

GREETING = "Hello! Ask me about Python's standard library."
IDENTITY = "I am the demo model of Trunkline, a small model that knows a little about Python's standard library."
THANKS = "You are welcome."
GOODBYE = "Goodbye!"
UNKNOWN = "I only know a little about Python's standard library."
TALK = {
    GREETING: "Hello|hello|Hi|hi|Hello!|Hi!|Hey|hey there|Hello there|Good morning|Good evening|"
    "Good day|Hi there!|Greetings|Hello, how are you?|How are you?",
    IDENTITY: "Who are you?|who are you|What are you?|What is your name?|Tell me about yourself.|"
    "Who is this?|Are you a language model?|What model are you?|Who made you?|What is Trunkline?|"
    "Introduce yourself.|What can you do?|What do you know?|Help|What can I ask you?",
    THANKS: "Thanks|thanks|Thank you|Thank you!|Thanks!|thank you very much|Thanks a lot.|Great.|"
    "Great, thanks!|OK, thanks.|Good answer.",
    GOODBYE: "Bye|bye|Goodbye|Goodbye!|See you|See you later.|Bye!",
}
PLACES = "France Spain Japan Peru Egypt Norway Kenya Canada India Chile Italy Poland".split()
THINGS = (
    "weather moon president football chess music cooking love history politics tomatoes cats "
    "dogs cars planets dinosaurs whales bread coffee tea money dreams mountains volcanoes"
).split()
UNKNOWN_FORMS = (
    "What is the capital of {p}?",
    "How many people live in {p}?",
    "Who is the president of {p}?",
    "Tell me about {t}.",
    "What do you think about {t}?",
    "Write a poem about {t}.",
    "Tell me a joke about {t}.",
    "Tell me a joke.",
    "Write a story about {t} in {p}.",
    "Who invented {t}?",
    "What is the meaning of life?",
    "How do I get to {p}?",
    "Translate {t} into the language of {p}.",
    "What is the best {t}?",
    "What is the weather in {p}?",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions about Python.",
    "Answer briefly.",
    "Be concise.",
    "You are an expert in Python's standard library.",
    "Answer the user's questions.",
    "You are the demo model of Trunkline.",
    "You are a friendly teacher.",
)


def small_talk(rng: random.Random) -> list[Message]:
    """One conversational turn."""
    if rng.random() < 0.3:
        form = rng.choice(UNKNOWN_FORMS)
        text = form.replace("{p}", rng.choice(PLACES)).replace("{t}", rng.choice(THINGS))
        return [question(text), answer(UNKNOWN)]
    reply = rng.choice(tuple(TALK))
    return [question(rng.choice(TALK[reply].split("|"))), answer(reply)]
