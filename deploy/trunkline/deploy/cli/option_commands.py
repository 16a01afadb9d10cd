"""Make commands of the table of options: flags, a file, variables, and hints for the flags of other servers."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from trunkline.deploy.config.cli_option import FIELD_DEFAULTS, FIELD_TYPES, OPERATION, CliOption
from trunkline.deploy.config.option_values import nearest
from trunkline.deploy.config.variables import check_names, given_values
from trunkline.deploy.errors import DeployError
from trunkline.deploy.launch.document import load
from trunkline.deploy.launch.unit_options import plain

_MODEL: Final = "Give the model as the first argument, as in `trunkline serve MODEL`."
_MODELS: Final = "more-models"
"""The option for which a file has a mapping: `models`."""
_ON_BY_DEFAULT: Final = "Prefixes are always cached, unless --no-prefix-cache is given."
_EXPERTS: Final = "Each worker of a group (--tp) has whole experts, unless --ep off is given."
HINTS: Final = {
    "--max-model-len": "Did you mean --max-context?",
    "--context-length": "Did you mean --max-context?",
    "--ctx-size": "Did you mean --max-context?",
    "--tensor-parallel-size": "Did you mean --tp?",
    "--tp-size": "Did you mean --tp?",
    "-tp": "Did you mean --tp?",
    "--enable-expert-parallel": _EXPERTS,
    "--ep-size": _EXPERTS,
    "--expert-parallel-size": _EXPERTS,
    "--data-parallel-size": "Did you mean --groups?",
    "--dp-size": "Did you mean --groups?",
    "-dp": "Did you mean --groups?",
    "--gpu-memory-utilization": "Did you mean --gpu-memory-fraction?",
    "--mem-fraction-static": "Did you mean --gpu-memory-fraction?",
    "--kv-cache-memory-bytes": "Did you mean --kv-memory?",
    "--max-num-seqs": "Did you mean --max-batch?",
    "--max-running-requests": "Did you mean --max-batch?",
    "--max-num-batched-tokens": "Did you mean --token-budget?",
    "--chunked-prefill-size": "Did you mean --token-budget?",
    "--block-size": "Did you mean --chunk-size?",
    "--page-size": "Did you mean --chunk-size?",
    "--swap-space": "Did you mean --host-tier?",
    "--enable-prefix-caching": _ON_BY_DEFAULT,
    "--no-enable-prefix-caching": "Did you mean --no-prefix-cache?",
    "--disable-radix-cache": "Did you mean --no-prefix-cache?",
    "--api-key": "Did you mean --api-key-file? Other users of a machine can read command lines.",
    "--lora-modules": "Did you mean --lora NAME=PATH?",
    "--lora-paths": "Did you mean --lora NAME=PATH?",
    "--enable-lora": "Adapters need no switch: --lora NAME=PATH, and --lora-updates for run time.",
    "--model": _MODEL,
    "--model-path": _MODEL,
}
"""Hints for users of vLLM, SGLang and llama.cpp, by the other server's option that they typed."""

LISTS: Final = frozenset({"--served-model-name", "--lora"})
"""Options whose values are lists: given several times, their values are joined with commas."""


def joined(args: Sequence[str]) -> list[str]:
    """Return the words of a command line with each option of `LISTS` once, where it was given first."""
    words: list[str] = []
    places: dict[str, int] = {}
    left = iter(args)
    for word in left:
        if word == "--":
            return [*words, word, *left]
        option, equals, value = word.partition("=")
        if option not in LISTS:
            words.append(word)
            continue
        given = value if equals else next(left, None)
        if given is None or option not in places:
            places[option] = len(words) + (0 if equals else 1)
            words += [word] if equals or given is None else [word, given]
        else:
            words[places[option]] += f",{given}"
    return words


