"""Two groups of which one pulls from the other, and what must be true of both when something went wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from cluster.chaos import View, flush
from cluster.harness import Cluster, wait_for

HOST_TIER: Final = 37 << 20
"""A size that no other memory of a worker has."""
OPTIONS: Final = (
    *("--groups", "2", "--tp", "1", "--dtype", "float32", "--threads", "1", "--disk-tier", "0"),
    *("--policy", "round-robin", "--host-tier", str(HOST_TIER)),
)
"""The second of two equal requests goes to the other group."""
WHOLE_CHUNKS: Final = 20
"""A prompt has more."""
_TEXT: Final = " ".join(f"Item {number} costs {number * 7 % 101} coins." for number in range(120))
_SLOT_BYTES: Final = 1 << 19


class Pair:
    """Groups 0 and 1."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.view = View(cluster)
        self._count = 0
        wait_for(self.view.is_healthy, 60)

    def prompt(self) -> str:
        """One that was not asked before."""
        self._count += 1
        return f"List {self._count}. {_TEXT}"

    def served(self) -> list[int]:
        """Requests that were sent to each group."""
        return [self.cluster.metric("routing_decisions_total", controller=str(group)) for group in range(2)]

    def turn_to(self, group: int) -> None:
        """Make the next request that group's."""
        before = self.served()
        self.ask("Hello", tokens=1)
        if self.served()[group] > before[group]:
            self.ask("Hello", tokens=1)

    def ask(self, prompt: str, tokens: int = 8) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.cluster.post("/v1/completions", body)

    def ask_at(self, group: int, prompt: str) -> dict[str, Any]:
        self.turn_to(group)
        before = self.served()
        answer = self.ask(prompt)
        assert self.served()[group] > before[group]
        return answer

    def computed_at(self, group: int, prompt: str) -> str:
        """What a group answers that pulls nothing, once it has the prompt in host memory."""
        before = self._saved(group)
        answer = self.ask_at(group, prompt)
        assert not pulled(answer)
        wait_for(lambda: self._saved(group) >= before + WHOLE_CHUNKS, 10)
        return text_of(answer)

    def _saved(self, group: int) -> int:
        return self.cluster.metric("controller_blocks_saved_total", controller=str(group))

    def given_up(self, *reasons: str) -> int:
        return sum(self.cluster.metric("pulls_given_up_total", reason=reason) for reason in reasons)

    def pulls_again(self, giver: int = 0) -> None:
        """Fail if what one group computes cannot be pulled by the other one any more."""
        taker = 1 - giver
        wait_for(self.view.is_healthy, 60)

        def pulls() -> bool:
            prompt = self.prompt()
            text = self.computed_at(giver, prompt)
            answer = self.ask_at(taker, prompt)
            assert text_of(answer) == text
            return pulled(answer) > 0

        wait_for(pulls, 60)

    def check(self) -> None:
        """Fail if anything is still held that none uses."""
        wait_for(self.view.is_healthy, 60)
        self.view.wait_for_no_leaks()
        wait_for(lambda: self.cluster.metric("tier_slots_used", tier="peer") == 0, 20)
        flush(self.cluster)
        deadline = time.monotonic() + 60
        while held := self._held():
            assert time.monotonic() < deadline, held
            time.sleep(0.2)

    def _held(self) -> dict[str, int]:
        gauge = self.cluster.gauge
        held = {
            "slots of host memory": self.cluster.metric("tier_slots_used", tier="host"),
            "blocks": gauge("blocks_total") - gauge("blocks_free"),
        }
        return {what: count for what, count in held.items() if count}

    @contextmanager
    def flipped(self, worker: str) -> Iterator[None]:
        """A byte of each slot in the host memory of a rank is another one."""
        path, places = Path(f"/proc/{self.view.pid(worker)}"), []
        for line in (path / "maps").read_text().splitlines():
            start, _, stop = line.split()[0].partition("-")
            if int(stop, 16) - int(start, 16) == HOST_TIER:
                places += [at + _SLOT_BYTES // 2 for at in range(int(start, 16), int(stop, 16), _SLOT_BYTES)]
        assert len(places) == HOST_TIER // _SLOT_BYTES
        _flip(path / "mem", places)
        try:
            yield
        finally:
            _flip(path / "mem", places)


def _flip(memory: Path, places: Sequence[int]) -> None:
    with memory.open("r+b", buffering=0) as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x40]))


def pulled(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that came from a peer."""
    return int(answer["cache"]["tiers"].get("peer", 0))


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])
