"""The forms in which models write tool calls, as one table, and how to detect the form of a model.

A form is data. The parser (`tools/parsers.py`), the grammar of forced calls (`tools/grammar.py`) and the text of
earlier calls for templates without tools (`tool_turns.py`) are all made from it:

    begin opener (head name number name_end body tail) separator (…) end        one marker around all calls
    (begin head name number name_end body tail end) separator (…)               a marker around each call

White space between these texts is written as the table has it; when it is read, any amount of it is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Final, Literal, get_args

import msgspec
from pydantic_core import from_json

StyleName = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "qwen3_coder",
    "pythonic",
    "harmony",
    "glm45",
    "deepseek_v3",
    "deepseek_v31",
    "granite",
    "phi4_mini",
    "kimi_k2",
]
STYLE_NAMES: Final[tuple[StyleName, ...]] = get_args(StyleName)
Body = Literal["object", "json", "tags", "python"]
"""What a call consists of: "object": one JSON object with name and arguments; the others: a name, then arguments
as a JSON object, as a pair of tags for each, or as Python writes them."""

TOOL_CALL: Final = "<tool_call>"
TOOL_CALL_END: Final = "</tool_call>"
TOOL_CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
CONSTRAIN: Final = "<|constrain|>"
START: Final = "<|start|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"


class Tags(msgspec.Struct, frozen=True):
    """How arguments are written as pairs of tags."""

    key: str
    """Text before an argument's name."""
    key_end: tuple[str, ...]
    """Texts between an argument's name and its value."""
    value_end: str
    ends: tuple[str, ...]
    """Texts of which one ends the arguments; the first is the one that models are taught."""
    lines: bool
    """Whether a value stands on lines of its own, so that one line end before and one behind it are not part of
    it."""
    grammar: str
    """The grammar library's word for these tags."""


class ToolForm(msgspec.Struct, frozen=True, kw_only=True):
    """A form of calls; see the module's text."""

    aliases: tuple[str, ...] = ()
    """What other servers call the form."""
    begins: tuple[str, ...]
    """Markers of which one comes before calls; the first is the one that models are taught."""
    bare: str = ""
    """Text with which a call may begin without a marker."""
    unmarked: bool = False
    """Whether calls are written without a marker."""
    each: bool = False
    """Whether each call has a marker of its own."""
    opener: str = ""
    separator: str = ""
    closers: tuple[str, ...] = ()
    """Texts that may come behind the last call, in this order."""
    end: str = ""
    """The text behind the last call, as it is written."""
    head: str = ""
    numbered: bool = False
    """Whether a call's number follows its function's name: `:0`, `:1`, …, counted over the conversation."""
    name_end: str = ""
    tail: str = ""
    body: Body = "object"
    tags: Tags | None = None
    arguments_field: str = "arguments"
    """Name of the field for the arguments in a call's object."""
    single: bool = False
    """Whether an answer ends with its first call."""
    otherwise: ToolForm | None = None
    """The form that is read if a name comes behind the marker, where this form has an object."""
    markers: tuple[str, ...] = ()
    """Parts of these texts that may be special tokens of the tokenizer."""


