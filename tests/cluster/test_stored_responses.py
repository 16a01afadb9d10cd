"""Stored responses and conversations in a real cluster, through OpenAI's client, over the death of a controller.

Texts are compared with a server that has no prefix cache and that nobody disturbs, in float32.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import openai
import pytest
from cluster.chaos import View
from cluster.harness import Cluster
from openai.types.responses import Response

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

MODEL = "trunkline-demo"
CHUNK = 64
TOPIC = "Stored answers. " * 40
QUESTIONS = ("What does str.split do?", "What does json.dumps do?", "Explain dict.get.", "What does len do?")


def ask(client: openai.OpenAI, question: Any, **more: Any) -> Response:
    """The answer, streamed; what its last event says is what is stored."""
    asked = {"model": MODEL, "input": question, "temperature": 0, "max_output_tokens": 24, "stream": True}
    events = list(client.responses.create(**asked, **more))
    answer: Response = events[-1].response
    assert client.responses.retrieve(answer.id) == answer
    return answer


def chain(client: openai.OpenAI, begun: list[Response], count: int) -> list[Response]:
    """Answer the next questions of a chain of responses."""
    for question in QUESTIONS[len(begun) :][:count]:
        if begun:
            begun.append(ask(client, question, previous_response_id=begun[-1].id))
        else:
            begun.append(ask(client, f"{TOPIC}{question}"))
    return begun


def talk(client: openai.OpenAI, conversation: str, begun: list[Response], count: int) -> list[Response]:
    """Answer the next questions of a conversation."""
    for question in QUESTIONS[len(begun) :][:count]:
        begun.append(ask(client, f"Again: {question}", conversation=conversation))
    return begun


def texts(answers: list[Response]) -> list[str]:
    return [answer.output_text for answer in answers]


def test_they_go_on_when_a_controller_is_killed(plain: Cluster) -> None:
    with plain.client() as client:
        expected = chain(client, [], 4)
        talked = talk(client, client.conversations.create().id, [], 4)
    options = ("--tp", "1", "--routers", "2", "--threads", "1", "--dtype", "float32", "--disk-tier", "0")
    with Cluster(*options) as cluster, cluster.client() as client:
        answers = chain(client, [], 2)
        conversation = client.conversations.create().id
        said = talk(client, conversation, [], 2)
        for before, after in pairwise(answers):
            assert before.usage is not None
            assert after.usage is not None
            cached = after.usage.input_tokens_details.cached_tokens
            # The last token of an answer that was cut short is known, but was never computed with.
            assert before.usage.total_tokens - 1 <= cached < after.usage.input_tokens
        parent = answers[-1].usage
        assert parent is not None
        with ThreadPoolExecutor(2) as both:
            branch = partial(ask, client, previous_response_id=answers[-1].id)
            for each in both.map(branch, ("And a sub-agent?", "And another one?")):
                assert each.usage is not None
                # Its last chunk may be the other branch's, which writes into it.
                assert each.usage.input_tokens_details.cached_tokens > parent.total_tokens - CHUNK
        short = {"max_output_tokens": 24, "temperature": 0}
        summary = client.responses.compact(model=MODEL, previous_response_id=answers[-1].id, extra_body=short)
        assert summary.usage.input_tokens_details.cached_tokens > parent.total_tokens - CHUNK
        kept = [item.to_dict(warnings=False) for item in summary.output]
        after = ask(client, [*kept, {"role": "user", "content": "And now?"}])
        assert after.usage is not None
        assert after.usage.input_tokens < summary.usage.input_tokens
        view = View(cluster)
        victim = view.pid("controller")
        os.kill(victim, signal.SIGKILL)
        view.wait_replaced("controller", victim)
        assert texts(chain(client, answers, 2)) == texts(expected)
        assert texts(talk(client, conversation, said, 2)) == texts(talked)
        items = list(client.conversations.items.list(conversation, order="asc"))
        assert [item.id for item in items[1::2]] == [answer.output[0].id for answer in said]
        assert cluster.stop() == 0
