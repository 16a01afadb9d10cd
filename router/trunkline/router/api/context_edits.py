"""`context_management` of `/v1/messages`: Anthropic's edits, read, checked and reported.

`read_edits` turns them into those of `text/edits.py`; `applied_edits` writes what these have done into the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from trunkline.router.errors import ApiError, bad_value, unsupported
from trunkline.router.http.body import validate
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.jobs.parameter_table import shown_names, unknown_within
from trunkline.router.text.edits import (
    KEPT_TURNS_DEFAULT,
    KEPT_USES_DEFAULT,
    TRIGGER_TOKENS_DEFAULT,
    AppliedEdit,
    ClearThinking,
    ClearToolUses,
    Edit,
)

PARAM: Final = "context_management"
_TOOL_USES: Final = "clear_tool_uses_20250919"
_THINKING: Final = "clear_thinking_20251015"
_NUMBER_MAX: Final = 2**31 - 1
_Number = Annotated[StrictInt, Field(ge=0, le=_NUMBER_MAX)]
_Counting = Annotated[StrictInt, Field(ge=1, le=_NUMBER_MAX)]
_Fields = TypeVar("_Fields", bound=BaseModel)


class _Object(LateModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class _Trigger(_Object):
    type: Literal["input_tokens", "tool_uses"]
    value: _Counting


class _Uses(_Object):
    type: Literal["tool_uses"]
    value: _Number


class _Tokens(_Object):
    type: Literal["input_tokens"]
    value: _Number


class _ToolUseEdit(_Object):
    type: Any = None
    trigger: _Trigger = _Trigger(type="input_tokens", value=TRIGGER_TOKENS_DEFAULT)
    keep: _Uses = _Uses(type="tool_uses", value=KEPT_USES_DEFAULT)
    clear_at_least: _Tokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: Any = None


class _Turns(_Object):
    type: Literal["thinking_turns", "all"]
    value: _Counting = KEPT_TURNS_DEFAULT


class _ThinkingEdit(_Object):
    type: Any = None
    keep: Any = None


_EDITS: Final[dict[str, type[_Object]]] = {_TOOL_USES: _ToolUseEdit, _THINKING: _ThinkingEdit}


def read_edits(given: dict[str, Any] | None, tools: Collection[str]) -> tuple[Edit, ...]:
    """Return the edits of `context_management`, in the request's order.

    Args:
        tools: Names of the tools that the request has or its conversation uses.

    Raises:
        ApiError: 400, naming the edit by its index: it is no edit that is known, its fields are wrong, it stands
            beside another of its type or in the wrong order, or it names unknown tools.
    """
    edits = None if given is None else given.get("edits")
    if edits is None:
        return ()
    if not isinstance(edits, list):
        raise bad_value(f"{PARAM}.edits", f"`{PARAM}.edits` must be a list")
    read: list[Edit] = []
    for index, fields in enumerate(edits):
        place = f"{PARAM}.edits[{index}]"
        edit = _read(fields, place, tools)
        if any(type(edit) is type(other) for other in read):
            raise bad_value(place, f"`{place}`: each type of edit is allowed once, because they would overlap")
        if isinstance(edit, ClearThinking) and read:
            raise bad_value(place, f'`{place}`: "{_THINKING}" must be the first edit')
        read.append(edit)
    return tuple(read)


def _read(fields: Any, place: str, tools: Collection[str]) -> Edit:
    kind = fields.get("type") if isinstance(fields, dict) else None
    if kind == _TOOL_USES:
        return _tool_uses(_checked(_ToolUseEdit, fields, place), place, tools)
    if kind == _THINKING:
        keep = _checked(_ThinkingEdit, fields, place).keep
        if keep is None or keep == "all":
            return ClearThinking(None if keep else KEPT_TURNS_DEFAULT)
        if not isinstance(keep, dict):
            raise bad_value(f"{place}.keep", f'`{place}.keep` must be "all" or an object with a `type`')
        turns = _checked(_Turns, keep, f"{place}.keep")
        return ClearThinking(None if turns.type == "all" else turns.value)
    if not isinstance(kind, str):
        raise bad_value(place, f"`{place}` must be an object with a `type`")
    why = f'"{kind[:60]}" is not known; edits are "{_TOOL_USES}" and "{_THINKING}"'
    if kind.startswith("compact_"):
        why = f'"{kind[:60]}" is not supported: let the client summarise, and send the summary as a message'
    raise unsupported(f"{place}.type", why)


def _tool_uses(given: _ToolUseEdit, place: str, tools: Collection[str]) -> ClearToolUses:
    inputs = given.clear_tool_inputs
    names = inputs if isinstance(inputs, list) else []
    if not (inputs is None or isinstance(inputs, bool | list)) or not all(isinstance(name, str) for name in names):
        param = f"{place}.clear_tool_inputs"
        raise bad_value(param, f"`{param}` must be true, false or a list of names of tools")
    for field, listed in (("exclude_tools", given.exclude_tools or []), ("clear_tool_inputs", names)):
        unknown = next((name for name in listed if name not in tools), None)
        if unknown is not None:
            param = f"{place}.{field}"
            raise bad_value(param, f"`{param}`: there is no tool {unknown[:80]!r} in the request")
    by_tokens = given.trigger.type == "input_tokens"
    return ClearToolUses(
        trigger_tokens=given.trigger.value if by_tokens else None,
        trigger_uses=0 if by_tokens else given.trigger.value,
        keep=given.keep.value,
        clear_at_least=0 if given.clear_at_least is None else given.clear_at_least.value,
        exclude=frozenset(given.exclude_tools or ()),
        inputs=frozenset(names) if isinstance(inputs, list) else bool(inputs),
    )


def _checked(model: type[_Fields], fields: dict[str, Any], place: str) -> _Fields:
    """Return fields as a model.

    Raises:
        ApiError: 400, naming the field within `place`.
    """
    try:
        return validate(model, {name: value for name, value in fields.items() if value is not None})
    except ApiError as error:
        names = {name: f"{place}.{name}" for name in model.model_fields}
        raise error.renamed(names) from None


def unknown_fields(given: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the names of unknown fields of `context_management` and its edits, which `read_edits` has accepted.
    The client is told of them, because a misspelt `exclude_tools` clears what was to stay."""
    return shown_names(list(_unknown_fields(given)))


