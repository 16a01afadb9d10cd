"""Chat templates: the Jinja programs in checkpoints that turn messages into the text a model was trained on.

They come with the model and are run in Jinja's immutable sandbox. The environment offers what templates
written for `transformers` rely on: trimmed blocks, `raise_exception`, `strftime_now`, a `tojson` that
escapes nothing, `break`/`continue` and the `generation` block (which only marks a region for training).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template refused the messages, or could not make sense of them."""


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}`: rendered as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which a model must not see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(helpers)
    return environment


class ChatTemplate:
    """A compiled chat template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile it.

        Raises:
            ChatTemplateError: it is not valid Jinja.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `extra` gives the template's own switches (`chat_template_kwargs`).

        Raises:
            ChatTemplateError: the template refused the messages; its text is meant for the client.
        """
        variables: dict[str, Any] = dict(extra or {})
        variables |= self._special_tokens
        variables |= {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except ChatTemplateError:
            raise
        except RecursionError as error:
            raise ChatTemplateError("the chat template recursed too deeply") from error
        except Exception as error:
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error
