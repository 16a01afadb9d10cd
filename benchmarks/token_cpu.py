"""What a token of a single stream costs the processor, by process: a served model, one client.

    python benchmarks/token_cpu.py [--quick] [--rounds 5] [--programs PATH,PATH] [--model demo] [--json PATH]

Runs `trunkline serve` of each program (default: this environment's) with one worker, all at once, and streams from
them by turns. Given is the CPU time of each process, from the first token to the last, over their number: the
kernel's count (`/proc/PID/task/*/schedstat`), which other work on the machine changes less than it changes wall
time. `loop` is the main thread, `all` the process with ZeroMQ's thread. A worker's has the model in it.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import psutil
from report import Report, argument_parser
from server_start import PATIENCE_S, Server, serving

ROLES: Final = ("controller", "router", "worker")
TOKENS: Final = 1200


def cpu_us(process: psutil.Process) -> tuple[float, float]:
    """Microseconds of CPU time of a process so far: of its main thread, and of all threads."""
    main = total = 0.0
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        try:
            spent = int((thread / "schedstat").read_text().split()[0]) / 1000
        except OSError:  # it has ended
            continue
        total += spent
        main += spent if thread.name == str(process.pid) else 0.0
    return main, total


def found(server: Server) -> dict[str, psutil.Process]:
    """The processes of a server, by role."""
    titles = {" ".join(process.cmdline()).strip(): process for process in server.processes()}
    begins = {
        "controller": "trunkline: controller ",
        "router": "trunkline: router",
        "worker": "trunkline: worker ",
    }
    return {role: next(p for title, p in titles.items() if title.startswith(begins[role])) for role in ROLES}


def streamed(server: Server, roles: dict[str, psutil.Process], tokens: int) -> dict[str, float]:
    """Microseconds of CPU time per token of one stream, by role and thread."""
    body = {"model": "m", "prompt": list(range(5, 105)), "max_tokens": tokens, "stream": True, "seed": 1}
    before: dict[str, tuple[float, float]] = {}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=PATIENCE_S
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and not before:
                before = {role: cpu_us(process) for role, process in roles.items()}
    spent = {role: cpu_us(process) for role, process in roles.items()}
    return {
        f"{role} {part}": (spent[role][i] - before[role][i]) / (tokens - 1)
        for role in ROLES
        for i, part in enumerate(("loop", "all"))
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="streams of each program (%(default)s)")
    parser.add_argument("--programs", default=os.path.join(os.path.dirname(sys.executable), "trunkline"))
    parser.add_argument("--model", default="demo")
    arguments = parser.parse_args()
    programs = arguments.programs.split(",")
    rounds, tokens = (2, TOKENS // 3) if arguments.quick else (arguments.rounds, TOKENS)
    report = Report("token_cpu")
    times: dict[str, list[dict[str, float]]] = {program: [] for program in programs}
    with ExitStack() as stack:
        servers = {program: stack.enter_context(serving(program, arguments.model, 1)) for program in programs}
        for server in servers.values():
            server.wait_until_it_serves()
            server.wait_for_a_token()
        roles = {program: found(server) for program, server in servers.items()}
        for _ in range(rounds):
            for program, server in servers.items():
                times[program].append(streamed(server, roles[program], tokens))
    for program, values in times.items():
        for what in values[0]:
            spent = median(value[what] for value in values)
            report.add({"program": program, "model": arguments.model}, what, spent, "us", rounds)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
