"""`trunkline schema`: prompt schemas, on a running server or in files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.deploy.cli.option_commands import WHOLE, Url, run
from trunkline.deploy.cli.pml_sources import Source, counting, read_source
from trunkline.deploy.errors import DeployError, UserError
from trunkline.deploy.supervisor.run_folder import client_key, server_url
from trunkline.prompts import Client, PmlRequestError, Schema, SchemaEntry, TrunklineError
from trunkline.router import pml

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Check prompt schemas, and manage those of a server.",
)

Salt = Annotated[str | None, typer.Option("--cache-salt", help="Schemas of this salt only.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Count tokens of this model, as for serve. Default: count words.",
    ),
]
Scope = Annotated[
    str,
    typer.Option("--scope", help="What a module sees while it is computed: ancestors (and itself), or self."),
]


def _client(url: str, model: str | None = None) -> Client:
    at = server_url(url=url, way="--url http://127.0.0.1:PORT")
    return Client(at, model=model, api_key=client_key(at) or None)


@app.command()
def add(
    file: Annotated[str, typer.Argument(help="A schema: XML, or JSON if it ends in .json.", metavar="FILE")],
    url: Url = "",
    model: Annotated[str | None, typer.Option(help="Name of a served model. Default: the first.")] = None,
    ttl: Annotated[
        int | None, typer.Option(help="Seconds after its last use when the server forgets it; 0: never.", **WHOLE)
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict its KV from all tiers.")] = False,
    warm: Annotated[
        bool, typer.Option("--warm/--no-warm", help="Compute its KV now; else with the first prompts.")
    ] = True,
    scope: Scope = "ancestors",
    cache_salt: Salt = None,
) -> None:
    """Store a schema on a server, in place of the one with its name."""

    def store() -> None:
        encode_scope = _scope(scope)
        source = read_source(file)
        source.schema()  # what is wrong in the file is said with its line, without a server
        sent = source.value() if source.is_json else source.text
        with (
            _mapped_errors(source),
            _client(url, model) as client,
        ):
            schema = client.schemas.create(
                sent,
                ttl=ttl,
                pin=pin,
                warm=warm,
                encode_scope=encode_scope,
                cache_salt=cache_salt,
            )
        show_schema(_out(), schema)

    run(store)


@app.command("list")
def list_schemas(url: Url = "", cache_salt: Salt = None) -> None:
    """List the schemas of a server."""

    def show() -> None:
        with _mapped_errors(), _client(url) as client:
            entries = list(client.schemas.list(cache_salt=cache_salt))
        show_list(_out(), entries)

    run(show)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of the schema.", metavar="NAME")],
    url: Url = "",
    cache_salt: Salt = None,
) -> None:
    """Show a server's schema: modules, positions, and where their KV is."""

    def look() -> None:
        with _mapped_errors(), _client(url) as client:
            schema = client.schemas.get(name, cache_salt=cache_salt)
        show_schema(_out(), schema)

    run(look)


@app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(help="Names of the schemas.", metavar="NAME...")],
    url: Url = "",
    cache_salt: Salt = None,
) -> None:
    """Remove schemas from a server. Running requests are not disturbed."""

    def forget() -> None:
        with _mapped_errors(), _client(url) as client:
            for name in names:
                client.schemas.delete(name, cache_salt=cache_salt)

    run(forget)


