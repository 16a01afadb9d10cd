"""Check a user's grammar before xgrammar sees it, and put it into the form that xgrammar reads correctly.

xgrammar accepts more than it enforces: keywords of JSON Schema that it does not know are skipped, repetition
counts wrap around at 2^32, deep nesting takes gigabytes. Here each of these is refused, with one sentence for the
user. Pure: no torch, no xgrammar, time proportional to the text's length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

TEXT_BYTES_MAX: Final = 64 * 1024
NESTING_MAX: Final = 200
"""Largest number of nested levels of JSON: a level of a schema is one or two of them."""
COUNT_MAX: Final = 1_000_000_000
"""Largest repetition count; xgrammar keeps counts in 32 bits and does not check whether they fit."""

_COUNT: Final = re.compile(r"\{\s*+(\d*+)\s*+(?:,\s*+(\d*+)\s*+)?\}")
"""A repetition count in braces. Possessive: a brace before 64 KiB of spaces would otherwise be read in a billion
ways, in the step thread."""
_COUNT_KEYWORDS: Final = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("min", "max"),  # of a structural tag's repetitions
)
_REGEX_KEYWORDS: Final = ("pattern", "excludes", "grammar")
_IGNORED: Final = frozenset(
    "not if then else multipleOf uniqueItems contains minContains maxContains dependentRequired dependentSchemas "
    "dependencies additionalItems $dynamicRef $recursiveRef unevaluatedItems contentEncoding contentMediaType "
    "contentSchema".split()
)
"""Keywords that restrict a document, but that xgrammar skips."""
_ALONE: Final = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords beside which xgrammar skips all other keywords."""
_RESTRICTING: Final = frozenset(
    "enum const properties required additionalProperties patternProperties propertyNames minProperties "
    "maxProperties items prefixItems minItems maxItems minLength maxLength pattern format minimum maximum "
    "exclusiveMinimum exclusiveMaximum unevaluatedProperties".split()
)
_FORMATS: Final = frozenset(
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template json-pointer "
    "relative-json-pointer".split()
)
_OBJECT: Final = frozenset(
    "properties patternProperties propertyNames additionalProperties unevaluatedProperties".split()
)
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES: Final = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames")


class GrammarError(ValueError):
    """A grammar that cannot be used. The message is for the user: one sentence without our internals."""


def prepare(kind: str, text: str) -> tuple[str, str]:
    """Return the kind ("json_schema", "regex", "ebnf" or "structural_tag") and the text to compile.

    A choice becomes EBNF; "json_object" becomes a schema; in schemas, objects without any named property and
    arrays without item schemas are opened, as JSON Schema means them (xgrammar would leave them empty), and
    `oneOf` becomes `anyOf`: that a document matches only one of the schemas is no property of a grammar.

    Raises:
        GrammarError: too long, malformed, or something that would be ignored rather than obeyed.
    """
    if len(text.encode(errors="replace")) > TEXT_BYTES_MAX:
        raise GrammarError(f"the grammar is longer than {TEXT_BYTES_MAX // 1024} KiB")
    if kind == "json_object":
        return "json_schema", '{"type":"object","additionalProperties":true}'
    if kind == "choice":
        return "ebnf", _choice(_parse(text, "the list of choices"))
    if kind == "json_schema":
        schema = _parse(text, "the JSON schema")
        _check_values(schema)
        _open_schema(schema)
        return kind, json.dumps(schema)
    if kind == "structural_tag":
        tag = _parse(text, "the structural tag")
        _check_values(tag)
        for schema in _schemas_of_tag(tag):
            _open_schema(schema)
        return kind, json.dumps(tag)
    if kind in ("regex", "ebnf"):
        _check_unicode(text)
        _check_counts(text)
        return kind, text
    raise GrammarError(f"grammars of kind {kind!r} are not supported")


def _parse(text: str, what: str) -> Any:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise GrammarError(f"{what} is nested more than {NESTING_MAX} levels deep") from error
    except ValueError as error:
        raise GrammarError(f"{what} is not valid JSON") from error
    level, layer = 0, [value]
    while layer := [child for node in layer for child in _children(node)]:
        level += 1
        if level > NESTING_MAX:
            raise GrammarError(f"{what} is nested more than {NESTING_MAX} levels deep")
    return value


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise GrammarError("the choices must be a list of strings, at least one")
    for choice in choices:
        _check_unicode(choice)
        if "\0" in choice:
            raise GrammarError("a choice contains a null character")
    return "root ::= " + " | ".join(map(_literal, dict.fromkeys(choices)))


