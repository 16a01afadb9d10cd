"""The grammars that requests ask for: each is compiled once, and kept while a request may need it again. Pure.

A request with a grammar waits in the queue, holding nothing, until the workers have compiled it beside their
steps; so nobody's tokens wait for somebody's schema.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from trunkline.controller.messages import Grammar, GrammarReady
from trunkline.worker.messages import CompileGrammar, ForgetGrammar

IDLE_MAX: Final = 64
"""Compiled grammars kept though nobody uses them: clients send the same schema again and again."""


@dataclass(slots=True)
class GrammarEntry:
    """A grammar that the workers know."""

    id: int
    grammar: Grammar
    ready: bool = False
    problem: str = ""
    """Why it cannot be compiled."""
    users: set[int] = field(default_factory=set)
    """Requests."""
    tenants: set[bytes] = field(default_factory=set)
    """For whom the workers have been asked for it."""


class GrammarBook:
    """By content and by id. Ids are never used twice."""

    def __init__(self, first_id: int = 1) -> None:
        """
        Args:
            first_id: of the first grammar.
        """
        self._by_content: OrderedDict[tuple[str, str, bool], GrammarEntry] = OrderedDict()
        """The least recently asked for first."""
        self._by_id: dict[int, GrammarEntry] = {}
        self.next_id = first_id
        """Of the next grammar; a report on one below it that is not known concerns nobody."""
        self._messages: list[CompileGrammar | ForgetGrammar] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def use(self, grammar: Grammar, request: int) -> GrammarEntry:
        """The grammar's entry, with the request among its users."""
        key = _content_of(grammar)
        entry = self._by_content.get(key)
        if entry is None:
            entry = GrammarEntry(self.next_id, grammar)
            self.next_id += 1
            self._by_content[key] = self._by_id[entry.id] = entry
        if not entry.ready and grammar.tenant not in entry.tenants:
            # Also if it is under way: it must not have to wait behind all else that the first one has sent.
            entry.tenants.add(grammar.tenant)
            self._messages.append(
                CompileGrammar(entry.id, grammar.kind, grammar.text, grammar.spaced, grammar.tenant)
            )
        self._by_content.move_to_end(key)
        entry.users.add(request)
        return entry

    def leave(self, grammar: Grammar, request: int) -> None:
        """The request has ended."""
        entry = self._by_content.get(_content_of(grammar))
        if entry is None:
            return
        entry.users.discard(request)
        if not entry.users and (entry.problem or not entry.ready):
            # Nothing was kept of it, and a corrected worker may succeed; or nobody waits for it any more, and it
            # is not to be compiled before those of others.
            self._forget(entry)
        idle = [other for other in self._by_content.values() if not other.users and other.ready]
        for other in idle[: max(0, len(idle) - IDLE_MAX)]:
            self._forget(other)

    def ready(self, message: GrammarReady) -> GrammarEntry | None:
        """The workers have compiled one, or cannot; None: nobody knows it."""
        entry = self._by_id.get(message.grammar)
        if entry is not None:
            entry.ready, entry.problem = True, message.problem
        return entry

    def _forget(self, entry: GrammarEntry) -> None:
        del self._by_id[entry.id]
        del self._by_content[_content_of(entry.grammar)]
        self._messages.append(ForgetGrammar(entry.id))

    def messages(self) -> list[CompileGrammar | ForgetGrammar]:
        """What the workers must be told since the last call, before the next plan."""
        messages, self._messages = self._messages, []
        return messages


def _content_of(grammar: Grammar) -> tuple[str, str, bool]:
    return grammar.kind, grammar.text, grammar.spaced
