"""Sharing changes what is computed and stored, never what is answered.

The same greedy requests, all at once, to a cluster of two ranks with prefix reuse and to one rank without, in
float32. The texts must be equal; the physical blocks held must show that KV was shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import openai
import pytest
from cluster.harness import Cluster, wait_for

pytestmark = pytest.mark.processes

CHUNK = 64
PREFIX = "The following functions are part of the standard library and are described here in turn. " * 18
ENDINGS = [f"Function number {i} returns" for i in range(6)]
TOKENS = 24


async def all_answers(cluster: Cluster) -> list[tuple[list[str], int]]:
    """For each prompt: the tokens of its answer and its number of prompt tokens."""

    async def answer(client: openai.AsyncOpenAI, ending: str) -> tuple[list[str], int]:
        done = await client.completions.create(
            model="trunkline-demo",
            prompt=PREFIX + ending,
            max_tokens=TOKENS,
            temperature=0,
            logprobs=1,
            extra_body={"ignore_eos": True},
        )
        assert done.choices[0].logprobs is not None
        assert done.usage is not None
        return done.choices[0].logprobs.tokens or [], done.usage.prompt_tokens

    async with cluster.async_client() as client:
        return list(await asyncio.gather(*(answer(client, ending) for ending in ENDINGS)))


@contextmanager
def streams(cluster: Cluster) -> Iterator[None]:
    """All prompts decode while the body runs."""
    with cluster.client() as client:
        opened = [
            client.completions.create(
                model="trunkline-demo",
                prompt=PREFIX + ending,
                max_tokens=1200,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for ending in ENDINGS
        ]
        try:
            for stream in opened:
                next(iter(stream))
            wait_for(lambda: cluster.gauge("requests_running") == len(ENDINGS), 10)
            yield
        finally:
            for stream in opened:
                stream.close()
    wait_for(cluster.is_idle, 10)


def test_what_is_shared_is_computed_and_stored_once(cluster: Cluster, plain: Cluster) -> None:
    expected = asyncio.run(all_answers(plain))
    shared_chunks = min(count for _, count in expected) // CHUNK
    with streams(plain):
        wait_for(lambda: plain.blocks_in_use() >= len(ENDINGS) * shared_chunks, 5)
    assert plain.gauge("cached_tokens_total") == 0
    wait_for(cluster.is_idle, 10)
    cached, written = cluster.gauge("cached_tokens_total"), cluster.gauge("output_tokens_total")
    for _ in range(2):  # the second time, from the cache
        assert asyncio.run(all_answers(cluster)) == expected
    # The first of all computes the prefix, the others find it.
    found = (2 * len(ENDINGS) - 1) * (shared_chunks - 1) * CHUNK
    wait_for(lambda: cluster.gauge("cached_tokens_total") - cached >= found, 5)
    wait_for(lambda: cluster.gauge("output_tokens_total") - written >= 2 * len(ENDINGS) * TOKENS, 5)
    before = cluster.gauge("output_tokens_total")
    with streams(cluster):
        # The prefix once, and for each request what only it has: its ending and its answer so far. The answers are
        # counted after the blocks, so they may be longer by then, not shorter.
        in_use = cluster.blocks_in_use()
        grown = (cluster.gauge("output_tokens_total") - before) / CHUNK + 2 * len(ENDINGS)
        assert shared_chunks <= in_use <= shared_chunks + grown


def test_embeddings_are_the_same_and_a_query_is_read_once(cluster: Cluster, plain: Cluster) -> None:
    """Of two ranks that reuse prefixes and of one that computes all anew; cached tokens tell what was reused."""
    vectors = {}
    for which in (cluster, plain):
        for pooling in ("last", "mean"):
            with which.client() as client:
                answer = client.embeddings.create(
                    model="trunkline-demo",
                    input=[PREFIX + ending for ending in ENDINGS],
                    extra_body={"pooling": pooling},
                )
            vectors[which, pooling] = np.array([item.embedding for item in answer.data])
    for pooling in ("last", "mean"):
        np.testing.assert_allclose(vectors[cluster, pooling], vectors[plain, pooling], atol=1e-5)
    body = {"query": f"What does this describe? {PREFIX}", "documents": ENDINGS}
    answers = [httpx.post(f"{which.url}/v1/rerank", json=body, timeout=60).json() for which in (plain, cluster)]
    unshared, shared = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    whole_chunks = answers[0]["usage"]["prompt_tokens"] // len(ENDINGS) // CHUNK
    assert unshared == 0
    assert shared >= (len(ENDINGS) - 1) * (whole_chunks - 1) * CHUNK
    scores = [{each["index"]: each["relevance_score"] for each in answer["results"]} for answer in answers]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert len(set(scores[0].values())) > 1
