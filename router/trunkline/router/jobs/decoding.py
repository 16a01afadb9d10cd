"""The decoding of an answer: choose the method and the grammar that a request asks for. Pure.

The method is sampling, parallel sampling, best of, or beam search (`decoding_of`). Structured output may be asked
for with several parameters, from which one grammar follows (`grammar_of`). Wishes that contradict each other are
refused: an answer that silently followed only one of them would be wrong without a sign of it.

Checks of a grammar's form are made here and in `parameters.py`. Only the engine finds out whether a schema or an
expression can be compiled; its answer names the same parameter.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from trunkline.controller.messages import BeamSearch, Grammar
from trunkline.kvstore.beams import candidate_count
from trunkline.router.errors import ApiError, bad_value
from trunkline.router.jobs.generation_parameters import GenerationRequest
from trunkline.router.jobs.parameters import (
    BEAM_WIDTH_MAX,
    CHOICES_MAX,
    GRAMMAR_CHARACTERS_MAX,
    ResponseFormat,
    StructuredOutputs,
)
from trunkline.router.jobs.request_models import CompletionRequest

CANDIDATES_MAX: Final = 4096
"""Largest number of continuations that a beam search may consider in a step. Each step sends them to the
controller."""
_BEAM_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "beam_width": (1,),
    "length_penalty": (1.0, 0.0),
    "early_stopping": (False,),
}
"""Parameters that have a meaning only in a beam search, with the values that ask for nothing."""
_NOT_WITH_BEAMS: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "stop": ([],),
    "stop_regex": ([],),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logprobs": (False,),
    "prompt_logprobs": (),
}
"""Parameters that a beam search ignores, with the values that ask for nothing. (`seed` is allowed: a search draws
no random numbers.)"""


class Decoding(msgspec.Struct, frozen=True):
    """A decoding method."""

    choices: int = 1
    """Number of texts that are returned."""
    samples: int = 1
    """Number of samples that are drawn; in a beam search, number of results."""
    beam: BeamSearch | None = None
    rows_param: str = "n"
    """Name of the request's parameter that gives the number of `rows`."""

    @property
    def rows(self) -> int:
        """Number of sequences that decode at once."""
        return self.samples if self.beam is None else self.beam.width

    @property
    def name(self) -> str:
        """The method's name in metrics."""
        if self.beam is not None:
            return "beam_search"
        return "sampling" if self.samples == 1 else "parallel_sampling"

    def in_clients_words(self, error: ApiError) -> ApiError:
        """Return an engine's error with the client's parameter `rows_param` instead of the engine's `n` or
        `beam_width`."""
        if error.param != ("n" if self.beam is None else "beam_width") or error.param == self.rows_param:
            return error
        message = re.sub(rf"\b{error.param}\b", self.rows_param, error.message)
        return ApiError(error.status, message, kind=error.kind, param=self.rows_param, code=error.code)


def decoding_of(request: GenerationRequest, rows_max: int) -> Decoding:
    """Return the decoding method that a request asks for.

    Args:
        rows_max: Number of sequences that the engine can decode at once; 0: not known yet.

    Raises:
        ApiError: 400, naming the parameter that contradicts another or is too large.
    """
    decoding = _beam_search(request) if request.use_beam_search else _sampling(request)
    param = decoding.rows_param
    if rows_max and decoding.rows > rows_max:
        raise bad_value(
            param, f"`{param}` is too large: {decoding.rows}. The engine decodes {rows_max} sequences at once."
        )
    return decoding


def check_candidates(beam: BeamSearch, stop_ids: int, vocab_size: int) -> None:
    """Refuse a search with more continuations in a step than it may consider, or than the vocabulary has tokens.

    Args:
        stop_ids: Number of tokens that end a result.

    Raises:
        ApiError: 400.
    """
    allowed = min(CANDIDATES_MAX, vocab_size)
    if candidate_count(beam.width, stop_ids) > allowed:
        raise bad_value(
            "beam_width",
            f"`beam_width` is too large: {beam.width} beams, any of which may end with one of {stop_ids} tokens, "
            f"are more than the {allowed} continuations that a search looks at in a step",
        )


