"""The tables of parameters in `docs/api.md`, from the table of parameters itself.

python docs/generate/parameter_tables.py           # writes them anew; with --check: only looks

Each stands between a line `<!-- parameters: NAME -->` and a line `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from generate.tables import code, table

from trunkline.router.api.anthropic import MESSAGES, MessagesRequest
from trunkline.router.api.openai_items import RESPONSES, ResponsesRequest
from trunkline.router.jobs.generation_parameters import DialogParameters, GenerationRequest, SharedParameters
from trunkline.router.jobs.known_parameters import HINTS, REFUSED
from trunkline.router.jobs.ollama_models import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from trunkline.router.jobs.parameter_table import Known, Parameter, parameter_of
from trunkline.router.jobs.pooling_models import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    ScoringRequest,
)
from trunkline.router.jobs.request_models import CHAT, COMPLETIONS, ChatRequest, CompletionRequest

PAGE: Final = Path(__file__).parents[1] / "api.md"
_PLACE: Final = re.compile(r"(<!-- parameters: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _applied(model: type[BaseModel], *bases: type[BaseModel]) -> str:
    """Return the table of the parameters that a model has, without those that a base has just like it."""
    told = {parameter for base in bases for parameter in _parameters(base)}
    rows = [
        (
            code(each.name),
            each.allowed,
            each.default,
            each.meaning + (f" (also {', '.join(map(code, each.also))})" if each.also else ""),
        )
        for each in _parameters(model)
        if each not in told
    ]
    return table(("parameter", "allowed", "default", ""), rows)


def _parameters(model: type[BaseModel]) -> list[Parameter]:
    return [parameter_of(name, field) for name, field in model.model_fields.items()]


def _rows(entries: Iterable[Known]) -> Iterator[tuple[Known, str, str]]:
    """Yield each entry that is in force somewhere, its names, and where that is; "": at every endpoint."""
    for known in entries:
        names, places = set(), []
        for endpoint in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
            found = {name for name, entry in endpoint.known if entry is known}
            names |= found
            places += [endpoint.name] if found else []
        if names:
            listed = ", ".join(code(name) for name in known.names if name in names)
            yield known, listed, ", ".join(places) if len(places) < 4 else ""


def _hints() -> str:
    rows = ((names, places, known.why) for known, names, places in _rows(HINTS))
    return table(("parameter", "at", "what it is for"), rows)


def _refused() -> str:
    rows = ((names, places, _neutral(known.neutral or ()), known.why) for known, names, places in _rows(REFUSED))
    return table(("parameter", "at", "accepted", ""), rows)


def _neutral(values: Iterable[object]) -> str:
    names = {True: "true", False: "false"}
    return ", ".join(
        code(names[value] if isinstance(value, bool) else repr(value).replace("'", '"')) for value in values
    )


_TABLES: Final[dict[str, Callable[[], str]]] = {
    "shared": lambda: _applied(SharedParameters),
    "dialogs": lambda: _applied(DialogParameters, SharedParameters),
    "both": lambda: _applied(GenerationRequest, SharedParameters),
    "chat": lambda: _applied(ChatRequest, GenerationRequest, DialogParameters),
    "completions": lambda: _applied(CompletionRequest, GenerationRequest),
    "responses": lambda: _applied(ResponsesRequest, DialogParameters),
    "messages": lambda: _applied(MessagesRequest, DialogParameters),
    "ollama_chat": lambda: _applied(OllamaChatRequest, DialogParameters),
    "ollama_generate": lambda: _applied(OllamaGenerateRequest, OllamaChatRequest),
    "ollama_embed": lambda: _applied(OllamaEmbedRequest),
    "pooling": lambda: _applied(PoolingRequest),
    "embeddings": lambda: _applied(EmbeddingRequest, PoolingRequest),
    "scoring": lambda: _applied(ScoringRequest, PoolingRequest),
    "rerank": lambda: _applied(RerankRequest, ScoringRequest),
    "score": lambda: _applied(ScoreRequest, ScoringRequest),
    "hints": _hints,
    "refused": _refused,
}


def rendered(page: str) -> str:
    """The page with its tables as the code says them now."""
    return _PLACE.sub(lambda place: place[1] + _TABLES[place[2]]() + place[4], page)


def main(arguments: Sequence[str]) -> int:
    """Exit code 1, with `--check`: the page is out of date."""
    before = PAGE.read_text(encoding="utf-8")
    after = rendered(before)
    if "--check" in arguments:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