def _literal(text: str) -> str:
    quoted = re.sub(r'["\\]', r"\\\g<0>", text)
    return '"' + re.sub(r"[\x01-\x1f\x7f]", lambda match: f"\\u{ord(match[0]):04x}", quoted) + '"'


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError("the grammar contains half of a surrogate pair, which is no character") from error


def _check_counts(text: str) -> None:
    for match in _COUNT.finditer(text):
        for number in match.groups(default=""):
            if len(number) > len(str(COUNT_MAX)) or int(number or 0) > COUNT_MAX:
                raise GrammarError(f"a repetition count is larger than {COUNT_MAX}")


def _check_values(value: Any) -> None:
    """Check counts and regular expressions wherever they stand, also where they turn out to be a property's
    name."""
    stack = [value]
    while stack:
        node = stack.pop()
        stack += _children(node)
        if isinstance(node, str):
            _check_unicode(node)
        if not isinstance(node, dict):
            continue
        for key, inner in node.items():
            _check_unicode(key)
            if key in _REGEX_KEYWORDS and isinstance(inner, str):
                _check_counts(inner)
            if key == "patternProperties" and isinstance(inner, dict):
                _check_counts(" ".join(inner))
            if key in _COUNT_KEYWORDS and isinstance(inner, int) and not -1 <= inner <= COUNT_MAX:
                raise GrammarError(f"{key} is {inner}; allowed are 0 to {COUNT_MAX}")


def _open_schema(schema: Any) -> None:
    """Check a schema with all that it contains, and open its free objects and arrays, in place."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        _check_keywords(node)
        if "oneOf" in node:
            node["anyOf"] = node.pop("oneOf")
        if node.get("type") == "object" and not _OBJECT & node.keys():
            node["additionalProperties"] = True
        if node.get("type") == "array" and not {"items", "prefixItems"} & node.keys():
            node["items"] = True
        for keyword in _MAPS:
            inner = node.get(keyword)
            stack += inner.values() if isinstance(inner, dict) else []
        for keyword in _LISTS:
            inner = node.get(keyword)
            stack += inner if isinstance(inner, list) else []
        stack += [node[keyword] for keyword in _SINGLES if keyword in node]


def _check_keywords(schema: dict[str, Any]) -> None:
    for keyword in sorted(_IGNORED & schema.keys()):
        if schema[keyword] is not False:
            raise GrammarError(f"the JSON schema uses {keyword!r}, which is not supported")
    for keyword in _ALONE:
        beside = sorted(schema.keys() & (_RESTRICTING | set(_ALONE)) - {keyword})
        if keyword in schema and beside:
            raise GrammarError(f"the JSON schema has {beside[0]!r} beside {keyword!r}, which is not supported")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise GrammarError("the JSON schema uses 'allOf' with more than one schema, which is not supported")
    if isinstance(schema.get("$ref"), str) and not re.match(r"#(/|$)", schema["$ref"]):
        raise GrammarError("the JSON schema has a '$ref' that does not begin with '#/'")
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        raise GrammarError(f"the JSON schema uses the format {schema['format'][:40]!r}, which is not supported")
    if "pattern" in schema and {"minLength", "maxLength", "format"} & schema.keys():
        raise GrammarError("the JSON schema has 'pattern' beside a length or a format, which is not supported")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and re.search(r'"|\\\\', pattern) and not re.search(r"[\[(|.*+?{]", pattern):
        # xgrammar would write it into the JSON string unescaped.
        raise GrammarError("the JSON schema has a 'pattern' of one text with a quote or backslash; use 'const'")
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        unknown = [name for name in required if isinstance(name, str) and name not in properties]
        if unknown:
            raise GrammarError(
                f"the JSON schema requires the property {unknown[0][:40]!r}, but does not define it"
            )


def _schemas_of_tag(tag: Any) -> Iterator[Any]:
    stack = [tag]
    while stack:
        node = stack.pop()
        if isinstance(node, dict) and "json_schema" in node:
            yield node["json_schema"]
            stack += [value for key, value in node.items() if key != "json_schema"]
        else:
            stack += _children(node)
