"""Random programs: the compiled prompt says what running the function says, in the schema's order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prompts.naive import module_of, spoken

from trunkline.prompts import PromptProgram
from trunkline.router.pml import compile_prompt, compile_schema, parse_prompt, parse_schema, prompt_from_json

HEAD = """from typing import Annotated
from trunkline.prompts import MaxTokens, prompt
WORDS = "constant words"
"""
SIGNATURE = "t: Annotated[str, MaxTokens(40)], n: Annotated[int, MaxTokens(20)] = 7, flag=False, kind=None"
TESTS = ("flag", "not flag", "kind == 'a'", "n > 7", "kind in ('a', 'b') and flag", "len(t) > 3", "t != 'x'")
PATTERNS = ("'a'", "'b'", "'b' | 'c'", "None", "str()", "'a' if flag")
SUBJECTS = ("kind", "t", "(kind, flag)")
CALLS = ("t", "t, n", "t, flag=flag, kind=kind", "f'{t}!', 3", "t='<&\"' + t", "str(n), kind='a'")
LETTERS = st.text(st.sampled_from("ab <&>\"'\n\t{}é☃"), max_size=8)
Lines = list[str]


def indented(lines: Lines) -> Lines:
    return [f"    {line}" for line in lines]


def literals() -> st.SearchStrategy[Lines]:
    plain = LETTERS.map(lambda text: [repr(text)])
    inserted = st.tuples(LETTERS, st.sampled_from(("{t}", "{n}", "{t} and {t}", "{WORDS}")), LETTERS)
    return plain | inserted.map(lambda parts: ["f" + repr(_braces(parts[0]) + parts[1] + _braces(parts[2]))])


def _braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


@st.composite
def branches(draw: st.DrawFn, body: st.SearchStrategy[Lines]) -> Lines:
    if draw(st.booleans()):
        lines = [f"if {draw(st.sampled_from(TESTS))}:", *indented(draw(body))]
        for test in draw(st.lists(st.sampled_from(TESTS), max_size=2)):
            lines += [f"elif {test}:", *indented(draw(body))]
        return lines + (["else:", *indented(draw(body))] if draw(st.booleans()) else [])
    lines = [f"match {draw(st.sampled_from(SUBJECTS))}:"]
    for pattern in draw(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3)):
        lines += indented([f"case {pattern}:", *indented(draw(body))])
    return lines + (indented(["case _:", *indented(draw(body))]) if draw(st.booleans()) else [])


def bodies(callees: int, depth: int) -> st.SearchStrategy[Lines]:
    statement = literals() | st.just(["pass"])
    if callees:
        call = st.tuples(st.integers(0, callees - 1), st.sampled_from(CALLS))
        statement |= call.map(lambda pair: [f"f{pair[0]}({pair[1]})"])
    if depth:
        statement |= branches(bodies(callees, depth - 1))
    return st.lists(statement, min_size=1, max_size=3).map(lambda parts: [line for part in parts for line in part])


@st.composite
def sources(draw: st.DrawFn) -> str:
    """Three programs, each of which may call those before it."""
    lines: Lines = []
    for index in range(3):
        lines += ["@prompt", f"def f{index}({SIGNATURE}):", *indented(draw(bodies(index, 2)))]
    return HEAD + "\n".join(lines) + "\n"


class Letters:
    """A tokenizer with a token per character."""

    has_chat_template = False
    bos_ids: list[int] = []  # noqa: RUF012 (as the protocol has it)

    def encode_plain(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    encode_special = encode_plain

    def placeholder_ids(self, fill: str | None, count: int) -> list[int]:
        return [0] * count

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        raise AssertionError("no program here has roles")


@settings(max_examples=40, deadline=None)
@given(sources(), LETTERS, st.integers(5, 9), st.booleans(), st.sampled_from([None, "a", "b", "c"]), LETTERS)
def test_what_is_selected_is_what_is_said(
    source: str, t: str, n: int, flag: bool, kind: str | None, trailing: str
) -> None:
    module = module_of(source)
    given_values: dict[str, Any] = {"flag": flag, "kind": kind}
    said = spoken(source, "f2", t, n, **given_values)
    program = module.f2
    assert isinstance(program, PromptProgram)
    call = program(t, n, **given_values).followed_by(trailing)
    assert call.text == said + trailing

    schema = compile_schema(parse_schema(program.to_pml()), Letters(), scope="ancestors", context=1 << 20)
    if not call.text:  # nothing to prompt with: an error of its own
        return
    for document in (parse_prompt(call.to_pml()), prompt_from_json(call.to_json())):
        prompt = compile_prompt(schema, document, Letters(), context=1 << 20, add_generation_prompt=False)
        tokens = {first + i: token for first, run in _placed(prompt) for i, token in enumerate(run)}
        assert "".join(chr(tokens[position]) for position in sorted(tokens)) == call.text


def _placed(prompt: Any) -> list[tuple[int, list[int]]]:
    """Runs of tokens that the answer sees, with their positions."""
    placed = [
        (text.position + start, text.tokens[start:stop].tolist())
        for text in prompt.texts
        for start, stop in text.seen
    ]
    first = 0
    for position, count in prompt.runs:
        placed.append((position, prompt.own[first : first + count].tolist()))
        first += count
    return placed
