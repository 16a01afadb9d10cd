"""Cuts of a session's history: text goes on as if the kept keys had been embedded anew (CachedAttention §3.4).

The judge is `transformers` with a cache of its own: keys and values of the uncut forward, of which the dropped
ones are removed and the others' keys are turned, in float64, to the positions at which they act now. The worker
touches no key. Its extents, its turned queries and its positions that go on counting must come to the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from worker.checkpoints import ALIKE, MODELS, RELATIVE, Models, make_checkpoint, transformers_model, with_kernels
from worker.cuts import (
    CHUNK,
    REPORT_ALL,
    CutSession,
    Logprobs,
    Turn,
    cut_on_rank,
    draw,
    load,
    make_driver,
    make_session,
    reported,
    sampled_token,
)
from worker.ranks import run_ranks

from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.messages import Fork, Join
from trunkline.worker.model.families import read_model_config

TOLERANCE = 1e-4
MEAN_INT8 = 0.04
"""That keys of rounded rows are turned exactly is tested in `kernels/test_family_shapes.py`."""
FAR = 2_000_000
"""A history index far beyond any model's maximum."""
PAIRS_BESIDE = ("glm", "glm4", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "cohere")
"""Families that turn neighbouring dimensions together; others, those half of the rotated part apart."""


class Judge:
    """`transformers` over KV whose rotations are embedded anew after each cut."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers_model(folder)
        self._frequencies = _frequencies(self._model)
        self._rotated_at: list[int] = []
        """Position of each cached key's rotation."""
        self._keys: list[Tensor] = []
        """By layer, `[1, kv_heads, tokens, head_dim]`, as they were computed; of latent attention the latents."""
        self._values: list[Tensor] = []
        """Of latent attention the rotary parts of keys."""
        self._has_latents = hasattr(self._model.config, "kv_lora_rank")

    def read(self, tokens: list[int]) -> Logprobs:
        """What comes after each of the next tokens."""
        cache, start = DynamicCache(), len(self._rotated_at)
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            if self._has_latents:
                cache.update(keys, self._embedded(layer, values), layer)
            else:
                cache.update(self._embedded(layer, keys), values, layer)
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]
        made: list[Any] = list(cache.layers)
        new = [(layer.keys[:, :, start:], layer.values[:, :, start:]) for layer in made]
        if not start:
            self._keys, self._values = [keys for keys, _ in new], [values for _, values in new]
        else:
            self._keys = [torch.cat((a, b), dim=2) for a, (b, _) in zip(self._keys, new, strict=True)]
            self._values = [torch.cat((a, b), dim=2) for a, (_, b) in zip(self._values, new, strict=True)]
        self._rotated_at += range(start, start + len(tokens))
        logprobs: Logprobs = logits.log_softmax(dim=-1).numpy()
        return logprobs

    def cut(self, *ranges: tuple[int, int]) -> None:
        """Drop what is seen at these places, which count what is still there."""
        dropped = {index for start, stop in ranges for index in range(start, stop)}
        kept = [index for index in range(len(self._rotated_at)) if index not in dropped]
        self._rotated_at = [self._rotated_at[index] for index in kept]
        self._keys = [keys[:, :, kept] for keys in self._keys]
        self._values = [values[:, :, kept] for values in self._values]

    def mislead(self, first: int, by: int) -> None:
        """Have keys from a place on embedded at wrong positions."""
        self._rotated_at[first:] = [position - by for position in self._rotated_at[first:]]

    def _embedded(self, layer: int, keys: Tensor) -> Tensor:
        """Keys turned from the positions of their rotation to their places."""
        frequencies = self._frequencies[layer]
        if frequencies is None:
            return keys
        turn = torch.arange(len(self._rotated_at), dtype=torch.float64) - torch.tensor(self._rotated_at)
        angle = turn[:, None] * frequencies.double()
        half = len(frequencies)
        exact = keys.double()
        rotated, rest = exact[..., : 2 * half], exact[..., 2 * half :]
        beside = self._model.config.model_type in PAIRS_BESIDE
        a, b = (rotated[..., ::2], rotated[..., 1::2]) if beside else rotated.chunk(2, dim=-1)
        turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        parts = torch.stack(turned, dim=-1).flatten(-2) if beside else torch.cat(turned, dim=-1)
        return torch.cat((parts, rest), dim=-1).float()


