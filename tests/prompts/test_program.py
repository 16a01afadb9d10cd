"""Prompt programs: what they compile to, what a call selects, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prompts import programs
from prompts.naive import module_of

from trunkline.prompts import MaxTokens, PromptProgram, PromptProgramError, prompt

HEAD = """from typing import Annotated
from trunkline.prompts import MaxTokens, prompt
"""


def body_of(program: PromptProgram[Any]) -> str:
    """The schema without what all have in common."""
    pml = program.to_pml()
    return pml[pml.index(">") + 1 : -len("</schema>")]


def compiled(source: str, name: str = "f") -> PromptProgram[Any]:
    program = getattr(module_of(HEAD + source), name)
    assert isinstance(program, PromptProgram)
    return program


@pytest.mark.parametrize(
    ("source", "schema"),
    [
        ('    "a "\n    "b"', "a b"),
        ('    """two\n    lines"""', "two\n    lines"),
        ("    '<&> \"'", '&lt;&amp;&gt; "'),
        ("    'a\\r\\n'", "a&#13;\n"),
        ('    "a"\n    if x: "b"', 'a<module name="x">b</module>'),
        (
            '    if x: "b"\n    else: "c"',
            '<union><module name="x">b</module><module name="else-x">c</module></union>',
        ),
        (
            '    if x == 1: "b"\n    elif x > 1: "c"',
            '<union><module name="x-1">b</module><module name="x-gt-1">c</module></union>',
        ),
        (
            '    if x: "b"\n    else:\n        "c"\n        if t: "d"',
            '<union><module name="x">b</module><module name="else-x">c<module name="t">d</module></module>'
            "</union>",
        ),
        ('    if x: pass\n    else: "c"', '<module name="else-x">c</module>'),
        ("    if x: pass", ""),
        ('    if x: "b"\n    if x: "c"', '<module name="x">b</module><module name="x-2">c</module>'),
        (
            '    match x:\n        case 1 | 2: "b"\n        case None: pass\n        case _: "c"',
            '<union><module name="x-1-2">b</module><module name="x-other">c</module></union>',
        ),
        ('    if system: "b"', '<module name="_system">b</module>'),
        (
            '    f"{t}, {t}"',
            '<param name="t" len="4" required="true"/>, <param name="t-2" len="4" required="true"/>',
        ),
        ('    f"{d}"', '<param name="d" len="2" fill="_" default="a&quot;b"/>'),
        ('    f"{e}"', '<param name="e" len="2"/>'),
        ('    f"{TEXT}!"', "text!"),
        ('    f"{user}"', '<param name="_user" len="5" required="true"/>'),
        ('    f"{{}}"', "{}"),
        ("    g()\n    g()", '<module name="g">G</module><module name="g-2">G</module>'),
    ],
)
def test_schema(source: str, schema: str) -> None:
    head = """TEXT = "text"
@prompt
def g() -> None: "G"
@prompt
def f(x, t: Annotated[str, MaxTokens(4)], user: Annotated[str, MaxTokens(5)],
      d: Annotated[str, MaxTokens(2, fill="_")] = 'a"b', e: Annotated[str, MaxTokens(2)] = "", system=False):
