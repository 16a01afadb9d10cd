"""Codex, Claude Code and aider, the programs themselves, hold conversations. Skipped where they are missing.

They are looked for on the PATH: `npm install -g @openai/codex @anthropic-ai/claude-code`, and `pip install
aider-chat`. The engine is scripted: it calls a tool when it is asked something, and answers with a text when it
has the result.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from router.fake_controller import FakeController, prompt_of
from router.harness import EOS, RunningRouter, running, wait_until

from trunkline.controller.messages import Submit
from trunkline.router.text.conversation_memory import common_length
from trunkline.router.text.tokenizer import Tokenizer

CONTEXT: Final = 131_072
TURNS: Final = 10
SECRET: Final = "the file is read, 1729"
CODEX: Final = """
model = "demo"
model_provider = "trunkline"
model_context_window = 131072
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.trunkline]
name = "Trunkline"
base_url = "{url}/v1"
wire_api = "responses"
"""
AIDER: Final = """--model openai/demo --no-git --yes-always --no-check-update --no-show-model-warnings --no-pretty
    --no-show-release-notes --analytics-disable --map-tokens 0 --restore-chat-history note.txt --message""".split()
CALLS: Final = {
    "codex": '{"name": "exec_command", "arguments": {"cmd": "cat note.txt"}}',
    "claude": '{{"name": "Read", "arguments": {{"file_path": "{folder}/note.txt"}}}}',
}


@pytest.fixture
def served(place: Path, tokenizer: Tokenizer) -> Iterator[tuple[RunningRouter, FakeController]]:
    """A router of a model with a context that holds the prompts of agents, and with names for all clients."""
    names = ["claude-*"]
    with running(place, tokenizer, max_context=CONTEXT, wait=False, served_model_aliases=names) as (
        router,
        [fake],
    ):
        fake.behaviour.max_context = CONTEXT
        fake.start()
        wait_until(lambda: router.ready == 1)
        yield router, fake
        fake.stop()


def run(program: str, router: RunningRouter, home: Path, turn: int) -> None:
    """Let a program ask something, in the conversation of the turns before."""
    work = home / "work"
    text = f"Turn {turn}: what is in note.txt?"
    if program == "codex":
        (home / "config.toml").write_text(CODEX.format(url=router.url), encoding="utf-8")
        going_on = ["resume", "--last"] if turn else []
        command = ["codex", "exec", *going_on, "--skip-git-repo-check", text]
    else:
        going_on = ["--continue"] if turn else []
        command = ["claude", "-p", "--model", "claude-demo", *going_on, text]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home),
        "ANTHROPIC_BASE_URL": router.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It says 1729." in done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("program", ["codex", "claude"])
def test_ten_turns_with_tools(
    served: tuple[RunningRouter, FakeController], tokenizer: Tokenizer, tmp_path: Path, program: str
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"the program {program} is not installed")
    router, fake = served
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note.txt").write_text(SECRET, encoding="utf-8")
    call = CALLS[program].format(folder=tmp_path / "work") if program == "claude" else CALLS[program]
    answers: dict[int, list[int]] = {}

    def script(submit: Submit) -> list[int]:
        end = tokenizer.decode(prompt_of(submit)[-600:], skip_special_tokens=False).rpartition("<|user|>")[2]
        said = "It says 1729." if SECRET in end else f"I look.\n<tool_call>\n{call}\n</tool_call>"
        answers[submit.request] = [*tokenizer.encode(said, add_special_tokens=False), EOS]
        return answers[submit.request]

    fake.behaviour.script = script
    for turn in range(TURNS):
        run(program, router, tmp_path, turn)
    assert len(fake.behaviour.submits) == 2 * TURNS  # each turn: a call, and an answer that has its result
    known: list[int] = []
    shares = []
    for submit in fake.behaviour.submits:
        prompt = prompt_of(submit)
        if known:
            shares.append(common_length(known, prompt) / len(known))
        known = [*prompt, *answers[submit.request]]
    assert min(shares) >= 0.99, shares


@pytest.mark.processes
def test_aider(served: tuple[RunningRouter, FakeController], tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It has no tools: files are a part of its prompts, behind the conversation, and answers may be edits."""
    if shutil.which("aider") is None:
        pytest.skip("the program aider is not installed")
    router, fake = served
    note = tmp_path / "note.txt"
    note.write_text("1", encoding="utf-8")
    prompts: list[str] = []

    def script(submit: Submit) -> list[int]:
        prompts.append(tokenizer.decode(prompt_of(submit), skip_special_tokens=False))
        said = f"I count on.\n\nnote.txt\n```\n{len(prompts) + 1}\n```\n"
        return [*tokenizer.encode(said, add_special_tokens=False), EOS]

    fake.behaviour.script = script
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "NO_PROXY": "127.0.0.1",
        "OPENAI_API_KEY": "none",
        "OPENAI_API_BASE": f"{router.url}/v1",
    }
    for turn in range(3):
        done = subprocess.run(
            ["aider", *AIDER, f"Turn {turn}: count on in note.txt."],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert note.read_text(encoding="utf-8").strip() == str(turn + 2), done.stdout
    assert len(prompts) == 3
    assert "Turn 0: count on" in prompts[2]