def check_choices(prompts: int, decoding: Decoding) -> None:
    """Refuse a request whose prompts together start more sequences than one request may.

    Raises:
        ApiError: 400.
    """
    if prompts * decoding.rows > CHOICES_MAX:
        raise bad_value(
            "prompt",
            f"`prompt` has {prompts} prompts, which with {decoding.rows} sequences for each are more than "
            f"{CHOICES_MAX}. Please send several requests.",
        )


def _asks_for(request: GenerationRequest, name: str, neutral: tuple[Any, ...]) -> bool:
    value = getattr(request, name, None)
    # 0 == False in Python, but `"logprobs": 0` asks for log-probabilities.
    return value is not None and not any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral
    )


def _sampling(request: GenerationRequest) -> Decoding:
    for name, neutral in _BEAM_ONLY.items():
        if _asks_for(request, name, neutral):
            raise bad_value(name, f"`{name}` is only allowed with `use_beam_search: true`")
    choices = request.n or 1
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    if best_of is None or best_of == choices:
        return Decoding(choices, choices)
    if best_of < choices:
        raise bad_value("best_of", f"`best_of` is {best_of}, but `n` asks for {choices} of them")
    if request.stream:
        raise bad_value(
            "best_of", "`best_of` above `n` is not available with `stream: true`: the best are known at the end"
        )
    return Decoding(choices, best_of, rows_param="best_of")


def _beam_search(request: GenerationRequest) -> Decoding:
    for name, neutral in _NOT_WITH_BEAMS.items():
        if _asks_for(request, name, neutral):
            raise bad_value(name, f"`{name}` has no place in a beam search (`use_beam_search: true`)")
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    widths = {"beam_width": request.beam_width, "best_of": best_of, "n": request.n}
    param, width = next(((name, given) for name, given in widths.items() if given is not None), ("", 0))
    if not param:
        raise bad_value("beam_width", "`beam_width` is required with `use_beam_search: true` (or `n`)")
    if width > BEAM_WIDTH_MAX:
        raise bad_value(param, f"`{param}` is too large: {width}. A search has {BEAM_WIDTH_MAX} beams at most.")
    choices = width if request.n is None else request.n
    if choices > width:
        raise bad_value("n", f"`n` is {choices}, but the search has only {width} beams (`{param}`)")
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    early = None if request.early_stopping == "never" else bool(request.early_stopping)
    return Decoding(choices, choices, BeamSearch(width, penalty, early), rows_param=param)


_JSON_KINDS: Final = ("json_schema", "json_object", "structural_tag")
_TENANT_BYTES: Final = 8


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """Return the grammar that a request's answer has to follow, or None for free text.

    Raises:
        ApiError: 400: the request asks for two grammars, or for one that is incomplete or too large.
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
    """Return the grammar with its tenant. Tenants take turns at the compiler of grammars."""
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
        yield Grammar("structural_tag", _structural_tag({"type": form.type, **form.rest}), "response_format")


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
        add("structural_tag", _structural_tag(wanted.structural_tag), "structural_tag")
    if len(found) != 1:
        raise bad_value(
            "structured_outputs",
            "`structured_outputs` must have exactly one of json, regex, choice, grammar, json_object and "
            "structural_tag",
        )
    return found[0]


def _structural_tag(tag: dict[str, Any]) -> str:
    """Return a structural tag as JSON. The older form, `structures` and `triggers`, becomes the present one. What
    is wrong with it, the engine's answer tells."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if "format" in tag or not isinstance(structures, list):
        return _json(tag)
    tags = []
    for one in structures:
        fields = one if isinstance(one, dict) else {}
        schema = fields.get("schema")
        content = {"type": "json_schema", "json_schema": _parsed(schema) if isinstance(schema, str) else schema}
        tags.append({"type": "tag", "begin": fields.get("begin"), "content": content, "end": fields.get("end")})
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return _json({"type": "structural_tag", "format": form})


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
