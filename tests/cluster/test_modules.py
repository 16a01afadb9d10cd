"""Prompts with modules against real processes: computed once, shared by all, and gone when they are to go.

The cluster has two ranks; what it says is compared with a plain prompt on a server of one rank that keeps no KV
(`test_module_tiers` compares it with modules on one rank).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, wait_for
from cluster.module_calls import (
    GREEDY,
    MODEL,
    ask,
    ask_plain,
    details_of,
    look,
    module_text,
    post,
    prompt_source,
    same,
    schema_source,
    tiers_of,
)

pytestmark = pytest.mark.processes


def encoded(cluster: Cluster) -> int:
    """Texts that were computed since the start."""
    return cluster.gauge("texts_encoded_total")


def encoded_till_now(cluster: Cluster) -> int:
    """As `encoded`, with all that an idle cluster has done before the call."""
    cluster.refresh()
    return encoded(cluster)


def wait_for_encoded(cluster: Cluster, texts: int) -> None:
    """Metrics are up to a second old."""
    wait_for(lambda: encoded(cluster) >= texts, 10)
    assert encoded(cluster) == texts


def test_a_schema_is_computed_once_and_serves_all_prompts(cluster: Cluster) -> None:
    made = post(cluster, schema_source("library"))
    assert made["status"] == "ready"
    assert made["usage"]["computed_tokens"] == made["usage"]["tokens"]
    assert {module["tier"] for module in made["modules"]} == {"device"}
    first = ask(cluster, prompt_source("library"))
    cached, modules = details_of(first)
    assert cached == modules > 300
    assert first["cache"] | {"tiers": {}} == first["cache"] | {"exact": False, "tier": "device", "tiers": {}}
    again = ask(cluster, prompt_source("library"))
    assert same(again, first)
    other = ask(cluster, prompt_source("library", "ac"))
    assert details_of(other)[0] == details_of(other)[1]
    assert not same(other, first)
    assert post(cluster, schema_source("library"))["usage"]["computed_tokens"] == 0
    more = post(cluster, schema_source("library", "abcd"))
    assert more["version"] == 3
    assert more["usage"]["computed_tokens"] == next(m["tokens"] for m in more["modules"] if m["path"] == "d")


def test_schemas_side_by_side_and_edits_behind_them(cluster: Cluster) -> None:
    """What was computed of each schema alone serves prompts of both, in any order; and messages behind them can be
    left out."""
    for name in ("left", "right"):
        source = (
            f'<schema name="{name}">{module_text(name, 3)}<module name="in-{name}">{module_text(name, 4)}</module>'
        )
        assert post(cluster, source + "</schema>")["status"] == "ready"
    messages = [
        {"role": role, "content": f"Word {n}. " * 30} for n, role in enumerate(("user", "assistant", "user"))
    ]

    def answer(names: str, **fields: Any) -> dict[str, Any]:
        source = f'<prompt schema="{names}"><in-right/><in-left/></prompt>'
        body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "pml": source, "messages": messages}
        return cluster.post("/v1/chat/completions", body | fields)

    whole = answer("left right")
    cached, modules = details_of(whole)
    assert cached == modules > 200, "the question is all that is new"
    assert details_of(answer("right left"))[0] >= modules
    edited = answer("left right", drop=[{"from": 1, "to": 2}])
    told = edited["truncation"]
    assert told["kept"] == "recomputed"
    assert edited["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] - told["dropped_tokens"]
    assert details_of(edited)[0] > modules, "up to what is left out it was there"
    left = answer("left right", messages=[messages[0], messages[2]])
    assert left["usage"]["prompt_tokens"] == edited["usage"]["prompt_tokens"]
    assert details_of(left)[0] >= details_of(edited)[0], "it is the same prompt"


def test_documents_are_computed_once_and_serve_in_any_order(cluster: Cluster) -> None:
    """Without a schema, another prompt computes only what it has for itself."""
    texts = [module_text(f"document {number}", 6) for number in range(3)]

    def answer(order: list[int]) -> dict[str, Any]:
        sources = [{"type": "text", "media_type": "text/plain", "data": texts[number]} for number in order]
        blocks: list[Any] = [{"type": "document", "source": source} for source in sources]
        blocks.append({"type": "text", "text": f"What is in {order}?"})
        fields = {"model": MODEL, "max_tokens": 8, "temperature": 0, "document_modules": True}
        return cluster.post("/v1/messages", {**fields, "messages": [{"role": "user", "content": blocks}]})

    assert answer([0, 1, 2])["usage"]["cache_read_input_tokens"] == 0
    for order in ([2, 0, 1], [1, 2], [0]):
        usage = answer(order)["usage"]
        documents = sum(len(tokens(cluster, prompt=texts[number])) for number in order)
        assert usage["cache_read_input_tokens"] > documents
        assert usage["input_tokens"] < 60, "the question, and what the template writes"


def test_everything_in_one_scaffold_is_a_plain_prompt(cluster: Cluster, plain: Cluster) -> None:
    """Theorem 1 of the specification, against a server that knows nothing of modules."""
    texts = ["It begins here. ", module_text("one", 4), module_text("two", 5), " Now go on: "]
    post(
        cluster,
        f'<schema name="whole">{texts[0]}<module name="a">{texts[1]}</module><module name="b">{texts[2]}</module>'
        '<scaffold name="all" modules="a b"/></schema>',
    )
    answer = ask(cluster, f'<prompt schema="whole"><a/><b/>{texts[3]}</prompt>')
    # Runs of whitespace at the ends are one blank each: as they are here.
    bos, *_ = tokens(plain, messages=[{"role": "user", "content": "x"}])
    expected = ask_plain(plain, [bos, *(token for text in texts for token in tokens(plain, prompt=text))])
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert same(answer, expected)


def tokens(cluster: Cluster, **what: Any) -> list[int]:
    """Of a text or a conversation."""
    found: list[int] = cluster.post("/tokenize", what)["tokens"]
    return found


def test_ten_requests_at_once_compute_a_cold_schema_once(cluster: Cluster) -> None:
    made = post(cluster, schema_source("cold", repeats=8), warm=False)
    assert made["status"] == "cold"
    assert tiers_of(cluster, "cold") == {None}
    wait_for(cluster.is_idle, 10)
    before = encoded_till_now(cluster)

    async def all_at_once() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client:
            sources = [prompt_source("cold", "abc" if i % 2 else "ac") for i in range(10)]
            bodies = [GREEDY | {"logprobs": 1, "pml": source} for source in sources]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json() for answer in answers]

    said = asyncio.run(all_at_once())
    wait_for_encoded(cluster, before + len(look(cluster, "cold")["modules"]))  # each has one text
    assert look(cluster, "cold")["status"] == "ready"
    alone = [ask(cluster, prompt_source("cold", modules)) for modules in ("ac", "abc")]
    assert all(map(same, said, alone * 5))


def test_who_leaves_while_a_schema_is_computed_leaves_nothing_behind(cluster: Cluster) -> None:
    """Nobody waits for its texts any more: they are not computed."""
    members = "".join(f'<module name="m{i}">{module_text(f"leaving {i}", 70)}</module>' for i in range(12))
    source = f'<schema name="left">You wait. <union>{members}</union></schema>'
    before = encoded_till_now(cluster)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cluster.url}/v1/schemas", json={"pml": source}, timeout=httpx.Timeout(30.0, read=0.5))
    wait_for(lambda: cluster.gauge("texts_encoding") == 0 and cluster.is_idle(), 20)
    assert encoded(cluster) < before + 13
    assert look(cluster, "left")["status"] in ("cold", "partial")
    answer = ask(cluster, '<prompt schema="left"><m11/>And?</prompt>')
    assert details_of(answer)[1] > 1000


def test_prompts_with_modules_and_without_share_steps(cluster: Cluster) -> None:
    """All at once, each gets what it would get alone."""
    post(cluster, schema_source("mixed"))
    jobs: list[Callable[[], dict[str, Any]]] = []
    for index in range(4):
        source = prompt_source("mixed", ("abc", "ab", "ac")[index % 3], f"Question {index}?")
        jobs.append(partial(ask, cluster, source))
        jobs.append(partial(ask_plain, cluster, f"{module_text('plain', 3)} Number {index}"))
    alone = [job() for job in jobs]
    cluster.post("/flush_cache")
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: job(), jobs))
    assert all(map(same, together, alone))
