"""A model in which some layers have a window, served with a share of whole blocks by real processes, on all tiers.

The device holds two contexts, and KV of layers with a window for a quarter of its blocks; host memory holds one
and a half, as a text must fit there to come back. So what is asked sinks to disk and to a Redis server, and comes
back into thin blocks. Texts are those of `transformers`, or of a server that has no share and keeps nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest
from cluster.chaos import Trouble, View
from cluster.harness import Cluster, soon, wait_for
from router.model_folders import VOCAB_SIZE, write_tokenizer
from worker.checkpoints import make_checkpoint, transformers_logits
from worker.redis_server import RedisServer

from trunkline.kvstore.chunks import ChunkName, chain, pack_int32

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

CHUNK: Final = 16
WINDOW: Final = 64
BLOCKS: Final = 64
TOKENS: Final = 24
TEXTS: Final = 4
CONTEXT: Final = 440
"""Tokens of the first turn of a text: 27 chunks, nearly twice as many as blocks are whole."""
NAME: Final = "windows"
PLAIN: Final = (
    *("--served-model-name", NAME, "--dtype", "float32", "--threads", "1", "--chunk-size", str(CHUNK)),
    *("--max-batch", "8", "--token-budget", "64"),
)
TIERED: Final = (*PLAIN, "--tp", "2", "--kv-memory", f"{BLOCKS * 18}KiB", "--host-tier", "2MiB")
GROUPS: Final = 3
PEACEFUL_ACTS: Final = 12
GROUPED: Final = (
    *(*PLAIN, "--groups", str(GROUPS), "--tp", "1", "--policy", "round-robin", "--drain-seconds", "5"),
    *("--kv-memory", f"{BLOCKS * 36}KiB", "--host-tier", "2MiB"),
)
SHARE: Final = ("--window-share", "0.25")
ROOMY: Final = ("--kv-memory", f"{3 * BLOCKS * 18}KiB")
"""Memory for the longest texts without a share, where every token needs room in every layer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 of six layers, five of them with a window; a rank's part of a layer is two pages."""
    windowed, plain = "sliding_attention", "full_attention"
    folder = make_checkpoint(
        tmp_path_factory.mktemp("model") / NAME,
        "gemma3",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        layer_types=[windowed, windowed, windowed, plain, windowed, windowed],
        head_dim=64,
        sliding_window=WINDOW,
        max_position_embeddings=2048,
    )
    write_tokenizer(folder, "the words of a model in which some layers have a window")
    return folder


def disk(folder: Path, size: str = "64MiB") -> tuple[str, str]:
    return "--disk-tier", f"{folder / 'kv'}:{size}"


class Answer(NamedTuple):
    """A prompt's answer, in tokens."""

    prompt: list[int]
    output: list[int]
    cache: dict[str, Any]

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output

    def found(self, *tiers: str) -> int:
        """Tokens of the prompt that were found in these tiers."""
        return sum(int(self.cache["tiers"].get(tier, 0)) for tier in tiers)


