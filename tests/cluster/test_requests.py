"""The API through the public client, against real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import httpx
import openai
import pytest
from cluster.harness import Cluster, wait_for

pytestmark = pytest.mark.processes

MODEL = "trunkline-demo"
QUESTION = "What does os.path.join do?"


def ask(cluster: Cluster, prompt: str, tokens: int = 16, **more: object) -> openai.types.Completion:
    extra = {"ignore_eos": True, **more}
    with cluster.client() as client:
        return client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, extra_body=extra
        )


def test_a_chat_answer_streams_and_equals_the_whole_one(cluster: Cluster) -> None:
    with cluster.client() as client:
        whole = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, temperature=0
        )
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 3


def test_the_same_prompt_again_is_cached(cluster: Cluster) -> None:
    prompt = "The module collections implements specialised container types. " * 8
    usages = [ask(cluster, prompt).usage for _ in range(2)]
    cached = []
    for usage in usages:
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[1] > cached[0]
    assert usages[1] is not None
    # All but the last token, whose logits are needed.
    assert cached[1] == usages[1].prompt_tokens - 1


def test_a_stop_string_ends_the_text_before_it(cluster: Cluster) -> None:
    text = ask(cluster, QUESTION, 24).choices[0].text
    stop = text[8:12]
    stopped = ask(cluster, QUESTION, 24, stop=[stop]).choices[0]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_thirty_two_requests_at_once_get_what_each_would_get_alone(cluster: Cluster) -> None:
    prompts = [f"{QUESTION} {word}" for word in ("First", "Then", "Last", "Else")]
    alone = [ask(cluster, prompt, 12).choices[0].text for prompt in prompts]

    async def all_at_once() -> list[str]:
        async with cluster.async_client() as client:
            pending = [
                client.completions.create(
                    model=MODEL,
                    prompt=prompts[i % len(prompts)],
                    max_tokens=12,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for i in range(32)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*pending)]

    assert asyncio.run(all_at_once()) == [alone[i % len(prompts)] for i in range(32)]


def test_a_client_that_goes_away_frees_its_blocks(cluster: Cluster) -> None:
    with cluster.client() as client:
        stream = client.completions.create(
            model=MODEL, prompt=QUESTION, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in zip(range(3), stream, strict=False):
            pass
        wait_for(lambda: cluster.blocks_in_use() > 0, 5)
        stream.close()
    wait_for(cluster.is_idle, 5)


def test_flushing_the_cache_frees_every_block(cluster: Cluster) -> None:
    ask(cluster, QUESTION * 20)
    wait_for(cluster.is_idle, 5)
    assert httpx.post(f"{cluster.url}/flush_cache", timeout=10).status_code == 401
    cluster.post("/flush_cache")
    wait_for(lambda: cluster.gauge("blocks_free") == cluster.gauge("blocks_total"), 5)


def test_a_prompt_longer_than_the_context_is_refused(cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        ask(cluster, "word " * 5000)


def test_an_unknown_model_is_not_found(cluster: Cluster) -> None:
    with cluster.client() as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"model": "trunkline-demo"}',
        b'{"model": "trunkline-demo", "prompt": "x", "temperature": "hot"}',
        b'{"model": "trunkline-demo", "prompt": "x", "max_tokens": -1}',
        b'{"model": "trunkline-demo", "prompt": "x", "max_tokens": 1e400}',
        b'{"model": "trunkline-demo", "prompt": [99999999]}',
        b'{"model": "trunkline-demo", "prompt": "x", "logit_bias": {"99999999": 1}}',
        b'{"model": "trunkline-demo", "prompt": "x", "stop": [""]}',
        b'{"model": "trunkline-demo", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_nonsense_is_a_client_error_and_harms_nobody(cluster: Cluster, body: bytes) -> None:
    answer = httpx.post(
        f"{cluster.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=20
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert cluster.health() == 200
    assert cluster.process.poll() is None


def test_the_chat_client_talks_to_it(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trunkline.deploy.cli.app", "chat", "--url", cluster.url, "--max-tokens", "12"],
        input=f"{QUESTION}\n/system Be brief.\nAnd os.path.split?\n/nonsense\n/quit\nnever sent\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) >= 1
    assert done.stderr.count("prompt tokens cached") == 2
    assert "There is no command /nonsense" in done.stderr