def _frequencies(model: Any) -> list[Tensor | None]:
    """Of each layer, in `transformers`' own numbers."""
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    config = model.config
    if rotary is None or getattr(config, "alibi", False):
        return [None] * config.num_hidden_layers
    if hasattr(rotary, "inv_freq"):
        return [rotary.inv_freq] * config.num_hidden_layers
    return [getattr(rotary, f"{kind}_inv_freq") for kind in config.layer_types]


def check(judge: Judge, turn: Turn) -> None:
    tokens, logprobs = turn
    expected = judge.read(tokens)
    assert logprobs.shape == expected.shape
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=TOLERANCE)


def check_int8(judge: Judge, turn: Turn) -> None:
    """To the error of KV in 8 bits, in the mean: it may change which expert a token goes to."""
    tokens, logprobs = turn
    assert 1e-4 < np.abs(logprobs - judge.read(tokens)).mean() < MEAN_INT8


def cut_again_and_again(
    judge: Judge, session: CutSession, head: int, start: int, check: Callable[[Judge, Turn], None] = check
) -> None:
    """Turns, between them two cuts and the discard of two ranges; history goes on at `start` behind the head."""
    rng = np.random.default_rng(7)
    if head:
        check(judge, session.turn(draw(rng, head), 1))
        session.skip_to(start)
    check(judge, session.turn(draw(rng, 41), 5))
    session.cut((start, start + 13))
    judge.cut((head, head + 13))
    check(judge, session.turn(draw(rng, 9), 6))
    session.cut((start + 13, start + 29))
    judge.cut((head, head + 16))
    check(judge, session.turn(draw(rng, 3), 20))
    session.cut((start + 33, start + 38), (start + 44, start + 51))
    judge.cut((head + 4, head + 9), (head + 15, head + 22))
    check(judge, session.turn(draw(rng, 7), 5))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_latents_in_8_bits_move(kernels: str, models: Models) -> None:
    """As without rounding, to the error of 8 bits: a cut after the other adds nothing to it."""
    name = "deepseek-v3"
    runner = load(models(name), kernels=kernels, kv_dtype="int8")
    driver = make_driver(runner)
    for first, head, start in ((0, 0, 0), (0, 4, 4), (FAR, 0, FAR)):
        cut_again_and_again(Judge(models(name)), make_session(runner, driver, first), head, start, check_int8)


@with_kernels(RELATIVE, soak=ALIKE)
def test_the_next_tokens_see_kept_kv_at_its_new_place(name: str, kernels: str, models: Models) -> None:
    runner = load(models(name), kernels=kernels)
    driver = make_driver(runner)
    for head, start in ((0, 0), (4, 4)):
        session = make_session(runner, driver, start - head)
        cut_again_and_again(Judge(models(name)), session, head, start)


@with_kernels(["gqa", "pythia", "gemma3", "falcon-rw", "mpt-six-heads", "yarn-rope"])
def test_history_may_count_far_beyond_the_models_maximum(name: str, kernels: str, models: Models) -> None:
    runner = load(models(name), kernels=kernels)
    driver = make_driver(runner)
    for first, head, start in ((FAR, 0, FAR), (0, 4, FAR + 5), (0, 4, 2**31 - 200)):
        cut_again_and_again(Judge(models(name)), make_session(runner, driver, first), head, start)


