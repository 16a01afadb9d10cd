"""How models mark the text in which they think before they answer, and how to detect a model's way.

Some templates open the thought at the end of the prompt, others leave that to the model, and with
`enable_thinking: false` many write an empty thought. So a request's state is read off the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal

import msgspec

ThoughtState = Literal["inside", "possible", "closed"]
"""Where an answer begins: within a thought, where a thought may begin, or behind a thought."""


class ReasoningStyle(msgspec.Struct, frozen=True):
    """The marks around thoughts."""

    begin: str
    """Text before a thought; "": thoughts are messages on a channel (`tools/harmony.py`)."""
    end: str
    special: frozenset[str] = frozenset()
    """Marks that are special tokens of the tokenizer. The detokenizer must not skip them."""
    answer: tuple[str, str] | None = None
    """Marks around the answer behind a thought, which are dropped; None: there are none."""
    assumed: bool = False
    """Whether an answer begins within a thought even if the prompt does not end with the mark."""

    def state(self, prompt: str) -> ThoughtState:
        """Return where the answer to a prompt begins. `prompt`: its text, or the end of it."""
        tail = prompt.rstrip()
        if self.begin and tail.endswith(self.end):
            return "closed"
        return "inside" if self.begin and (self.assumed or tail.endswith(self.begin)) else "possible"


THINK: Final = ReasoningStyle("<think>", "</think>")
HARMONY: Final = ReasoningStyle("", "")
_RESPONSE: Final = ("<response>", "</response>")
"""Marks that Granite 3.3 writes around its answer."""
_STYLES: Final[dict[str, ReasoningStyle]] = {
    "think": THINK,
    "deepseek_r1": ReasoningStyle("<think>", "</think>", assumed=True),
    "mistral": ReasoningStyle("[THINK]", "[/THINK]"),
    "granite": ReasoningStyle("Here is my thought process:", "Here is my response:"),
    "seed_oss": ReasoningStyle("<seed:think>", "</seed:think>"),
    "harmony": HARMONY,
}
_ALIASES: Final = {
    **dict.fromkeys(("qwen3", "glm45", "deepseek_v3", "hunyuan", "phi4"), "think"),
    **dict.fromkeys(("openai_gptoss", "gpt-oss", "gpt_oss"), "harmony"),
    "deepseek-r1": "deepseek_r1",
    "magistral": "mistral",
}
REASONING_PARSERS: Final = ("auto", "none", *_STYLES, *_ALIASES)
"""The values of the option, among them the names of other servers."""


def detect_reasoning(
    option: str, template: str | None, tokens: Collection[str], special: Collection[str]
) -> ReasoningStyle | None:
    """Return a model's style: the one that `option` names or, for "auto", the one that its files suggest; None: it
    does not think.

    Args:
        option: one of `REASONING_PARSERS`.
        template: Text of the chat template.
        tokens: Added tokens of the tokenizer.
        special: Those of `tokens` that are special tokens.
    """
    style = _STYLES.get(_ALIASES.get(option, option))
    if option == "auto" and template:
        style = next((one for one in _STYLES.values() if _fits(one, template, tokens)), None)
    if style is None:
        return None
    if style.begin == THINK.begin and all(mark in (template or "") for mark in _RESPONSE):
        style = msgspec.structs.replace(style, answer=_RESPONSE)
    return msgspec.structs.replace(style, special=frozenset({style.begin, style.end}.intersection(special)))


def _fits(style: ReasoningStyle, template: str, tokens: Collection[str]) -> bool:
    if not style.begin:
        return "<|channel|>" in template and "<|message|>" in template
    return style.begin in template or style.end in template or style.end in tokens
