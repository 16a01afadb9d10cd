"""A model's tokenizer and chat template, as the PML compiler asks for them (`pml.PmlTokenizer`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from trunkline.router.pml import RoleTemplateError
from trunkline.router.text.chat_template import ChatTemplateError
from trunkline.router.text.tokenizer import Tokenizer

_PLACEHOLDERS: Final = ("unk_token", "pad_token")
_CHARACTERS_AT_ONCE: Final = 1 << 20
"""Encoding takes hundreds of bytes a character; a text that is longer fits into hardly any context anyway."""


class ModelText:
    """See `pml.PmlTokenizer`."""

    def __init__(self, tokenizer: Tokenizer, switches: Mapping[str, Any] | None = None) -> None:
        """`switches`: the template's own (`chat_template_kwargs`)."""
        self._tokenizer = tokenizer
        self._switches = switches

    @property
    def has_chat_template(self) -> bool:
        """Whether roles can be written."""
        return self._tokenizer.has_chat_template

    @property
    def bos_ids(self) -> list[int]:
        """What stands in front of every plain text."""
        return list(self._tokenizer.leading_ids)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text from a client: special tokens in it are plain text."""
        ids: list[int] = []
        for start in range(0, len(text), _CHARACTERS_AT_ONCE):
            ids += self._tokenizer.encode_plain(text[start : start + _CHARACTERS_AT_ONCE])
        return ids

    def encode_special(self, text: str) -> list[int]:
        """Token ids of a template's own text: special tokens in it are tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def placeholder_ids(self, fill: str | None, count: int) -> list[int]:
        """So many tokens to compute where an argument may stand later: `fill` over and over, or the token for what
        is unknown, for padding, or a blank: the first that the model has."""
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
        """The text of a conversation.

        Raises:
            RoleTemplateError: there is no template, or it refused the messages.
        """
        try:
            return self._tokenizer.render_chat(
                messages, add_generation_prompt=add_generation_prompt, extra=self._switches
            )
        except ChatTemplateError as error:
            raise RoleTemplateError(str(error)[:1000]) from None
