"""Grammars that users should not send: explained, bounded in time and memory, and harmless to all others."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

import psutil
import pytest
from worker.grammar_driver import Grammars, V, allowed
from worker.tier_driver import wait_until

from trunkline.controller.reports import GrammarReady
from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.worker.grammar.checks import prepare
from trunkline.worker.grammar.compiler import GrammarStore, Line
from trunkline.worker.grammar.process import TrialProcess, Wanted

pytestmark = pytest.mark.processes


def nested(levels: int) -> str:
    return '{"type":"array","items":' * levels + "true" + "}" * levels


REFUSED: Final = [
    ("regex", "(a", "not closed"),
    ("regex", "a)", "Unmatched"),
    ("regex", "[z-a]", "character class"),
    ("regex", "a{5,2}", "lower bound"),
    ("regex", r"(a)\1", "Backreference"),
    ("regex", "(?=a)b", "Lookahead"),
    ("regex", "a^b", "should be at the start"),
    ("regex", "a\0b", "null"),
    ("regex", "a{4294967298}", "repetition count"),
    ("regex", "a{1,99999999999999999999}", "repetition count"),
    ("regex", r"[^\s\S]", "matches no text"),
    ("regex", "(" * 20_000 + "a" + ")" * 20_000, "nest layer"),
    ("regex", "a" * 70_000, "longer than"),
    ("regex", "([a-z]{0,30}[0-9]{0,30}){0,1000}", "ambiguous|within"),
    ("ebnf", "", "root"),
    ("ebnf", 'root ::= "a', "line 1"),
    ("ebnf", "root ::= foo", '"foo"'),
    ("ebnf", "root ::= root", "matches no text"),
    ("ebnf", 'root ::= root root | "a" | ""', "ambiguous"),
    ("ebnf", 'root ::= (("a"{0,1000}){0,1000}){0,1000}', "ambiguous|within"),
    ("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "Nest layer"),
    ("choice", "[]", "at least one"),
    ("choice", '["a", 3]', "list of strings"),
    ("choice", '["\\ud800"]', "surrogate"),
    ("json_schema", "{", "JSON"),
    ("json_schema", "[1]", "object or bool"),
    ("json_schema", '{"type":"foo"}', "foo"),
    ("json_schema", "false", "cannot accept"),
    ("json_schema", nested(2000), "nested"),
    ("json_schema", "[" * 60_000, "nested|JSON"),
    ("json_schema", '{"$ref":"#"}', "matches no text"),
    ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}', "matches no text"),
    ("json_schema", '{"$ref":"#/$defs/x"}', "defs"),
    ("json_schema", '{"$ref":"http://example.com/x"}', "ref"),
    ("json_schema", '{"not":{"type":"string"}}', "'not'"),
    ("json_schema", '{"items":{"properties":{"x":{"multipleOf":7}}}}', "'multipleOf'"),
    ("json_schema", '{"type":"array","uniqueItems":true}', "'uniqueItems'"),
    ("json_schema", '{"allOf":[{"type":"string"},{"minLength":3}]}', "'allOf'"),
    ("json_schema", '{"anyOf":[{"type":"string"}],"minLength":3}', "beside 'anyOf'"),
    ("json_schema", '{"type":"string","pattern":"a+","minLength":3}', "'pattern' beside"),
    ("json_schema", '{"type":"string","pattern":"("}', "not closed"),
    ("json_schema", '{"type":"string","pattern":"say \\"a\\""}', "'const'"),
    ("json_schema", '{"type":"string","pattern":"a{4294967298}"}', "repetition count"),
    ("json_schema", '{"type":"string","maxLength":4294967298}', "maxLength"),
    ("json_schema", '{"type":"string","format":"foo"}', "'foo'"),
    ("json_schema", '{"type":"object","required":["zz"]}', "'zz'"),
    ("json_schema", '{"type":"integer","minimum":5,"maximum":2}', "minimum"),
    ("json_schema", '{"type":"integer","minimum":-99999999999999999999999}', "limit"),
    ("structural_tag", '{"type":"structural_tag","format":{"type":"foo"}}', "the grammar cannot be used: .*foo"),
    ("structural_tag", "{", "JSON"),
    ("poem", "roses", "'poem'"),
]


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _, _ in REFUSED))
def test_grammars_that_cannot_be_used_are_explained(grammars: Grammars, kind: str) -> None:
    for text, expected in ((text, expected) for one, text, expected in REFUSED if one == kind):
        problem = grammars.problem(kind, text)
        assert re.search(expected, problem), (kind, text[:80], problem)
        assert problem.isprintable()
        assert len(problem) <= 200
        assert not re.search(r"\.cc|\.h:|\.py|/project|Check failed|\d\d:\d\d:\d\d|Error", problem)


DOUBLING: Final = {
    f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} if i < 60 else {"type": "null"}
    for i in range(61)
}


def test_large_grammars_that_can_be_used_are(grammars: Grammars) -> None:
    for kind, text in (
        ("regex", "a{1000000000}"),
        ("regex", "((a{1000}){1000}){1000}"),
        ("regex", "(a*)*b"),
        ("regex", ""),
        ("json_schema", nested(90)),
        ("json_schema", '{"type":"string","maxLength":1000000}'),
        ("json_schema", '{"type":"object","properties":{"not":{},"pattern":{"type":"string"},"if":true}}'),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(2000)]})),
        ("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": DOUBLING})),
    ):
        assert allowed(grammars, grammars.row(grammars.add(kind, text))), text[:80]


def trial_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too: of an earlier test, until it is reaped
            if "trunkline.worker.grammar.trial" in process.cmdline():
                found.append(process)
    return found


SLOW: Final = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}})
"""Seconds, also on a fast machine."""


def test_a_grammar_that_takes_too_long_is_given_up() -> None:
    store, before = GrammarStore(DEMO_FOLDER, V, seconds_max=0.05, slice_s=0.02), set(trial_processes())
    short = Grammars(store)
    assert "does not compile within" in short.problem("json_schema", SLOW)
    own = set(trial_processes()) - before
    assert len(own) == 2, "one process for short trials, one for long ones"
    assert not [child for process in own for child in process.children()], "a trial goes on"
    store.close()


def test_a_process_that_starts_while_its_trials_are_cancelled_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialProcess(DEMO_FOLDER, V, 60.0)

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        trial.cancel()
        return popen(*arguments, **options)

    popen = subprocess.Popen
    monkeypatch.setattr(
        "trunkline.worker.grammar.process.subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)
    )
    trial.start()
    assert trial._process is not None
    assert trial._process.wait(60.0) == -signal.SIGKILL
    with pytest.raises(OSError, match="cancelled"):
        trial.start()


def test_grammars_that_take_long_delay_nobody_else() -> None:
    """Counts what has been answered, not how fast: the slow ones' trials could go on for minutes.

    What was forgotten before its turn is not compiled.
    """
    store = GrammarStore(DEMO_FOLDER, V, seconds_max=3600.0, slice_s=3.0)
    grammars = Grammars(store)
    try:
        assert grammars.add("regex", "warm")
        many = "|".join(f"[a-z]{{{i},{i + 50}}}x{i}" for i in range(1500))
        slow = [grammars.begin("regex", f"{i}({many})") for i in range(2)]
        for i in range(5):
            store.compile(2000 + i, "regex", f"b{{{i}}}", tenant=b"gone")
            store.forget(2000 + i)
            store.compile(1000 + i, "regex", f"x{{{i}}}", tenant=b"other")
        ready: list[GrammarReady] = []

        def all_ready() -> bool:
            ready.extend(store.poll())
            return len(ready) >= 5

        wait_until(all_ready, 60.0)
        assert ready == [GrammarReady(1000 + i) for i in range(5)]
        assert store.pending == set(slow), "the slow ones are not given up for that"
        wanted = ["warm", *(f"x{{{i}}}" for i in range(5))]
        assert set(store._cache._compiled) == {Wanted("regex", text).digest() for text in wanted}
    finally:
        store.close()


def test_what_was_refused_is_refused_again_without_a_trial(grammars: Grammars) -> None:
    problem = grammars.problem("regex", "([a-z]{0,30}[0-9]{0,30}){0,999}")
    process = first_trial(grammars)
    process.suspend()
    try:
        again = grammars.begin("regex", "([a-z]{0,30}[0-9]{0,30}){0,999}")
        assert grammars.store.poll() == [GrammarReady(again, problem)]
    finally:
        process.resume()


@pytest.fixture(scope="module")
def patient() -> Iterator[Grammars]:
    """Grammars that one process tries, however slow it is: another would try those that take more than a slice."""
    store = GrammarStore(DEMO_FOLDER, V, slice_s=60.0)
    yield Grammars(store)
    store.close()


def first_trial(grammars: Grammars) -> psutil.Process:
    """The process of the short trials."""
    process = grammars.store._threads._compilers[Line.FIRST]._trial._process
    assert process is not None
    return psutil.Process(process.pid)


def test_a_trial_whose_process_was_killed_is_tried_again(grammars: Grammars) -> None:
    assert grammars.add("regex", "a+")
    process = first_trial(grammars)
    process.suspend()
    grammar = grammars.begin("regex", "b+")
    process.kill()
    assert grammars.wait() == GrammarReady(grammar)


def test_a_grammar_that_kills_its_process_harms_no_other(patient: Grammars) -> None:
    assert patient.add("regex", "a+")
    first = first_trial(patient)
    first.suspend()
    grammar = patient.begin("json_schema", SLOW)
    first.kill()  # as the kernel does when memory runs out
    trial = patient.store._threads._compilers[Line.FIRST]._trial
    wait_until(lambda: trial._process is not None and trial._process.pid != first.pid, 60.0)
    second = first_trial(patient)
    wait_until(second.children, 60.0)  # it has begun
    second.kill()
    assert patient.wait() == GrammarReady(grammar, "the grammar needs too much memory to compile")
    # The same text again needs no trial: the compiled grammar was kept.
    assert allowed(patient, patient.row(patient.add("regex", "a+")))
    assert patient.store._threads._compilers[Line.FIRST]._trial._process is None
    assert patient.add("regex", "c+")


def test_the_trial_process_refuses_to_outgrow_its_memory(patient: Grammars) -> None:
    patient.add("regex", "before")
    process = first_trial(patient)
    hard = process.rlimit(psutil.RLIMIT_DATA)[1]
    assert hard < 2 << 30
    process.rlimit(psutil.RLIMIT_DATA, (process.memory_info().data + (1 << 20), hard))
    many = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}})
    assert "memory" in patient.problem("json_schema", many)
    process.rlimit(psutil.RLIMIT_DATA, (hard, hard))
    assert patient.add("regex", "after")


def test_what_is_checked_in_the_step_thread_takes_no_time() -> None:
    """All streams wait meanwhile: each of these once took minutes, by backtracking."""
    spaces = " " * 60_000
    for kind, text in (
        ("regex", "a{" + spaces),
        ("ebnf", 'root ::= "a" {1 ,' + spaces),
        ("json_schema", json.dumps({"type": "string", "pattern": "a{1" + spaces})),
    ):
        start = time.thread_time()
        prepare(kind, text)
        assert time.thread_time() - start < 1.0
