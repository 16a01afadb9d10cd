"""The formats in which models write tool calls, and how to detect the one that a model was trained on.

- `hermes` (Hermes, Qwen): `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`, any number, among text;
- `llama3_json` (Llama 3.1 and later): `{"name": …, "parameters": {…}}`, several separated by `;`, maybe after
  `<|python_tag|>`;
- `mistral`: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, in newer models `[TOOL_CALLS]name[ARGS]{…}`,
  repeated.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, get_args

import msgspec

StyleName = Literal["hermes", "llama3_json", "mistral"]
STYLE_NAMES: Final[tuple[StyleName, ...]] = get_args(StyleName)

TOOL_CALL: Final = "<tool_call>"
TOOL_CALL_END: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
TOOL_CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"

MARKERS: Final[dict[StyleName, tuple[str, ...]]] = {
    "hermes": (TOOL_CALL, TOOL_CALL_END),
    "llama3_json": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS, CALL_ID, ARGS),
}


class ToolStyle(msgspec.Struct, frozen=True):
    """The format in which one model writes calls."""

    name: StyleName = "hermes"
    special: frozenset[str] = frozenset()
    """Markers that are special tokens of the tokenizer. The detokenizer must not skip them."""
    newer: bool = False
    """Whether a function's name is written before the arguments instead of in one object with them (`mistral`
    only)."""

    @property
    def arguments_field(self) -> str:
        """Name of the field for the arguments in a call's object."""
        return "parameters" if self.name == "llama3_json" else "arguments"


def detect_style(
    option: str, template: str | None, tokens: Collection[str], special: Collection[str]
) -> ToolStyle:
    """Return a model's style: the one that `option` names or, for "auto", the one that its files suggest.

    Args:
        option: "auto" or one of `STYLE_NAMES`.
        template: Text of the chat template, the best evidence: many models keep tokens of the model they derive
        from.
        tokens: Added tokens of the tokenizer.
        special: Those of `tokens` that are special tokens.
    """
    name = next((name for name in STYLE_NAMES if name == option), None) or _guess(template or "", tokens)
    return ToolStyle(
        name=name,
        special=frozenset(marker for marker in MARKERS[name] if marker in special),
        newer=name == "mistral" and ARGS in tokens,
    )


def _guess(template: str, tokens: Collection[str]) -> StyleName:
    evidence: tuple[tuple[StyleName, str], ...] = (
        ("hermes", TOOL_CALL),
        ("mistral", TOOL_CALLS),
        ("llama3_json", PYTHON_TAG),
    )
    for name, marker in evidence:
        if marker in template:
            return name
    if '"parameters": ' in template:
        return "llama3_json"
    if "tools" in template:
        for name, marker in evidence:
            if marker in tokens:
                return name
    return "hermes"
