"""What the controller costs: planning, results and matching, without a model.

    python benchmarks/control_plane.py [--quick] [--json PATH]

The engine and the wire's encoders are real; the workers answer at once with made-up tokens. A decode step's
control-plane time is everything the controller does for it: decode the result, take it in, plan the next
step, encode the plan, collect and encode the outputs. The limit beside it: the same messages decoded and
encoded with nothing in between.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray
from report import Report, parse_arguments

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.sequences.tree_order import tree_order
from trunkline.kvstore.chunks import Int32Array, pack_int32, unpack_int32
from trunkline.router.messages import Outputs
from trunkline.runtime.process import spare_the_collector
from trunkline.worker.messages import Sampling, StepPlan

CHUNK = 64


def asked(number: int, tokens: Int32Array, max_tokens: int) -> Request:
    """Return a request for this many tokens behind a prompt."""
    return Request.of(number, Submit(number, pack_int32(tokens), len(tokens), max_tokens, Sampling()))


class Loop:
    """An engine whose workers answer at once."""

    def __init__(self, batch: int, context: int, shared: int, mean_tokens: int = 0) -> None:
        """
        Args:
            mean_tokens: rows end after 1 to twice as many tokens, and requests with short prompts take their
                places; 0: no row ends.
        """
        blocks = batch * (context // CHUNK + 40)
        config = EngineConfig(
            num_blocks=blocks, max_context=context + 2000, token_budget=8192, max_rows=max(batch, 2)
        )
        self.engine = Engine(config)
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(StepResult)
        self.inflight: deque[bytes] = deque()
        self.rng = np.random.default_rng(0)
        self.batch, self.mean_tokens, self.asked = batch, mean_tokens, 0
        prefix = self.rng.integers(0, 30_000, shared)
        for i in range(batch):
            own = self.rng.integers(0, 30_000, context - shared - i % CHUNK)  # chunks fill at different times
            self.send(np.concatenate([prefix, own]))
        while self.engine.scheduler.waiting_count or self.engine.scheduler.prefilling:
            self.turn()
        for _ in range(4):
            self.turn()

    def send(self, tokens: NDArray[np.int64]) -> None:
        """Send a request with this prompt."""
        self.asked += 1
        most = int(self.rng.integers(1, 2 * self.mean_tokens)) if self.mean_tokens else 1900
        self.engine.receive(asked(self.asked, tokens.astype(np.int32), most), 0.0)

    def fill_up(self) -> None:
        """Send a request in the place of each one that has ended."""
        for _ in range(self.batch - len(self.engine.requests())):
            self.send(self.rng.integers(0, 30_000, CHUNK))

    def answer(self, plan: StepPlan) -> bytes:
        """What rank 0 would send: a token for every decode row and every prefill that ends."""
        samples = int(unpack_int32(plan.prefill, 5)[:, 4].sum()) if plan.prefill else 0
        rows = len(self.engine.scheduler.row_set)
        tokens = np.full(rows + samples, 7, np.int32)
        return self.encoder.encode(StepResult(plan.step, plan.epoch, pack_int32(tokens), 1))

    def turn(self) -> float:
        """One step of the loop; seconds that the controller spent."""
        spent = 0.0
        start = time.perf_counter()
        events = [self.decoder.decode(self.inflight.popleft())] if self.inflight else []
        while True:
            ready = self.engine.step(events, 1.0)
            if ready.plan is not None:
                self.encoder.encode(ready.plan)
            if (outputs := ready.outputs) is not None:
                for requests, tokens in zip(outputs.requests, outputs.tokens, strict=True):
                    packed = requests.astype("<u4").tobytes(), pack_int32(tokens)
                    self.encoder.encode(Outputs(1, *packed, outputs.started, outputs.finished))
            spent += time.perf_counter() - start
            if ready.plan is not None:
                self.inflight.append(self.answer(ready.plan))
            if not ready.again:
                return spent
            start, events = time.perf_counter(), []


def busy_steps(report: Report, quick: bool) -> None:
    """Steps of batches in which rows end and others take their places."""
    repeats = 200 if quick else 1500
    lengths = (250, 1000)
    loops = {(batch, mean): Loop(batch, 1024, 0, mean) for batch in (32, 256) for mean in lengths}
    times: dict[tuple[int, int], list[float]] = {key: [] for key in loops}
    for _ in range(repeats):
        for key, loop in loops.items():
            loop.fill_up()
            times[key].append(loop.turn())
    for (batch, mean), values in times.items():
        case = {"impl": "engine", "batch": batch, "mean_output_tokens": mean}
        micros = np.array(values) * 1e6
        report.add(case, "busy_step_time_p50", float(np.median(micros)), "us", repeats)
        report.add(case, "busy_step_time_mean", float(micros.mean()), "us", repeats)
        report.add(case, "busy_step_time_p99", float(np.quantile(micros, 0.99)), "us", repeats)


def arrivals(report: Report, quick: bool) -> None:
    """New prompts while many others are cached, all of which begin with another token."""
    sizes = (1000, 5000) if quick else (1000, 5000, 20_000)
    config = EngineConfig(num_blocks=5 * max(sizes), max_context=4096, token_budget=8192, max_rows=256)
    engine, rng, count = Engine(config), np.random.default_rng(3), 0

    def serve(requests: int) -> list[float]:
        nonlocal count
        for _ in range(requests):
            count += 1
            engine.receive(asked(count, rng.integers(0, 1 << 20, 200).astype(np.int32), 1), 0.0)
        seconds = []
        while not engine.is_idle:
            start = time.perf_counter()
            plan = engine.step((), 0.0).plan
            seconds.append(time.perf_counter() - start)
            assert plan is not None
            samples = int(unpack_int32(plan.prefill, 5)[:, 4].sum())
            engine.receive(StepResult(plan.step, plan.epoch, pack_int32([7] * samples), 1), 0.0)
        return seconds

    for size in sizes:
        while count < size:
            serve(min(200, size - count))
        seconds = serve(400)
        case = {"impl": "engine", "cached_prompts": size, "prompt_tokens": 200}
        report.add(case, "planning_time_per_request", sum(seconds) / 400 * 1e6, "us", 400)
        report.add(case, "longest_planning_time", max(seconds) * 1e3, "ms", len(seconds))


def wire_only(batch: int, repeats: int) -> float:
    """Microseconds to decode a result and encode a plan and outputs of this batch, nothing else."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(StepResult)
    tokens = pack_int32(np.zeros(batch, np.int32))
    payload = encoder.encode(StepResult(1, 1, tokens, 1))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = decoder.decode(payload)
        encoder.encode(StepPlan(2, 1))
        encoder.encode(Outputs(1, result.tokens, result.tokens))
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