@app.command()
def lint(
    files: Annotated[
        list[str], typer.Argument(help="Schemas: XML, or JSON if it ends in .json.", metavar="FILE...")
    ],
    model: Model = None,
    scope: Scope = "ancestors",
) -> None:
    """Check files, without a server. Exit code 1: a file is wrong.

    [bold]Examples[/]

    trunkline schema lint trip.pml --model demo
    """

    def check() -> int:
        seen, unit = _scope(scope), counting(model)
        sources = [read_source(file) for file in files]
        wrong = 0
        for source in sources:
            try:
                document = source.schema()
                with source.errors():
                    compiled = pml.compile_schema(document, unit.tokenizer, scope=seen, context=unit.context)
            except DeployError as error:
                wrong += 1
                _err().print(Text(str(error)), soft_wrap=True)
                continue
            _out().print(
                f"{source.path}: schema {compiled.name}, {compiled.extent} {unit.unit}",
                markup=False,
                highlight=False,
            )
            if model is not None:
                show_compiled(_out(), compiled, unit.unit)
            for warning in pml.lint(document, unit.tokenizer if model is not None else None):
                place, text = _split_place(warning)
                _err().print(
                    Text.assemble(f"{source.path}:{place} ", ("warning: ", "yellow"), text), soft_wrap=True
                )
        return 1 if wrong else 0

    raise typer.Exit(run(check))


@app.command()
def render(
    schema_file: Annotated[str, typer.Argument(help="The schema.", metavar="SCHEMA")],
    prompt_file: Annotated[str, typer.Argument(help="A prompt that uses the schema.", metavar="PROMPT")],
    model: Model = None,
    scope: Scope = "ancestors",
    trailing: Annotated[
        str, typer.Option(help="Where trailing text stands: fixed (behind the schema), compact.")
    ] = "fixed",
) -> None:
    """Show the layout of a prompt, without a server: positions of its parts, and
    which are cached.

    [bold]Examples[/]

    trunkline schema render trip.pml lisbon.pml --model demo
    """

    def draw() -> None:
        seen, place = _scope(scope), _trailing(trailing)
        unit = counting(model)
        schema_source, prompt_source = read_source(schema_file), read_source(prompt_file)
        schema_document, prompt_document = schema_source.schema(), prompt_source.prompt()
        with schema_source.errors():
            schema = pml.compile_schema(schema_document, unit.tokenizer, scope=seen, context=unit.context)
        with prompt_source.errors():
            prompt = pml.compile_prompt(
                schema,
                prompt_document,
                unit.tokenizer,
                context=unit.context,
                trailing=place,
                add_generation_prompt=False,
            )
        show_prompt(_out(), schema, prompt, unit.unit)

    run(draw)


def _split_place(warning: str) -> tuple[str, str]:
    """Return the place at the beginning of a warning ("4:5:"), if there is one, and its text."""
    found = re.match(r"(\d+:\d+:) (.*)", warning, re.DOTALL)
    return (found[1], found[2]) if found else ("", warning)


def _out() -> Console:
    return Console(highlight=False)


def _err() -> Console:
    return Console(stderr=True, highlight=False)


def _scope(given: str) -> Literal["ancestors", "self"]:
    match given:
        case "ancestors":
            return "ancestors"
        case "self":
            return "self"
    raise UserError(f"--scope is {given!r}; allowed are ancestors, self")


def _trailing(given: str) -> Literal["fixed", "compact"]:
    match given:
        case "fixed":
            return "fixed"
        case "compact":
            return "compact"
    raise UserError(f"--trailing is {given!r}; allowed are fixed, compact")


@contextlib.contextmanager
def _mapped_errors(source: Source | None = None) -> Iterator[None]:
    """Turn errors of the client into errors for people; those about `source` with its line."""
    try:
        yield
    except PmlRequestError as error:
        if source is None or error.line is None:
            raise DeployError(str(error)) from error
        raise source.error(str(error.code), error.message, error.line, error.column, error.path) from error
    except TrunklineError as error:
        raise DeployError(str(error)) from error


_STYLES: Final = {
    "text": "green",
    "role": "cyan",
    "argument": "bold yellow",
    "hole": "dim yellow",
    "gap": "magenta",
    "trailing": "bold magenta",
    "free": "dim",
}
_LEGEND: Final = {
    "text": "text of the schema",
    "role": "text of the chat template",
    "argument": "the value of a parameter",
    "hole": "unused rest of a parameter",
    "gap": "text between modules",
    "trailing": "text after the modules",
    "free": "not selected",
}


