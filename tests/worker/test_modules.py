"""Prompts with modules against a block-masked forward of the same tokens at the same positions (Prompt Cache §3).

What is read from modules' KV, computed text by text, in whatever order and at whatever place, is what one forward
says in which every token sees what the specification lets it see. Every token's distribution is compared. The
theorems are those of the specification of prompts with modules.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from worker.block_masks import BlockMaskedModel, TextJudge
from worker.checkpoints import VARIANTS, make_checkpoint, make_variant, transformers_logits
from worker.cuts import CHUNK, Logprobs, draw, load, make_driver, reported, sampled_token
from worker.driver import Driver
from worker.module_driver import ModulePrompt, Modules, Part, Text
from worker.module_prompts import chain_prompt, chain_texts, moved_prompt, random_prompt, random_texts
from worker.test_cuts import KERNELS, RELATIVE, ROPES, TOLERANCE
from worker.test_equality import LAYOUTS
from worker.test_parallel import run_ranks

from trunkline.kernels.native import library
from trunkline.kvstore.extents import blocks_for
from trunkline.kvstore.int32_codec import pack_int32
from trunkline.worker.messages import Fork
from trunkline.worker.runner import Runner

NATIVE = pytest.mark.skipif(library() is None, reason="the compiled kernels are not installed")
POSITIONS = 256
"""Room in models that have a maximum."""
KINDS = ("gqa", "gpt2", "opt", "falcon-rw", "mpt", "gemma3")
"""Rotary, learned and linear positions, windows."""


def families(*names: str) -> pytest.MarkDecorator:
    """All these with the compiled kernels, one of each kind with the reference."""
    native = [pytest.param(name, "cpu", marks=NATIVE) for name in names]
    return pytest.mark.parametrize(
        ("name", "kernels"), [*native, *((name, "reference") for name in KINDS if name in names)]
    )


def make_model(folder: Path, name: str) -> Path:
    if name in LAYOUTS:
        return make_checkpoint(folder, **LAYOUTS[name])
    maximum = {"gpt2": "n_positions", "opt": "max_position_embeddings", "mpt": "max_seq_len"}
    field = maximum.get(name.split("-")[0])
    return make_variant(folder, name, **({field: POSITIONS} if field else {}))


def near(actual: Logprobs, expected: Logprobs) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def check(judge: TextJudge, prompt: ModulePrompt, encoded: Mapping[int, Logprobs]) -> None:
    texts, own = judge.read(prompt)
    near(np.array(prompt.rows), own)
    for index, logprobs in texts:
        near(encoded[index], logprobs)


def check_plain(folder: Path, texts: list[Text], encoded: Mapping[int, Logprobs], prompt: ModulePrompt) -> None:
    tokens = [token for text in texts for token in text.tokens] + prompt.own + prompt.output[:-1]
    expected = transformers_logits(folder, tokens).log_softmax(dim=-1).numpy()
    near(np.concatenate([*encoded.values(), np.array(prompt.rows)]), expected)


def make_modules(runner: Runner, texts: list[Text], piece: int = 7) -> tuple[Modules, dict[int, Logprobs]]:
    """With all texts computed, and what the model said meanwhile."""
    driver = make_driver(runner)
    driver.step = runner.steps
    modules = Modules(driver, texts, piece)
    return modules, {index: modules.encode(index) for index in range(len(texts))}


@families(*VARIANTS, "gqa", *ROPES)
def test_cached_texts_are_a_masked_forward(name: str, kernels: str, tmp_path: Path) -> None:
    """Several prompts of one schema side by side, their rows sharing its blocks (theorem 4)."""
    folder = make_model(tmp_path / name, name)
    runner = load(folder, kernels=kernels)
    assert runner.kernels.name == kernels
    model = BlockMaskedModel(folder)
    for seed, piece in enumerate((7, 100)):
        rng = np.random.default_rng(seed)
        modules, encoded = make_modules(runner, random_texts(rng, 7), piece)
        prompts = [random_prompt(rng, modules.texts) for _ in range(3)]
        modules.run(prompts, 6)
        for prompt in prompts:
            check(TextJudge(model, modules), prompt, encoded)


@families(*RELATIVE, "gqa", *ROPES)
def test_texts_that_see_only_themselves_act_at_any_place(name: str, kernels: str, tmp_path: Path) -> None:
    """Moved by a shift, exactly; even twice in one prompt (theorem 4, `encode_scope="self"`)."""
    folder = make_model(tmp_path / name, name)
    runner = load(folder, kernels=kernels)
    rng = np.random.default_rng(3)
    texts = [Text(draw(rng, count), int(rng.integers(0, 40))) for count in (5, 21, 1, 16)]
    modules, encoded = make_modules(runner, texts)
    prompts = [moved_prompt(rng, texts) for _ in range(3)]
    modules.run(prompts, 6)
    for prompt in prompts:
        check(TextJudge(BlockMaskedModel(folder), modules), prompt, encoded)


@families(*VARIANTS, "gqa", *ROPES)
def test_one_chain_of_everything_is_a_plain_prefill(name: str, kernels: str, tmp_path: Path) -> None:
    """Theorem 1: each text sees all before it, nothing is left out, so nothing is masked."""
    folder = make_model(tmp_path / name, name)
    rng = np.random.default_rng(5)
    modules, encoded = make_modules(load(folder, kernels=kernels), chain_texts(rng))
    prompt = chain_prompt(rng, modules.texts)
    modules.run([prompt], 9)
    check_plain(folder, modules.texts, encoded, prompt)


@families(*KINDS)
def test_the_order_of_modules_does_not_matter(name: str, kernels: str, tmp_path: Path) -> None:
    """Theorem 2: of the block table, and so of the prompt's references."""
    rng = np.random.default_rng(6)
    runner = load(make_model(tmp_path / name, name), kernels=kernels)
    modules, _ = make_modules(runner, random_texts(rng, 8))
    prompt = random_prompt(rng, modules.texts)
    orders = [rng.permutation(len(prompt.parts)).tolist() for _ in range(5)]
    assert len(set(map(tuple, orders))) > 2
    others = [ModulePrompt([prompt.parts[index] for index in order], prompt.runs) for order in orders]
    modules.run([prompt], 6)
    modules.run(others, 6)
    for other in others:
        assert other.output == prompt.output
        np.testing.assert_allclose(other.rows, prompt.rows, rtol=0, atol=1e-5)


