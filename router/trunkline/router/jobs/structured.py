"""From the several parameters that ask for structured output to the one grammar that the engine follows. Pure.

What can be told from the form alone is checked here and in `jobs/parameters.py`; whether a schema or an expression
can be compiled, only the engine finds out, and its answer names the same parameter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from trunkline.controller.messages import Grammar
from trunkline.router.errors import bad_value
from trunkline.router.jobs.parameters import GRAMMAR_CHARACTERS_MAX, ResponseFormat, StructuredOutputs
from trunkline.router.jobs.request_models import GenerationRequest

_JSON_KINDS: Final = ("json_schema", "json_object", "structural_tag")
_TENANT_BYTES: Final = 8


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """Return the grammar that a request's answer has to follow, or None for free text.

    Raises:
        ApiError: 400: two are asked for, or one is incomplete or too large.
    """
    grammars = list(_grammars(request))
    if len(grammars) > 1:
        first, second = (grammar.param.split(".")[0] for grammar in grammars[:2])
        raise bad_value(second, f"`{second}` contradicts `{first}`: an answer can follow one grammar only")
    if not grammars:
        return None
    [grammar] = grammars
    if len(grammar.text) > GRAMMAR_CHARACTERS_MAX:
        raise bad_value(
            grammar.param,
            f"`{grammar.param}` has {len(grammar.text)} characters; {GRAMMAR_CHARACTERS_MAX} are allowed",
        )
    return grammar


def spaced(grammar: Grammar, request: GenerationRequest) -> Grammar:
    """Return the grammar with as much white space between the parts of JSON as the request allows."""
    return msgspec.structs.replace(grammar, spaced=request.whitespace == "any" and grammar.kind in _JSON_KINDS)


def owned(grammar: Grammar | None, tenant: str) -> Grammar | None:
    """Return the grammar with the tenant whose turn at the compiler it uses."""
    if grammar is None:
        return None
    digest = hashlib.blake2b(tenant.encode(), digest_size=_TENANT_BYTES).digest()
    return msgspec.structs.replace(grammar, tenant=digest)


def _grammars(request: GenerationRequest) -> Iterator[Grammar]:
    if request.response_format is not None:
        yield from _response_format(request.response_format)
    if request.structured_outputs is not None:
        yield _structured_outputs(request.structured_outputs)
    # The names that vLLM had before `structured_outputs`.
    if request.guided_json is not None:
        yield Grammar("json_schema", _json(request.guided_json), "guided_json")
    if request.guided_regex is not None:
        yield Grammar("regex", request.guided_regex, "guided_regex")
    if request.guided_choice is not None:
        yield Grammar("choice", _json(request.guided_choice), "guided_choice")
    if request.guided_grammar is not None:
        yield Grammar("ebnf", request.guided_grammar, "guided_grammar")


def _response_format(form: ResponseFormat) -> Iterator[Grammar]:
    if form.type == "json_object":
        yield Grammar("json_object", "", "response_format")
    elif form.type == "json_schema":
        param = "response_format.json_schema"
        if form.json_schema is None:
            raise bad_value(param, f"`{param}` is required", code="missing_required_parameter")
        yield Grammar("json_schema", _json(form.json_schema.schema_), f"{param}.schema")
    elif form.type == "structural_tag":
        if not form.rest:
            raise bad_value("response_format", "`response_format` of type structural_tag needs a `format`")
        yield Grammar("structural_tag", _json({"type": form.type, **form.rest}), "response_format")


def _structured_outputs(wanted: StructuredOutputs) -> Grammar:
    found: list[Grammar] = []

    def add(kind: str, text: str, name: str) -> None:
        found.append(Grammar(kind, text, f"structured_outputs.{name}"))

    if wanted.json_ is not None:
        add("json_schema", _json(wanted.json_), "json")
    if wanted.regex is not None:
        add("regex", wanted.regex, "regex")
    if wanted.choice is not None:
        add("choice", _json(wanted.choice), "choice")
    if wanted.grammar is not None:
        add("ebnf", wanted.grammar, "grammar")
    if wanted.json_object:
        add("json_object", "", "json_object")
    if wanted.structural_tag is not None:
        add("structural_tag", _json(wanted.structural_tag), "structural_tag")
    if len(found) != 1:
        raise bad_value(
            "structured_outputs",
            "`structured_outputs` must have exactly one of json, regex, choice, grammar, json_object and "
            "structural_tag",
        )
    return found[0]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
