"""Structured output: whatever the model says, its text follows the grammar, and no other row notices."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import jsonschema_rs
import numpy as np
import psutil
import pytest
import torch
from seeds import seeds
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from worker.grammar_driver import STOP, Grammars, V, allowed

from trunkline.controller.reports import GrammarReady
from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.kernels.plan import WritePlan
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.batch.batch import ForwardBatch
from trunkline.worker.batch.draft_rows import DraftRows
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError
from trunkline.worker.grammar.compiler import GrammarStore
from trunkline.worker.sampling.beams import BeamSearches
from trunkline.worker.sampling.sampler import Sampler
from trunkline.worker.sampling.selection import Selector
from trunkline.worker.tensor_parallel import TensorParallel

pytestmark = pytest.mark.processes
CPU: Final = torch.device("cpu")

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


@functools.cache
def tokenizer() -> Tokenizer:
    found: Tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    return found


def token(text: str) -> int:
    found = tokenizer().token_to_id(text)
    assert found is not None
    return int(found)


def text_of(row: BatchSequence) -> str:
    output = [one for one in row.tokens[row.prompt_len :] if one != STOP]
    found: str = tokenizer().decode(output, skip_special_tokens=True)
    return found


@functools.cache
def closers() -> tuple[int, ...]:
    """Tokens that end things: with a preference for them a random output comes to an end."""
    return (STOP, *map(token, '"}]'))


def logits_for(rows: list[BatchSequence]) -> Tensor:
    """Random, more and more inclined to end; a row's depend on its own output only."""
    logits = torch.empty(len(rows), V)
    for i, row in enumerate(rows):
        seed = hash((row.sampling.seed, tuple(row.tokens)))
        logits[i] = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
        logits[i, list(closers())] += min(40.0, 1.5 * row.output_index)
    return logits


def generate(store: GrammarStore, rows: list[BatchSequence], steps: int = 400) -> None:
    """Sample until every row that follows a grammar has ended."""
    sampler = Sampler(V, CPU, store)
    live = list(rows)
    changed = True
    for _ in range(steps):
        ids, _ = sampler.sample(logits_for(live), live, changed=changed)
        for row, token in zip(live, ids.tolist(), strict=True):
            row.append(token)
        ended = [row for row in live if row.tokens[-1] == STOP]
        live = [row for row in live if row.tokens[-1] != STOP]
        changed = bool(ended)
        sampler.forget([row.id for row in ended])
        if not live:
            return
    raise AssertionError(f"{len(live)} rows do not end: {text_of(live[0])!r}")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "length", "range"]
    kind = rng.choice(kinds + ["object", "array", "union", "object", "array"] * (depth < 3))
    inner = functools.partial(random_schema, rng, depth + 1)
    if kind == "object":
        names = rng.sample(["a", "b c", 'q"x', "größe", "not", "type", "pattern", "x"], rng.randint(0, 5))
        return {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    simple: dict[str, dict[str, Any]] = {
        "enum": {"enum": rng.sample(["x", "yz", 3, None, True, 'a"b', "ä", -2.5], 3)},
        "const": {"const": {"k": [1, "v\n"]}},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^x(y|z)*$", "^[0-9]+-[A-Z]$"])},
        "length": {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 9)},
        "range": {"type": "integer", "minimum": -rng.randint(0, 99), "maximum": rng.randint(0, 5000)},
        "union": {rng.choice(["anyOf", "oneOf"]): [{"type": "null"}, {"type": "object", "properties": {}}]},
    }
    return simple.get(kind, {"type": kind})


