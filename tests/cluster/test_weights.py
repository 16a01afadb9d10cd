"""Two checkpoints with one tokenizer under one name: real groups and a router, while the weights are upgraded.

The checkpoints are random, so each says something else to a prompt, and a text shows which of them made it.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster.harness import wait_for
from cluster.test_models import _COMMAND, START_S, TRAINED, Models, text_of
from deploy.waiting import free_ports
from router.harness import free_port
from router.model_folders import VOCAB_SIZE, write_tokenizer
from worker.checkpoints import make_checkpoint

from trunkline.router.membership.member import Member
from trunkline.router.membership.static_source import write_members

pytestmark = pytest.mark.processes


class Upgrade(Models):
    """A router that follows a list of members, and groups of two checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = {}
        self.ports: dict[str, int] = {}
        self.checkpoints = {}
        for seed, name in enumerate(("old", "new")):
            path = make_checkpoint(folder / f"{name}-checkpoint", vocab_size=VOCAB_SIZE, seed=seed)
            write_tokenizer(path, TRAINED["first"])
            self.checkpoints[name] = path
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.start_all(port)

    def start_all(self, port: int) -> None:
        """Start the router, without any group."""
        self.list_members()
        self.start(
            "router",
            *("router", str(self.checkpoints["old"]), "--served-model-name", "m", "--port", str(port)),
            *("--members", f"static:{self.folder / 'members.json'}", "--log-level", "info", "--plain-tcp"),
        )

    def list_members(self) -> None:
        write_members(
            self.folder / "members.json",
            [
                Member(f"127.0.0.1:{port}", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
                for port in self.ports.values()
            ],
        )

    def join(self, name: str, checkpoint: str, *options: str) -> None:
        """Start a group."""
        self.ports[name] = free_ports(2)
        self.start(
            name,
            *("group", str(self.checkpoints[checkpoint]), "--served-model-name", "m", "--plain-tcp"),
            *("--listen", f"127.0.0.1:{self.ports[name]}", "--log-level", "warning"),
            *("--tp", "1", "--threads", "1", "--kv-memory", "8MiB", "--chunk-size", "16", "--disk-tier", "0"),
            *options,
        )
        self.list_members()

    def leave(self, name: str) -> None:
        """Stop a group; then it is no member any more."""
        self.stop(name)
        del self.ports[name]
        self.list_members()

    def groups(self) -> dict[str, tuple[bool, str]]:
        """Of each group, whether it takes requests, and why it is not used."""
        try:
            health = httpx.get(f"{self.url}/health", timeout=60).json()
        except httpx.HTTPError:
            return {}
        found = {each["name"]: (each["ready"], each["problem"]) for each in health["controllers"]}
        return {name: found.get(f"127.0.0.1:{port}", (False, "")) for name, port in self.ports.items()}

    def ready(self) -> dict[str, bool]:
        """Whether each group takes requests."""
        return {name: is_ready for name, (is_ready, _) in self.groups().items()}

    def texts(self) -> set[str]:
        """What several requests are answered that any group may get."""
        return {text_of(self.chat(f"{number % 2} Tell me")) for number in range(8)}


@pytest.fixture
def upgrade() -> Iterator[Upgrade]:
    made = Upgrade(Path(tempfile.mkdtemp(prefix="tl-weights-")))
    try:
        yield made
    finally:
        for log in made.folder.glob("*.log"):
            print(log.name, log.read_text(errors="replace")[-2000:])
        made.close()


def test_weights_are_upgraded_without_being_mixed(upgrade: Upgrade) -> None:
    upgrade.join("a", "old")
    upgrade.wait_ready(a=True)
    of_old = upgrade.texts()
    upgrade.join("b", "new")
    wait_for(lambda: "are others than those that serve" in upgrade.groups().get("b", (True, ""))[1], START_S)
    time.sleep(1.5)  # it is ready by now, or soon
    assert upgrade.texts() == of_old
    said = subprocess.run(
        [*_COMMAND, "doctor", "--url", upgrade.url, "--no-probe"], capture_output=True, text=True, check=False
    )
    assert f"group 127.0.0.1:{upgrade.ports['b']}" in said.stdout
    assert "others than those that serve model 'm' now" in " ".join(said.stdout.split())
    upgrade.join("c", "old", "--quantization", "int8")
    upgrade.wait_ready(a=True, b=False, c=True)
    upgrade.leave("c")
    assert upgrade.texts() == of_old
    upgrade.leave("a")
    upgrade.wait_ready(b=True)
    of_new = upgrade.texts()
    assert not of_new & of_old
    upgrade.join("d", "new", "--tp", "2")
    upgrade.wait_ready(b=True, d=True)
    assert upgrade.texts() == of_new
    log = (upgrade.folder / "router.log").read_text()
    assert log.count("weights_in_force") == 2
