"""The command line: fast, explains itself, answers nonsense with one line and exit code 2."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner, Result

from trunkline.deploy.cli.app import ORDER, app
from trunkline.deploy.cli.option_commands import HINTS, joined
from trunkline.deploy.config.options import NODE_OPTIONS, SERVE_OPTIONS


def trunkline(*arguments: str, stdin: str = "", columns: int = 120) -> Result:
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version(word: str) -> None:
    done = trunkline(word)
    assert (done.exit_code, done.stdout) == (0, f"trunkline {version('trunkline')}\n")


def test_help_lists_commands_and_options_with_examples() -> None:
    text = trunkline("--help", columns=80).stdout
    assert re.findall(r"(?m)^│ ([a-z]+)  ", text) == [*ORDER, "version"], "in the order in which they are needed"
    assert "Examples" in text
    text = trunkline("serve", "--help").stdout
    options = "groups tp dtype device host port chunk-size kv-memory max-context max-batch token-budget"
    options += " max-waiting served-model-name kernels no-prefix-cache drain-seconds threads log-level"
    options += " routers policy no-restart resume-seconds"
    options += " host-tier disk-tier remote-tier tier-policy session-ttl"
    options += " gpu-memory-fraction"
    assert [option for option in options.split() if f"--{option}" not in text] == []
    assert "Examples" in text
    assert "--no-wait" in trunkline("restart", "--help").stdout
    assert "/reset" in trunkline("chat", "--help").stdout


def test_hints_name_options_that_exist_for_options_that_do_not() -> None:
    options = [option for option in (*SERVE_OPTIONS, *NODE_OPTIONS) if not option.is_argument]
    known = {flag for option in options for flag in option.flag.split("/")}
    assert not known & set(HINTS)
    named = {word for hint in HINTS.values() for word in re.findall(r"--[a-z-]+", hint)}
    assert named <= known


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("serve demo --tp 2", "serve demo --tp 2"),
        ("--served-model-name a demo", "--served-model-name a demo"),
        ("--served-model-name a --tp 2 --served-model-name b,c* x", "--served-model-name a,b,c* --tp 2 x"),
        ("--served-model-name=a x --served-model-name b", "--served-model-name=a,b x"),
        ("--served-model-name a x --served-model-name=b", "--served-model-name a,b x"),
        ("--served-model-name", "--served-model-name"),
        ("--served-model-name a --served-model-name", "--served-model-name a --served-model-name"),
        ("--served-model-name a -- --served-model-name b", "--served-model-name a -- --served-model-name b"),
    ],
)
def test_names_of_a_model_that_are_given_one_by_one(typed: str, words: str) -> None:
    assert joined(typed.split()) == words.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "/nonexistent"], "no folder"),
        (["serve", "--kv-memory", "lots"], "is not a size"),
        (["serve", "--disk-tier", "/data/kv"], "says no size; write PATH:SIZE"),
        (["serve", "--remote-tier", "memcached://h"], "allowed are redis://HOST:PORT/DB, rediss://"),
        (["serve", "--tp", "3", "--port", "0"], "3 ranks"),
        (["serve", "--tp", "many"], "--tp"),
        (["serve", "--policy", "best"], "--policy is 'best'; allowed are prefix, "),
        (["serve", "--routers", "0"], "--routers is 0; allowed are 1 to 64"),
        (["serve", "--resume-seconds", "-1"], "--resume-seconds is -1"),
        (["serve", "--no-such-option"], "No such option"),
        (["serve", "--max-model-len=4096"], "No such option: --max-model-len. Did you mean --max-context?"),
        (["serve", "demo", "-tp", "2"], "No such option: -tp. Did you mean --tp?"),
        (["router", "--model", "demo"], "Give the model as the first argument"),
        (["group", "--enable-prefix-caching"], "are always cached, unless --no-prefix-cache"),
    ],
)
def test_errors_are_one_line_and_code_2(arguments: list[str], message: str) -> None:
    done = trunkline(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "--url", "http://127.0.0.1:9"], "Error: no server answers at http://127.0.0.1:9"),
        (["status", "--port", "1"], "Error: no cluster of yours "),
        (["drain", "0", "--port", "1"], "Error: no cluster of yours "),
        (["undrain", "0", "--port", "1"], "Error: no cluster of yours "),
        (["restart", "routers", "--port", "1"], "Error: no cluster of yours "),
    ],
)
def test_commands_say_that_no_cluster_runs_there(arguments: list[str], message: str) -> None:
    done = trunkline(*arguments, stdin="hello\n")
    assert done.exit_code == 1
    assert done.stderr.startswith(message)


@pytest.mark.processes
def test_the_command_line_imports_nothing_heavy() -> None:
    """Help must not wait for a machine-learning stack."""
    heavy = {"torch", "transformers", "fastapi", "uvicorn", "huggingface_hub", "tokenizers", "redis"}
    assert heavy & _modules("trunkline.deploy.cli.app") == set()


@pytest.mark.processes
def test_a_server_waits_for_nothing_that_only_other_commands_need() -> None:
    others = {"httpx", "trunkline.prompts", "trunkline.router.pml", "trunkline.deploy.launch.commands"}
    assert others & _modules("trunkline.deploy.cli.app") == others
    assert others & _modules("trunkline.deploy.cli.serving") == set()


def _modules(name: str) -> set[str]:
    """Return the modules that a process has imported with this one."""
    code = f"import sys, {name}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.processes
def test_an_interrupt_while_it_is_imported_shows_no_traceback() -> None:
    code = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *rest):
        if name == "trunkline.deploy.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from trunkline.deploy.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")
