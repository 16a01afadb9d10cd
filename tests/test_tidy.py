"""House style that no linter checks: sizes, imports' directions, what must not be in a file.

The ratchet: `KNOWN` lists what is over a limit today, with its size. An entry may shrink or go, never grow;
nothing may be added without a reason in the commit that does it.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("runtime", "controller", "worker", "router", "kvstore", "kernels", "deploy")
SOURCE_FOLDERS: Final = (*PACKAGES, "tests", "benchmarks", "examples")

FILE_LINES_MAX: Final = 500
FUNCTION_LINES_MAX: Final = 70
PARAMETERS_MAX: Final = 8
ATTRIBUTES_MAX: Final = 15

KNOWN: Final[dict[tuple[str, str], int]] = {
    # A record with slots: everything about a sequence in one place is what keeps the scheduler readable.
    ("controller/trunkline/controller/sequences/sequence.py", "attributes of Sequence"): 16,
}

LATE_IMPORTS: Final = {
    # Who keeps records in SQLite needs no client of Redis.
    "kvstore/trunkline/kvstore/records/__init__.py": {"trunkline.kvstore.records.redis_store"},
    # httpx: for clusters whose groups are found through Kubernetes.
    "router/trunkline/router/membership/open_source.py": {
        "trunkline.router.membership.kubernetes_api",
        "trunkline.router.membership.kubernetes_source",
    },
    # OpenTelemetry takes half a second and 7 MB, and may not be installed: for processes that are traced only.
    "runtime/trunkline/runtime/tracing.py": {"trunkline.runtime.tracing_export"},
    # A Ctrl-C meanwhile must not show a traceback.
    "deploy/trunkline/deploy/main.py": {
        "trunkline.deploy.cli.app",
        "trunkline.deploy.cli.serving",
        "trunkline.deploy.supervisor",
    },
    # Too slow to import for a command that may not need it.
    "deploy/trunkline/deploy/config/gguf_models.py": {"tokenizers"},
    "deploy/trunkline/deploy/config/models.py": {"huggingface_hub", "huggingface_hub.errors"},
    "deploy/trunkline/deploy/cli/pml_sources.py": {
        "trunkline.router.stores.model_text",
        "trunkline.router.text.tokenizer",
    },
    # xgrammar imports transformers: over a second and 40 MB, for the first grammar only, beside the steps.
    "worker/trunkline/worker/grammar/compiler.py": {"trunkline.worker.grammar.automaton"},
}
"""Imports inside functions, by file."""

TIED_TESTS: Final = {
    *("cluster/test_weights.py", "deploy/test_watch_stores.py"),
    *("router/test_edits.py", "router/test_ollama_options.py", "router/test_purge.py"),
}
"""Files of tests that import from other ones. None may be added."""

FORBIDDEN_TEXT: Final = re.compile(rf"/(?:home|Users|root|mnt)/\w|{re.escape(ROOT.as_posix())}/", re.ASCII)
"""Paths of somebody's machine, this one's among them."""


class Source(NamedTuple):
    """A parsed Python file."""

    path: str
    text: str
    nodes: tuple[ast.AST, ...]
    """All of its tree."""


@functools.cache
def sources() -> tuple[Source, ...]:
    found = []
    gc.disable()  # it would look at millions of nodes again and again, and there is no garbage among them
    try:
        for folder in SOURCE_FOLDERS:
            for path in sorted((ROOT / folder).rglob("*.py")):
                text = path.read_text()
                found.append(Source(path.relative_to(ROOT).as_posix(), text, tuple(ast.walk(ast.parse(text)))))
        gc.freeze()
    finally:
        gc.enable()
    return tuple(found)


def packaged() -> Iterator[Source]:
    return (source for source in sources() if source.path.split("/")[0] in PACKAGES)


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def own_attributes(node: ast.ClassDef) -> set[str]:
    """Names assigned on `self` anywhere in the class."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


@functools.cache
def too_large() -> dict[tuple[str, str], int]:
    """The sizes of what is over its limit, by file and what it is."""
    return {(path, what): size for path, what, size, limit in sizes() if size > limit}


def sizes() -> Iterator[tuple[str, str, int, int]]:
    """(file, what, size, limit) of everything that has a limit."""
    for source in sources():
        yield source.path, "lines", len(source.text.splitlines()), FILE_LINES_MAX
        for function in functions(source):
            length = (function.end_lineno or 0) - function.lineno + 1
            yield source.path, f"lines of {function.name}", length, FUNCTION_LINES_MAX
            yield source.path, f"parameters of {function.name}", parameter_count(function), PARAMETERS_MAX
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                yield source.path, f"attributes of {node.name}", len(own_attributes(node)), ATTRIBUTES_MAX


