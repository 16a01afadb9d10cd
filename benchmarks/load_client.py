"""Serving a trace: every request when it is due, the controller watched meanwhile, and the figures of it.

All times are seconds on the clock of `time.perf_counter`. A request's latency counts from the moment it was due,
not from when the client got to send it: a client that is late hides nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import httpx
import numpy as np
from load_observer import Cluster, Observer, Sample
from load_workload import Arrival, Trace
from serving import StreamTimes, stream

from trunkline.deploy.supervisor.run_folder import client_headers

DRAIN_SECONDS_MAX: Final = 240.0
"""A rate that leaves the server this far behind is too high to say anything."""
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A server to send requests to."""

    url: str
    model: str
    cluster: Cluster
    reuses: bool
    """It has its prefix cache."""

    def client(self) -> httpx.AsyncClient:
        """One connection per stream, however many there are: the client must not queue."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = client_headers(self.url)  # an admin's, for flushing
        return httpx.AsyncClient(base_url=self.url, timeout=DRAIN_SECONDS_MAX, limits=limits, headers=headers)


@dataclass(frozen=True, slots=True)
class Run:
    """A trace that was served."""

    target: Target
    trace: Trace
    begin: float
    times: list[StreamTimes]
    samples: list[Sample]
    """The first is from before the first request."""

    @property
    def window(self) -> list[Sample]:
        """Samples from while requests arrived."""
        return [s for s in self.samples if self.begin <= s.at <= self.begin + self.trace.window_seconds]

    def metrics(self) -> dict[str, float]:
        """The figures that load_latency.py describes, but for what takes two runs."""
        late = [
            times.started_at - self.begin - arrival.at_seconds
            for times, arrival in zip(self.times, self.trace.arrivals, strict=True)
        ]
        latency = [times.end + delay for times, delay in zip(self.times, late, strict=True)]
        first = [times.first + delay for times, delay in zip(self.times, late, strict=True)]
        tokens = [times.tokens for times in self.times]
        spent = max(times.started_at + times.end for times in self.times) - self.begin
        prompt_tokens = sum(len(arrival.prompt) for arrival in self.trace.arrivals)
        to_mib = self.target.cluster.block_bytes / MIB
        return {
            "normalised_latency": fmean(a / b for a, b in zip(latency, tokens, strict=True)) * 1e3,
            "ttft_p50": float(np.quantile(first, 0.5)) * 1e3,
            "ttft_p90": float(np.quantile(first, 0.9)) * 1e3,
            "achieved_rate": len(self.times) / spent,
            "output_rate": sum(tokens) / spent,
            "kv_peak": max(sample.blocks for sample in self.samples) * to_mib,
            "kv_mean": fmean(sample.blocks for sample in self.window) * to_mib,
            "batch_peak": max(sample.state.running for sample in self.samples),
            "cached_share": 100 * sum(times.cached for times in self.times) / prompt_tokens,
            "kv_waste": self._waste(),
            "send_delay_max": max(late) * 1e3,
        }

    def _waste(self) -> float:
        """Slots are the controller's count of blocks; tokens follow from who runs and what was sampled."""
        slots = tokens = 0
        ends = [times.started_at + times.end for times in self.times]
        outputs_before = self.samples[0].state.output_tokens
        for sample in self.window:
            ended = [i for i, end in enumerate(ends) if end <= sample.at]
            # First come, first served: the running ones are the earliest that have not ended.
            running = sorted(set(range(len(ends))) - set(ended))[: sample.state.running]
            outputs = sample.state.output_tokens - outputs_before - sum(self.times[i].tokens for i in ended)
            tokens += sum(len(self.trace.arrivals[i].prompt) for i in running) + outputs
            if self.target.reuses:
                sharers = sum(self.trace.arrivals[i].shared for i in running)
                tokens -= max(0, sharers - 1) * self.trace.system_tokens
            slots += sample.blocks * self.target.cluster.chunk_size
        return 100 * (1 - tokens / slots) if slots else 0.0


async def serve_trace(target: Target, trace: Trace) -> Run:
    """Send each request when it is due, whatever became of those before it; the cache is empty at the start.

    Raises:
        SystemExit: the server is hopelessly behind, or refused a request.
    """
    async with target.client() as client, Observer(target.cluster) as observer:
        (await client.post("/flush_cache")).raise_for_status()
        first = await observer.next_sample()
        begin = time.perf_counter()

        async def send(arrival: Arrival) -> StreamTimes:
            await asyncio.sleep(begin + arrival.at_seconds - time.perf_counter())
            return await stream(client, target.model, arrival.prompt, arrival.output_tokens)

        try:
            async with asyncio.timeout(trace.window_seconds + DRAIN_SECONDS_MAX):
                times = await asyncio.gather(*(send(arrival) for arrival in trace.arrivals))
        except TimeoutError:
            raise SystemExit(
                f"{len(trace.arrivals)} requests in {trace.window_seconds:.0f} s left the server more than "
                f"{DRAIN_SECONDS_MAX:.0f} s behind; use lower --rates"
            ) from None
        last = await observer.next_sample()
    if preempted := last.state.preemptions - first.state.preemptions:
        print(f"{preempted} preemptions: the KV pool is too small for this load", file=sys.stderr)
    samples = [sample for sample in observer.samples if sample.at >= first.at]
    return Run(target, trace, begin, list(times), samples)


async def serve_one_by_one(target: Target, trace: Trace) -> dict[str, float]:
    """The same requests, each alone: the latency that no load can undercut."""
    async with target.client() as client:
        (await client.post("/flush_cache")).raise_for_status()
        times = [await stream(client, target.model, a.prompt, a.output_tokens) for a in trace.arrivals]
    return {
        "normalised_latency": fmean(one.end / one.tokens for one in times) * 1e3,
        "ttft_p50": float(np.quantile([one.first for one in times], 0.5)) * 1e3,
        "ttft_p90": float(np.quantile([one.first for one in times], 0.9)) * 1e3,
    }


async def decode_steadily(target: Target, prompts: list[list[int]], output_tokens: int) -> dict[str, float]:
    """All prompts at once; figures of the time in which every one of them is decoding."""
    async with target.client() as client, Observer(target.cluster) as observer:
        times = await asyncio.gather(*(stream(client, target.model, p, output_tokens) for p in prompts))
    begin = max(one.started_at + one.first for one in times)
    end = min(one.started_at + one.end for one in times)
    steady = [s for s in observer.samples if begin <= s.at <= end and s.state.running == len(prompts)]
    if len(steady) < 2 or steady[-1].state.steps == steady[0].state.steps:
        raise SystemExit("the decode was over before it could be watched; raise --decode-tokens")
    before, after = steady[0].state, steady[-1].state
    return {
        "decode_rate": (after.output_tokens - before.output_tokens) / (steady[-1].at - steady[0].at),
        "plan_copies": (after.plan_copies - before.plan_copies) / (after.steps - before.steps),
    }