@pytest.mark.parametrize(("name", "kernels"), [("gqa", "reference"), ("falcon-rw", "auto")])
def test_fifty_cuts_do_not_drift(name: str, kernels: str, models: Models) -> None:
    """What is kept loses nothing, however often what lies before it is dropped."""
    runner = load(models(name), kernels=kernels)
    judge, session = Judge(models(name)), make_session(runner, make_driver(runner))
    rng = np.random.default_rng(8)
    check(judge, session.turn(draw(rng, 40), 1))
    for index in range(50):
        session.cut((4 + 13 * index, 4 + 13 * (index + 1)))
        judge.cut((4, 17))
        check(judge, session.turn(draw(rng, 9), 4))


def test_the_judge_sees_a_place_that_is_one_off(folder: Path) -> None:
    """Keys embedded one position beside their place lead to something else by far more than the tolerance."""
    runner = load(folder)
    judge, session = Judge(folder), make_session(runner, make_driver(runner))
    rng = np.random.default_rng(9)
    check(judge, session.turn(draw(rng, 40), 1))
    session.cut((4, 20))
    judge.cut((4, 20))
    judge.mislead(first=4, by=1)
    tokens, logprobs = session.turn(draw(rng, 9), 4)
    assert np.abs(logprobs - judge.read(tokens)).max() > 100 * TOLERANCE


@with_kernels(["gqa"])
def test_samples_of_a_cut_session_read_its_kv_together(name: str, kernels: str, folder: Path) -> None:
    """A fork keeps its parent's extents; the rows share the items of shifted blocks."""
    runner = load(folder, kernels=kernels)
    driver = make_driver(runner)
    judge, session = Judge(folder), make_session(runner, driver)
    rng = np.random.default_rng(10)
    check(judge, session.turn(draw(rng, 70), 1))
    session.cut((20, 33))
    judge.cut((20, 33))
    session.forget_output()
    prompt, parent, child = draw(rng, 13), driver.take_id(), driver.take_id()
    table, extents = session.layout(session.end + len(prompt) + 8)
    first, full = session.seen, len(table) - 1
    stop = first + len(prompt)
    own = driver.take_blocks(1)
    join = Join(parent, pack_int32(prompt), first, stop, pack_int32(table), REPORT_ALL, pack_int32(extents))
    fork = Fork(parent, child, pack_int32(table[:full] + own), seed=1)
    prefill = pack_int32(np.array([[parent, first, len(prompt), first, 1]], dtype=np.int32))
    results = [driver.send(joins=[join], prefill=prefill, forks=[fork], rows=b"", runs=b"")]
    tail = (session.end + len(prompt)) % CHUNK
    assert 0 < tail <= CHUNK - 7, "the tail is begun, and holds all that is generated"
    copies = pack_int32(np.array([[table[full], own[0], 0, tail]], dtype=np.int32))
    runs = pack_int32(np.array([[0, 2, 0, full]], dtype=np.int32))
    runner.kernels.counters.reset()
    results.append(driver.send(copies=copies, rows=pack_int32([parent, child]), runs=runs))
    results += [driver.send() for _ in range(6)]
    once = 2 * sum(stop + step for step in range(1, 8))  # layers × what one row sees
    assert runner.kernels.counters.decode_tokens_read < 1.5 * once, "the rows read it once for both"
    tokens = prompt + [sampled_token(result) for result in results[:-1]]
    expected = judge.read(tokens)
    for sample in (0, 1):
        said = np.array([reported(result, parent)[sample - 2] for result in results])
        np.testing.assert_allclose(said, expected[len(prompt) - 1 :], rtol=0, atol=TOLERANCE)


@pytest.mark.processes
def test_ranks_cut_their_shards_alike(folder: Path) -> None:
    judge = Judge(folder)
    for turn in run_ranks(cut_on_rank, 2, folder)[0]:
        check(judge, turn)
        judge.cut((4, 25))


def test_what_depends_on_the_length_or_is_learned_does_not_shift(models: Models, tmp_path: Path) -> None:
    """A scaling that changes with the length is refused at load, learned positions are known not to shift."""
    for name in MODELS:
        assert read_model_config(models(name)).positions_shift == (name in RELATIVE), name
    path = make_checkpoint(tmp_path / "model", "codellama") / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}))
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        read_model_config(path.parent)
