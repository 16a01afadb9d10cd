"""Try out the store of the remote tier of a cluster on this machine, with the rights of the person who asks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from trunkline.deploy.config.option_values import redacted
from trunkline.kvstore.remote_stores import RemoteUrlError, find_store, try_out


@dataclass(frozen=True)
class Trial:
    """What became of a few bytes that were written, read and deleted again."""

    at: str
    """The store's URL, without its password."""
    problem: str = ""
    """Why that was not possible; "": it was."""
    seconds: float = 0.0
    """How long all of it took."""
    keeps: bool = False
    """Whether the store keeps everything until a rule of its own ends it."""


class _WorkerFile(msgspec.Struct):
    """What is of interest in a worker's configuration."""

    remote_url: str = ""


def remote_urls(folder: Path) -> list[str]:
    """Return the URLs of the remote tiers of the cluster that has this run folder; they may have passwords."""
    found: set[str] = set()
    for path in folder.glob("worker*.json"):
        try:
            found.add(msgspec.json.decode(path.read_bytes(), type=_WorkerFile).remote_url)
        except (OSError, msgspec.MsgspecError):
            continue  # the cluster is just being changed
    return sorted(found - {""})


def trial(url: str) -> Trial:
    """Try out a store as workers do at their start."""
    at, keeps = redacted(url), urlsplit(url).scheme == "s3"
    try:
        kind = find_store(url)
        if kind.missing:
            return Trial(at, kind.missing, keeps=keeps)
        store = kind.open(url)
    except (RemoteUrlError, ValueError, ImportError) as error:
        return Trial(at, str(error), keeps=keeps)
    begun = time.monotonic()
    try:
        try_out(store)
    except OSError as error:
        return Trial(at, str(error), keeps=keeps)
    finally:
        store.close()
    return Trial(at, "", time.monotonic() - begun, keeps)
