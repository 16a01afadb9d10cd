"""`PmlTokenizer`: the interface to a model's tokenizer and chat template that the PML compiler needs."""

from __future__ import annotations

from typing import Protocol


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
            PromptError: The template refuses it.
        """
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be called."""
        ...
