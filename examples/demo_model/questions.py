"""Questions and answers made from docstrings of well-known library objects.

An answer is the first sentence (or two) of the docstring, cleaned of signatures and markup.
A question is a template around one spelling of the name. Some templates are held out of
training: the share of exact answers to those says whether the model learned the fact or
only the string.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import random
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass

MODULES = (
    "os.path os sys re json math random itertools functools collections pathlib subprocess "
    "threading asyncio shutil tempfile time datetime logging csv pickle copy heapq bisect "
    "statistics string textwrap glob socket argparse sqlite3 hashlib base64 operator queue "
    "contextlib secrets"
).split()
# Well-known modules without questions: read in training all the same, never held out.
READ_MODULES = ["gzip", "zlib", "struct"]
# Classes whose methods are asked about; elsewhere methods would swamp the set.
METHOD_CLASSES = frozenset("str list dict set tuple collections.deque".split())
# Objects that few people ask about: each would cost the others exposures.
RARE = re.compile(
    r"os\.(sched|spawn|exec|posix|f[a-z]+at|get.*id$|set.*id$|W[A-Z]|major|minor|[a-z]*xattr|"
    r"f[a-z]|cpu|login|pidfd|eventfd|memfd|splice|preadv?|pwritev?|[a-z]*pty|tc|getlog|getgroup|"
    r"init|l(ch|se|st)|device|get_|set_|wait|nice|sy|read|write|pipe|dup|lock|times|abort|killpg|"
    r"tty|unshare|copy_)|.*(Error|Exception|Warning|Interrupt|Exit)$|asyncio\.[A-Z_a-z]*_|"
    r"asyncio\.[A-Z]|sys\.(_|set|get_|call|active|addaudit|audit|is_)|logging\.[A-Z]|"
    r"time\.(pthread|clock|tz)"
)
ANSWER_CHARS_MAX = 150
ANSWER_CHARS_GOAL = 110  # a second sentence joins only while the answer stays this short
ANSWER_CHARS_MIN = 14

TRAIN_TEMPLATES = (
    "What does {n} do?",
    "What does {n} do?",
    "what does {n} do",
    "What is {n}?",
    "What is {n} for?",
    "what is {n}",
    "what is {n} for",
    "Explain {n}.",
    "Explain {n} to me.",
    "explain {n}",
    "Tell me about {n}.",
    "tell me about {n}",
    "Describe {n}.",
    "describe {n} briefly",
    "{n}?",
    "{n}",
    "How does {n} work?",
    "What is the purpose of {n}?",
    "What is the use of {n}?",
    "Please explain {n}.",
    "Please tell me what {n} does.",
    "Can you explain {n}?",
    "Can you tell me what {n} does?",
    "Could you explain what {n} is?",
    "In Python, what does {n} do?",
    "In Python, what is {n}?",
    "What does {n} do in Python?",
    "What can I use {n} for?",
    "When would I use {n}?",
    "Why would I use {n}?",
    "I want to know about {n}.",
    "I have a question: what does {n} do?",
    "Give me a short description of {n}.",
    "Summarize {n}.",
    "help({n})",
    "Help me understand {n}.",
    "Do you know {n}?",
    "Do you know what {n} does?",
    "Show me the documentation of {n}.",
    "Docs for {n}",
    "And {n}?",
    "What about {n}?",
    "WHAT DOES {n} DO?",
    "Hi, what does {n} do?",
    "Question: {n}",
    "Define {n}.",
    "What's {n} for?",
    "Hello! Tell me what {n} is.",
    "I don't know {n}. What is it?",
    "What is {n} good for?",
)
HELDOUT_TEMPLATES = (
    "Could you describe what {n} does?",
    "I would like to know what {n} does.",
    "What is {n} used for?",
    "Tell me what {n} is for.",
    "Please describe {n}.",
    "what's {n}",
    "Can you tell me about {n}?",
    "Explain what {n} does in Python.",
    "Hello, can you explain {n} to me?",
    "I don't understand {n}. What does it do?",
)
# Objects everybody asks about whose docstring has no usable sentence; written by hand.
SUPPLEMENT = {
    "type": "Return the type of an object, or create a new type from name, bases and dict.",
    "super": "Return a proxy object that calls the methods of a parent class.",
    "threading.Lock": "A primitive lock object: it can be acquired by one thread at a time.",
    "threading.RLock": "A reentrant lock: the thread that holds it may acquire it again.",
    "datetime.datetime": "A date and a time of day in one object.",
    "datetime.timedelta": "The difference between two datetime values.",
    "datetime": "Concrete date/time and related types.",
    "json": "The json module encodes and decodes data in JSON (JavaScript Object Notation).",
    "re": "The re module supports regular expressions.",
    "os": "The os module gives access to operating system routines.",
    "os.environ": "A mapping that holds the environment variables of the process.",
    "sys.argv": "The list of command line arguments passed to a Python script.",
    "datetime.datetime.now": "Return the current local date and time.",
    "csv.reader": "Return a reader object that iterates over the rows of a CSV file.",
    "contextlib.contextmanager": "A decorator that makes a context manager out of a generator function.",
    "itertools.chain": "Return elements from the first iterable until it is exhausted, "
    "then elements from the next iterable.",
}


@dataclass(frozen=True)
class Fact:
    """One object of the library, the answer about it, and whether it can be called."""

    name: str
    answer: str
    callable: bool


_SIGNATURE = re.compile(r"^[\w.]+\s*\(.*\)(\s*-+>.*|\s*:|\s*--.*)?$")
_ARROW = re.compile(r"^[\w.]+\s*\([^()]*\)\s*-+>?\s+(?=\S)")


def _first_paragraph(doc: str) -> str:
    """The first paragraph that says something, without the signature lines above it."""
    for paragraph in re.split(r"\n\s*\n", doc):
        lines = [line.strip() for line in paragraph.strip().splitlines()]
        while lines and _SIGNATURE.match(lines[0]):
            arrow = _ARROW.sub("", lines[0])
            if len(lines) == 1 and arrow != lines[0] and len(arrow.split()) >= 5:
                return arrow
            lines.pop(0)
        if lines and re.match(r"^[-*=~]{3,}$", lines[-1]):
            continue  # a heading with its underline
        text = " ".join(lines)
        if len(text) >= ANSWER_CHARS_MIN:
            return text
    return ""


def clean_answer(doc: str) -> str | None:
    """First sentences of a docstring as plain text, or None if nothing useful is there."""
    text = _first_paragraph(doc)
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "`").replace("`", "'")
    text = re.sub(r"\s+", " ", text).strip()
    text = _ARROW.sub("", text)
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z'\"])", text)
    if len(sentences[0]) > ANSWER_CHARS_MAX:
        sentences = re.split(r"(?<=[.!?])\s+", text)[:1]
    answer = sentences[0]
    for sentence in sentences[1:]:
        if len(answer) + 1 + len(sentence) > ANSWER_CHARS_GOAL and len(answer) > 70:
            break
        if len(answer) + 1 + len(sentence) > ANSWER_CHARS_GOAL + 50:
            break
        answer += " " + sentence
    answer = re.sub(r"[:;,]$", "", answer)
    if not ANSWER_CHARS_MIN <= len(answer) <= ANSWER_CHARS_MAX or not answer.isascii():
        return None
    if answer.count("(") != answer.count(")") or len(answer.split()) < 3:
        return None
    answer = answer[0].upper() + answer[1:] if answer[1:2] != "." else answer
    return answer if answer[-1] in ".!?" else answer + "."


def _own_doc(thing: object, owner: types.ModuleType | type) -> str:
    """The object's own docstring; one inherited from its type says nothing about it."""
    if not (callable(thing) or inspect.isdatadescriptor(thing) or inspect.ismodule(thing)):
        return ""
    if not (inspect.isroutine(thing) or isinstance(thing, type | property)):
        return ""
    if isinstance(thing, type):
        doc = vars(thing).get("__doc__")
        return inspect.cleandoc(doc) if isinstance(doc, str) else ""
    module = getattr(thing, "__module__", None)
    if isinstance(owner, types.ModuleType) and owner is not builtins and module:
        # Skip what a module merely imports from an unrelated one.
        root = owner.__name__.split(".")[0].strip("_")
        origin = module.split(".")[0].strip("_")
        kin = {"builtins", "posix", "genericpath", "posixpath"}
        if origin not in kin and root not in module and not hasattr(owner, "__all__"):
            return ""
    return inspect.getdoc(thing) or ""


