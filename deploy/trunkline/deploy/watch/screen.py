"""Draw the screen of `trunkline top` from the figures of a cluster. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trunkline.deploy.config.option_values import format_bytes, format_duration
from trunkline.deploy.watch.facts import Look

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_BAR: Final = 10
_SESSIONS_SHOWN: Final = 8
_UNKNOWN: Final = "–"
_STATES: Final = {"ready": "green", "starting": "yellow", "draining": "yellow"}
_SPARK: Final = 40
_MISSES_SHOWN: Final = 4


def screen(look: Look) -> RenderableType:
    """Return the whole screen."""
    parts: list[RenderableType] = [head(look), Text(), groups(look)]
    for part in (tiers(look), travels(look), sessions(look)):
        if part is not None:
            parts += [Text(), part]
    return Group(*parts)


def head(look: Look) -> RenderableType:
    """Return three lines about the cluster."""
    overview, router = look.overview, look.overview["router"]
    series = look.history.get("series", {})
    up = format_duration(overview["now"] - router["started"])
    first = Text.assemble(
        (str(overview["model"]), "bold"), f" · Trunkline {overview['version']} · {router['name']}, up {up}"
    )
    if router.get("routers", 1) > 1:
        first.append(f" (one of {router['routers']}: rates and requests are its own)", style="dim")
    rows = Table.grid(padding=(0, 2))
    for name, title, show in (
        ("tokens_per_s", "output tokens/s", _rate),
        ("prompt_tokens_per_s", "prompt tokens/s", _rate),
        ("hit_rate", "of them cached", _share),
    ):
        values = series.get(name, [])
        rows.add_row(
            title, show(_last(values)), Text(spark(values, 1.0 if name == "hit_rate" else 0.0), style="cyan")
        )
    misses: defaultdict[str, int] = defaultdict(int)
    for group in overview["groups"]:
        for reason, count in group.get("misses", {}).items():
            misses[reason] += count
    told = sorted(((count, reason) for reason, count in misses.items() if count), reverse=True)[:_MISSES_SHOWN]
    why = ", ".join(f"{reason} {count}" for count, reason in told) or "none"
    last = Text.assemble(
        f"{router.get('requests', len(look.requests))} requests here, ",
        f"{router.get('waiting', 0)} of them without a group",
        ("   not cached, by reason: ", "dim"),
        why,
    )
    return Group(first, rows, last)


def groups(look: Look) -> Table:
    """Return a table with a line for each group."""
    series = look.history.get("series", {})
    table = _table("group state >running >waiting >tokens_to_compute KV_of_running >cached >hits >tokens/s note")
    for group in look.overview["groups"]:
        state, role = str(group["status"]), group.get("role", "both")
        prefix = f"group.{group['group']}."
        blocks = group.get("blocks")
        used = cached = None
        if blocks and blocks["total"]:
            used = 1 - (blocks["free"] + blocks["cached"]) / blocks["total"]
            cached = blocks["cached"] / blocks["total"]
        table.add_row(
            str(group["group"]),
            Text(state if role == "both" else f"{state}, {role}", style=_STATES.get(state, "bold red")),
            number(group.get("running")),
            number(group.get("waiting")),
            number(group.get("queued_tokens")),
            bar(used),
            _share(cached),
            _share(_last(series.get(f"{prefix}hit_rate", []))),
            _rate(_last(series.get(f"{prefix}tokens_per_s", []))),
            Text(str(group.get("detail") or ""), style="yellow", overflow="ellipsis", no_wrap=True),
        )
    return table


def tiers(look: Look) -> Table | None:
    """Return a table of the tiers of all groups together; None if no figures are known."""
    whole: dict[str, dict[str, float]] = {}
    problems: dict[str, str] = {}
    hits = 0.0
    for group in look.overview["groups"]:
        for tier in group.get("tiers", []):
            sums = whole.setdefault(tier["name"], defaultdict(float))
            for key in ("slots", "used", "hit_tokens", "reads", "writes", "evictions", "failures"):
                sums[key] += tier[key]
            hits += tier["hit_tokens"]
            if tier["problem"]:
                problems[tier["name"]] = f"group {group['group']}: {tier['problem']}"
    if not whole:
        return None
    series = look.history.get("series", {})
    table = _table("tier full >chunks >share_of_hits >in/s >out/s >evicted >failed note")
    for name, sums in whole.items():
        table.add_row(
            name,
            bar(sums["used"] / sums["slots"] if sums["slots"] else None),
            number(sums["used"]),
            _share(sums["hit_tokens"] / hits if hits else None),
            _rate(_last(series.get(f"tier.{name}.writes_per_s", []))),
            _rate(_last(series.get(f"tier.{name}.reads_per_s", []))),
            number(sums["evictions"]),
            Text(number(sums["failures"]), style="bold red" if sums["failures"] else ""),
            Text(problems.get(name, ""), style="bold red", overflow="ellipsis", no_wrap=True),
        )
    return table


def travels(look: Look) -> Text | None:
    """Return what groups have taken from each other; None if they take nothing."""
    pulls = [group["pulls"] for group in look.overview["groups"] if group.get("pulls")]
    if not pulls:
        return None
    text = Text.assemble(
        ("KV from other groups: ", "dim"),
        f"{number(sum(each['chunks'] for each in pulls))} chunks pulled "
        f"({format_bytes(sum(each['bytes'] for each in pulls))})",
    )
    if tokens := sum(each["tokens"] for each in pulls):
        text.append(f", with {number(tokens)} prompt tokens of requests that waited for them")
    if saved := sum(each["saved_s"] for each in pulls):
        text.append(f", about {_seconds(saved)} of computing saved")
    given_up: defaultdict[str, int] = defaultdict(int)
    for each in pulls:
        for reason, count in each["given_up"].items():
            given_up[reason] += count
    if any(given_up.values()):
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(given_up.items()) if count)
        text.append(f"; chunks given up: {told}", style="yellow")
    for occasion, of in (("drain", "groups that left"), ("warm_up", "new groups")):
        found = look.overview["router"].get("handovers", {}).get(occasion, {})
        if found.get("chunks") or found.get("given_up"):
            text.append(f"\n{of}: ", style="dim")
            text.append(
                f"{number(found['count'])}, {number(found['chunks'])} chunks of {number(found['paths'])} prompts "
                f"moved in {_seconds(found['seconds'])}"
            )
            if found["given_up"]:
                text.append(f"; {number(found['given_up'])} prompts not completely", style="yellow")
    return text


def sessions(look: Look) -> Table | None:
    """Return a table of the sessions that were used last; None if there are none."""
    if not look.sessions:
        return None
    now = look.overview["now"]
    table = _table("session >turns >tokens tier >group >used")
    table.title = f"{len(look.sessions)} sessions" + (
        ", the last used ones:" if len(look.sessions) > _SESSIONS_SHOWN else ""
    )
    table.title_style, table.title_justify = "dim", "left"
    for session in sorted(look.sessions, key=lambda row: -(row.get("used") or 0))[:_SESSIONS_SHOWN]:
        used = session.get("used")
        table.add_row(
            Text(str(session["id"]), overflow="ellipsis", no_wrap=True),
            number(session.get("turns")),
            number(session.get("tokens")),
            str(session.get("tier") or _UNKNOWN),
            number(session.get("group")),
            f"{format_duration(now - used)} ago" if used else _UNKNOWN,
        )
    return table


def spark(values: Sequence[float | None], top: float = 0.0) -> str:
    """Return the last values as a line of blocks; `top` is the value of a full block, or 0 for the largest
    value."""
    shown = list(values)[-_SPARK:]
    highest = top or max((value for value in shown if value is not None), default=0.0)
    if not highest:
        return ""
    last = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[max(0, min(last, round(value / highest * last)))] for value in shown
    )


def bar(share: float | None) -> Text:
    """Return a bar that shows a fraction."""
    if share is None:
        return Text(_UNKNOWN)
    filled = max(0, min(_BAR, round(share * _BAR)))
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    return Text.assemble(("█" * filled, style), ("░" * (_BAR - filled), "dim"), f" {share:4.0%}")


def number(value: float | None) -> str:
    """Return a count in few characters."""
    if value is None:
        return _UNKNOWN
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else format_duration(seconds)


def _table(titles: str) -> Table:
    """Return a table with these column titles: underscores stand for blanks, a > aligns to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for title in titles.split():
        table.add_column(title.lstrip(">").replace("_", " "), justify="right" if title[0] == ">" else "left")
    return table


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _rate(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1f}" if 0 < value < 100 else number(value)


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0%}"
