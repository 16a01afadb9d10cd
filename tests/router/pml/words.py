"""A tokenizer whose tokens are words, and chat templates to go with it."""

from __future__ import annotations

import re
from typing import Final
from zlib import crc32

from trunkline.router.text.chat_template import ChatTemplate

FIRST_WORD: Final = 1000
"""Smaller ids are special tokens, in the order of `SPECIAL`."""
SPECIAL: Final = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<unk>")
_WORD: Final = re.compile(r"\s*\S+|\s+")
_SPECIAL: Final = re.compile("|".join(re.escape(token) for token in SPECIAL))

PLAIN: Final = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As the demo model's: a BOS, and a token before and behind each message."""
CHATML: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""No BOS; its first token comes again."""
INSTRUCT: Final = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = none %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content if loop.first and system else m.content %}"
    "{% if m.role == 'user' %}{{ '<s>[INST] ' + text | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"
)
"""As Llama 2's: the system message is within the first user's; contents are trimmed; strict about the order."""
SHUFFLED: Final = "{% for m in messages | reverse %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
"""Writes messages in another order than they come."""


class Words:
    """A tokenizer (`PmlTokenizer`)."""

    def __init__(self, template: str | None = None, bos: bool = False) -> None:
        """`bos`: whether plain texts begin with `<s>`."""
        self._template = None if template is None else ChatTemplate(template, {})
        self._bos = bos

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def bos_ids(self) -> list[int]:
        return [SPECIAL.index("<s>")] if self._bos else []

    def encode_plain(self, text: str) -> list[int]:
        return [FIRST_WORD + crc32(word.encode()) % 1_000_000 for word in _WORD.findall(text)]

    def encode_special(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in _SPECIAL.finditer(text):
            ids += self.encode_plain(text[start : match.start()])
            ids.append(SPECIAL.index(match[0]))
            start = match.end()
        return ids + self.encode_plain(text[start:])

    def placeholder_ids(self, fill: str | None, count: int) -> list[int]:
        unit = self.encode_plain(fill) if fill else [SPECIAL.index("<unk>")]
        return (unit * count)[:count]

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        assert self._template is not None
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)