def _whole(given: str | int) -> int:
    try:
        return int(given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is not a whole number.") from None


def _number(given: str | float) -> float:
    try:
        return float(given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is not a number.") from None


WHOLE: Final[dict[str, Any]] = {"parser": _whole, "metavar": "<int>"}
"""Arguments of `typer.Option` for whole numbers. Typer's own errors do not say what was given."""
NUMBER: Final[dict[str, Any]] = {"parser": _number, "metavar": "<float>"}
"""The same for other numbers."""

Port = Annotated[
    int | None, typer.Option(help="Port of the cluster. Default: the only cluster that runs here.", **WHOLE)
]
Url = Annotated[str, typer.Option(help="Address of the server. Default: the cluster that runs on this machine.")]


class HintingCommand(TyperCommand):
    """A command that answers options of other servers with the name that they have here."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the words; end with a hint if one of them is an option of another server."""
        for word in args:
            option = word.partition("=")[0]
            if option in HINTS:
                ctx.fail(f"No such option: {option}. {HINTS[option]}")
        return super().parse_args(ctx, joined(args))


def _set_defaults(options: Sequence[CliOption], ctx: typer.Context, path: Path | None) -> None:
    """Let a file, and after it environment variables, give the options that the command line does not give."""
    found: dict[str, Any] = {**run(lambda: given_values(options, os.environ))}
    if path is not None:
        found |= run(lambda: file_values(options, path))
    ctx.default_map = found


def file_values(options: Sequence[CliOption], path: Path) -> dict[str, Any]:
    """Return the values that a YAML file gives, by the parameters of their options; null: not given.

    Raises:
        FileError: The file cannot be read, names an unknown option, or gives an impossible value.
    """
    document = load(path)
    if not isinstance(document.value, dict):
        raise document.error((), "the file is a mapping of options, such as `port: 9000`")
    known = {plain(option.parameter): option for option in options}
    found = {}
    for key, value in document.value.items():
        if key == "models" and isinstance(value, dict) and _MODELS in known:
            found[known[_MODELS].parameter] = json.dumps(value, default=str)
            continue
        option = known.get(plain(key))
        if option is None:
            if key == "models" and _MODELS in known:
                raise document.error((key,), "is a mapping of names to models, such as `small: ./small`")
            raise document.error((key,), f"is unknown; {nearest(plain(key), list(known))}")
        if isinstance(value, dict | list):
            raise document.error((key,), "takes one value")
        if value is not None:
            try:
                option.words(value)
            except ValueError as error:
                raise document.error((key,), str(error)) from error
            found[option.parameter] = value
    return found


def command(
    options: Sequence[CliOption], *, has_config: bool = False
) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """Return a decorator that makes a function a command with these options.

    The function gets the values of the settings' fields by name, and its docstring is the command's help.

    Args:
        has_config: Whether the options can also stand in a file (`--config`), or in environment variables.
    """

    def make(action: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        @wraps(action)
        def call(**typed: Any) -> None:
            run(lambda: check_names(os.environ))
            action(run(lambda: values(options, typed)))

        parameters = []
        for option in options:
            default = None if option.parse is not None else FIELD_DEFAULTS[option.field]
            parameters.append(
                inspect.Parameter(
                    option.parameter,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if default is MISSING else default,
                    annotation=_annotation(option, None if has_config else option.variable),
                )
            )
        if has_config:
            parameters.append(
                inspect.Parameter(
                    "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_config(options)
                )
            )
        # What Typer looks at: without it, it would see the parameters of `action`.
        vars(call)["__signature__"] = inspect.Signature(parameters)
        call.__annotations__ = {}
        return call

    return make


def _config(options: Sequence[CliOption]) -> Any:
    """Return what Typer needs to know of `--config`."""

    def callback(ctx: typer.Context, path: Path | None) -> None:
        _set_defaults(options, ctx, path)

    return Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file with options, such as `tp: 4`. The command line goes first, the environment "
            "(TRUNKLINE_TP=4) last.",
            rich_help_panel=OPERATION,
            callback=callback,
            is_eager=True,
        ),
    ]


def _annotation(option: CliOption, variable: str | None) -> Any:
    """Return what Typer needs to know of an option."""
    if option.is_argument:
        return Annotated[str, typer.Argument(help=option.help, metavar=option.metavar)]
    shown = (str | None) if option.parse is not None else FIELD_TYPES[option.field]
    kind: dict[str, Any] = WHOLE if option.kind is int else NUMBER if option.kind is float else {}
    return Annotated[
        shown,
        typer.Option(
            *option.flags,
            help=option.help,
            rich_help_panel=option.panel,
            envvar=variable,
            **{"metavar": option.metavar, **kind},
        ),
    ]


def values(options: Sequence[CliOption], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the settings' fields.

    Raises:
        UserError: A text cannot be parsed.
    """
    found = {}
    for option in options:
        value = typed[option.parameter]
        if option.parse is not None:
            value = FIELD_DEFAULTS[option.field] if value is None else option.parse(value)
        found[option.field] = value
    return found


T = TypeVar("T")


def run(action: Callable[[], T]) -> T:
    """Return what an action returns; print an error meant for people as one line, and exit with its code."""
    try:
        return action()
    except DeployError as error:
        Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(error.exit_code) from error
