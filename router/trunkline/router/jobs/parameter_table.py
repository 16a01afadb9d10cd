"""The table of parameters: what each endpoint knows, under which spellings, and what becomes of it.

A parameter that is applied is a field of the endpoint's model. `row` says about the field what the model cannot:
its other spellings, and its row in docs/api.md. What is known and not applied stands in `known_parameters.py`.

    body ─► Endpoint.read ─► spellings of others ─► the model's own names ─► validation
                   │          known, not applied ─► ignored, if it cannot change the answer; else 400
                   └───────── unknown ────────────► ignored; the answer names it

An error names a parameter as the client spelt it (`Reading.names`, `ApiError.renamed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeGuard, TypeVar, get_args

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from trunkline.router.errors import bad_value, unsupported

UNKNOWN_MAX: Final = 16
"""Largest number of unknown parameters that an answer names."""
UNKNOWN_CHARACTERS_MAX: Final = 64
"""Number of characters after which the name of an unknown parameter is cut off."""
_HINTS: Final = frozenset({"stream_options.include_obfuscation"})
"""Fields of objects that are known, and that no answer depends on."""

_Model = TypeVar("_Model", bound=BaseModel)


def row(
    allowed: str = "",
    default: str = "",
    meaning: str = "",
    *,
    also: Iterable[str] = (),
    alias: str | None = None,
    value: Any = None,
) -> Any:
    """Return the declaration of a parameter, as the value of a model's field.

    Args:
        allowed: Which values are allowed; "" for what the type says.
        default: What counts if the client gives nothing.
        meaning: What it does.
        also: Other spellings, those of other servers.
        alias: The endpoint's own spelling, if it is not the field's name.
        value: The field's value if the client gives none.
    """
    told: dict[str, Any] = {"x-allowed": allowed, "x-default": default, "x-also": list(also)}
    extra = {name: item for name, item in told.items() if item}
    if value == [] or value == {}:
        # pydantic would copy a value for each request, deeply.
        return Field(
            default_factory=type(value),
            alias=alias,
            description=meaning or None,
            json_schema_extra={**extra, "default": value},
        )
    return Field(default=value, alias=alias, description=meaning or None, json_schema_extra=extra)


class Parameter(NamedTuple):
    """A parameter that an endpoint applies, as its row in the documentation tells of it."""

    name: str
    allowed: str
    default: str
    meaning: str
    also: tuple[str, ...]


def parameter_of(name: str, field: FieldInfo) -> Parameter:
    """Return the row of a model's field. `name`: name of the field."""
    told = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    allowed, default, also = (told.get(key, "") for key in ("x-allowed", "x-default", "x-also"))
    spellings = tuple(str(other) for other in also) if isinstance(also, list) else ()
    return Parameter(field.alias or name, str(allowed), str(default), field.description or "", spellings)


class Known(NamedTuple):
    """Parameters that are known and not applied."""

    names: tuple[str, ...]
    neutral: tuple[Any, ...] | None
    """Values that ask for nothing, besides null, `[]` and `{}`; None: any value is accepted, because none changes
    the answer."""
    why: str
    """Why it is not applied, or what to send instead; "": it is not supported."""
    at: frozenset[str] = frozenset()
    """Names of the endpoints at which it is known; empty: all."""


class Reading(NamedTuple):
    """What a body says besides its parameters."""

    names: Mapping[str, str] = {}
    """The client's spelling of parameters, by the names that errors have for them."""
    unknown: tuple[str, ...] = ()
    """Names of parameters that are not known, and of fields of those that are objects; at most `UNKNOWN_MAX`, each
    cut off after `UNKNOWN_CHARACTERS_MAX` characters; those that are not printable are escaped."""


