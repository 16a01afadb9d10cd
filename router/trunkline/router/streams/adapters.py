"""The adapters that groups have, and how all groups of a model get one, or lose it.

Controllers say in their `State` which adapters they have. A name stands for the adapter that most groups have
under it; requests go to those groups only (`RoutingCore`, by the key in their salt).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from trunkline.controller.messages import AdapterCall
from trunkline.router.errors import ApiError
from trunkline.router.messages import AdapterReply
from trunkline.router.streams.link import Answer, ControllerLink

LOAD_SECONDS_MAX: Final = 600.0
"""Longest time in seconds for which a group may read an adapter."""

_log = structlog.get_logger("trunkline.router.streams.adapters")


class OfferedAdapter(NamedTuple):
    """An adapter that requests may choose as their model."""

    name: str
    key: bytes
    model: str
    """Main name of its base model."""


def offered(links: Iterable[ControllerLink]) -> list[OfferedAdapter]:
    """Return the adapters of all groups that take requests, by name."""
    found: dict[str, Counter[OfferedAdapter]] = {}
    for link in links:
        if link.state is None or link.problem:
            continue
        for each in link.state.adapters:
            known = found.setdefault(each.name, Counter())
            known[OfferedAdapter(each.name, each.key, link.standing.model)] += 1
    return [found[name].most_common(1)[0][0] for name in sorted(found)]


def may_have(key: bytes, links: Iterable[ControllerLink]) -> bool:
    """Return whether any group has an adapter, or may turn out to have it: one that is not ready, or that comes
    when there is none."""
    found = list(links)
    return not found or any(
        not link.ready or link.state is None or key in {each.key for each in link.state.adapters} for link in found
    )


async def load_adapter(links: Sequence[ControllerLink], name: str, path: str) -> bool:
    """Have all these groups load an adapter; if one cannot, none keeps it. Return whether any did not have it.

    Raises:
        ApiError: 400, a group cannot use it, or groups read different files; 503, one does not answer.
    """
    answers = await _ask(links, name, path)
    problem = next((error for answer in answers if (error := _problem(answer)) is not None), None)
    if problem is None:
        keys = {each.key for link in links if link.state for each in link.state.adapters if each.name == name}
        if len(keys) > 1:
            problem = ApiError(400, f"the groups read different files in {path}", param="lora_path")
    if problem is not None:
        new = [
            link
            for link, answer in zip(links, answers, strict=True)
            if isinstance(answer, AdapterReply) and not (answer.problem or answer.was_so)
        ]
        await _ask(new, name, "")
        raise problem
    is_new = not all(isinstance(answer, AdapterReply) and answer.was_so for answer in answers)
    if is_new:
        _log.info("adapter_loaded", name=name, path=path, groups=len(links))
    return is_new


async def unload_adapter(links: Sequence[ControllerLink], name: str) -> bool:
    """Have all these groups forget an adapter, once no request uses it any more. Return whether any had it.

    Raises:
        ApiError: 400, it is being loaded; 503, a group does not answer.
    """
    answers = await _ask(links, name, "")
    if problem := next((error for answer in answers if (error := _problem(answer)) is not None), None):
        raise problem
    had = not all(isinstance(answer, AdapterReply) and answer.was_so for answer in answers)
    if had:
        _log.info("adapter_unloaded", name=name, groups=len(links))
    return had


async def _ask(links: Sequence[ControllerLink], name: str, path: str) -> list[Answer | BaseException]:
    calls = (link.call(lambda ticket: AdapterCall(ticket, name, path), LOAD_SECONDS_MAX) for link in links)
    return await asyncio.gather(*calls, return_exceptions=True)


def _problem(answer: Answer | BaseException) -> BaseException | None:
    if isinstance(answer, BaseException):
        return answer
    if isinstance(answer, AdapterReply) and answer.problem:
        return ApiError(400, answer.problem, code="invalid_adapter")
    return None
