"""The grammars that requests ask for, and what the workers are told of them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from trunkline.controller.messages import Grammar
from trunkline.controller.reports import GrammarReady
from trunkline.worker.messages import CompileGrammar, ForgetGrammar

IDLE_MAX: Final = 64
"""Largest number of compiled grammars that are kept without a request that uses them: clients send the same schema
again and again."""


@dataclass(slots=True)
class GrammarEntry:
    """A grammar that the workers know or are about to compile."""

    id: int
    grammar: Grammar
    ready: bool = False
    """Whether the workers have compiled it, or have failed to."""
    problem: str = ""
    """The reason why the grammar cannot be compiled; "": there is none."""
    users: set[int] = field(default_factory=set)
    """The live requests that ask for the grammar."""
    tenants: set[bytes] = field(default_factory=set)
    """The tenants on whose behalf the workers were asked to compile the grammar."""


class GrammarBook:
    """The grammars that requests ask for: each is compiled once, and kept while a request may need it again.

    A request with a grammar waits in the queue, holding nothing, until the workers have compiled the grammar. They
    do that beside their steps, so running requests do not wait for it. Ids are never used twice.
    """

    def __init__(self, first_id: int = 1, *, foretell: bool = False) -> None:
        """
        Args:
            first_id: id of the first grammar.
            foretell: whether the workers tell what grammars demand next (`CompileGrammar.foretell`).
        """
        self._foretell = foretell
        self._by_content: OrderedDict[tuple[str, str, bool], GrammarEntry] = OrderedDict()
        """The grammars by kind, text and spacing; the one that was asked for least recently comes first."""
        self._by_id: dict[int, GrammarEntry] = {}
        self.next_id = first_id
        """Id of the next grammar. A report on a smaller id that is not known is ignored."""
        self._messages: list[CompileGrammar | ForgetGrammar] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def use(self, grammar: Grammar, request: int) -> GrammarEntry:
        """Return the entry of a grammar, with the request among its users."""
        key = grammar.kind, grammar.text, grammar.spaced
        entry = self._by_content.get(key)
        if entry is None:
            entry = GrammarEntry(self.next_id, grammar)
            self.next_id += 1
            self._by_content[key] = self._by_id[entry.id] = entry
        if not entry.ready and grammar.tenant not in entry.tenants:
            # Also if it is being compiled for another tenant: this tenant's turn may come earlier.
            entry.tenants.add(grammar.tenant)
            self._messages.append(
                CompileGrammar(
                    entry.id, grammar.kind, grammar.text, grammar.spaced, grammar.tenant, self._foretell
                )
            )
        self._by_content.move_to_end(key)
        entry.users.add(request)
        return entry

    def leave(self, grammar: Grammar, request: int) -> None:
        """Note that a request with this grammar has ended."""
        entry = self._by_content.get((grammar.kind, grammar.text, grammar.spaced))
        if entry is None:
            return
        entry.users.discard(request)
        if not entry.users and (entry.problem or not entry.ready):
            # A problem: nothing was kept of the grammar, and a corrected worker may succeed. Not ready: no request
            # waits for it any more, so it must not be compiled before grammars that requests wait for.
            self._forget(entry)
        idle = [other for other in self._by_content.values() if not other.users and other.ready]
        for other in idle[: max(0, len(idle) - IDLE_MAX)]:
            self._forget(other)

    def ready(self, message: GrammarReady) -> GrammarEntry | None:
        """Note that the workers have compiled a grammar, or cannot; return its entry, None if it is forgotten."""
        entry = self._by_id.get(message.grammar)
        if entry is not None:
            entry.ready, entry.problem = True, message.problem
        return entry

    def _forget(self, entry: GrammarEntry) -> None:
        del self._by_id[entry.id]
        del self._by_content[entry.grammar.kind, entry.grammar.text, entry.grammar.spaced]
        self._messages.append(ForgetGrammar(entry.id))

    def messages(self) -> list[CompileGrammar | ForgetGrammar]:
        """Return the messages that the workers must get before the next plan: all since the last call."""
        messages, self._messages = self._messages, []
        return messages
