"""Prompts with modules against a block-masked forward of the same tokens at the same positions (Prompt Cache §3).

What is read from modules' KV, computed text by text, in whatever order and at whatever place, is what one forward
says in which every token sees what the specification lets it see. Every token's distribution is compared. The
theorems are those of the specification of prompts with modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from worker.block_masks import BlockMaskedModel, TextJudge
from worker.checkpoints import ALIKE, MODELS, RELATIVE, Models, transformers_logits, with_kernels
from worker.cuts import CHUNK, Logprobs, draw, load, make_driver, reported, sampled_token
from worker.driver import Driver
from worker.module_driver import ModulePrompt, Modules, Part, SentSequence, Text
from worker.module_prompts import (
    chain_prompt,
    chain_texts,
    modules_on_rank,
    moved_prompt,
    random_prompt,
    random_texts,
)
from worker.ranks import run_ranks

from trunkline.kvstore.chunks import blocks_for, pack_int32
from trunkline.worker.messages import Fork
from trunkline.worker.runner import Runner

TOLERANCE = 1e-4
POSITIONS = ("gqa", "gpt2", "falcon-rw", "mpt", "gemma3")
"""Rotary, learned and linear positions, windows."""


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


@with_kernels(MODELS, soak=ALIKE)
def test_cached_texts_are_a_masked_forward(name: str, kernels: str, models: Models) -> None:
    """Several prompts of one schema side by side, their rows sharing its blocks (theorem 4)."""
    # `transformers` scales Llama 4's queries by the number of tokens before them, whatever their positions are.
    folder = models(name, attn_temperature_tuning=False) if name == "llama4" else models(name)
    runner = load(folder, kernels=kernels)
    model = BlockMaskedModel(folder)
    for seed, piece in enumerate((7, 100)):
        rng = np.random.default_rng(seed)
        modules, encoded = make_modules(runner, random_texts(rng, 7), piece)
        prompts = [random_prompt(rng, modules.texts) for _ in range(3)]
        modules.run(prompts, 6)
        for prompt in prompts:
            check(TextJudge(model, modules), prompt, encoded)


@with_kernels(RELATIVE, soak=ALIKE)
def test_texts_that_see_only_themselves_act_at_any_place(name: str, kernels: str, models: Models) -> None:
    """Moved by a shift, exactly; even twice in one prompt (theorem 4, `encode_scope="self"`)."""
    rng = np.random.default_rng(3)
    texts = [Text(draw(rng, count), int(rng.integers(0, 40))) for count in (5, 21, 1, 16)]
    modules, encoded = make_modules(load(models(name), kernels=kernels), texts)
    prompts = [moved_prompt(rng, texts) for _ in range(3)]
    modules.run(prompts, 6)
    for prompt in prompts:
        check(TextJudge(BlockMaskedModel(models(name)), modules), prompt, encoded)


@with_kernels(MODELS, soak=ALIKE)
def test_one_chain_of_everything_is_a_plain_prefill(name: str, kernels: str, models: Models) -> None:
    """Theorem 1: each text sees all before it, nothing is left out, so nothing is masked."""
    rng = np.random.default_rng(5)
    modules, encoded = make_modules(load(models(name), kernels=kernels), chain_texts(rng))
    prompt = chain_prompt(rng, modules.texts)
    modules.run([prompt], 9)
    check_plain(models(name), modules.texts, encoded, prompt)


@with_kernels(POSITIONS)
def test_the_order_of_modules_does_not_matter(name: str, kernels: str, models: Models) -> None:
    """Theorem 2: of the block table, and so of the prompt's references."""
    rng = np.random.default_rng(6)
    modules, _ = make_modules(load(models(name), kernels=kernels), random_texts(rng, 8))
    prompt = random_prompt(rng, modules.texts)
    orders = [rng.permutation(len(prompt.parts)).tolist() for _ in range(5)]
    assert len(set(map(tuple, orders))) > 2
    others = [ModulePrompt([prompt.parts[index] for index in order], prompt.runs) for order in orders]
    modules.run([prompt], 6)
    modules.run(others, 6)
    for other in others:
        assert other.output == prompt.output
        np.testing.assert_allclose(other.rows, prompt.rows, rtol=0, atol=1e-5)


