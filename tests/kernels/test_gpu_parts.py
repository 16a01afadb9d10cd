"""The parts of the GPU benchmark, executed with the emulated kernels at small sizes: what a visit would run."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_attention
import gpu_baselines
import gpu_checks
import gpu_prefill
import gpu_start
import gpu_tokens
import pytest
import torch
from gpu_attention import Cells, by_phase, measure_decode
from gpu_baselines import compare_all, compile_flashinfer
from gpu_cases import Cell
from gpu_device import Gpu, Output, Visit, measure_ceilings, times_by_kernel
from gpu_errors import LIMITS
from gpu_model import ModelShape, measure_model
from gpu_part import RUNS
from gpu_prefill import Prompt, measure_prefill
from gpu_sampling import WAYS, measure_sampling
from gpu_tiers import Copies, measure_tiers
from gpu_tokens import Engine, Trial
from gpu_visit import PARTS, Findings
from kernels.cuda_emulated import CXX
from kernels.emulated_gpu import EmulatedGpu

from trunkline.kernels.cuda_sampling import CudaSampling
from trunkline.kernels.library_attention import FLASH_ON_CPU
from trunkline.kvstore.chunk_format import KV_DTYPES

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")

SMALL = Cell(128, 64, 4, 2, batch=3, head_dim=64)
LONG = Visit(1e9)


def found_by(part: Callable[..., object], *arguments: Any, visit: Visit = LONG) -> Findings:
    stream = io.StringIO()
    part(EmulatedGpu(), Output(stream), visit, *arguments)
    found = Findings("part", "done", 0, "")
    found.read(stream.getvalue())
    return found


def metrics(found: Findings) -> set[str]:
    return {result["metric"] for result in found.results}


def test_every_part_has_something_to_run() -> None:
    assert list(RUNS) == [part.name for part in PARTS]


@pytest.mark.processes
def test_start_calls_every_op_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "random_trial", small_trial)
    found = found_by(gpu_start.start)
    called = {result["case"]["op"] for result in found.results}
    assert called == {
        *("decode_attention", "decode_attention_invariant", "prefill_attention", "replays_of_other_plans"),
        *("decode_attention_over_int8", "decode_attention_invariant_over_int8", "prefill_attention_over_int8"),
        *("replays_of_other_plans_over_int8", "write_kv_in_int8"),
        *("write_kv", "pool_moves", "rms_norm", "add_rms_norm", "linear"),
        *("edit_logits", "draw", "float8_by_row", "round_float8_by_row", "round_float8_by_group"),
        *(f"experts{form}{kind}" for form in FORMS for kind in ("", "_as_a_graph")),
        *("gated_silu", "gated_gelu", "gated_gelu_tanh"),
    }
    assert found.facts["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert "nvcc" in found.facts


FORMS = ("", "_by_own_products", "_int8", "_fp8", "_fp8_in_groups")
RANDOM_TRIAL = gpu_checks.random_trial


def small_trial(seed: int, head_dim: int, rows: int = 5) -> gpu_checks.Trial:
    return RANDOM_TRIAL(seed, head_dim, chunk=16, rows=min(rows, 5))


@pytest.mark.processes
def test_start_ends_at_the_first_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_start, "one_round", lambda *_: iter([("a", 0.0), ("b", 1.0), ("c", 0.0)]))
    stream = io.StringIO()
    with pytest.raises(ValueError, match=r"b is off by 1\.00e\+00"):
        gpu_start.start(EmulatedGpu(), Output(stream), LONG)
    assert '"op": "c"' not in stream.getvalue()


def test_checks_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round itself is executed by the part `start`."""
    monkeypatch.setattr(gpu_checks, "one_round", lambda *_: iter([("an op", 1e-6)]))
    monkeypatch.setattr(gpu_checks, "library_round", lambda *_: iter([("an op", 1e-5)]))
    found = found_by(gpu_checks.check_all, (64,), 1)
    assert {result["case"]["dtype"] for result in found.results} == {"float32", "bfloat16", "float16"}
    assert {result["value"] for result in found.results if result["metric"] == "relative_error_max"} == {1e-5}
    assert found.problems == []
    monkeypatch.setattr(gpu_checks, "one_round", lambda *_: iter([("an op", float("inf"))]))
    assert "an op in float16 is off by inf" in " ".join(found_by(gpu_checks.check_all, (64,), 1).problems)


def test_libraries_compute_what_the_reference_does() -> None:
    """What fails is told, with its own words, and the next one comes."""

    def fail(*_: object) -> Any:
        raise RuntimeError("no such head size")

    gpu, stream = EmulatedGpu(), io.StringIO()
    gpu.libraries = (replace(FLASH_ON_CPU, name="broken", call=fail), FLASH_ON_CPU)
    found = dict(gpu_checks.library_round(gpu, Output(stream), 1, torch.bfloat16, (64,)))
    assert list(found) == ["prefill_by_flash-on-cpu", "prefill_by_flash-on-cpu_over_fp8"]
    assert max(found.values()) <= LIMITS[torch.bfloat16]
    assert "prefill by broken, torch.bfloat16: no such head size" in stream.getvalue()
    gpu.libraries = (replace(FLASH_ON_CPU, dtypes=frozenset()),)
    assert not list(gpu_checks.library_round(gpu, Output(stream), 1, torch.bfloat16, (64,)))


