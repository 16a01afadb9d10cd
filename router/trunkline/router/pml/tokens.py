"""What this package needs of a model's tokenizer."""

from __future__ import annotations

from typing import Protocol


class PmlTokenizer(Protocol):
    """Texts to token ids, and conversations to text. All calls give the same result for the same arguments."""

    def encode_plain(self, text: str) -> list[int]:
        """Tokens of a user's text: special tokens that are written in it are plain text; nothing is added."""
        ...

    def encode_special(self, text: str) -> list[int]:
        """Tokens of what a chat template wrote: special tokens are tokens; nothing is added."""
        ...

    @property
    def bos_ids(self) -> list[int]:
        """What the tokenizer puts in front of a plain completion's prompt; empty: nothing."""
        ...

    def placeholder_ids(self, fill: str | None, count: int) -> list[int]:
        """`count` tokens that stand for a parameter: `fill` repeated or, without it, the unknown token, else the
        padding token, else a blank."""
        ...

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """A conversation (`role` and `content` of each message) in the model's own form.

        Raises:
            RoleTemplateError: the template refuses it.
        """
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be called."""
        ...
