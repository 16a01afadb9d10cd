"""The servers that agents are let loose on: ours in several forms, and others.

All serve the small model with a chat template that is nothing but the words. Ours are arms of one program: as it
is by default, and with options that turn off what agents gain by.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx
from agent_apis import CHAT_TEMPLATE
from peer_servers import KINDS, TRUNKLINE, Kind, Running, Setting, trunkline
from report import server_environment
from serving import model_name
from small_model import small_model

ARMS: Final = {
    "trunkline": "",
    "lru": "--tier-policy lru --peers off",
    "no-cache": "--no-prefix-cache",
}
"""Options of the arms: all as by default; what was used least recently leaves first, and groups give each other
nothing; every prompt is computed."""
EVENTS: Final = ("drain", "restart")
COMMAND_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A server that runs."""

    name: str
    url: str
    model: str
    keys: tuple[str, ...] = ("",)
    """Of its tenants; an empty one: it asks for none."""
    happen: Callable[[str], None] | None = None
    """Lets one of `EVENTS` happen to it and returns when it is over; None: it cannot."""
    server: Running | None = None
    """None: it runs elsewhere."""


def chat_model(folder: Path) -> Path:
    """Make a folder of the small model that has a chat template."""
    for file in small_model().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def tenants_file(path: Path, keys: Sequence[str]) -> list[str]:
    """Write the tenants of keys, one each; return the options that name the file, or none without keys."""
    if not keys:
        return []
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    tenants = {
        f"tenant{at}": {"keys": [{"sha256": digest, "name": "agents"}]} for at, digest in enumerate(digests)
    }
    path.write_text(json.dumps({"tenants": tenants}))
    path.chmod(0o600)
    return ["--tenants", str(path)]


@contextmanager
def own(name: str, options: Sequence[str], setting: Setting, tenants: int) -> Iterator[Arm]:
    """Run one of our arms.

    Args:
        tenants: How many there are, each with a key; 0: the server asks for no key.
    """
    keys = tuple(f"tl-{secrets.token_urlsafe(32)}" for _ in range(tenants))
    folder = setting.scratch / name
    folder.mkdir()
    more = [*tenants_file(folder / "tenants.json", keys), *options]

    def command(program: str, given: Setting, port: int) -> list[str]:
        return [*trunkline(program, given, port), *more]

    kind = replace(TRUNKLINE, name=name, command=command)
    program = kind.found("")
    if program is None:
        raise SystemExit(f"trunkline is not installed: {kind.install}")
    apart = replace(setting, scratch=folder, key=keys[0] if keys else "")
    with Running(kind, program, apart) as server:
        happen = functools.partial(_happen, program, server.url.rpartition(":")[2], folder / "cache")
        yield Arm(name, server.url, server.model, keys or ("",), happen, server)


def _happen(program: str, port: str, cache: Path, event: str) -> None:
    """Drain the first group and take it back, or restart groups and routers one after the other."""
    steps = {"drain": [["drain", "0"], ["undrain", "0"]], "restart": [["restart"]]}[event]
    environment = server_environment(XDG_CACHE_HOME=str(cache), NO_COLOR="1")
    for words in steps:
        done = subprocess.run(
            [program, *words, "--port", port],
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"trunkline {' '.join(words)} failed:\n{done.stdout}{done.stderr}")


@contextmanager
def peer(kind: Kind, given: str, setting: Setting) -> Iterator[Arm | None]:
    """Run another server; None, and a line that says how to install it, if it is not installed."""
    program = kind.found(given)
    if program is None:
        print(f"# {kind.name} is left out: it is not installed. {kind.install}", flush=True)
        yield None
        return
    with Running(kind, program, setting) as server:
        yield Arm(kind.name, server.url, server.model, server=server)


PEERS: Final = {kind.name: kind for kind in KINDS if kind is not TRUNKLINE}


def running(stack: ExitStack, scratch: Path, arguments: argparse.Namespace) -> Iterator[Arm]:
    """Start our arms and the installed peers, until `stack` ends, and find the servers that run already."""
    (scratch / "model").mkdir()
    setting = Setting(folder=chat_model(scratch / "model"), dtype="bfloat16", scratch=scratch)
    for name in filter(None, arguments.arms.split(",")):
        options = [*arguments.serve_args.split(), *ARMS[name].split()]
        yield stack.enter_context(own(name, options, setting, arguments.tenants))
    for name in filter(None, arguments.peers.split(",")):
        arm = stack.enter_context(peer(PEERS[name], vars(arguments)[name], setting))
        if arm:
            yield arm
    for name, url in (each.split("=", 1) for each in arguments.against):
        try:
            yield Arm(name, url, model_name(url))
        except (httpx.HTTPError, ValueError, LookupError) as error:
            print(f"# {url} is left out: {error!r}", flush=True)