def test_nothing_outgrows_its_limit() -> None:
    too_big = [
        f"{path}: {what}: {size}, allowed {KNOWN.get((path, what), 'the limit')}"
        for (path, what), size in too_large().items()
        if size > KNOWN.get((path, what), 0)
    ]
    assert too_big == []


def test_native_sources_keep_the_same_limits() -> None:
    """What clang-format does not look at in C++ and CUDA."""
    found = []
    for path in sorted((ROOT / "kernels/trunkline/kernels/csrc").rglob("*.*")):
        name, lines = path.relative_to(ROOT).as_posix(), path.read_text().splitlines()
        if len(lines) > FILE_LINES_MAX:
            found.append(f"{name}: {len(lines)} lines")
        if path.suffix in (".h", ".cuh"):
            found += [f"{name}: no #pragma once"] if "#pragma once" not in lines else []
            found += [f"{name}: does not say what it is"] if not lines[0].startswith("// ") else []
    assert found == []


def test_the_ratchet_only_tightens() -> None:
    actual = too_large()
    slack = {key: (known, actual.get(key)) for key, known in KNOWN.items() if actual.get(key) != known}
    assert slack == {}, "these shrank: lower or remove their entries in KNOWN"


def test_no_global_statements() -> None:
    found = [s.path for s in sources() if any(isinstance(node, ast.Global) for node in s.nodes)]
    assert found == []


def test_no_test_imports_from_another_one() -> None:
    """What several need has a module of its own."""
    found = {
        source.path.removeprefix("tests/")
        for source in sources()
        if source.path.startswith("tests/")
        for node in source.nodes
        for module in imported_modules(node)
        if module.rpartition(".")[2].startswith("test_")
    }
    assert found == TIED_TESTS


def test_no_imports_inside_functions() -> None:
    found = []
    for source in packaged():
        allowed = LATE_IMPORTS.get(source.path, set())
        for function in functions(source):
            for node in ast.walk(function):
                found += [f"{source.path}: {m}" for m in imported_modules(node) if m not in allowed]
    assert found == []


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        if node.module == "trunkline" or re.fullmatch(r"trunkline\.\w+", node.module):
            return [f"{node.module}.{alias.name}" for alias in node.names]
        return [node.module]
    return []


def test_no_broad_except_without_a_reason() -> None:
    found = []
    for source in packaged():
        lines = source.text.splitlines()
        for node in source.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            names = ast.unparse(node.type) if node.type else ""
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if not raises and (not node.type or re.search(r"\b(Base)?Exception\b", names)):
                # A reason: words behind the `noqa`, or a comment in the line before or after.
                near = lines[node.lineno - 2 : node.lineno + 1]
                if not any(re.search(r"#\s*(noqa: ?\S+\s+)?\(?\w+ \w+", line) for line in near):
                    found.append(f"{source.path}:{node.lineno}")
    assert found == []


def test_namespace_packages_have_no_init_files_of_their_own() -> None:
    """`<folder>/__init__.py` or `<folder>/trunkline/__init__.py` would hide the other folders' packages."""
    stray = [
        path
        for folder in PACKAGES
        for path in (f"{folder}/__init__.py", f"{folder}/trunkline/__init__.py")
        if (ROOT / path).exists()
    ]
    stray += [s.path for s in sources() if s.path.startswith("tests/") and s.path.endswith("__init__.py")]
    assert stray == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed_and_says_what_it_is(package: str) -> None:
    folder = ROOT / package / "trunkline" / package
    assert (folder / "py.typed").is_file()
    for path in folder.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"


def test_no_paths_of_anybodys_machine() -> None:
    this = Path(__file__).relative_to(ROOT).as_posix()
    texts = {s.path: s.text for s in sources() if s.path != this}
    for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".ci/*", "docs/**/*.md"):
        texts.update({p.relative_to(ROOT).as_posix(): p.read_text() for p in ROOT.glob(pattern)})
    found = [
        f"{path}: {match[0]}"
        for path, text in texts.items()
        for match in [FORBIDDEN_TEXT.search(text)]
        if match is not None
    ]
    assert found == []


@pytest.mark.parametrize("role", ["router", "controller"])
@pytest.mark.processes
def test_router_and_controller_run_without_torch_and_kernels(role: str) -> None:
    """They start in a second, and their memory is their own."""
    code = (
        f"import sys, trunkline.{role}.__main__; "
        "print([m for m in sys.modules if m == 'torch' or m == 'transformers' or m == 'trunkline.kernels'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_make_runs_the_long_tests_of_areas_too() -> None:
    """Without named files `pytest` leaves out all areas, which most long tests of clusters are in."""
    commands = re.findall(r"python -m pytest\b[^;\n]* -m soak\b", (ROOT / "Makefile").read_text())
    assert len(commands) == 1
    assert "--areas all" in commands[0]
