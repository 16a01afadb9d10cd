"""Who may import whom: packages, the rooms of a package, and rooms that do no I/O (docs/architecture.md).

A room is a sub-package. Rooms stand on floors, and a module imports only from its own floor and from lower ones.
`KNOWN_ARROWS` and `KNOWN_IMPURE` list what is not so yet: entries may go, none may be added.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]

MESSAGES: Final = {"controller.messages", "controller.reports", "router.messages", "worker.messages"}
"""What travels between roles."""

PACKAGES: Final[dict[str, set[str]]] = {
    "runtime": set(),
    "kvstore": set(),
    "kernels": {"kvstore"},
    "prompts": {"router.pml"},
    "controller": {"kvstore", "runtime", *MESSAGES},
    "worker": {"kernels", "kvstore", "runtime", *MESSAGES},
    "router": {"prompts", "kvstore", "runtime", "controller", *MESSAGES},
    "deploy": {"runtime", "controller", "worker", "router", "kvstore", "kernels", "prompts"},
}
"""The packages, and what each may import beside itself."""

FLOORS: Final[dict[str, tuple[str, ...]]] = {
    "controller": (
        *("root", "cache", "sequences", "allocation", "tiers", "drafts", "scheduling", "engine"),
        *("storage", "service", "__main__"),
    ),
    "router": (
        *(
            "root",
            "text",
            "tools",
            "pml",
            "routing",
            "membership",
            "config",
            "tenancy",
            "jobs",
            "telemetry",
            "streams",
            "stores",
        ),
        *("http", "service", "api", "tasks", "ui", "app", "server", "__main__"),
    ),
    "worker": (
        *("root", "tensor_parallel", "batch", "tiers", "model", "grammar", "sampling", "device"),
        *(
            "pool_memory",
            "step_graphs",
            "launched_steps",
            "calm_steps",
            "runner",
            "loading",
            "service",
            "__main__",
        ),
    ),
    "deploy": ("root", "config", "supervisor", "node", "launch", "watch", "cli", "main"),
}
"""Rooms, and modules of a package's root that stand above rooms, from the ground floor up."""

PURE: Final = (
    "controller.cache",
    "controller.sequences",
    "controller.allocation",
    "controller.tiers",
    "controller.drafts",
    "controller.scheduling",
    "controller.engine",
    "kvstore.directory",
    "kvstore.copies",
    "kvstore.next_use",
    "kvstore.return_times",
    "kvstore.tier_policy",
    "kvstore.tier_moves",
    "kvstore.tier_health",
    "kvstore.slots",
    "kvstore.peers",
    "router.routing",
    "router.membership.member",
    "router.pml",
    "router.text.detokenizer",
    "router.text.edits",
    "router.text.marked_text",
    "router.text.token_places",
    "router.text.stops",
    "router.text.truncation",
)
"""Rooms and modules that decide: they import nothing that does I/O, reads a clock or draws at random."""

IMPURE: Final = frozenset(
    "asyncio concurrent fcntl fastapi glob httpx mmap multiprocessing os pathlib random redis requests".split()
    + "secrets select selectors shutil signal socket sqlite3 starlette structlog subprocess tempfile".split()
    + "threading time torch urllib uvicorn uvloop zmq".split()
)

KNOWN_ARROWS: Final[frozenset[str]] = frozenset({})
"""Imports that go up a floor: "package room/module -> room/module"."""
KNOWN_IMPURE: Final[frozenset[str]] = frozenset()
"""Pure modules that reach an impure one: "module: impure"."""


@functools.cache
def modules() -> dict[str, Path]:
    """Return the product's modules by their name without "trunkline."."""
    found = {}
    for package in PACKAGES:
        folder = ROOT / ("router" if package == "prompts" else package) / "trunkline"
        for path in (folder / package).rglob("*.py"):
            name = path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
            found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Return what a module imports at run time: product modules without "trunkline.", else the top package."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    found = set()
    for node in at_run_time(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {each for each in inner if each.removeprefix("trunkline.") in modules()}
            found |= known if len(known) == len(inner) else known | {node.module}
    return frozenset(
        each.removeprefix("trunkline.") if each.startswith("trunkline.") else each.split(".")[0] for each in found
    )


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, but for what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield child
            yield from at_run_time(child)


def room(name: str) -> str:
    """Return the room of a module, "root" for one that is in none; a root module with a floor is its own."""
    package, *inner = name.split(".")
    floors = FLOORS.get(package, ("root",))
    return inner[0] if inner and inner[0] in floors else "root"


def upward_arrows() -> Iterator[str]:
    """Yield the imports that go up a floor."""
    for name in modules():
        package = name.split(".")[0]
        if package not in FLOORS:
            continue
        floors = FLOORS[package]
        for other in imports(name):
            if other.split(".")[0] == package and floors.index(room(other)) > floors.index(room(name)):
                yield f"{name} -> {other}"


def reached(name: str, seen: set[str]) -> set[str]:
    """Return what a module imports, and what that imports, and so on."""
    for other in imports(name):
        if other not in seen:
            seen.add(other)
            if other in modules():
                reached(other, seen)
    return seen


def pure_modules() -> Iterator[str]:
    """Yield the modules that must be pure."""
    return (name for name in modules() if any(name == each or name.startswith(f"{each}.") for each in PURE))


def impurities() -> Iterator[str]:
    """Yield what a pure module can reach that it should not."""
    for name in pure_modules():
        yield from (f"{name}: {other}" for other in sorted(reached(name, set()) & IMPURE))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str) -> None:
    def may(other: str) -> bool:
        return other.split(".")[0] == package or any(
            other == each or other.startswith(f"{each}.") for each in PACKAGES[package]
        )

    names = [name for name in modules() if name.split(".")[0] == package]
    found = [
        f"{name} -> {other}"
        for name in names
        for other in imports(name)
        if (other in modules() or other.split(".")[0] in PACKAGES) and not may(other)
    ]
    assert found == []


def check(found: Iterable[str], known: frozenset[str]) -> None:
    listed = set(found)
    assert listed - known == set(), "new ones"
    assert known - listed == set(), "these are gone: remove them from the list"


def test_no_import_goes_upstairs() -> None:
    check(upward_arrows(), KNOWN_ARROWS)


def test_what_decides_does_no_io() -> None:
    assert len(list(pure_modules())) > 50
    check(impurities(), KNOWN_IMPURE)


def test_every_room_has_a_floor() -> None:
    rooms = {name for name, path in modules().items() if path.name == "__init__.py" and name.count(".") == 1}
    assert {name for name in rooms if name.split(".")[0] in FLOORS and room(name) == "root"} == set()