class Endpoint(Generic[_Model]):
    """The parameters of an endpoint."""

    def __init__(
        self,
        name: str,
        model: type[_Model],
        known: Iterable[Known],
        names: Mapping[str, str] | None = None,
        *,
        like: type[BaseModel] | None = None,
    ) -> None:
        """
        Args:
            name: The endpoint's name, as in `Known.at`.
            model: The model of its body.
            known: What is known at some endpoint and not applied there.
            names: The endpoint's parameters, by the names that errors of chat completions have for them.
            like: A model with all fields that may be sent here; None: `model`.
        """
        self.name = name
        self.model = model
        fields = (like or model).model_fields
        own = {field: info.alias for field, info in fields.items() if info.alias is not None}
        self.names: dict[str, str] = {**own, **(names or {})}
        """The endpoint's parameters, by the names that errors have for them."""
        self.parameters = [parameter_of(field, info) for field, info in fields.items()]
        keys = {parameter.name for parameter in self.parameters}
        others = {spelling: each.name for each in self.parameters for spelling in each.also}
        others |= {field: key for field, key in own.items() if field not in others}
        self.spellings = {spelling: key for spelling, key in others.items() if spelling not in keys}
        """The names of parameters, by their other spellings."""
        self.known = [
            (spelling, entry)
            for entry in known
            for spelling in entry.names
            if spelling not in keys and spelling not in others and (not entry.at or name in entry.at)
        ]
        """What is known and not applied here, by its name."""
        self._refused = {spelling: entry for spelling, entry in self.known if entry.neutral is not None}
        hints = {spelling for spelling, entry in self.known if entry.neutral is None}
        self._ordinary = frozenset(keys | hints)
        self._objects = {
            info.alias or field: objects
            for field, info in model.model_fields.items()
            if (objects := _objects(info))
        }
        """The models of parameters that are objects, as far as these ignore what they do not know."""
        self._plain = Reading(self.names)

    def read(self, fields: dict[str, Any]) -> Reading:
        """Check the raw fields of a body, and give them the names that the model has for them.

        Raises:
            ApiError: 400, naming the first parameter that asks for something unsupported, or is given twice.
        """
        is_plain = fields.keys() <= self._ordinary
        if is_plain and fields.keys().isdisjoint(self._objects):
            return self._plain
        names: dict[str, str] = {}
        unknown: list[str] = []
        for name in [name for name in fields if name not in self._ordinary]:
            if name in self.spellings:
                key = self.spellings[name]
                value = fields.pop(name)
                if value is None:
                    continue
                if fields.get(key) is not None:
                    raise bad_value(name, f"`{name}` says the same as `{names.get(key, key)}`")
                fields[key], names[key] = value, name
            elif name in self._refused:
                self._check(name, fields[name])
            else:
                unknown.append(name)
        for name in self._objects.keys() & fields.keys():
            unknown += unknown_within(name, fields[name], self._objects[name])
        if names:
            return Reading(self._spelt(names), shown_names(unknown))
        return Reading(self.names, shown_names(unknown))

    def _check(self, name: str, value: Any) -> None:
        known = self._refused[name]
        if isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if inner is not None}
        if value in (None, [], {}) or any(_same(value, allowed) for allowed in known.neutral or ()):
            return
        raise unsupported(name, known.why or f"`{name}` is not supported")

    def _spelt(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return `names` with the client's spellings, which are given by the model's keys."""
        spelt = {name: given.get(key, key) for name, key in self.names.items()}
        return {**given, **spelt}


def _objects(info: FieldInfo) -> frozenset[type[BaseModel]]:
    """Return the models that a parameter may be an object of; none of them if one takes any field, or none but its
    own."""
    found = {each for each in (info.annotation, *get_args(info.annotation)) if _is_model(each)}
    return frozenset(found if all(each.model_config.get("extra") == "ignore" for each in found) else ())


def _is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def unknown_within(path: str, value: Any, models: frozenset[type[BaseModel]]) -> Iterator[str]:
    """Yield the names of unknown fields of a parameter, as "parameter.field"."""
    if not isinstance(value, dict):
        return
    fields = {info.alias or name: info for model in models for name, info in model.model_fields.items()}
    for name, inner in value.items():
        if name in fields:
            if further := _objects(fields[name]):
                yield from unknown_within(f"{path}.{name}", inner, further)
        elif inner is not None and f"{path}.{name}" not in _HINTS:
            yield f"{path}.{name}"


def _same(given: Any, neutral: Any) -> bool:
    # 1 == True in Python, but `"n": true` is not a request for one choice.
    return isinstance(given, bool) == isinstance(neutral, bool) and bool(given == neutral)


def shown_names(names: list[str]) -> tuple[str, ...]:
    """Return names as they may be shown and logged."""
    shown = {name[:UNKNOWN_CHARACTERS_MAX] for name in names}
    shown = {name if name.isprintable() else ascii(name)[1:-1] for name in shown}
    return tuple(sorted(shown)[:UNKNOWN_MAX])