def decode_steps(report: Report, quick: bool) -> None:
    repeats = 200 if quick else 1500
    batches = (32, 256) if quick else (1, 32, 64, 128, 256)
    loops = {(batch, shared): Loop(batch, 4096, shared) for batch in batches for shared in (0, 1024)}
    times: dict[tuple[int, int], list[float]] = {key: [] for key in loops}
    spare_the_collector()  # as a controller does
    for _ in range(repeats):  # interleaved, so that a noisy moment hits all cases
        for key, loop in loops.items():
            times[key].append(loop.turn())
    for (batch, shared), values in times.items():
        case = {"impl": "engine", "batch": batch, "context": 4096, "shared_prefix": shared}
        micros = np.array(values) * 1e6
        report.add(case, "step_time_p50", float(np.median(micros)), "us", repeats)
        report.add(case, "step_time_mean", float(micros.mean()), "us", repeats)
        report.add(case, "step_time_p99", float(np.quantile(micros, 0.99)), "us", repeats)
    for batch in batches:
        case = {"impl": "wire_only", "batch": batch, "context": 4096, "shared_prefix": 0}
        report.add(case, "step_time_p50", wire_only(batch, repeats), "us", repeats)


def matching(report: Report, quick: bool) -> None:
    repeats = 50 if quick else 300
    for length in (2048, 32_768):
        config = EngineConfig(num_blocks=2 * length // CHUNK, max_context=length + 64, token_budget=8192)
        engine = Engine(config)
        tokens = np.random.default_rng(1).integers(0, 30_000, length).astype(np.int32)
        engine.receive(asked(1, tokens, 1), 0.0)
        while not engine.is_idle:
            plan = engine.step((), 0.0).plan
            assert plan is not None
            samples = int(unpack_int32(plan.prefill, 5)[:, 4].sum())
            engine.receive(StepResult(plan.step, plan.epoch, pack_int32([7] * samples), 1), 0.0)
        tree = engine.scheduler.kv.tree
        data = tokens.tobytes()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            match = tree.match(tree.root(b""), data, 1 << 40)
            times.append(time.perf_counter() - start)
        assert len(match.path) == length // CHUNK
        case = {"impl": "tree_match", "prompt_tokens": length}
        report.add(case, "match_time", median(times) * 1e3, "ms", repeats)


def block_tables(blocks: int, shared: int, groups: int) -> Int32Array:
    """Tables of 256 rows in random order; each of `groups` groups shares its first `shared` blocks."""
    rng = np.random.default_rng(2)
    rows = 256
    tables = np.empty((rows, blocks), np.int32)
    tables[:, :shared] = (np.arange(rows) % groups)[:, None] * blocks + np.arange(shared)
    own = groups * blocks + rng.permutation(rows * (blocks - shared))
    tables[:, shared:] = own.reshape(rows, -1)
    return tables[rng.permutation(rows)]


def tree_orders(report: Report, quick: bool) -> None:
    """Sorting 256 rows into tree order, beside the obvious way (docs/decisions/0002-tree-order.md)."""
    repeats = 20 if quick else 200
    for blocks in (64, 512):
        for shared, groups in ((0, 1), (16, 1), (blocks - 4, 1), (blocks - 4, 8)):
            tables = block_tables(blocks, shared, groups)
            times: dict[str, list[float]] = {"tree_order": [], "lexsort": []}
            for _ in range(repeats):
                start = time.perf_counter()
                tree_order(tables)
                middle = time.perf_counter()
                np.lexsort(tables.T[::-1])
                times["tree_order"].append(middle - start)
                times["lexsort"].append(time.perf_counter() - middle)
            for impl, values in times.items():
                case = {"impl": impl, "blocks": blocks, "shared_blocks": shared, "groups": groups}
                report.add(case, "order_time", median(values) * 1e6, "us", repeats)


def main() -> None:
    arguments = parse_arguments(__doc__)
    report = Report("control_plane")
    decode_steps(report, arguments.quick)
    busy_steps(report, arguments.quick)
    arrivals(report, arguments.quick)
    matching(report, arguments.quick)
    tree_orders(report, arguments.quick)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
