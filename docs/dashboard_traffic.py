"""Requests that make a cluster worth looking at: users who share beginnings, conversations, documents, modules."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping
from typing import Any, Final

import httpx

ASSISTANTS: Final = (
    "You are the help desk of a library for programmers. Answer in one sentence, name the module that is meant, "
    "and give an example of a call. If a function can raise an error, say which one. Speak of no other language. ",
    "You review code. List what is wrong in the order of its weight, each point in one line, and begin with "
    "errors of logic. Say nothing about spaces. If nothing is wrong, say so in three words. ",
)
QUESTIONS: Final = (
    "What does os.path.join do?",
    "What does json.dumps do?",
    "How do I read a file line by line?",
    "What is the difference of a list and a tuple?",
    "What does itertools.chain do?",
    "How do I sort a list of pairs by their second part?",
    "What does functools.lru_cache keep?",
    "When is a generator closed?",
)
DOCUMENT: Final = " ".join(
    f"Section {number}. The archive keeps letters of the year {1800 + number}, in boxes that are numbered from "
    f"{number * 12} on; who wants to read them asks at desk {number % 5 + 1} before noon."
    for number in range(1, 15)
)
SCHEMA: Final = """\
<schema name="notes">
  <system>
    Use these notes.
    <module name="rules"> Be exact. <param name="days" len="4" default="two"/> days are left.</module>
    <union default="rome">
      <module name="rome"> Rome is warm in May. The price of Marble Gate is 48. Trams run all night.</module>
      <module name="oslo"> Oslo lies at the end of a long fjord. The price of Glacier Tower is 93.</module>
    </union>
    <module name="end"> Answer in one sentence.</module>
  </system>
</schema>
"""


class Traffic:
    """Users of one cluster, until `close`. What they ask depends on the seed only; when, on the cluster."""

    def __init__(self, url: str, headers: Mapping[str, str], seed: int = 7) -> None:
        self._client = httpx.AsyncClient(base_url=url, headers=dict(headers), timeout=60.0)
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []

    async def prepare(self) -> None:
        """A schema and two stored sessions, with turns."""
        await self._post("/v1/schemas", {"pml": SCHEMA})
        for number, question in enumerate(QUESTIONS[:2]):
            begin = [{"role": "system", "content": ASSISTANTS[0]}]
            session = await self._post("/v1/sessions", {"messages": begin, "metadata": {"user": f"user-{number}"}})
            for text in (question, "And why?"):
                turn = {"session_id": session["id"], "messages": [{"role": "user", "content": text}]}
                await self._post("/v1/chat/completions", turn | {"max_tokens": 24})

    def start(self, users: int) -> None:
        """So many users, each with one request at a time."""
        kinds = (self._talk, self._talk, self._read, self._choose)
        self._tasks += [
            asyncio.create_task(kind(number)) for number, kind in zip(range(users), itertools.cycle(kinds))
        ]

    async def close(self) -> None:
        """Everybody leaves, in the middle of their answers, too."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._client.post(path, json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def _ask(self, messages: list[dict[str, str]], session: str, **more: Any) -> str:
        body = {
            "messages": messages,
            "session_id": session,
            "max_tokens": 48,
            "ignore_eos": True,
            "stop": ["<|"],
            **more,
        }
        answer = await self._post("/v1/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"])

    async def _talk(self, user: int) -> None:
        """Conversations that grow, below a system message that others have, too."""
        system = {"role": "system", "content": ASSISTANTS[user % 2]}
        for conversation in itertools.count():
            messages = [system]
            for _ in range(self._random.randint(2, 5)):
                messages.append({"role": "user", "content": self._random.choice(QUESTIONS)})
                text = await self._ask(messages, f"talk-{user}-{conversation}")
                messages.append({"role": "assistant", "content": text})
                await asyncio.sleep(self._random.random())

    async def _read(self, user: int) -> None:
        """Questions about one document."""
        while True:
            question = f"{DOCUMENT}\n\nWhere is the letter of {1800 + self._random.randint(1, 12)}?"
            await self._ask([{"role": "user", "content": question}], f"read-{user}", max_tokens=90)
            await asyncio.sleep(self._random.random())

    async def _choose(self, user: int) -> None:
        """Prompts made of modules."""
        while True:
            modules = ["rules", self._random.choice(["rome", "oslo"]), "end"][self._random.randint(0, 1) :]
            prompt = {"schema": "notes", "modules": modules}
            messages = [{"role": "user", "content": "What is the price of Glacier Tower?"}]
            body = {"prompt": prompt, "messages": messages, "max_tokens": 40, "ignore_eos": True}
            await self._post("/v1/chat/completions", body)
            await asyncio.sleep(self._random.random() + user / 100)