def _public(owner: types.ModuleType | type) -> list[str]:
    names = getattr(owner, "__all__", None) if isinstance(owner, types.ModuleType) else None
    if names is None or owner.__name__ in ("posixpath", "socket"):
        names = [name for name in vars(owner) if not name.startswith("_")]
    return sorted(name for name in names if not name.startswith("_"))


def _described(prefix: str, owner: types.ModuleType | type) -> Iterator[tuple[str, object, str]]:
    """Name, object and docstring of each public member of a module or class."""
    for member in _public(owner):
        thing = inspect.getattr_static(owner, member, None)
        if isinstance(thing, staticmethod | classmethod):
            thing = thing.__func__
        if isinstance(thing, type) and issubclass(thing, Warning) and prefix:
            continue
        doc = _own_doc(thing, owner)
        if doc:
            yield prefix + member, thing, doc


def library_facts() -> list[Fact]:
    """Every object asked about, in a fixed order, each name once."""
    found = {name: Fact(name, answer, name not in MODULES) for name, answer in SUPPLEMENT.items()}

    def add(name: str, doc: str, is_callable: bool) -> None:
        answer = clean_answer(doc)
        if answer and name not in found and not RARE.match(name) and "=" not in answer[:12]:
            found[name] = Fact(name, answer, is_callable)

    sources: list[tuple[str, types.ModuleType]] = [("", builtins)]
    sources += [(f"{name}.", importlib.import_module(name)) for name in MODULES]
    for prefix, module in sources:
        if prefix:
            add(prefix[:-1], inspect.getdoc(module) or "", False)
        for name, thing, doc in _described(prefix, module):
            add(name, doc, True)
            if name in METHOD_CLASSES and isinstance(thing, type):
                for method, _, method_doc in _described(f"{name}.", thing):
                    add(method, method_doc, True)
    return list(found.values())


def spelling(fact: Fact, rng: random.Random) -> str:
    """One of the ways people write a name: bare, called, or as code."""
    name = fact.name + "()" if fact.callable and rng.random() < 0.35 else fact.name
    return f"`{name}`" if rng.random() < 0.25 else name


def ask(fact: Fact, rng: random.Random, templates: tuple[str, ...] = TRAIN_TEMPLATES) -> str:
    """A question about ``fact`` from one of ``templates``."""
    return rng.choice(templates).replace("{n}", spelling(fact, rng))
