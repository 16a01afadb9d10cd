"""Sampling: noise, distribution, penalties, limits, log-probabilities, independence of the batch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trunkline.kernels.reference_sampling import first_argmax, gumbel, token_keys
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.messages import Join, Sampling
from trunkline.worker.sampling.sampler import LOGPROB_MIN, Sampler, is_plain_greedy

V = 50


def sequence(prompt: list[int], output: list[int], **sampling: Any) -> BatchSequence:
    join = Join(1, pack_int32(prompt + output), 0, len(prompt), pack_int32([0]), Sampling(**sampling))
    return BatchSequence(join)


def draw(logits: Tensor, samples: list[BatchSequence]) -> list[int]:
    sampler = Sampler(logits.shape[1], torch.device("cpu"))
    ids, _ = sampler.sample(logits.clone(), samples, changed=True)
    found: list[int] = ids.tolist()
    return found


def test_noise_is_a_function_of_seed_index_and_token() -> None:
    seeds, index = torch.tensor([5, -1, 5]), torch.tensor([0, 3, 1])
    noise = gumbel(seeds, index, token_keys(torch.arange(V)))
    alone = gumbel(seeds[1:2], index[1:2], token_keys(torch.tensor([[7, 3]])))
    assert torch.equal(alone[0], noise[1, [7, 3]])
    assert not torch.equal(noise[0], noise[2])
    # Against plain integers: streams must go on with the same noise in another version, on another machine.
    for row, token in ((0, 0), (1, 7), (2, 49)):
        expected = plain_gumbel(int(seeds[row]), int(index[row]), token)
        assert float(noise[row, token]) == pytest.approx(expected, rel=1e-12)


def plain_gumbel(seed: int, index: int, token: int) -> float:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    row = mix((mix(seed % 2**64) + (index + 1) * golden) % 2**64)
    bits = mix(row ^ mix((token + 1) * golden % 2**64)) >> 11
    return -math.log(-math.log((bits + 0.5) / 2**53))


def test_noise_statistics() -> None:
    """Mean and variance of Gumbel noise, and no correlation along seeds, indices or tokens."""
    keys = token_keys(torch.arange(1000))
    steps = gumbel(torch.full((300,), 42), torch.arange(300), keys)
    seeds = gumbel(torch.arange(300), torch.zeros(300, dtype=torch.int64), keys)
    for noise in (steps, seeds):
        uniform = torch.exp(-torch.exp(-noise))
        counts = torch.histc(uniform, bins=100, min=0, max=1)
        chi_square = float(((counts - 3000) ** 2 / 3000).sum())
        assert 50 < chi_square < 160, "99 degrees of freedom"
        assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
        assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
        for a, b in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])):
            correlation = np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1]
            assert abs(correlation) < 0.01


def test_distribution_follows_the_softmax() -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(1)) * 1.5
    draws = 20_000
    sampler = Sampler(V, torch.device("cpu"))
    rows = [sequence([1], [], temperature=0.8, seed=seed) for seed in range(draws)]
    ids, _ = sampler.sample(logits.repeat(draws, 1), rows, changed=True)
    expected = (logits[0] / 0.8).softmax(-1) * draws
    found = torch.bincount(ids, minlength=V)
    large = expected > 20
    chi_square = float(((found - expected) ** 2 / expected)[large].sum())
    freedom = int(large.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_rows_do_not_influence_each_other() -> None:
    torch.manual_seed(3)
    variants: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 2**64 - 1},
        {"temperature": 0.7, "seed": 4, "top_k": 5},
        {"temperature": 1.3, "seed": 5, "top_p": 0.6},
        {"temperature": 1.3, "seed": 5, "min_p": 0.2},
        {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": {3: 9.0}},
        {"temperature": 1.0, "seed": 9, "bad_words": [[4, 7], [11]], "min_tokens": 5, "stop_ids": pack_int32([2])},
        {"temperature": 1.0, "seed": 10, "allowed_ids": pack_int32([1, 5, 30]), "presence_penalty": 0.5},
    ]
    rows = [sequence([1, 2, 3], [4, 4], **variant) for variant in variants]
    logits = torch.randn(len(rows), V)
    together = draw(logits, rows)
    for i, row in enumerate(rows):
        assert draw(logits[i : i + 1], [row]) == together[i : i + 1], variants[i]
    order = torch.randperm(len(rows)).tolist()
    assert draw(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_ties_take_the_lowest_id() -> None:
    logits = torch.zeros(3, V)
    logits[1, [9, 30]] = 2.0
    logits[2] = float("nan")
    assert first_argmax(logits).tolist() == [0, 9, 0]


@pytest.mark.parametrize(
    "limits",
    [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 10, "top_p": 0.8, "min_p": 0.05}, {"top_p": 0.0}],
)
def test_limits_allow_exactly_the_right_tokens(limits: dict[str, Any]) -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(2)) * 2
    order = sorted(range(V), key=lambda token: -float(logits[0, token]))
    order = order[: limits.get("top_k", V)]
    probs = logits[0, order].double().softmax(-1).tolist()
    allowed: list[int] = []
    mass = 0.0
    for token, prob in zip(order, probs, strict=True):
        if allowed and (mass >= limits.get("top_p", 1.0) or prob < limits.get("min_p", 0.0) * probs[0]):
            break
        allowed.append(token)
        mass += prob
    rows = [sequence([1], [], temperature=1.0, seed=seed, **limits) for seed in range(4000)]
    drawn = draw(logits.repeat(4000, 1), rows)
    assert set(drawn) <= set(allowed)
    if len(allowed) <= 5:
        assert set(drawn) == set(allowed)


def test_penalties_and_bias_against_a_naive_version_over_steps() -> None:
    torch.manual_seed(4)
    rows = [
        sequence([1, 2, 3, 3], [4], temperature=0, logprobs=V, repetition_penalty=1.7),
        sequence([1, 2], [7, 7, 8], temperature=0, logprobs=V, presence_penalty=0.9, frequency_penalty=0.4),
        sequence([5], [], temperature=0, logprobs=V, logit_bias={11: 3.0, 5: -100.0, 999: 1.0}),
        sequence([6], [], temperature=0),
    ]
    sampler = Sampler(V, torch.device("cpu"))
    for step in range(6):
        logits = torch.randn(4, V) * 2
        expected = torch.stack([naive(logits[i].double(), row) for i, row in enumerate(rows)])
        ids, reports = sampler.sample(logits.float(), rows, changed=step == 0)
        assert ids.tolist() == expected.argmax(-1).tolist()
        assert reports is not None
        assert sorted(reports) == [0, 1, 2]
        for i, report in reports.items():
            log_probs = expected[i].log_softmax(-1)
            token = int(ids[i])
            assert report.token_logprob == pytest.approx(float(log_probs[token]), abs=1e-5)
            tops = unpack_int32(report.top_ids).tolist()
            values = np.frombuffer(report.top_logprobs, dtype="<f4")
            assert tops[0] == token
            np.testing.assert_allclose(values, log_probs[tops].numpy(), atol=1e-5)
            assert (np.diff(values) <= 0).all()
        for row, token in zip(rows, ids.tolist(), strict=True):
            row.append(token)


def naive(logits: Tensor, row: BatchSequence) -> Tensor:
    """One row, token by token."""
    p, tokens = row.sampling, list(row.tokens)
    output = tokens[row.prompt_len :]
    result = logits.clone()
    for token, bias in p.logit_bias.items():
        if token < V:
            result[token] += bias
    for token in set(tokens):
        value = float(result[token])
        result[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
    for token in set(output):
        result[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return result


def test_logprobs_zero_reports_only_the_sampled_token() -> None:
    sampler = Sampler(V, torch.device("cpu"))
    row = sequence([1], [], temperature=1.0, seed=1, logprobs=0)
    logits = torch.randn(1, V)
    ids, reports = sampler.sample(logits.clone(), [row], changed=True)
    assert reports is not None
    assert reports[0].top_ids == b""
    assert reports[0].token_logprob == pytest.approx(float(logits[0].log_softmax(-1)[ids[0]]), abs=1e-5)


def test_stop_ids_are_not_drawn_before_min_tokens() -> None:
    row = sequence([7, 7], [], temperature=0, min_tokens=3, stop_ids=pack_int32([4, 5]))
    logits = torch.zeros(1, V)
    logits[0, [4, 5, 9]] = torch.tensor([3.0, 2.0, 1.0])
    sampler, drawn = Sampler(V, torch.device("cpu")), []
    for step in range(5):
        ids, _ = sampler.sample(logits.clone(), [row], changed=step == 0)
        drawn.append(int(ids[0]))
        row.append(drawn[-1])
    assert drawn == [9, 9, 9, 4, 4]


def test_bad_words_are_never_completed() -> None:
    """Single ids, sequences, sequences that begin in the prompt or overlap themselves."""
    bad = [[9], [2, 3], [1, 2, 4], [6, 6, 6], [], [8, 999]]
    row = sequence([5, 1, 2], [], temperature=1.0, seed=3, bad_words=bad)
    logits = torch.full((1, V), -8.0)
    logits[0, :10] = 0.0
    sampler = Sampler(V, torch.device("cpu"))
    ids, _ = sampler.sample(logits.clone(), [row], changed=True)
    assert int(ids[0]) not in (3, 4, 9), "2 is the prompt's last token"
    row.append(int(ids[0]))
    for _ in range(600):
        ids, _ = sampler.sample(logits.clone(), [row], changed=False)
        row.append(int(ids[0]))
    tokens = row.tokens.tolist()
    for word in bad:
        found = [i for i in range(3, len(tokens)) if word and tokens[i + 1 - len(word) : i + 1] == word]
        assert found == [], word
    pairs = set(itertools.pairwise(tokens))
    assert {(2, 4), (6, 6), (5, 3)} <= pairs, "what is not forbidden is drawn"


def test_a_bad_word_that_lies_wholly_before_the_next_token_forbids_nothing() -> None:
    row = sequence([1, 2, 3], [], temperature=0, bad_words=[[1, 2], [3, 4, 5]])
    logits = torch.zeros(1, V)
    logits[0, 2] = 2.0
    assert draw(logits, [row]) == [2]


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({"allowed_ids": [4], "bad_words": [[4]]}, {4}),
        ({"allowed_ids": [4, 5], "bad_words": [[4]]}, {5}),
        ({"allowed_ids": [4], "stop_ids": [4], "min_tokens": 2}, {4}),
        ({"allowed_ids": [4, 6], "stop_ids": [4], "min_tokens": 2, "bad_words": [[6]]}, {6}),
        ({"allowed_ids": [V, V + 7]}, set(range(V))),
        ({"bad_words": [[i] for i in range(V)]}, set(range(V))),
    ],
)
def test_of_masks_that_contradict_each_other_the_later_is_left_out(
    masks: dict[str, Any], expected: set[int]
) -> None:
    packed = {k: pack_int32(v) if k in ("allowed_ids", "stop_ids") else v for k, v in masks.items()}
    rows = [sequence([1], [], temperature=2.0, seed=seed, **packed) for seed in range(800)]
    assert set(draw(torch.zeros(800, V), rows)) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3e38, 3e38])
@pytest.mark.parametrize(
    "method",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.01, "seed": 1, "top_p": 0.5, "min_p": 0.1, "top_k": 3, "repetition_penalty": 2.0},
    ],
)
def test_logits_that_are_no_numbers_never_lead_outside_the_mask(value: float, method: dict[str, Any]) -> None:
    masked = sequence([1, 4], [], **method, allowed_ids=pack_int32([4, 8]))
    drawn = draw(torch.full((2, V), value), [masked, sequence([1], [], **method)])
    assert drawn[0] in (4, 8)
    assert 0 <= drawn[1] < V
    logits = torch.zeros(1, V)
    logits[0, [4, 8]] = value
    assert draw(logits, [masked])[0] in (4, 8)


def test_masks_come_after_the_bias_and_show_in_log_probabilities() -> None:
    row = sequence([1], [], temperature=0, logit_bias={9: 100.0}, bad_words=[[9]], logprobs=V)
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(5))
    _, reports = Sampler(V, torch.device("cpu")).sample(logits.clone(), [row], changed=True)
    assert reports is not None
    logits[0, 9] = -math.inf
    tops = unpack_int32(reports[0].top_ids)
    values = np.frombuffer(reports[0].top_logprobs, dtype="<f4")
    np.testing.assert_allclose(values[:-1], logits[0].log_softmax(-1).numpy()[tops[:-1]], atol=1e-5)
    assert tops[-1] == 9
    assert values[-1] == LOGPROB_MIN, "JSON has no infinity"


def test_plain_greedy_is_recognised() -> None:
    assert is_plain_greedy([sequence([1], [], temperature=0)])
    assert is_plain_greedy([sequence([1], [3, 4], temperature=0, min_tokens=2, stop_ids=pack_int32([4]))])
    for other in (
        {"temperature": 1.0},
        {"logprobs": 0},
        {"logit_bias": {1: 1.0}},
        {"presence_penalty": 1.0},
        {"min_tokens": 1, "stop_ids": pack_int32([4])},
        {"bad_words": [[1]]},
        {"bad_words": [[1, 2]]},
        {"allowed_ids": pack_int32([1])},
        {"grammar": 1},
    ):
        assert not is_plain_greedy([sequence([1], [], **{"temperature": 0, **other})])