def show_prompt(console: Console, schema: pml.CompiledSchema, prompt: pml.CompiledPrompt, unit: str) -> None:
    """Print a prompt's parts with their positions; `unit` says what is counted."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("position", unit.split()[0]):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kind", "kv"):
        table.add_column(name, no_wrap=True)
    table.add_column("module", overflow="fold", max_width=32)
    table.add_column("text", overflow="fold")
    kinds = []
    for kind, path, position, count, text, kv in _rows(prompt):
        style = _STYLES[kind]
        kinds.append(kind)
        table.add_row(str(position), str(count), Text(kind, style), kv, path, Text(_visible(text), style))
    console.print(table)
    console.print()
    for kind, style in _STYLES.items():
        if kind in kinds:
            console.print(Text.assemble((f"{kind:<9}", style), _LEGEND[kind]))
    cached, own = prompt.module_tokens, len(prompt.own)
    console.print(
        f"\n{cached + own} {unit}: {cached} cached with their modules, {own} computed for this prompt. The schema "
        f"takes {schema.extent} positions; the answer begins at {prompt.end}.",
        highlight=False,
    )


def _rows(prompt: pml.CompiledPrompt) -> Iterator[tuple[str, str, int, int, str, str]]:
    """Yield (kind, module, position, count, text, origin of its KV) of each part, and of gaps between them."""
    end = 0
    for piece in prompt.pieces:
        if piece.position > end:
            yield "free", "", end, piece.position - end, "", ""
        kv = "" if piece.kind == "hole" else ("cached" if piece.cached else "computed")
        yield piece.kind, piece.path, piece.position, piece.count, piece.text, kv
        end = max(end, piece.position + piece.count)


def _visible(text: str) -> str:
    """Return a text with visible line ends, and without characters that control a terminal."""
    shown = (character if character.isprintable() or character == "\n" else "�" for character in text)
    return "".join(shown).replace("\n", "⏎\n").removesuffix("\n")


def show_compiled(console: Console, schema: pml.CompiledSchema, unit: str) -> None:
    """Print the modules of a schema that was compiled here."""
    table = _module_table(unit)
    for module in schema.modules:
        params = ", ".join(f"{slot.name}[{slot.length}]" for slot in module.params)
        table.add_row(module.path or "(schema)", str(module.start), str(module.length), str(module.tokens), params)
    console.print(table)


def show_schema(console: Console, schema: Schema) -> None:
    """Print a schema of a server."""
    console.print(
        f"{schema.name}, version {schema.version}: {schema.status}, {schema.extent} positions, "
        f"{_expiry(schema.expires_at)}",
        markup=False,
        highlight=False,
    )
    table = _module_table("tokens")
    table.add_column("KV bytes", justify="right")
    table.add_column("tier")
    for module in schema.modules:
        params = ", ".join(f"{param.name}[{param.length}]" for param in module.params)
        numbers = (str(module.start), str(module.length), str(module.tokens))
        tier = module.tier or "-" if module.cached else "per request"
        table.add_row(module.path or "(schema)", *numbers, params, str(module.bytes), tier)
    console.print(table)
    for warning in schema.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning), soft_wrap=True)


def show_list(console: Console, entries: list[SchemaEntry]) -> None:
    """Print the names of schemas, one a line."""
    if not entries:
        Console(stderr=True).print("There are no schemas.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("name", "expires"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(entry.id, _expiry(entry.expires_at))
    console.print(table)


def _module_table(unit: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("module", overflow="fold")
    for name in ("start", "length", unit.split()[0]):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("parameters", overflow="fold")
    return table


def _expiry(expires_at: int | None) -> str:
    if expires_at is None:
        return "never expires"
    return f"expires {datetime.fromtimestamp(expires_at, UTC):%Y-%m-%d %H:%M} UTC"