@pytest.mark.parametrize("seed", seeds(1))
def test_outputs_are_valid_for_random_schemas_all_in_one_batch(grammars: Grammars, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(20)] + [SCHEMA, {"type": "array"}, {"type": "object"}]
    schemas += [{"type": "string", "pattern": p} for p in ('^[^a"]{3,6}$', r"^.{2,5}\W$", r"^\S{1,5} \S{1,5}$")]
    schemas += [{"type": "string", "maxLength": n} for n in (3, 30, 300)]
    schemas += [{"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}]
    rows = [grammars.row(grammars.add("json_schema", json.dumps(s)), seed=i) for i, s in enumerate(schemas)]
    generate(grammars.store, rows)
    for schema, row in zip(schemas, rows, strict=True):
        # The validator takes infinity, which Python makes of 1e999, for null.
        document = json.loads(text_of(row), parse_float=lambda text: max(-1e300, min(float(text), 1e300)))
        jsonschema_rs.validate(schema, document)


def accepts(grammars: Grammars, kind: str, text: str, written: str, *, spaced: bool = False) -> bool:
    """Whether a model may write a text, token by token, and end there."""
    row = grammars.row(grammars.add(kind, text, spaced=spaced))
    for one in [*tokenizer().encode(written, add_special_tokens=False).ids, STOP]:
        if one not in allowed(grammars, row):
            return False
        row.append(one)
    return True


DOCUMENTS: Final[list[Any]] = [
    {"name": "Nora", "age": 3, "tags": ["red", "green"]},
    {"name": "a,  b:  c", "age": 0, "tags": ["red"]},
]


@pytest.mark.parametrize("kind", ["json_schema", "json_object", "structural_tag", "in a tag"])
def test_json_is_written_as_json_dumps_does(grammars: Grammars, kind: str) -> None:
    """A weak model otherwise goes on with blanks and line ends up to its limit."""
    format_ = {"type": "json_schema", "json_schema": SCHEMA}
    text = {
        "json_schema": json.dumps(SCHEMA),
        "json_object": "",
        "structural_tag": json.dumps({"type": "structural_tag", "format": format_}),
        "in a tag": json.dumps(
            {
                "type": "structural_tag",
                "format": {"type": "sequence", "elements": [{"type": "const_string", "value": "<<"}, format_]},
            }
        ),
    }[kind]
    kind, front = ("structural_tag", "<<") if kind == "in a tag" else (kind, "")
    for document in DOCUMENTS:
        assert accepts(grammars, kind, text, front + json.dumps(document))
        for indent in (json.dumps(document, indent=1), json.dumps(document, separators=(" , ", ":  "))):
            assert not accepts(grammars, kind, text, front + indent)
            assert accepts(grammars, kind, text, front + indent, spaced=True)
    for run in ('{"name"      :\n      ', '{      "name": ', "{\n"):
        assert not accepts(grammars, kind, text, front + run + json.dumps(DOCUMENTS[0])[8:])


@pytest.mark.parametrize("seed", seeds(2))
def test_a_part_of_limited_length_ends_also_after_a_preemption(grammars: Grammars, seed: int) -> None:
    """Thoughts have budgets: so many tokens, then the mark that ends them."""
    rng = random.Random(seed)
    budget = rng.randint(0, 9)
    thought = {"type": "any_text", "excludes": ["##"], "max_tokens": budget}
    mark, answer = {"type": "const_string", "value": "##"}, {"type": "const_string", "value": "yes"}
    form = {"type": "sequence", "elements": [thought, mark, answer]}
    grammar = grammars.add("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    whole = grammars.row(grammar)
    for _ in range(budget + 12):
        choices = allowed(grammars, whole)
        written = list(whole.tokens[whole.prompt_len :])
        again = allowed(grammars, grammars.row(grammar, written))
        # Within the mark, the first half of it may count as a thought again.
        assert again >= choices if "#" in text_of(whole) else again == choices
        # Whole words: with a character of several tokens it could not be told where the thought ends.
        words = [one for one in sorted(choices) if re.fullmatch("[A-Za-z]+", tokenizer().id_to_token(one) or "")]
        whole.append(rng.choice(words or sorted(choices)))
    written = list(whole.tokens[whole.prompt_len :])
    text = tokenizer().decode([one for one in written if one != STOP], skip_special_tokens=False)
    assert text.endswith("##yes")
    # The mark takes one or two tokens.
    ends = next(n for n in range(len(written)) if "##" in tokenizer().decode(written[: n + 1]))
    assert budget <= ends <= budget + 1


def test_characters_before_hexadecimal_digits_are_kept(grammars: Grammars) -> None:
    """xgrammar reads as many digits of an escape as there are: "ß" before "e" became another character."""
    for text in ("größe", "a\\xdfe", "日本a", "😀a", "Ābc"):
        schema = {"type": "object", "properties": {text: {"enum": [text]}}, "required": [text]}
        assert accepts(grammars, "json_schema", json.dumps(schema), json.dumps({text: text}, ensure_ascii=False))
        assert accepts(grammars, "choice", json.dumps([text, "\x01a"]), text)
    assert accepts(grammars, "choice", '["\\u0001a", "x"]', "\x01a")


def test_tags_may_say_how_much_white_space_they_have(grammars: Grammars) -> None:
    format_ = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 3}
    text = json.dumps({"type": "structural_tag", "format": format_})
    written = json.dumps(DOCUMENTS[0], separators=(",   ", ":   "))
    assert accepts(grammars, "structural_tag", text, written)
    assert not accepts(grammars, "structural_tag", text, written.replace(",   ", ",    "))


def test_very_wide_objects_have_white_space(grammars: Grammars) -> None:
    """Compact, they would take minutes to compile. In a structural tag, too."""
    schema: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for kind, whole in (("json_schema", schema), ("structural_tag", tag)):
        text = json.dumps(whole, separators=(",", ":"))
        assert accepts(grammars, kind, text, '{"p0":"x",\n"p7": "y"}')


def test_objects_without_named_properties_are_free(grammars: Grammars) -> None:
    grammar = grammars.add("json_schema", '{"type":"object"}')
    rows = [grammars.row(grammar) for _ in range(10)]
    grammar = grammars.add("json_object", "")
    rows += [grammars.row(grammar) for _ in range(10)]
    generate(grammars.store, rows)
    found = [json.loads(text_of(row)) for row in rows]
    assert all(isinstance(document, dict) for document in found)
    assert any(found[:10])
    assert any(found[10:])


PATTERNS: Final = (
    r"[a-z]{3,5}-\d+",
    r"(yes|no|maybe)( indeed)?",
    r"[^x]{4}é[α-ω]{2}",
    r"\w{1,9}@\w{1,9}\.(com|org)",
    r"(ab|a)*c",
    r"😀{1,3}",
)


def test_outputs_match_regular_expressions(grammars: Grammars) -> None:
    rows = {pattern: [grammars.row(grammars.add("regex", pattern)) for _ in range(6)] for pattern in PATTERNS}
    generate(grammars.store, [row for own in rows.values() for row in own])
    for pattern, own in rows.items():
        for row in own:
            assert re.fullmatch(pattern, text_of(row), re.ASCII | re.DOTALL), text_of(row)


def test_outputs_are_one_of_the_choices(grammars: Grammars) -> None:
    choices = ["yes", 'no\n"x\\', "é\x01😀", "yes, but", "{a}|b", "tab\there"]
    grammar = grammars.add("choice", json.dumps(choices))
    rows = [grammars.row(grammar) for _ in range(60)]
    generate(grammars.store, rows)
    assert {text_of(row) for row in rows} == set(choices)


def test_outputs_follow_a_context_free_grammar(grammars: Grammars) -> None:
    grammar = grammars.add("ebnf", 'root ::= sum\nsum ::= item ("+" item)*\nitem ::= [0-9] | "(" sum ")"')
    rows = [grammars.row(grammar) for _ in range(10)]
    generate(grammars.store, rows)
    for row in rows:
        assert re.fullmatch(r"[0-9+()]+", text_of(row))
        eval(text_of(row))  # balanced, or a SyntaxError


def test_special_tokens_spell_nothing_but_in_structural_tags(grammars: Grammars) -> None:
    marker = token("<|user|>")
    plain = grammars.row(grammars.add("regex", r"<\|user\|>a"))
    first = allowed(grammars, plain)
    assert first
    assert marker not in first
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    tag = {"type": "tag", "begin": "<|user|>", "content": content, "end": ""}
    row = grammars.row(grammars.add("structural_tag", json.dumps({"type": "structural_tag", "format": tag})))
    assert marker in allowed(grammars, row)
    row.append(marker)
    texts = [tokenizer().decode([found]) for found in allowed(grammars, row)]
    assert all(text.startswith("{") for text in texts)
    assert texts


def test_replay_after_a_preemption_continues_alike(grammars: Grammars) -> None:
    grammar = grammars.add("json_schema", json.dumps(SCHEMA))
    whole = [grammars.row(grammar, seed=seed) for seed in range(3)]
    generate(grammars.store, whole)
    for row in whole:
        output = row.tokens[3:].tolist()
        for cut in {1, len(output) // 2}:
            back = grammars.row(grammar, output[:cut], seed=row.sampling.seed)
            generate(grammars.store, [back])
            assert back.tokens == row.tokens


@pytest.mark.parametrize("seed", seeds(1))
def test_drafts_change_no_output(grammars: Grammars, seed: int) -> None:
    """Right and wrong ones, some of them against the grammar; a plain row beside them."""
    rng = random.Random(seed)
    grammar = grammars.add("regex", '([a-z]{1,3}[0-9]){3,9}"')
    variants: list[dict[str, Any]] = [{}, {"temperature": 0}, {"presence_penalty": 1.0, "min_tokens": 20}]

    def rows() -> list[BatchSequence]:
        plain = grammars.row(0, seed=seed, min_tokens=5, stop_ids=pack_int32([STOP]))
        return [plain, *(grammars.row(grammar, seed=seed + i, **more) for i, more in enumerate(variants))]

    expected, found = rows(), rows()
    generate(grammars.store, expected)
    shard = SimpleNamespace(config=SimpleNamespace(vocab_size=V), vocab_start=0)
    sampler = Sampler(V, CPU, grammars.store)
    selector = Selector(TensorParallel.alone(CPU), sampler, BeamSearches(), shard, 64)  # type: ignore[arg-type]
    live, steps = list(zip(found, expected, strict=True)), 0
    while live:
        steps += 1
        chains = []
        for row, whole in live:
            coming = whole.tokens[row.known : min(row.known + rng.randrange(6), whole.known - 1)].tolist()
            chains.append([one if rng.random() < 0.8 else rng.randrange(V) for one in coming])
        drafted = DraftRows.of([row for row, _ in live], [pack_int32(chain) for chain in chains])
        seen = [
            grown(row, chain[:n])
            for (row, _), chain in zip(live, chains, strict=True)
            for n in range(len(chain) + 1)
        ]
        selector.select(batch_of(drafted), logits_for(seen))
        for row, whole in live:
            assert row.tokens == whole.tokens[: len(row.tokens)]
        live = [(row, whole) for row, whole in live if len(row.tokens) < len(whole.tokens)]
    assert steps < max(len(row.tokens) for row in expected)


def grown(row: BatchSequence, tokens: list[int]) -> BatchSequence:
    """A copy of a row that has gone on."""
    other = copy.copy(row)
    other.tokens = row.tokens[:]
    for token in tokens:
        other.append(token)
    return other


def batch_of(drafted: DraftRows) -> ForwardBatch:
    """A batch of these rows, as far as selection looks at it."""
    count, nothing = len(drafted.ids), np.zeros(0, dtype=np.int32)
    return ForwardBatch(
        lambda: (drafted.ids, drafted.lengths),
        count,
        WritePlan(64, nothing),
        None,
        None,
        drafted.sequences,
        samples_changed=True,
        state_rows=None,
        guesses=drafted.guesses,
    )


def test_an_id_that_comes_back_with_another_output_is_not_confused(grammars: Grammars) -> None:
    grammar = grammars.add("choice", '["ab", "cd"]')
    row = grammars.row(grammar)
    row.append(token("a"))
    assert STOP not in allowed(grammars, row)
    other = grammars.row(grammar)
    other.id = row.id
    other.append(token("c"))
    assert allowed(grammars, other) == {token("d")}


def test_other_rows_do_not_notice(grammars: Grammars) -> None:
    def plain() -> list[BatchSequence]:
        variants: list[dict[str, Any]] = [
            {"seed": 2, "temperature": 0},
            {"seed": 3},
            {"seed": 4, "top_p": 0.7, "presence_penalty": 1.0},
            {"seed": 5, "bad_words": [[10, 11], [12]], "top_k": 40},
        ]
        return [grammars.row(0, **variant) for variant in variants]

    def steps(sampler: Sampler, rows: list[BatchSequence]) -> None:
        for step in range(20):
            ids, _ = sampler.sample(logits_for(rows), rows, changed=step == 0)
            for row, token in zip(rows, ids.tolist(), strict=True):
                row.append(token)

    grammar = grammars.add("json_schema", json.dumps(SCHEMA))
    alone, mixed = plain(), plain()
    steps(Sampler(V, CPU), alone)
    constrained = [grammars.row(grammar) for _ in range(3)]
    steps(
        Sampler(V, CPU, grammars.store),
        [constrained[0], *mixed[:2], constrained[1], *mixed[2:], constrained[2]],
    )
    assert [row.tokens for row in mixed] == [row.tokens for row in alone]


def test_after_the_end_only_stop_ids_follow(grammars: Grammars) -> None:
    """The engine plans a step ahead: a row that drew its stop token is asked for one more."""
    grammar = grammars.add("choice", '["a"]')
    row = grammars.row(grammar, stop_ids=pack_int32([STOP, 9, V + 5, -3]))
    row.append(token("a"))
    assert allowed(grammars, row) == {STOP, 9}
    row.append(9)
    assert allowed(grammars, row) == {STOP, 9}
    left = grammars.row(grammar, [token("b")])
    assert allowed(grammars, left) == {STOP}, "an output that is not the grammar's ends"


def test_an_output_that_nothing_may_end_is_free_once_it_is_complete(grammars: Grammars) -> None:
    row = grammars.row(grammars.add("choice", '["a"]'), stop_ids=b"")
    assert allowed(grammars, row) == {token("a")}
    row.append(token("a"))
    assert allowed(grammars, row) == set(range(V))


def test_a_grammar_wins_over_other_masks(grammars: Grammars) -> None:
    grammar = grammars.add("choice", '["a", "b"]')
    a, b = map(token, "ab")
    rows = [
        *(grammars.row(grammar, allowed_ids=pack_int32([b, 900])) for _ in range(20)),
        *(grammars.row(grammar, allowed_ids=pack_int32([900, 901])) for _ in range(20)),
        *(grammars.row(grammar, bad_words=[[a], [b]]) for _ in range(20)),
        *(grammars.row(grammar, bad_words=[[a]], allowed_ids=pack_int32([a, b])) for _ in range(20)),
        *(grammars.row(grammar, [a], min_tokens=5) for _ in range(20)),
    ]
    ids, _ = Sampler(V, CPU, grammars.store).sample(torch.zeros(len(rows), V), rows, changed=True)
    drawn = [set(ids[i : i + 20].tolist()) for i in range(0, len(rows), 20)]
    assert drawn == [{b}, {a, b}, {a, b}, {b}, {STOP}]


def test_a_model_with_more_ids_than_tokens_never_draws_them(tmp_path: Path) -> None:
    """Padding rows of an embedding; a vocabulary of single bytes, and one added token that is no byte's."""
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    small = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    small.pre_tokenizer, small.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    small.add_special_tokens(["<end>"])
    small.add_tokens([" é "])
    small.save(str(tmp_path / "tokenizer.json"))
    store = GrammarStore(tmp_path, 300)
    tiny = Grammars(store)
    end, added = len(alphabet), len(alphabet) + 1
    row = tiny.row(tiny.add("regex", "( |é|x)*"), stop_ids=pack_int32([end]))
    expected = {alphabet[symbol] for symbol in ("Ġ", "Ã", "x")} | {end, added}
    assert allowed(tiny, row, 300) == expected
    drawn, _ = Sampler(300, CPU, store).sample(torch.zeros(1, 300), [row], changed=True)
    assert int(drawn[0]) in expected
    store.close()


def test_forgotten_grammars_are_not_reported_and_not_followed(grammars: Grammars) -> None:
    grammar = grammars.begin("regex", "forgotten|soon")
    grammars.store.forget(grammar)
    after = grammars.begin("regex", "x")
    assert grammars.wait() == GrammarReady(after)
    row = grammars.row(grammar)
    with pytest.raises(PlanError, match="not compiled"):
        allowed(grammars, row)
    with pytest.raises(PlanError, match="this rank has none"):
        Sampler(V, CPU).sample(torch.zeros(1, V), [row], changed=True)


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    """Nothing is started before the first grammar."""
    before = len(psutil.Process().children())
    store = GrammarStore(tmp_path, V)
    assert not store.pending
    assert store.poll() == []
    assert len(psutil.Process().children()) == before
    assert "on this server" in Grammars(store).problem("regex", "a")
    store.close()
