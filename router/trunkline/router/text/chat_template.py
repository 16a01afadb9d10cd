"""Chat templates: the Jinja programs in checkpoints that turn messages into the text a model was trained on.

They come with the model and run in Jinja's immutable sandbox, which counts their steps (`template_limits.py`). The
environment offers what templates for `transformers` rely on: trimmed blocks, `raise_exception`, `strftime_now`, a
`tojson` that escapes nothing, `break`/`continue` and the `generation` block (which only marks a region for
training).

`ChatRenderer` renders conversations for the router. It also prepares conversations with tools (`tool_turns.py`).
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

from trunkline.router.text.template_limits import CountingEnvironment, TemplateLimitError, counted, with_counting
from trunkline.router.text.tool_styles import ToolStyle
from trunkline.router.text.tool_turns import TurnError, for_plain_template, for_tool_template, has_calls


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
    environment = CountingEnvironment(
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
        """Compile a template.

        Raises:
            ChatTemplateError: The source is not valid Jinja.
        """
        environment = _environment()
        try:
            syntax = environment.parse(source)
            self.uses_tools = any(name.name == "tools" for name in syntax.find_all(nodes.Name))
            """Whether the template uses the variable `tools`."""
            self._template = environment.from_string(with_counting(syntax))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a prompt.

        Args:
            messages: Messages in the form that the template expects.
            add_generation_prompt: Whether the text ends where an answer begins.
            extra: Extra variables of the template (`chat_template_kwargs`).
            tools: Functions that may be called, in OpenAI's form.

        Raises:
            ChatTemplateError: The template refused the messages; the error's text is meant for the client.
        """
        variables: dict[str, Any] = dict(extra or {})
        variables |= self._special_tokens
        variables |= {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with counted():
                return self._template.render(variables)
        except ChatTemplateError:
            raise
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the model's chat template does too much: {error}") from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template recursed too deeply") from error
        except Exception as error:
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error


class ChatRenderer:
    """A model's chat templates: one for conversations, and maybe another for conversations with tools."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], style: ToolStyle, *, tool_source: str | None = None
    ) -> None:
        """Compile the templates.

        Args:
            style: How the model writes calls.
            tool_source: The template for conversations with tools, if the model has a separate one.

        Raises:
            ChatTemplateError: A template is not valid Jinja.
        """
        self._plain = ChatTemplate(source, special_tokens)
        self._with_tools = self._plain if tool_source is None else ChatTemplate(tool_source, special_tokens)
        self._style = style

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a conversation. `messages`, `tools`: in OpenAI's form.

        Raises:
            ChatTemplateError: The template refused the messages, or the result of a tool answers no call.
        """

        def run(template: ChatTemplate, turns: Sequence[Mapping[str, Any]], shown: Any = None) -> str:
            return template.render(turns, add_generation_prompt=add_generation_prompt, extra=extra, tools=shown)

        if not tools and not has_calls(messages):
            return run(self._plain, messages)
        try:
            turns = for_tool_template(messages, self._style)
        except TurnError as error:
            raise ChatTemplateError(str(error)) from None
        if self._with_tools.uses_tools:
            return run(self._with_tools, turns, tools or None)
        try:
            return run(self._plain, for_plain_template(turns, tools, self._style, system=True))
        except ChatTemplateError:
            if not tools or any(turn["role"] == "system" for turn in turns):
                raise
            # Some templates refuse a system message. Here the router added it, not the client.
            return run(self._plain, for_plain_template(turns, tools, self._style, system=False))