@pytest.mark.area("gpu-kit")
def test_replays_of_other_plans_are_noticed_if_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay computes what its plan says; one that keeps the captured plan is far off."""
    trials = [small_trial(seed, 64) for seed in (0, 20, 40)]
    trials = [replace(trial, spec=trials[0].spec) for trial in trials]
    limit = LIMITS[torch.bfloat16]
    errors = [error for _, error in gpu_checks.check_replays(EmulatedGpu(), trials, torch.bfloat16)]
    assert len(errors) == 4
    assert max(errors) <= limit
    gpu = EmulatedGpu()
    kernels = gpu.kernels()
    monkeypatch.setattr(gpu, "kernels", lambda: kernels)
    graph = gpu.graph

    def graph_and_freeze(*arguments: Any) -> Any:
        made = graph(*arguments)
        monkeypatch.setattr(kernels, "prepare_replay", lambda *_: None)
        return made

    monkeypatch.setattr(gpu, "graph", graph_and_freeze)
    assert max(error for _, error in gpu_checks.check_replays(gpu, trials, torch.bfloat16)) > 10 * limit


def test_ceilings() -> None:
    found = found_by(measure_ceilings, 1 << 12, 16)
    assert [result["unit"] for result in found.results] == ["TB/s", "TB/s", "TFLOP/s"]


@pytest.mark.area("gpu-kit")
def test_decode_measures_tables_batches_and_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "PIECES", (1, 2))
    monkeypatch.setattr(gpu_attention, "PIECE_TOKENS", (64,))
    monkeypatch.setattr(gpu_attention, "PARTS", (1, 2))
    kept = tuple(replace(SMALL, kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES[1:])
    cells = Cells((SMALL,), (1, 2), SMALL, (replace(SMALL, head_dim=128),), kept, (SMALL,))
    found = found_by(measure_decode, cells)
    assert found.problems == []
    assert {result["case"]["heads"] for result in found.results} == {
        *("GQA 4/2", "GQA 4/2, int8 KV", "GQA 4/2, fp8 KV"),
    }
    assert {"ours", "each row alone", "planning, first call", "floor here"} <= metrics(found)
    assert {result["case"]["batch"] for result in found.results} == {1, 2, 3}
    variants = {result["case"].get("variant") for result in found.results}
    assert "1 pieces of 64 tokens or more" not in variants, "the same plan as with 2"
    assert {"2 pieces of 64 tokens or more", "2 stages", "3 stages for narrow pieces"} <= variants
    assert {"shared tokens in 1 pieces", "shared tokens in 2 pieces"} <= variants
    assert {"pieces in turns", "attention alone", "merge alone"} <= variants
    assert found_by(measure_decode, Cells((SMALL,), kept=()), visit=Visit(0.0)).results == []


def test_kernels_are_told_apart_by_name() -> None:
    events = [SimpleNamespace(key=k, self_device_time_total=v) for k, v in (("a", 20), ("b", 40), ("none", 0))]
    assert times_by_kernel(events, 10) == {"b": 4.0, "a": 2.0}
    times = {"void trunkline::attention_matrix_kernel<128>": 5.0, "merge_kernel<Fp16>": 2.0, "add": 1.0}
    assert by_phase(times) == {"attention alone": 5.0, "merge alone": 2.0, "other kernels": 1.0}


def test_peers_run_on_the_same_buffers() -> None:
    found = found_by(compare_all, (SMALL,))
    assert metrics(found) >= {"ours", "torch_sdpa"}
    assert found.problems == []


def test_a_peer_that_is_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(cell: Cell, sets: list[Any]) -> list[Any]:
        return [lambda each=each: each.out.fill_(1.0) for each in sets]

    monkeypatch.setattr(gpu_baselines, "BASELINES", {"wrong": wrong})
    found = found_by(compare_all, (SMALL,))
    assert "wrong" not in metrics(found)
    assert "is off by" in " ".join(found.notes)


def test_flashinfer_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page tables, lengths and layouts, checked against a stand-in that computes from them."""
    calls: list[str] = []

    class Wrapper:
        def __init__(self, *_: object, **options: object) -> None:
            calls.append("made")

        def plan(self, *arguments: Any, **_: object) -> None:
            self.arguments = arguments

        def run(self, q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            calls.append("run")
            assert (pool.shape[1], *pool.shape[3:]) == (2, 64, 128), "[pages, K and V, KV heads, page, head size]"
            return torch.zeros_like(q) if out is None else out.zero_()

    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchAttention", "MultiLevelCascadeAttentionWrapper")
    monkeypatch.setattr(gpu_baselines, "has_flashinfer", lambda: True)
    fake = SimpleNamespace(**dict.fromkeys(names, Wrapper))
    monkeypatch.setattr(importlib, "import_module", lambda _: fake)
    monkeypatch.setattr(gpu_baselines, "_DEVICE", torch.device("cpu"))
    found = found_by(compile_flashinfer)
    assert found.notes == []
    assert calls.count("run") == 3 * len(gpu_baselines.COMPILED)


def test_prefill_beside_others() -> None:
    found = found_by(measure_prefill, (Prompt(24, 0, 4, 2, 64), Prompt(8, 70, 4, 2, 64)))
    assert found.problems == []
    assert {"ours", "ours, rate", "flash-on-cpu, gathered and joined"} <= metrics(found)
    for missing in ("cuDNN", "FlashInfer"):
        assert any(missing in note for note in found.notes), "not here: said, and the others go on"
    assert len({result["case"]["context"] for result in found.results}) == 2


def test_flashinfers_prefill_is_left_out_where_it_would_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_prefill, "has_flashinfer", lambda: True)
    monkeypatch.setattr(gpu_prefill, "has_kernel", lambda beginning: False)
    found = found_by(measure_prefill, (Prompt(24, 0, 4, 2, 64),))
    assert [note for note in found.notes if "FlashInfer" in note] == [
        "FlashInfer was left out: its kernel for prefill is not compiled; part `compile` does that"
    ]
    monkeypatch.setattr(gpu_prefill, "has_kernel", lambda beginning: beginning == "single_prefill")
    found = found_by(measure_prefill, (Prompt(24, 0, 4, 2, 64),))
    assert any(note.startswith("prefill with FlashInfer at") for note in found.notes), "asked, and not installed"


