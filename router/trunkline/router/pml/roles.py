"""Find the text that a model's chat template writes around messages, by rendering the template.

A conversation is rendered with a sentinel as the content of each message, and the text is cut at the sentinels:
into the text before the first message, between messages, and after the last. Text between two messages belongs
partly to the first (its suffix) and partly to the second (its prefix). The suffix is the text that the template
writes after a message when it is the last one, if the text goes on the same way with another message after it.

The roles of a schema are compiled once, although prompts select different modules. Each role is written as the
template writes it after the roles before it in the schema, with the first (or default) module of every union. The
messages of a prompt are rendered after the roles that are selected. Templates that reorder messages, or leave some
out, cannot be used (E_TEMPLATE).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol, TypeVar

from trunkline.router.errors import PromptError
from trunkline.router.pml.pml_error import ErrorCode, Mark, PmlError
from trunkline.router.pml.tree import Text


class PmlTokenizer(Protocol):
    """Encodes texts and renders conversations. Equal arguments must give equal results."""

    def encode_plain(self, text: str) -> list[int]:
        """Encode a user's text, in which special tokens count as plain text, without adding tokens."""
        ...

    def encode_special(self, text: str) -> list[int]:
        """Encode text of a chat template, in which special tokens are tokens, without adding tokens."""
        ...

    @property
    def bos_ids(self) -> list[int]:
        """Tokens that the tokenizer puts in front of a plain completion's prompt."""
        ...

    def placeholder_ids(self, fill: str | None, count: int) -> list[int]:
        """Return `count` placeholder tokens for a parameter: `fill` repeated or, without it, the unknown token,
        else the padding token, else a blank."""
        ...

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Return the text of a conversation (`role` and `content` of each message) in the model's chat template.

        Raises:
            PromptError: The template refuses the conversation.
        """
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be called."""
        ...


ROLES_MAX: Final = 128
"""Largest number of roles on one path of a schema, and in a prompt without the messages that follow it. Finding
the text around each role takes as many renderings as there are roles."""
_REMEMBERED_MAX: Final = 4096
"""Largest number of forms in the cache. Each different beginning of a conversation has one."""

_SENTINEL: Final = "PmlSlot{}End"
_SENTINEL_PATTERN: Final = re.compile(r"(\t\n)?PmlSlot([0-9]+)End(\n\t)?", re.ASCII)
"""Matches the sentinel that stands for a message's content. Around it is white space that no template writes;
where it is missing, the template trims contents."""


class RoleForm(NamedTuple):
    """Text that the template writes around a message at its place in a conversation."""

    gap: str
    """Text between the previous message (or the beginning) and this one, without the BOS."""
    suffix: str
    trims_left: bool
    """Whether the template removes white space at the beginning of the message's content."""
    trims_right: bool
    """Whether the template removes white space at the end of the message's content."""


class Rendered(NamedTuple):
    """A rendered conversation without the contents of its messages."""

    gaps: tuple[str, ...]
    """Texts before, between and after the messages: one more than there are messages."""
    trims: tuple[tuple[bool, bool], ...]
    """For each message: whether the beginning and the end of its content are trimmed."""


