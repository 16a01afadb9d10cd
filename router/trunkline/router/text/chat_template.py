"""Chat templates: the Jinja programs in checkpoints that turn messages into the text a model was trained on.

`ChatRenderer` renders conversations for the router, with or without tools (`tool_turns.py`). A template runs in
Jinja's immutable sandbox. The environment offers what templates for `transformers` rely on: trimmed blocks,
`raise_exception`, `strftime_now`, a `tojson` that escapes nothing, `break`/`continue` and the `generation` block
(which only marks a region for training).

A template that runs away is stopped (`template_limits.py`).
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from trunkline.router.errors import PromptError
from trunkline.router.text.loop_compiler import with_known_loops
from trunkline.router.text.message_loops import Rendered, rendering
from trunkline.router.text.template_limits import (
    CountingEnvironment,
    TemplateLimitError,
    counted,
    join_checked,
    with_counting,
)
from trunkline.router.text.tool_styles import ToolStyle
from trunkline.router.text.tool_turns import PlainTurns, ToolTurns


class ChatTemplateError(PromptError):
    """A template is broken, or it refused the messages."""


class _GenerationBlock(Extension):
    """The block `{% generation %} … {% endgeneration %}`. Its content is rendered as if the tags were not
    there."""

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
            names = {name.name for name in syntax.find_all(nodes.Name)}
            self.uses_tools = "tools" in names
            """Whether the template uses the variable `tools`."""
            self.uses_documents = "documents" in names
            """Whether the template uses the variable `documents`."""
            self.goes_on = with_known_loops(syntax) > 0
            """Whether a rendering can begin with another one's text (`message_loops.py`)."""
            self._template = environment.from_string(with_counting(syntax))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the text of what `rendered` returns. `options`: those of `rendered`."""
        return self.rendered(messages, **options).text

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        before: Rendered | None = None,
    ) -> Rendered:
        """Return a prompt.

        Args:
            messages: Messages in the form that the template expects.
            add_generation_prompt: Whether the text ends where an answer begins.
            extra: Extra variables of the template (`chat_template_kwargs`, `documents`).
            tools: Functions that may be called, in OpenAI's form.
            before: A rendering of this template, with which this one may begin. Messages that both have in common
                must be the same objects, and must not have changed.

        Raises:
            ChatTemplateError: The template refused the messages; the error's text is meant for the client.
        """
        variables: dict[str, Any] = {"documents": None, **(extra or {})}
        variables |= self._special_tokens
        variables |= {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with counted(), rendering(before) as made:
                context = self._template.new_context(variables)
                made.made.text = join_checked(made.counted(self._template.root_render_func(context)))
                return made.made
        except ChatTemplateError:
            raise
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the model's chat template does too much: {error}") from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template recursed too deeply") from error
        except Exception as error:
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error


def has_calls(turns: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a conversation has calls or their results."""
    return any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)


class RenderedChat(NamedTuple):
    """The text of a conversation, and what another one that begins with the same messages can use of it."""

    messages: Sequence[Any]
    """In OpenAI's form."""
    has_calls: bool
    """Whether the messages have calls or their results."""
    template: ChatTemplate
    rendered: Rendered
    turns: ToolTurns | None = None
    """The messages in the form for tools; None: they are shown as they are."""
    plain: PlainTurns | None = None
    """`turns` in the form for templates without tools; None: the template supports them."""
    characters: int = 0
    """Characters of the messages' contents, if the one that keeps it has counted them."""

    @property
    def text(self) -> str:
        """The text."""
        return self.rendered.text

    def begins(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a conversation begins with all of these messages."""
        return len(self.messages) <= len(messages) and all(map(operator.is_, self.messages, messages))


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
        self.goes_on = self._plain.goes_on and self._with_tools.goes_on
        """As of a `ChatTemplate`."""
        self.uses_documents = self._plain.uses_documents and self._with_tools.uses_documents
        """Whether documents are shown, with tools and without."""

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the text of what `rendered` returns. `options`: those of `rendered`."""
        return self.rendered(messages, **options).text

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        before: RenderedChat | None = None,
    ) -> RenderedChat:
        """Return the text of a conversation.

        Args:
            messages: In OpenAI's form.
            tools: In OpenAI's form.
            before: A conversation that this one may begin with. Messages that both have in common must be the same
                objects, and must not have changed.

        Raises:
            ChatTemplateError: The template refused the messages.
            TurnError: The result of a tool answers no call.
        """

        def run(template: ChatTemplate, turns: Sequence[Mapping[str, Any]], shown: Any = None) -> Rendered:
            known = before.rendered if before is not None and before.template is template else None
            return template.rendered(
                turns, add_generation_prompt=add_generation_prompt, extra=extra, tools=shown, before=known
            )

        longer = before if before is not None and before.begins(messages) else None
        new = messages if longer is None else messages[len(longer.messages) :]
        calls = (longer is not None and longer.has_calls) or has_calls(new)
        if not tools and not calls:
            return RenderedChat(messages, calls, self._plain, run(self._plain, messages))
        if longer is None or longer.turns is None:
            turns = ToolTurns(self._style).extended(messages)
        else:
            turns = longer.turns.extended(new)
        if self._with_tools.uses_tools:
            made = run(self._with_tools, turns.turns, tools or None)
            return RenderedChat(messages, calls, self._with_tools, made, turns)
        if longer is None or longer.turns is None or longer.plain is None:
            plain = PlainTurns(self._style).extended(turns.turns)
        else:
            plain = longer.plain.extended(turns.turns[len(longer.turns.turns) :])
        try:
            made = run(self._plain, plain.described(tools, system=True))
        except ChatTemplateError:
            if not tools or any(turn["role"] == "system" for turn in turns.turns):
                raise
            # Some templates refuse a system message. Here the router added it, not the client.
            made = run(self._plain, plain.described(tools, system=False))
        return RenderedChat(messages, calls, self._plain, made, turns, plain)