def test_sampling_beside_torch() -> None:
    found = found_by(measure_sampling, (1, 2), 600)
    assert found.problems == []
    assert metrics(found) == {"ours", "torch"}
    assert len(found.results) == 2 * 2 * len(WAYS)


def test_tokens_that_differ_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaSampling, "draw", lambda self, logits, draws: torch.zeros(len(logits)).long())
    assert "2 of 2 rows drew other tokens" in " ".join(found_by(measure_sampling, (2,), 600).problems)


TINY = ModelShape(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    mlp=96,
    vocabulary=512,
    context=128,
    shared=64,
    prompt=70,
    batches=(1, 2, 3),
)


def test_a_random_model_in_the_runner() -> None:
    found = found_by(measure_model, TINY)
    assert found.problems == []
    assert {"step", "busy on the device", "products alone, as a graph", "to the first token"} <= metrics(found)
    steps = [result["case"] for result in found.results if result["metric"] == "step"]
    assert [(case["rows"], case["shared"]) for case in steps] == [(1, 0), (2, 64), (2, 0), (3, 64), (3, 0)]
    assert "there are no graphs for these kernels" in " ".join(found.notes)
    assert {"more than greedy", "time in a step"} <= metrics(found)


def test_copies_alone_and_beside_decoding() -> None:
    found = found_by(measure_tiers, Copies(3, 2, 2, 64, SMALL))
    assert found.problems == []
    cases = [(result["case"]["copy"], result["case"]["beside"]) for result in found.results]
    assert {(copy, beside) for copy in ("save", "load") for beside in ("nothing", "decode attention")} == set(
        cases
    )


def test_an_engine_that_differs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tokens, "generate", lambda *_: {"tokens": [[1, 2]], "kernels": "reference"})
    trial = Trial("TP = 1", Engine("cuda", "cuda"), [[1, 2]])
    stream = io.StringIO()
    gpu_tokens.compare(Output(stream), LONG, trial)
    assert "kernels reference" in stream.getvalue()
    stream = io.StringIO()
    gpu_tokens.compare(Output(stream), LONG, trial._replace(engine=Engine("cuda", "reference"), expected=[[1, 3]]))
    assert "1 of 2 tokens are equal" in stream.getvalue()


@pytest.mark.soak
@pytest.mark.processes
def test_the_engine_gives_the_kits_tokens(tmp_path: Path) -> None:
    """One rank and two, here on the CPU: as on a GPU, from the kit's file."""
    tokens = gpu_tokens.generate(Engine("cpu", "cpu"), 120)["tokens"]
    (tmp_path / gpu_tokens.EXPECTED).parent.mkdir()
    (tmp_path / gpu_tokens.EXPECTED).write_text(json.dumps({"tokens": tokens}))
    for check in (gpu_tokens.check_engine, gpu_tokens.check_two_ranks):
        found = found_by(check, visit=Visit(600, tmp_path))
        assert found.problems == []
        assert all(result["value"] >= gpu_tokens.KEPT_EQUAL for result in found.results)


def test_the_real_device_is_not_used_here() -> None:
    """The seam is complete: nothing that parts call on the device is left to torch.cuda."""
    names = {name for name in vars(Gpu) if not name.startswith("_")}
    inherited = {"copy_bandwidth", "read_bandwidth", "matmul_rate", "graph_or_call"}
    assert names - set(vars(EmulatedGpu)) == inherited