def test_ranks_read_their_shards_alike(tmp_path: Path) -> None:
    """The three theorems with two ranks."""
    folders = [make_model(tmp_path / name, name) for name in ("gqa", "gpt2", "mpt")]
    assert run_ranks("module_rank.py", 2, tmp_path, *map(str, folders)) == [0, 0]
    for folder in folders:
        texts, chain, encoded, prompts, plain = pickle.loads((tmp_path / f"{folder.name}.pickle").read_bytes())
        modules = Modules(Driver(lambda _: None, num_blocks=0, chunk_size=CHUNK), texts)
        for prompt, reordered in zip(prompts[:3], prompts[3:], strict=True):
            check(TextJudge(BlockMaskedModel(folder), modules), prompt, encoded[0])
            assert reordered.output == prompt.output
            np.testing.assert_allclose(reordered.rows, prompt.rows, rtol=0, atol=1e-5)
        check_plain(folder, chain, encoded[1], plain)


@families(*KINDS)
def test_a_prompt_goes_on_from_any_own_token(name: str, kernels: str, tmp_path: Path) -> None:
    """As after a preemption: what was computed of the own tokens is kept, in whichever run it ends."""
    rng = np.random.default_rng(8)
    modules, _ = make_modules(load(make_model(tmp_path / name, name), kernels=kernels), random_texts(rng, 8))
    prompt = random_prompt(rng, modules.texts)
    modules.run([prompt], 4)
    rows, output = np.array(prompt.rows), prompt.output
    assert len(prompt.runs) > 3
    for skip in range(len(prompt.own)):
        modules.resume(prompt, skip, 4)
        assert prompt.output == output
        np.testing.assert_allclose(prompt.rows, rows[skip:], rtol=0, atol=1e-5)


