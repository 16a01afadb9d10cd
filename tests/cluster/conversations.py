"""Stored sessions, several at once and turn by turn: what they say is compared with an undisturbed server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from cluster.harness import Cluster

MODEL = "trunkline-demo"
QUESTIONS = ("What does str.split do?", "What does json.dumps do?", "Explain dict.get.", "What does len do?")
TOKENS = 16
_TOPICS = ("Rivers", "Mountains", "Lakes", "Forests", "Deserts", "Islands")


class Conversations:
    """Sessions of one server; each has a topic of its own, longer than a chunk."""

    def __init__(self, cluster: Cluster, name: str, count: int = 6) -> None:
        """
        Args:
            name: distinguishes these sessions' topics from those of other tests.
        """
        self._url = cluster.url
        topics = [f"{name}, {_topic(number)}. " for number in range(count)]
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            self.ids = [_begun(client, topic * 24) for topic in topics]

    def turn(self, cluster: Cluster, number: int) -> list[str]:
        """What the sessions answer to the question with this number, all of them asked at once."""
        with httpx.Client(base_url=cluster.url, timeout=90.0) as client, ThreadPoolExecutor() as pool:
            return list(pool.map(lambda session: _answer(client, session, QUESTIONS[number]), self.ids))


def expected_of(plain: Cluster, name: str, turns: int = 3, count: int = 6) -> list[list[str]]:
    """What such sessions answer in peace, by turn."""
    conversations = Conversations(plain, name, count)
    return [conversations.turn(plain, number) for number in range(turns)]


def body_of(session: str, question: str, **more: object) -> dict[str, Any]:
    """A turn's request."""
    messages = [{"role": "user", "content": question}]
    asked = {"model": MODEL, "session_id": session, "messages": messages, "max_tokens": TOKENS}
    return {**asked, "temperature": 0, "ignore_eos": True, **more}


def sessions_of(cluster: Cluster) -> set[str]:
    """The ids of all sessions that the server lists."""
    found: set[str] = set()
    while True:
        after = {"after": max(found)} if found else {}
        page = httpx.get(f"{cluster.url}/v1/sessions", params={"limit": 100, **after}, timeout=60).json()
        found |= {session["id"] for session in page["data"]}
        if not page["has_more"]:
            return found


def messages_of(cluster: Cluster, session: str) -> list[dict[str, Any]]:
    """What has been said in a session, as it is stored."""
    answer = httpx.get(f"{cluster.url}/v1/sessions/{session}?include=messages", timeout=60)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["messages"])


def _topic(number: int) -> str:
    again, topic = divmod(number, len(_TOPICS))
    return f"{_TOPICS[topic]} {again}" if again else _TOPICS[topic]


def _begun(client: httpx.Client, system: str) -> str:
    answer = client.post("/v1/sessions", json={"messages": [{"role": "system", "content": system}]})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def _answer(client: httpx.Client, session: str, question: str) -> str:
    answer = client.post("/v1/chat/completions", json=body_of(session, question))
    assert answer.status_code == 200, (session, answer.text)
    return str(answer.json()["choices"][0]["message"]["content"])
