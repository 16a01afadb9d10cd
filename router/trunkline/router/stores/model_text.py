"""`ModelText`: a model's tokenizer and chat template in the interface that the PML compiler needs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from trunkline.router.text.tokenizer import Tokenizer

_PLACEHOLDERS: Final = ("unk_token", "pad_token")
_CHARACTERS_AT_ONCE: Final = 1 << 20
"""Length in characters above which a text is encoded in pieces, because encoding needs hundreds of bytes per
character."""


class ModelText:
    """An implementation of `pml.PmlTokenizer`."""

    def __init__(self, tokenizer: Tokenizer, switches: Mapping[str, Any] | None = None) -> None:
        """`switches`: extra variables of the chat template (`chat_template_kwargs`)."""
        self._tokenizer = tokenizer
        self._switches = switches

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, so that roles can be written."""
        return self._tokenizer.has_chat_template

    @property
    def bos_ids(self) -> list[int]:
        """Token ids that the tokenizer puts in front of every plain text."""
        return list(self._tokenizer.leading_ids)

    def encode_plain(self, text: str) -> list[int]:
        """Encode a client's text, in which special tokens count as plain text."""
        ids: list[int] = []
        for start in range(0, len(text), _CHARACTERS_AT_ONCE):
            ids += self._tokenizer.encode_plain(text[start : start + _CHARACTERS_AT_ONCE])
        return ids

    def encode_special(self, text: str) -> list[int]:
        """Encode a template's text, in which special tokens are tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def placeholder_ids(self, fill: str | None, count: int) -> list[int]:
        """Return `count` placeholder tokens for an argument: `fill` repeated, or else the model's unknown token,
        its padding token or a blank, whichever it has first."""
        unit = self.encode_plain(fill) if fill else []
        if not unit:
            unit = [self._filler]
        return (unit * -(-count // len(unit)))[:count]

    @functools.cached_property
    def _filler(self) -> int:
        ids = (self._tokenizer.special_token_id(name) for name in _PLACEHOLDERS)
        known = next((token for token in ids if token is not None), None)
        return known if known is not None else (self.encode_plain(" ") or [0])[-1]

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Return a conversation's text in the model's chat template.

        Raises:
            ChatTemplateError: There is no template, or it refused the messages.
        """
        return self._tokenizer.render_chat(
            messages, add_generation_prompt=add_generation_prompt, extra=self._switches
        )
