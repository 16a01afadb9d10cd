"""The client, prompt programs and the command line against a router, with a scripted controller behind it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from prompts import programs
from router.fake_controller import FakeController
from router.harness import RunningRouter
from typer.testing import CliRunner

from trunkline.deploy.cli.app import app
from trunkline.prompts import Client, PmlRequestError
from trunkline.router.text.tokenizer import Tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pml"


@pytest.fixture
def client(router: RunningRouter, fake: FakeController) -> Iterator[Client]:
    with Client(router.url) as made:
        yield made


def shown(fake: FakeController, tokenizer: Tokenizer) -> str:
    """What the last request's answer sees, in the order of positions."""
    submit = fake.behaviour.submits[-1]
    assert submit.layout is not None
    placed: dict[int, int] = {}
    for text in submit.layout.texts:
        tokens = np.frombuffer(text.tokens, np.int32)
        for start, stop in np.frombuffer(text.seen, np.int32).reshape(-1, 2):
            placed |= {text.position + i: int(tokens[i]) for i in range(start, stop)}
    own = iter(np.frombuffer(submit.tokens, np.int32)[: submit.prompt_len])
    for position, count in np.frombuffer(submit.layout.runs, np.int32).reshape(-1, 2):
        placed |= {position + i: int(next(own)) for i in range(count)}
    return tokenizer.decode([placed[position] for position in sorted(placed)], skip_special_tokens=False)


def test_a_program_says_to_the_model_what_it_says(
    client: Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    call = programs.trip("Lisbon", 5, style="museum").followed_by("\nPlan <it>.")
    answer = client.complete(call, max_tokens=8)
    assert answer.text
    assert answer.finish_reason in ("stop", "length")
    assert answer.usage["prompt_tokens"] > answer.usage["prompt_tokens_details"]["module_tokens"] > 20
    assert answer.cache["status"] in ("hit", "partial", "miss")
    assert shown(fake, tokenizer).removeprefix("<|bos|>") == call.text
    [entry] = client.schemas.list()
    assert entry.id == call.program.schema_name


def test_roles_and_messages_follow_each_other(client: Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    client.chat(programs.conversation("<|end|>", formal=True), "What is up?", max_tokens=4)
    assert shown(fake, tokenizer) == (
        "<|bos|><|system|>You are <|end|>. <|end|><|user|>Be formal.<|end|><|user|>What is up?<|end|><|assistant|>"
    )
    submit = fake.behaviour.submits[-1]
    end = tokenizer.encode("<|end|>", add_special_tokens=False)[0]
    assert end not in np.frombuffer(submit.tokens, np.int32)[:3], "the argument is plain text"


def test_openai_beside_it(
    client: Client, router: RunningRouter, fake: FakeController, tokenizer: Tokenizer
) -> None:
    call = programs.trip("Lisbon")
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as other:
        for pml in (call, call.to_pml()):
            extra = client.extra_body(pml)
            client.register(call.program)
            other.completions.create(model="demo", prompt="", max_tokens=4, extra_body=extra)
            assert shown(fake, tokenizer).removeprefix("<|bos|>") == call.text
            other.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, extra_body=extra
            )
            assert shown(fake, tokenizer).endswith("<|user|>Hello<|end|><|assistant|>")


def test_all_that_can_be_done_with_schemas(client: Client, fake: FakeController) -> None:
    made = client.schemas.create(programs.trip, ttl=60, pin=True, encode_scope="self", cache_salt="mine")
    assert (made.id, made.version, made.status, made.pin) == (programs.trip.schema_name, 1, "ready", True)
    assert made.expires_at is not None
    trip = made.modules[1]
    assert (trip.path, trip.params[0].name, trip.params[0].length) == ("trip", "city", 8)
    assert client.schemas.create(programs.trip.to_json(), cache_salt="mine").version == 2
    assert client.schemas.update(made.id, ttl=0, cache_salt="mine").expires_at is None
    assert client.schemas.get(made.id, cache_salt="mine").version == 2
    with pytest.raises(PmlRequestError, match="E_SCHEMA_UNKNOWN"):
        client.schemas.get(made.id)
    client.schemas.delete(made.id, cache_salt="mine")
    assert list(client.schemas.list(cache_salt="mine")) == []


def test_mistakes_have_a_code_and_a_place(client: Client, fake: FakeController) -> None:
    client.register(programs.conversation)
    for prompt, code, place in (
        (programs.trip("word " * 30), "E_ARG_TOO_LONG", (None, None, "trip")),
        ('<prompt schema="chat">\n  <nothing/></prompt>', "E_MODULE_UNKNOWN", (2, 3, "nothing")),
        ("<prompt schema='nobody'/>", "E_SCHEMA_UNKNOWN", (None, None, "")),
    ):
        with pytest.raises(PmlRequestError, match=code) as caught:
            client.complete(prompt)
        error = caught.value
        assert (error.line, error.column) == place[:2]
        assert place[2] in error.path
        assert code != "E_ARG_TOO_LONG" or error.extra["len"] == 8


def test_the_command_line(router: RunningRouter, fake: FakeController, tmp_path: Path) -> None:
    def schema(*arguments: str) -> str:
        env = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}
        done = CliRunner().invoke(app, ["schema", *arguments, "--url", router.url], env=env)
        assert done.exit_code == 0, done.output
        return done.stdout

    file = tmp_path / "s.pml"
    file.write_text('<schema name="s">a<module name="b">long text</module></schema>')
    assert "s, version 1: ready" in schema("add", str(file), "--pin", "--ttl", "60")
    assert schema("list").splitlines()[1].startswith("s ")
    assert "s, version 1: ready" in schema("show", "s")
    schema("rm", "s")
    assert schema("list") == ""


@pytest.mark.parametrize("name", ["code_assistant", "document_qa", "personalisation", "trip_planner"])
def test_examples_run(
    name: str,
    router: RunningRouter,
    fake: FakeController,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the model makes of them is another question: here it says something fixed."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(path), "--url", router.url])
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("first token after") >= 4
    assert "'exact': " in shown
    assert all(submit.layout is not None for submit in fake.behaviour.submits[:4])