@pytest.mark.processes
def test_ranks_read_their_shards_alike(models: Models) -> None:
    """The three theorems with two ranks."""
    folders = [models(name) for name in ("gqa", "gpt2", "mpt")]
    for folder, said in zip(folders, run_ranks(modules_on_rank, 2, folders)[0], strict=True):
        texts, chain, encoded, prompts, plain = said
        modules = Modules(Driver(lambda _: None, num_blocks=0, chunk_size=CHUNK), texts)
        for prompt, reordered in zip(prompts[:3], prompts[3:], strict=True):
            check(TextJudge(BlockMaskedModel(folder), modules), prompt, encoded[0])
            assert reordered.output == prompt.output
            np.testing.assert_allclose(reordered.rows, prompt.rows, rtol=0, atol=1e-5)
        check_plain(folder, chain, encoded[1], plain)


@pytest.mark.parametrize(("name", "kernels"), [*((name, "auto") for name in POSITIONS), ("gqa", "reference")])
def test_a_prompt_goes_on_from_any_own_token(name: str, kernels: str, models: Models) -> None:
    """As after a preemption: what was computed of the own tokens is kept, in whichever run it ends."""
    rng = np.random.default_rng(8)
    modules, _ = make_modules(load(models(name), kernels=kernels), random_texts(rng, 8))
    prompt = random_prompt(rng, modules.texts)
    modules.run([prompt], 4)
    rows, output = np.array(prompt.rows), prompt.output
    assert len(prompt.runs) > 3
    for skip in range(len(prompt.own)):
        modules.resume(prompt, skip, 4)
        assert prompt.output == output
        np.testing.assert_allclose(prompt.rows, rows[skip:], rtol=0, atol=1e-5)


@with_kernels(["gqa"])
def test_samples_of_a_prompt_keep_its_layout(name: str, kernels: str, folder: Path) -> None:
    """A fork reads the modules and the full own blocks of its parent; its tail is a copy."""
    rng = np.random.default_rng(10)
    modules, _ = make_modules(load(folder, kernels=kernels), random_texts(rng, 6))
    prompt = random_prompt(rng, modules.texts)
    prompt.runs[-1] = (prompt.runs[-1][0], draw(rng, 2 * CHUNK + 3))
    modules.run([prompt], 5)
    rows, output, driver = np.array(prompt.rows), prompt.output, modules.driver
    sequence, child, own = SentSequence(modules, prompt), driver.take_id(), len(prompt.own)
    table = sequence.table[: len(sequence.table) - blocks_for(own + 5, CHUNK) + own // CHUNK]
    tail, copy = prompt.blocks[own // CHUNK], driver.take_blocks(1)[0]
    assert own % CHUNK + 5 <= CHUNK, "the tail is begun, and holds all that is generated"
    fork = Fork(sequence.id, child, pack_int32([*table, copy]), seed=1)
    entries = pack_int32(np.array([sequence.entry(1000)], dtype=np.int32))
    results = [driver.send(joins=[sequence.join], prefill=entries, forks=[fork], rows=b"", runs=b"")]
    copies = pack_int32(np.array([[tail, copy, 0, own % CHUNK]], dtype=np.int32))
    runs = pack_int32(np.array([[0, 2, 0, len(table)]], dtype=np.int32))
    results.append(driver.send(copies=copies, rows=pack_int32([sequence.id, child]), runs=runs))
    results += [driver.send() for _ in range(3)]
    assert [sampled_token(result) for result in results] == output
    for sample in (0, 1):
        said = np.array([reported(result, sequence.id)[sample - 2] for result in results])
        np.testing.assert_allclose(said, rows[own - 1 :], rtol=0, atol=1e-5)


def test_the_judge_sees_a_place_that_is_one_off(folder: Path) -> None:
    """A module one position beside its place, or a token more that is seen, is far off."""
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