"""
    assert body_of(compiled(head + source)) == f'<module name="f">{schema}</module>'


def test_a_schema_is_named_by_what_it_says() -> None:
    one, same, other = (
        compiled(f"@prompt\ndef f(x=0):\n    {text!r}\n", "f").schema_name for text in ("a", "a", "b")
    )
    assert one == same != other
    assert one.startswith("f-")
    assert programs.conversation.schema_name == "chat"
    inner = "@prompt\ndef g():\n    {!r}\n@prompt\ndef f():\n    g()\n"
    assert compiled(inner.format("a")).schema_name != compiled(inner.format("b")).schema_name


@pytest.mark.processes
def test_names_are_the_same_in_every_process() -> None:
    code = "from prompts.programs import trip; print(trip.to_pml())"
    tests = Path(__file__).parents[1]
    written = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(tests)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert written == {programs.trip.to_pml()}


def test_long_conditions_have_short_names_that_differ() -> None:
    source = "@prompt\ndef f(x):\n" + "".join(
        f'    if x == "{"very " * 20}{tail}": "{tail}"\n' for tail in ("a", "b")
    )
    pml = compiled(source).to_pml()
    names = [part.split('"')[0] for part in pml.split('<module name="')[2:]]
    assert len(set(names)) == 2
    assert all(len(name) <= 48 for name in names)


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ('for i in x: "a"', 6, "a loop has no fixed layout"),
        ("y = 1", 6, "nothing is assigned"),
        ("x += 1", 6, "nothing is assigned"),
        ('with open("a"): "b"', 6, "`with` has no meaning"),
        ('try: "a"\n    finally: "b"', 6, "`try` has no meaning"),
        ("return", 6, "there is no `return`"),
        ("def g(): pass", 6, "write the function outside"),
        ("import os", 6, "import outside"),
        ("assert x", 6, "it has no meaning in a prompt"),
        ("x", 6, "`x` is no text"),
        ('"a" + "b"', 6, "is no text"),
        ("yield 'a'", 6, "is no text"),
        ('if (y := x): "a"', 6, "`:=` assigns"),
        ('if (lambda: x)(): "a"', 6, "`lambda`"),
        ('if x:\n        "a"\n        f"{t:>3}"', 8, "a format"),
        ('f"{t!r}"', 6, "a format"),
        ('f"{t.upper()}"', 6, "only a name may stand in the braces"),
        ('f"{x}"', 6, "{x} has no length: annotate it with Annotated[str, MaxTokens(n)]"),
        ('f"{COUNT}"', 6, "neither an argument nor a text"),
        ('"a\\x00"', 6, "'\\x00', which no PML document can hold"),
        ('match x:\n        case y: "a"', 7, "captures a name"),
        ('match x:\n        case [1, *_]: "a"\n        case {**y}: "a"', 8, "captures a name"),
        ('match x:\n        case 1 if (y := 1): "a"', 7, "`:=` assigns"),
        ("f('a')", 6, "f calls itself"),
        ("later()", 6, "later is no prompt program that is known here"),
        ("len('a')", 6, "len is no prompt program"),
        ("x.y()", 6, "x.y is no prompt program"),
        ("g(1)", 6, "g cannot be called so: missing a required argument: 'b'"),
        ("g(1, b=2, c=3)", 6, "g cannot be called so: got an unexpected keyword argument 'c'"),
        ("g(*x)", 6, "`*` arguments"),
        ("g(1, **x)", 6, "`**` arguments"),
        ("g(1, (y := 2))", 6, "`:=` assigns"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_line(body: str, line: int, message: str) -> None:
    head = '@prompt\ndef g(a, b): "a"\n'
    source = f"COUNT = 1\n{head}def f(x, t: Annotated[str, MaxTokens(4)]):\n    {body}\n"
    module = module_of(HEAD + source)
    with pytest.raises(PromptProgramError) as caught:
        prompt(module.f)
    assert message in caught.value.message
    assert (caught.value.filename, caught.value.line) == ("<program>", line + 1)
    assert str(caught.value).startswith(f"<program>:{line + 1}: ")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@prompt\ndef f(*x): 'a'", "`*x` cannot be compiled"),
        ("@prompt\nasync def f(): 'a'", "a plain function"),
        ("f = prompt(lambda: 'a')", "a plain function"),
        ("def g(x):\n    @prompt\n    def f():\n        if x: 'a'\ng(1)", "uses x of the function around it"),
        ("@prompt\ndef f(x: 'Unknown'): 'a'", "annotations of f cannot be read"),
        ("@prompt\ndef f(x: Annotated[float, MaxTokens(2)]): 'a'", "or int in the place of str"),
        ("@prompt\ndef f(x: Annotated[str, MaxTokens(2), MaxTokens(3)]): 'a'", "x: write Annotated"),
        ("@prompt(name='a b')\ndef f(): 'a'", "'a b' is no name"),
        ("@prompt(role='tool')\ndef f(): 'a'", "'tool' is no role"),
        (
            "@prompt(role='user')\ndef g(): 'a'\n@prompt\ndef h(x):\n    if x: g()\n"
            "@prompt(role='system')\ndef f(x): h(x)",
            "h has a role; it cannot stand inside of the role system",
        ),
    ],
)
def test_functions_that_are_no_programs(source: str, message: str) -> None:
    with pytest.raises(PromptProgramError, match=r"<program>:\d+: ") as caught:
        module_of(HEAD + source)
    assert message in caught.value.message


def test_what_is_not_there_to_be_read_is_refused() -> None:
    names: dict[str, Any] = {"prompt": prompt}
    with pytest.raises(PromptProgramError, match="write it in a file or a notebook"):
        exec("@prompt\ndef f(): 'a'", names)
    with pytest.raises(TypeError, match="for plain functions, not for type"):
        prompt(int)  # type: ignore[arg-type]
    module = module_of("def f(): 'a'\n")
    module_of("\ndef f(): 'a'\n")
    with pytest.raises(PromptProgramError, match="changed after it was imported"):
        prompt(module.f)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "8"])
def test_lengths_are_whole_numbers(count: Any) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        MaxTokens(count)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'city'"):
        programs.trip()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"trip\(city=…\) becomes text, so it is str or int, not float"):
        programs.trip(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not bool"):
        programs.trip("Bern", True)


def test_an_error_in_a_condition_shows_the_condition() -> None:
    program = compiled('@prompt\ndef f(x):\n    "a"\n    if x > 1:\n        "b"\n')
    with pytest.raises(TypeError) as caught:
        program("text")
    assert [entry.lineno for entry in caught.traceback][-1] + 1 == 6


def test_conditions_see_globals_as_they_are_when_called() -> None:
    module = module_of(HEAD + 'LIMIT = 1\n@prompt\ndef f(x):\n    if x > LIMIT: "b"\n')
    assert module.f(2).text == "b"
    vars(module)["LIMIT"] = 5
    assert module.f(2).text == ""


def test_characters_that_xml_cannot_hold_go_as_json() -> None:
    call = programs.trip("a\x00b\nc\td", budget=True)
    assert call.to_json()["modules"][1]["args"] == {"city": "a\x00b\nc\td"}
    with pytest.raises(ValueError, match="keep to the JSON form"):
        call.to_pml()
    assert 'city="a&#10;b&#9;c"' in programs.trip("a\nb\tc").to_pml()