def test_rows_read_a_shared_module_once(tmp_path: Path) -> None:
    """Whatever its place in each row's table, and wherever it acts."""
    folder = make_model(tmp_path / "gqa", "gqa")
    runner = load(folder, kernels="reference")
    rng = np.random.default_rng(9)
    texts = [Text(draw(rng, count), position) for position, count in ((0, 20), (30, 40), (80, 7), (90, 33))]
    modules, _ = make_modules(runner, texts)
    prompts = []
    for order in ([0, 1, 2], [2, 1], [3, 0], [1, 3, 2, 0]):
        at = [0, *itertools.accumulate(len(texts[index].tokens) for index in order)]
        parts = [
            Part(index, [(0, len(texts[index].tokens))], place) for index, place in zip(order, at, strict=False)
        ]
        prompts.append(ModulePrompt(parts, [(at[-1], draw(rng, 5))]))
    runner.kernels.counters.reset()
    generated = 7
    modules.run(prompts, generated)
    shared = sum(len(text.tokens) for text in texts)
    own = [sum(len(prompt.own) + step for prompt in prompts) for step in range(1, generated)]
    layers = 2
    assert runner.kernels.counters.decode_tokens_read == layers * (shared * (generated - 1) + sum(own))


@KERNELS
def test_samples_of_a_prompt_keep_its_layout(kernels: str, tmp_path: Path) -> None:
    """A fork reads the modules and the full own blocks of its parent; its tail is a copy."""
    folder = make_model(tmp_path / "gqa", "gqa")
    rng = np.random.default_rng(10)
    modules, _ = make_modules(load(folder, kernels=kernels), random_texts(rng, 6))
    prompt = random_prompt(rng, modules.texts)
    prompt.runs[-1] = (prompt.runs[-1][0], draw(rng, 2 * CHUNK + 3))
    modules.run([prompt], 5)
    rows, output, driver = np.array(prompt.rows), prompt.output, modules.driver
    stay, child, own = modules.stay(prompt), driver.take_id(), len(prompt.own)
    table = stay.table[: len(stay.table) - blocks_for(own + 5, CHUNK) + own // CHUNK]
    tail, copy = prompt.blocks[own // CHUNK], driver.take_blocks(1)[0]
    assert own % CHUNK + 5 <= CHUNK, "the tail is begun, and holds all that is generated"
    fork = Fork(stay.id, child, pack_int32([*table, copy]), seed=1)
    entries = pack_int32(np.array([stay.entry(1000)], dtype=np.int32))
    results = [driver.send(joins=[stay.join], prefill=entries, forks=[fork], rows=b"", runs=b"")]
    copies = pack_int32(np.array([[tail, copy, 0, own % CHUNK]], dtype=np.int32))
    runs = pack_int32(np.array([[0, 2, 0, len(table)]], dtype=np.int32))
    results.append(driver.send(copies=copies, rows=pack_int32([stay.id, child]), runs=runs))
    results += [driver.send() for _ in range(3)]
    assert [sampled_token(result) for result in results] == output
    for sample in (0, 1):
        said = np.array([reported(result, stay.id)[sample - 2] for result in results])
        np.testing.assert_allclose(said, rows[own - 1 :], rtol=0, atol=1e-5)


def test_the_judge_sees_a_place_that_is_one_off(tmp_path: Path) -> None:
    """A module one position beside its place, or a token more that is seen, is far off."""
    folder = make_model(tmp_path / "gqa", "gqa")
    rng = np.random.default_rng(11)
    texts = [Text(draw(rng, 20), 0), Text(draw(rng, 12), 20, 0)]
    modules, _ = make_modules(load(folder), texts)
    prompt = ModulePrompt([Part(0, [(0, 20)], 0), Part(1, [(0, 5), (6, 12)], 20)], [(40, draw(rng, 9))])
    modules.run([prompt], 4)
    model = BlockMaskedModel(folder)
    near(np.array(prompt.rows), TextJudge(model, modules).read(prompt)[1])
    for part in (Part(1, [(0, 5), (6, 12)], 21), Part(1, [(0, 12)], 20)):
        wrong = ModulePrompt([prompt.parts[0], part], prompt.runs, output=prompt.output)
        off = np.abs(np.array(prompt.rows) - TextJudge(model, modules).read(wrong)[1]).max()
        assert off > 100 * TOLERANCE