class RoleForms:
    """The forms of one model's chat template, each found when it is first needed."""

    def __init__(self, tokenizer: PmlTokenizer) -> None:
        self._tokenizer = tokenizer
        self._forms: dict[tuple[str, ...], RoleForm] = {}
        bos = _template_bos(tokenizer) if tokenizer.has_chat_template else None
        self.bos: tuple[int, ...] = tuple(tokenizer.bos_ids) if bos is None else bos
        """Tokens at the beginning of every prompt: the template's, or else those that the tokenizer puts in front
        of plain completions."""
        self._bos_text = self._find_bos_text()

    def render(
        self, roles: tuple[str, ...], *, generate: bool = False, tokenizer: PmlTokenizer | None = None
    ) -> Rendered:
        """Render a conversation with these roles, without the BOS.

        Args:
            roles: Roles of the messages.
            generate: Whether the generation prompt follows them.
            tokenizer: A tokenizer whose template has other extra variables; None: the usual one.

        Raises:
            PmlError: E_TEMPLATE.
        """
        tokenizer = tokenizer or self._tokenizer
        if not tokenizer.has_chat_template:
            message = "the model has no chat template, so <system>, <user> and <assistant> have no form"
            raise PmlError(ErrorCode.TEMPLATE, message)
        messages = [{"role": role, "content": f"\t\n{_SENTINEL.format(n)}\n\t"} for n, role in enumerate(roles)]
        try:
            text = tokenizer.render_chat(messages, generate)
        except PromptError as error:
            shown = ", ".join(roles[-8:])
            message = f"the model's chat template refuses the roles {'… ' * (len(roles) > 8)}{shown}: {error}"
            raise PmlError(ErrorCode.TEMPLATE, message) from None
        found = list(_SENTINEL_PATTERN.finditer(text))
        if [int(match[2]) for match in found] != list(range(len(roles))):
            message = f"the model's chat template does not write the roles {', '.join(roles[-8:])} in this order"
            raise PmlError(ErrorCode.TEMPLATE, message)
        starts = [0, *(match.end() for match in found)]
        ends = [*(match.start() for match in found), len(text)]
        gaps = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        gaps[0] = gaps[0].removeprefix(self._bos_text)
        return Rendered(tuple(gaps), tuple((match[1] is None, match[3] is None) for match in found))

    def form(self, before: tuple[str, ...], role: str, mark: Mark | None = None, path: str = "") -> RoleForm:
        """Return the text around a message.

        Args:
            before: Roles of the messages before this one.
            role: Role of this message.
            mark: Place of this message in the document, for the error.
            path: Path of this message's module, for the error.

        Raises:
            PmlError: E_TEMPLATE.
        """
        roles = (*before, role)
        known = self._forms.get(roles)
        if known is None:
            if len(roles) > ROLES_MAX:
                message = f"there are more than {ROLES_MAX} messages one behind the other; put some into one"
                raise PmlError(ErrorCode.TEMPLATE, message, mark, path)
            try:
                known = self._find(roles)
            except PmlError as error:
                raise PmlError(ErrorCode.TEMPLATE, error.message, mark, path) from None
            if len(self._forms) >= _REMEMBERED_MAX:
                self._forms.clear()
            self._forms[roles] = known
        return known

    def encode(self, text: str) -> list[int]:
        """Encode text of the template."""
        return self._tokenizer.encode_special(text) if text else []

    def _find(self, roles: tuple[str, ...]) -> RoleForm:
        """Render the message as the last one, and with another one after it. Templates may refuse one of these, or
        need the other message (a system message within the user's first one)."""
        follower = "assistant" if roles[-1] == "user" else "user"
        try:
            followed = self.render((*roles, follower))
        except PmlError:
            last = self.render(roles)
            return RoleForm(last.gaps[-2], last.gaps[-1], *last.trims[-1])
        behind, trims = followed.gaps[-2], followed.trims[-2]
        try:
            suffix = self.render(roles).gaps[-1]
        except PmlError:
            suffix = behind
        if not behind.startswith(suffix):
            suffix = behind
        return RoleForm(followed.gaps[-3], suffix, *trims)

    def _find_bos_text(self) -> str:
        """Return the text of the BOS in the template; "" if the template does not write it."""
        if not self.bos or not self._tokenizer.has_chat_template:
            return ""
        for roles in (("user",), ("system", "user")):
            try:
                text = self._tokenizer.render_chat([{"role": role, "content": "x"} for role in roles], False)
            except PromptError:
                continue
            bos = list(self.bos)
            if self._tokenizer.encode_special(text)[: len(bos)] == bos:
                return next(
                    (text[:n] for n in range(len(text)) if self._tokenizer.encode_special(text[:n]) == bos), ""
                )
        return ""


_Part = TypeVar("_Part")


def trimmed(items: Sequence[_Part | Text], form: RoleForm) -> list[_Part | Text]:
    """Return the parts of a message without the white space that the template trims."""
    parts = list(items)
    if parts and form.trims_left and isinstance(parts[0], Text):
        parts[0] = replace(parts[0], text=parts[0].text.lstrip())
    if parts and form.trims_right and isinstance(parts[-1], Text):
        parts[-1] = replace(parts[-1], text=parts[-1].text.rstrip())
    return [part for part in parts if not isinstance(part, Text) or part.text]


def without_common(text: str, prefix: str) -> str:
    """Return `text` without the beginning that it has in common with `prefix`."""
    length = next(
        (n for n, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), min(len(text), len(prefix))
    )
    return text[length:]


def _template_bos(tokenizer: PmlTokenizer) -> tuple[int, ...] | None:
    """Return the tokens with which a template begins a conversation; None if there are none.

    They are the tokenizer's BOS or, if the tokenizer adds none, a special token that comes first and never again.
    """
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    try:
        text = tokenizer.render_chat(messages, False)
    except PromptError:
        return None
    ids = tokenizer.encode_special(text)
    own = tokenizer.bos_ids
    if own:
        return tuple(own) if ids[: len(own)] == own else None
    is_special = bool(ids) and tokenizer.encode_plain(text)[:1] != ids[:1]
    return (ids[0],) if is_special and ids.count(ids[0]) == 1 else None
