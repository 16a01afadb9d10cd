"""The roles of a prompt, from the schema and from the prompt itself, with the text the template writes around
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trunkline.router.pml.compiled import CompiledSchema
from trunkline.router.pml.prompt import AtomKind, Resolved
from trunkline.router.pml.roles import without_common
from trunkline.router.pml.tokens import PmlTokenizer
from trunkline.router.pml.tree import Turn


@dataclass(frozen=True, slots=True)
class _Present:
    """A role in the prompt."""

    rank: int
    """Order among roles and inserts."""
    role: str
    suffix: str
    """Text written after the role; "" while it is open."""
    is_open: bool


@dataclass(frozen=True, slots=True)
class TurnForm:
    """Text written around a role that the prompt adds."""

    prefix: str
    suffix: str
    trims_left: bool
    trims_right: bool


class Conversation:
    """The roles of one prompt, in order."""

    def __init__(self, schema: CompiledSchema, resolved: Resolved, tokenizer: PmlTokenizer) -> None:
        """`tokenizer`: its template writes the messages and the generation prompt at the end.

        Raises:
            PmlError: E_TEMPLATE.
        """
        self._forms = schema.forms
        self._tokenizer = tokenizer
        self._present = sorted(
            (
                _Present(2 * slot.event, slot.role, "" if slot.open else slot.suffix, slot.open)
                for index in resolved.args
                for slot in schema.modules[index].roles
            ),
            key=lambda present: present.rank,
        )
        self.turns: dict[int, TurnForm] = {}
        """Forms by number in `Resolved.turns`."""
        for insert in resolved.inserts:
            for atom in insert.atoms:
                if atom.kind is AtomKind.PREFIX:
                    turn = resolved.turns[atom.turn]
                    self.turns[atom.turn] = self._add(insert.rank, turn)

    def _add(self, rank: int, turn: Turn) -> TurnForm:
        """Add a role after those of its rank or a lower one."""
        place = sum(present.rank <= rank for present in self._present)
        before = self._present[:place]
        form = self._forms.form(tuple(present.role for present in before), turn.role, turn.mark)
        written = before[-1].suffix if before else ""
        self._present.insert(place, _Present(rank, turn.role, "" if turn.open else form.suffix, turn.open))
        return TurnForm(without_common(form.gap, written), form.suffix, form.trims_left, form.trims_right)

    def answer_prompt(self) -> str:
        """Return the generation prompt: the text that the template writes where an answer begins.

        Raises:
            PmlError: E_TEMPLATE.
        """
        if not self._present:
            return ""
        last = self._present[-1]
        if last.is_open and last.role == "assistant":
            return ""
        roles = tuple(present.role for present in self._present)
        rendered = self._forms.render(roles, generate=True, tokenizer=self._tokenizer)
        return without_common(rendered.gaps[-1], last.suffix)

    def continued(self, messages: Sequence[dict[str, str]], generate: bool) -> Iterator[tuple[str, bool]]:
        """Yield the texts that follow the prompt's roles for these messages, and whether the template wrote each.

        Raises:
            PmlError: E_TEMPLATE.
        """
        count = len(self._present)
        roles = (*(present.role for present in self._present), *(message["role"] for message in messages))
        rendered = self._forms.render(roles, generate=generate, tokenizer=self._tokenizer)
        written = self._present[-1].suffix if self._present else ""
        yield without_common(rendered.gaps[count], written), True
        for number, message in enumerate(messages, count):
            left, right = rendered.trims[number]
            content = message["content"]
            content = content.lstrip() if left else content
            yield content.rstrip() if right else content, False
            yield rendered.gaps[number + 1], True