NAMED_MISTRAL: Final = ToolForm(
    begins=(TOOL_CALLS,), each=True, name_end=ARGS, body="json", markers=(TOOL_CALLS, CALL_ID, ARGS)
)
"""Calls of newer models of Mistral: a function's name is written before the arguments, not in their object."""
FORMS: Final[dict[StyleName, ToolForm]] = {
    "hermes": ToolForm(
        aliases=("qwen", "qwen25", "qwen3"),
        begins=(TOOL_CALL,),
        each=True,
        head="\n",
        tail="\n",
        separator="\n",
        closers=(TOOL_CALL_END,),
        end=TOOL_CALL_END,
        markers=(TOOL_CALL, TOOL_CALL_END),
    ),
    "llama3_json": ToolForm(
        aliases=("llama3", "llama4_json"),
        begins=("<|python_tag|>", "<|python_start|>"),
        bare="{",
        unmarked=True,
        separator="; ",
        closers=("<|python_end|>",),
        arguments_field="parameters",
        markers=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    ),
    "mistral": ToolForm(
        begins=(TOOL_CALLS,),
        opener="[",
        separator=", ",
        closers=("]",),
        end="]",
        otherwise=NAMED_MISTRAL,
        markers=(TOOL_CALLS, CALL_ID, ARGS),
    ),
    "qwen3_coder": ToolForm(
        aliases=("qwen3_xml",),
        begins=(TOOL_CALL,),
        bare="<function=",
        each=True,
        head="\n<function=",
        name_end=">\n",
        tail="\n",
        separator="\n",
        closers=(TOOL_CALL_END,),
        end=TOOL_CALL_END,
        body="tags",
        tags=Tags("<parameter=", (">",), "</parameter>", ("</function>", TOOL_CALL_END), True, "qwen_xml"),
        markers=(TOOL_CALL, TOOL_CALL_END),
    ),
    "pythonic": ToolForm(
        aliases=("llama4_pythonic", "llama4", "gemma3"),
        begins=("<|python_start|>", "```tool_code"),
        bare="[",
        unmarked=True,
        opener="[",
        separator=", ",
        closers=("]", "<|python_end|>", "```"),
        end="]",
        name_end="(",
        body="python",
        markers=("<|python_start|>", "<|python_end|>"),
    ),
    "harmony": ToolForm(
        aliases=("openai", "gpt-oss", "gpt_oss"),
        begins=(CHANNEL,),
        each=True,
        head="commentary to=functions.",
        name_end=f" {CONSTRAIN}json{MESSAGE}",
        body="json",
        end=CALL,
        single=True,
        markers=(START, END, CHANNEL, MESSAGE, CONSTRAIN, CALL, RETURN),
    ),
    "glm45": ToolForm(
        aliases=("glm", "glm47"),
        begins=(TOOL_CALL,),
        each=True,
        name_end="\n",
        separator="\n",
        body="tags",
        tags=Tags("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", (TOOL_CALL_END,), False, "glm_xml"),
        markers=(TOOL_CALL, TOOL_CALL_END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v3": ToolForm(
        aliases=("deepseekv3", "deepseek_r1", "deepseek"),
        begins=("<｜tool▁calls▁begin｜>",),
        head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        separator="\n",
        closers=("<｜tool▁calls▁end｜>",),
        end="<｜tool▁calls▁end｜>",
        body="json",
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    "deepseek_v31": ToolForm(
        aliases=("deepseekv31",),
        begins=("<｜tool▁calls▁begin｜>",),
        head="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        tail="<｜tool▁call▁end｜>",
        closers=("<｜tool▁calls▁end｜>",),
        end="<｜tool▁calls▁end｜>",
        body="json",
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    "granite": ToolForm(
        begins=("<|tool_call|>", TOOL_CALL),
        opener="[",
        separator=", ",
        closers=("]", TOOL_CALL_END),
        end="]",
        markers=("<|tool_call|>", TOOL_CALL, TOOL_CALL_END),
    ),
    "phi4_mini": ToolForm(
        aliases=("phi4_mini_json", "phi4"),
        begins=("<|tool_call|>", "functools"),
        opener="[",
        separator=", ",
        closers=("]", "<|/tool_call|>"),
        end="]<|/tool_call|>",
        markers=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "kimi_k2": ToolForm(
        aliases=("kimi",),
        begins=("<|tool_calls_section_begin|>",),
        head="<|tool_call_begin|>functions.",
        numbered=True,
        name_end="<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        closers=("<|tool_calls_section_end|>",),
        end="<|tool_calls_section_end|>",
        body="json",
        markers=(
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
            *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
    ),
}
OPTIONS: Final[dict[str, StyleName]] = {
    option: name for name, form in FORMS.items() for option in (name, *form.aliases)
}
"""The style that each value of the option names."""
MARKERS: Final[dict[StyleName, tuple[str, ...]]] = {name: form.markers for name, form in FORMS.items()}


class ToolStyle(msgspec.Struct, frozen=True):
    """The form in which one model writes calls."""

    name: StyleName = "hermes"
    special: frozenset[str] = frozenset()
    """Markers that are special tokens of the tokenizer. The detokenizer must not skip them."""
    newer: bool = False
    """Whether the form is `NAMED_MISTRAL` (`mistral` only)."""
    begin: str = ""
    """The marker that the model's template writes, if the form has several; "": the first."""

    @property
    def form(self) -> ToolForm:
        """The form of the calls."""
        return NAMED_MISTRAL if self.newer else FORMS[self.name]

    @property
    def written_begin(self) -> str:
        """The marker before calls that the router writes."""
        return "" if self.form.unmarked else self.begin or self.form.begins[0]

    @property
    def arguments_field(self) -> str:
        """Name of the field for the arguments in a call's object."""
        return self.form.arguments_field


def detect_style(
    option: str, template: str | None, tokens: Collection[str], special: Collection[str]
) -> ToolStyle:
    """Return a model's style: the one that `option` names or, for "auto", the one that its files suggest.

    Args:
        option: "auto" or one of `OPTIONS`.
        template: Text of the chat template, the best evidence: many models keep tokens of the model they derive
            from.
        tokens: Added tokens of the tokenizer.
        special: Those of `tokens` that are special tokens.
    """
    name = OPTIONS.get(option) or _guess(template or "", tokens)
    begins = FORMS[name].begins
    return ToolStyle(
        name=name,
        special=frozenset(marker for marker in MARKERS[name] if marker in special),
        newer=name == "mistral" and ARGS in tokens,
        begin=next((marker for marker in begins[1:] if marker in (template or "")), "")
        if begins[0] not in (template or "")
        else "",
    )


_EVIDENCE: Final[tuple[tuple[StyleName, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("harmony", (CHANNEL, MESSAGE), ()),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json"), ()),
    ("deepseek_v31", ("<｜tool▁sep｜>",), ()),
    ("kimi_k2", ("<|tool_call_argument_begin|>",), ()),
    ("glm45", ("<arg_key>",), ()),
    ("qwen3_coder", ("<function=", "<parameter="), ()),
    ("granite", ("<|start_of_role|>", "tool_call"), (TOOL_CALL_END,)),
    ("phi4_mini", ("<|tool|>",), ()),
    ("phi4_mini", ("<|/tool_call|>",), ()),
    ("hermes", (TOOL_CALL,), ()),
    ("mistral", (TOOL_CALLS,), ()),
    ("pythonic", ("<|python_start|>", "func_name"), ('"parameters": ',)),
    ("pythonic", ("[func_name",), ()),
    ("llama3_json", ("<|python_tag|>",), ()),
    ("llama3_json", ("<|python_start|>",), ()),
    ("llama3_json", ('"parameters": ',), ()),
    ("pythonic", ("<start_of_turn>",), ()),
)
"""For each style the texts that its templates have, all of them, and texts that they have not; in this order."""


def _guess(template: str, tokens: Collection[str]) -> StyleName:
    for name, present, absent in _EVIDENCE:
        if all(text in template for text in present) and not any(text in template for text in absent):
            return name
    if "tools" in template:
        for name, (marker, *_), _ in _EVIDENCE:
            if marker in tokens:
                return name
    return "hermes"


def calls_text(style: ToolStyle, calls: Sequence[tuple[str, str]]) -> str:
    """Return calls (name, JSON text of the arguments) as a model of a style writes them."""
    form = style.form
    begin, end = (style.written_begin, form.end) if form.each else ("", "")
    written = [
        f"{begin}{_call_text(form, name, arguments, number)}{end}"
        for number, (name, arguments) in enumerate(calls)
    ]
    text = form.separator.join(written)
    return text if form.each else f"{style.written_begin}{form.opener}{text}{form.end}"


def _call_text(form: ToolForm, name: str, arguments: str, number: int) -> str:
    if form.body == "object":
        return f'{form.head}{{"name": "{name}", "{form.arguments_field}": {arguments}}}{form.tail}'
    told = f":{number}" if form.numbered else ""
    return f"{form.head}{name}{told}{form.name_end}{_body_text(form, arguments)}{form.tail}"


def _body_text(form: ToolForm, arguments: str) -> str:
    if form.body == "json":
        return arguments
    try:
        fields = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        fields = {}
    fields = fields if isinstance(fields, dict) else {}
    if form.tags is None:
        return ", ".join(f"{name}={_python(value)}" for name, value in fields.items()) + ")"
    tags = form.tags
    line = "\n" if tags.lines else ""
    between = (line or "\n").join(tags.key_end) + line
    written = [
        f"{tags.key}{name}{between}{value if isinstance(value, str) else _json(value)}{line}{tags.value_end}\n"
        for name, value in fields.items()
    ]
    return "".join(written) + tags.ends[0]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python(value: object) -> str:
    """Return a value of JSON as a literal of Python, with texts as JSON writes them."""
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(name)}: {_python(inner)}" for name, inner in value.items()) + "}"
    return _json(value) if isinstance(value, str | float) else repr(value)
