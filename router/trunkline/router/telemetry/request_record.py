"""What is known of an HTTP request when it is over: what its line in the log and its span say. Never its content.

`RequestMiddleware` makes a record the current one; whoever works for the request, in its task or in one that it
started, finds it with `current_record`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from trunkline.router.jobs.job import Job
from trunkline.router.request_context import current
from trunkline.router.telemetry.request_trace import RequestTrace


class Ended(Protocol):
    """A generation that is over."""

    @property
    def job(self) -> Job:
        """What was asked for."""

    @property
    def outcome(self) -> str:
        """How it ended: "stop", "length", or what went wrong."""

    @property
    def steps(self) -> int:
        """Tokens of the sample that came furthest; 0: there was none."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found."""

    @property
    def output_tokens(self) -> int:
        """Over all samples."""

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token."""

    @property
    def decode_s(self) -> float:
        """Seconds from its first token until its last."""


@dataclass(slots=True)
class RequestRecord:
    """Of one request; several prompts in one, and all their samples, are added up."""

    id: str
    """As in `X-Request-Id`."""
    trace: RequestTrace | None = None
    """None: it is not traced."""
    tenant: str = ""
    groups: list[int] = field(default_factory=list)
    """Controllers that it was sent to, in the order of the first time."""
    attempts: int = 0
    """How often it, or one of its samples, was sent to one."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    """From its arrival; of several prompts the earliest."""
    outcomes: list[str] = field(default_factory=list)
    """How its generations ended."""
    job: Job | None = None
    """Of one of them."""

    def sent(self, controller: int) -> None:
        """It was sent to a controller."""
        self.attempts += 1
        if controller not in self.groups:
            self.groups.append(controller)

    def add(self, generation: Ended) -> None:
        """A generation of it is over."""
        self.job = generation.job
        self.prompt_tokens += generation.job.seen_tokens
        self.cached_tokens += generation.cached_tokens
        self.output_tokens += generation.output_tokens
        self.outcomes.append(generation.outcome)
        first = generation.first_token_s
        if first is not None:
            self.first_token_s = first if self.first_token_s is None else min(self.first_token_s, first)

    def fields(self) -> dict[str, Any]:
        """For the log: what there is to say."""
        said: dict[str, Any] = {"tenant": self.tenant} if self.tenant else {}
        if not self.outcomes:
            return said
        said["group"] = self.groups[0] if len(self.groups) == 1 else self.groups
        if self.attempts > len(self.outcomes):
            said["attempts"] = self.attempts
        said |= {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish": self.outcomes[0] if len(set(self.outcomes)) == 1 else self.outcomes,
        }
        if self.first_token_s is not None:
            said["ttft_s"] = round(self.first_token_s, 4)
        return said


def current_record() -> RequestRecord | None:
    """Return the record of the request at hand; None: there is none (a probe of the router's own)."""
    return current().record