def body_of(prompt: list[int], tokens: int) -> dict[str, Any]:
    greedy = {"model": NAME, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return greedy | {"prompt": prompt, "max_tokens": tokens}


def complete(cluster: Cluster, body: dict[str, Any]) -> Answer:
    said = cluster.post("/v1/completions", body)
    return Answer(body["prompt"], said["choices"][0]["token_ids"], said["cache"])


def ask(cluster: Cluster, prompt: list[int], tokens: int = TOKENS) -> Answer:
    return complete(cluster, body_of(prompt, tokens))


class Stream(threading.Thread):
    """An answer that is being read while something happens to the cluster."""

    def __init__(self, cluster: Cluster, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.output: list[int] = []
        self.body = body
        self._url = f"{cluster.url}/v1/completions"
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self.body | {"stream": True}, timeout=100) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        self.output += choice.get("token_ids") or []

    def wait_for(self, tokens: int) -> None:
        """Return when so many tokens have come."""
        wait_for(lambda: len(self.output) >= tokens, 60)

    def end(self) -> Answer:
        """Return what it said, which is all that was asked for."""
        self.join(100)
        assert len(self.output) == self.body["max_tokens"]
        return Answer(self.body["prompt"], self.output, {})


def check(model: Path, *answers: Answer) -> None:
    """They are what `transformers` would have said."""
    for answer in answers:
        logits = transformers_logits(model, answer.text)
        assert logits[len(answer.prompt) - 1 : -1].argmax(dim=-1).tolist() == answer.output


def draw(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(6, VOCAB_SIZE) for _ in range(tokens)]  # behind the special ones


def next_turn(rng: random.Random, answer: Answer) -> list[int]:
    return answer.text + draw(rng, 9)


def sink(cluster: Cluster, answers: list[Answer]) -> None:
    """Wait until the disk has nearly all chunks of these texts. So small a host pool may lose some before the disk
    has them; texts that are asked again bring theirs back."""
    chunks = 0.9 * sum((len(answer.text) - 1) // CHUNK for answer in answers)
    for _ in range(10):
        if soon(lambda: cluster.metric("tier_slots_used", tier="disk") >= chunks, 5):
            return
        for answer in answers:
            ask(cluster, answer.prompt)
    assert cluster.metric("tier_slots_used", tier="disk") >= chunks


@pytest.mark.timeout(300)
def test_texts_sink_and_come_back_and_outlive_a_worker(
    model: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    rng = random.Random(1)
    options = (*TIERED, *SHARE, *disk(tmp_path), "--remote-tier", redis_server.url)
    with Cluster(*options, model=str(model)) as cluster:
        assert cluster.gauge("blocks_total") == BLOCKS
        first = [ask(cluster, draw(rng, CONTEXT)) for _ in range(TEXTS)]
        check(model, *first)
        sink(cluster, first)
        second = [ask(cluster, next_turn(rng, answer)) for answer in first]
        check(model, *second)
        assert any(answer.found("host", "disk", "remote") > CONTEXT for answer in second), "loading never paid"
        midway = [ask(cluster, answer.text[:300] + draw(rng, 5)) for answer in first[:2]]
        check(model, *midway)
        # A part of a chunk is loaded or computed, whichever is quicker; what the device still has is not loaded.
        whole = 300 // CHUNK * CHUNK
        assert any(answer.found("device", "host", "disk", "remote") >= whole for answer in midway)
        assert any(answer.found("host", "disk", "remote") for answer in midway)
        stream = Stream(cluster, body_of(next_turn(rng, second[0]), 160))
        stream.wait_for(8)
        os.kill(cluster.pids["worker-1"], signal.SIGKILL)
        check(model, stream.end())
        wait_for(lambda: "worker-1 was killed by SIGKILL" in cluster.log, 10)
        third = [ask(cluster, next_turn(rng, answer)) for answer in second[2:]]
        check(model, *third)
        assert any(answer.found("disk", "remote") > CONTEXT for answer in third), "the disk outlives the worker"
        assert cluster.metric("tier_failures_total") == 0
        last = Stream(cluster, body_of(next_turn(rng, third[0]), 160))
        last.wait_for(8)
        cluster.process.send_signal(signal.SIGTERM)
        check(model, last.end())
        assert cluster.wait() == 0
        assert cluster.alive() == []


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_texts_while_workers_die(model: Path, redis_server: RedisServer, tmp_path: Path, seed: int) -> None:
    """Turns and departures of texts, several at once, against a server without a share that keeps nothing; then
    other clusters find what this one wrote, without a share and with another share and number of ranks.

    What is stored is counted in the index and in the store: whether it is loaded or computed depends on which is
    quicker, and so on what else the machine does.
    """
    rng = random.Random(seed)
    roomy = disk(tmp_path, "256MiB")  # what a full disk does not take, only the store has
    remote = ("--remote-tier", redis_server.url)
    plain = (*PLAIN, "--tp", "1", "--no-prefix-cache", "--kv-memory", "32MiB")
    with Cluster(*plain, model=str(model)) as expected:
        with Cluster(*TIERED, *SHARE, *roomy, *remote, model=str(model)) as cluster:
            texts = play(rng, cluster, expected, 80)
            assert cluster.log.count("killed by SIGKILL") >= 4
            assert cluster.metric("tier_hit_tokens_total", tier="disk") > CONTEXT
            wait_for(cluster.is_idle, 20)
            wait_for(lambda: all_is_written(cluster), 20)
            assert cluster.stop() == 0
        chunks = sum((len(text) - 1) // CHUNK for text in texts)
        on_disk, in_store = stored(tmp_path, redis_server, texts)
        print(f"of {chunks} chunks {on_disk} are on disk, {in_store} in the remote store")
        assert on_disk > 0.5 * chunks  # a chunk that only the store has is a gap here
        assert in_store > 0.9 * chunks
        with Cluster(*TIERED, *ROOMY, *roomy, model=str(model)) as cluster:
            assert read_again(cluster, expected, texts, "disk") > 0
            assert cluster.stop() == 0
        wide = (*PLAIN, "--tp", "1", "--kv-memory", "3MiB", "--host-tier", "2MiB", "--window-share", "0.5")
        with Cluster(*wide, "--disk-tier", "0", *remote, model=str(model)) as cluster:
            print(f"{read_again(cluster, expected, texts, 'remote')} tokens found in the remote store")
            assert cluster.stop() == 0


def all_is_written(cluster: Cluster) -> bool:
    """Whether a time without requests that is longer than any pause for writes brings no further ones."""

    def writes() -> list[int]:
        return [cluster.metric("tier_writes_total", tier=tier) for tier in ("disk", "remote")]

    before = writes()
    time.sleep(2.5)  # metrics are up to a second old
    return writes() == before


def stored(folder: Path, server: RedisServer, texts: list[list[int]]) -> tuple[int, int]:
    """Return how many of the texts' chunks a prompt would find on disk, and in the remote store: up to the first
    gap of each text."""
    [index] = folder.rglob("index.sqlite")
    with closing(sqlite3.connect(index)) as database:
        on_disk = {name for (name,) in database.execute("SELECT name FROM chunks")}
        roots = [name for (name,) in database.execute("SELECT name FROM roots")]
    places = [place for place in server.places() if place.startswith(b"tl:kv:")]
    remote = {bytes.fromhex(place.rpartition(b"/")[2].decode()) for place in places}

    def found(names: list[ChunkName], there: set[bytes]) -> int:
        return next((count for count, name in enumerate(names) if name not in there), len(names))

    def most(text: list[int], there: set[bytes]) -> int:
        tokens = pack_int32(text[: (len(text) - 1) // CHUNK * CHUNK])
        return max(found(chain(root, tokens, CHUNK), there) for root in roots)

    return sum(most(text, on_disk) for text in texts), sum(most(text, remote) for text in texts)


def play(rng: random.Random, cluster: Cluster, expected: Cluster, acts: int) -> list[list[int]]:
    """Let texts grow, and workers die; return the texts."""
    texts = [draw(rng, CONTEXT) for _ in range(TEXTS)]
    for act in range(acts):
        chosen = rng.sample(range(TEXTS), rng.randrange(1, 4))
        prompts = []
        for index in chosen:
            text = texts[index] if len(texts[index]) < 560 else draw(rng, rng.randrange(200, CONTEXT))
            keep = len(text) if rng.random() < 0.6 else rng.randrange(1, len(text))
            prompts.append(text[:keep] + draw(rng, rng.randrange(1, 40)))
        streams = [Stream(cluster, body_of(prompt, TOKENS)) for prompt in prompts]
        if act % 16 == 8:
            streams[0].wait_for(2)
            os.kill(cluster.pids[rng.choice(["worker-0", "worker-1"])], signal.SIGKILL)
        for index, stream in zip(chosen, streams, strict=True):
            answer = stream.end()
            assert answer.output == ask(expected, answer.prompt).output, f"act {act}"
            texts[index] = answer.text
    return texts


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("seed", "count"), [(1, 12), (2, 12), (3, 40)])
def test_agents_at_groups_that_pull_from_each_other_and_die(
    model: Path, tmp_path: Path, seed: int, count: int
) -> None:
    """Turns, edits, parts left out and forks of agents' texts, each at another group than the one before, while
    groups drain, freeze and die, against a server without a share that keeps nothing."""
    plain = (*PLAIN, "--tp", "1", "--no-prefix-cache", "--kv-memory", "32MiB")
    options = (*GROUPED, *SHARE, *disk(tmp_path))
    with Cluster(*plain, model=str(model)) as expected, Cluster(*options, model=str(model)) as cluster:
        trouble = Trouble(View(cluster), seed, GROUPS)
        reign = threading.Thread(target=lambda: asyncio.run(trouble.reign(count)), daemon=True)
        agents, rng = Agents(seed), random.Random(f"acts {seed}")
        found = [Tally(cluster, tier) for tier in ("peer", "disk")]
        acts = 0
        while reign.is_alive() or acts < 2 * count:
            if acts == PEACEFUL_ACTS:
                reign.start()
            asked = agents.ask(rng.randrange(1, 4))
            streams = [Stream(cluster, body) for body in asked.values()]
            for agent, stream in zip(asked, streams, strict=True):
                answer = stream.end()
                body = stream.body
                assert answer.output == complete(expected, body).output, f"act {acts}: {trouble.done}"
                agents.said(agent, answer)
            acts += 1
            for tally in found:
                tally.look()
        reign.join()
        pulled, read = (tally.tokens for tally in found)
        print(f"{acts} acts, {pulled} tokens pulled, {read} read from disk; {'; '.join(trouble.done)}")
        assert pulled > 0
        assert read > 0
        View(cluster).wait_for_no_leaks()
        assert cluster.stop() == 0


class Tally:
    """Tokens that were found in a tier, also by controllers that are dead by now."""

    def __init__(self, cluster: Cluster, tier: str) -> None:
        self.tokens = 0
        self._before = 0
        self._cluster, self._tier = cluster, tier

    def look(self) -> None:
        now = self._cluster.metric("tier_hit_tokens_total", tier=self._tier)
        self.tokens += now - self._before if now > self._before else 0
        self._before = now


class Agents:
    """What agents ask, made from a seed and from what they were told: their next turns, their texts with a part
    edited or left out, and turns of two agents that go on from one text."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"agents {seed}")
        head = draw(self._rng, 150)  # tools and instructions, the same for all
        self._texts = [head + draw(self._rng, CONTEXT - len(head)) for _ in range(TEXTS)]
        self._drops: list[list[dict[str, int]]] = [[] for _ in range(TEXTS)]

    def ask(self, count: int) -> dict[int, dict[str, Any]]:
        """Return the requests of so many agents, by agent."""
        return {agent: self._next(agent) for agent in self._rng.sample(range(TEXTS), count)}

    def said(self, agent: int, answer: Answer) -> None:
        self._texts[agent] = answer.text

    def _next(self, agent: int) -> dict[str, Any]:
        rng, text = self._rng, self._texts[agent]
        what = rng.choice(("turn", "turn", "turn", "edit", "drop", "fork", "back"))
        if len(text) > 560:
            what = "new"
        if what != "turn" and what != "drop":
            self._drops[agent] = []
        match what:
            case "edit":  # the result of a tool is cleared: what is behind it stays
                at = rng.randrange(150, len(text) - 40)
                text = text[:at] + draw(rng, rng.randrange(1, 30)) + text[at + 40 :]
            case "drop":
                at = max([150, *(drop["to"] for drop in self._drops[agent])])
                if at + 60 < len(text):
                    self._drops[agent].append({"from": at + 10, "to": at + 10 + rng.randrange(8, 40)})
            case "fork":
                text = self._texts[rng.randrange(TEXTS)]
            case "back":
                text = text[: rng.randrange(150, len(text))]
            case "new":
                text = text[:150] + draw(rng, rng.randrange(50, CONTEXT - 150))
        body = body_of(text + draw(rng, rng.randrange(1, 40)), TOKENS)
        return body | ({"drop": self._drops[agent]} if self._drops[agent] else {})


def read_again(cluster: Cluster, expected: Cluster, texts: list[list[int]], tier: str) -> int:
    """Ask for what follows on texts; return how many of their tokens were found in a tier."""
    answers = [ask(cluster, text) for text in texts]
    assert [answer.output for answer in answers] == [ask(expected, text).output for text in texts]
    return sum(answer.found(tier) for answer in answers)