def _unknown_fields(given: dict[str, Any] | None) -> Iterator[str]:
    for name, value in (given or {}).items():
        if name != "edits" and value is not None:
            yield f"{PARAM}.{name}"
    for index, fields in enumerate((given or {}).get("edits") or ()):
        models = frozenset[type[BaseModel]]((_EDITS[fields["type"]],))
        yield from unknown_within(f"{PARAM}.edits[{index}]", fields, models)


def tool_names(tools: Any, turns: Iterable[Any]) -> set[str]:
    """Return the names of the tools in a request's `tools` and in the calls of its messages, as they were sent."""
    found = set(_names(tools, None))
    for turn in turns:
        found.update(_names(turn.get("content") if isinstance(turn, dict) else None, "tool_use"))
    return found


def _names(entries: Any, kind: str | None) -> Iterable[str]:
    for entry in entries if isinstance(entries, list) else ():
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str) and (kind is None or str(entry.get("type")).endswith(kind)):
            yield name


def applied_edits(applied: Iterable[AppliedEdit]) -> list[dict[str, Any]]:
    """Return what edits have done, in Anthropic's form."""
    entries = []
    for done in applied:
        thinking = isinstance(done.edit, ClearThinking)
        counted = "cleared_thinking_turns" if thinking else "cleared_tool_uses"
        entries.append(
            {
                "type": _THINKING if thinking else _TOOL_USES,
                counted: done.groups,
                "cleared_input_tokens": done.tokens,
            }
        )
    return entries
