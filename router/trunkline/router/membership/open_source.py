"""Opens the source of members that a URL names."""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult, parse_qs, urlsplit

from trunkline.kvstore.records import RecordStore
from trunkline.router.membership.dns_source import DnsSource
from trunkline.router.membership.member import MemberSource
from trunkline.router.membership.records_source import RecordsSource
from trunkline.router.membership.static_source import StaticSource

FORMS: Final = (
    "static:PATH",
    "records",
    "dns://NAME:PORT?events=PORT",
    "kubernetes://NAMESPACE/SERVICE?port=NAME&events=NAME",
)
"""The URLs that `--members` takes. `events` may be left out where groups publish no KV events."""


def open_source(url: str, records: RecordStore) -> MemberSource:
    """Return the source that a URL names.

    Args:
        records: the cluster's record store, for the source `records`.

    Raises:
        ValueError: the URL is wrong.
    """
    if url == "records":
        return RecordsSource(records)
    scheme, _, path = url.partition(":")
    if scheme == "static" and path:
        return StaticSource(path)
    parts = urlsplit(url)
    if scheme == "dns":
        return _dns(url, parts)
    if scheme == "kubernetes":
        return _kubernetes(url, parts)
    raise ValueError(f"members are {url!r}; it must be one of {', '.join(FORMS)}")


def problem_of_members(url: str) -> str:
    """Return what is wrong with the URL of a source of members, for people; "": nothing."""
    try:
        if url != "records":
            open_source(url, None)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


def _dns(url: str, parts: SplitResult) -> DnsSource:
    query = _query(url, parts, ("events",))
    events = query.get("events", "0")
    if not parts.hostname or not parts.port or not events.isdecimal() or int(events) > 65535:
        raise ValueError(f"members are {url!r}; expected {FORMS[2]}")
    return DnsSource(parts.hostname, parts.port, int(events))


def _kubernetes(url: str, parts: SplitResult) -> MemberSource:
    query = _query(url, parts, ("port", "events"))
    service = parts.path.strip("/")
    if not parts.hostname or not service or "/" in service or not query.get("port"):
        raise ValueError(f"members are {url!r}; expected {FORMS[3]}")
    from trunkline.router.membership.kubernetes_api import SlicesApi  # noqa: PLC0415
    from trunkline.router.membership.kubernetes_source import KubernetesSource  # noqa: PLC0415

    return KubernetesSource(SlicesApi(parts.hostname, service), query["port"], query.get("events", ""))


def _query(url: str, parts: SplitResult, known: tuple[str, ...]) -> dict[str, str]:
    found = parse_qs(parts.query, keep_blank_values=True)
    if parts.fragment or any(name not in known or len(values) > 1 for name, values in found.items()):
        raise ValueError(f"members are {url!r}; after '?' come only {' and '.join(known)}, once each")
    return {name: values[0] for name, values in found.items()}
