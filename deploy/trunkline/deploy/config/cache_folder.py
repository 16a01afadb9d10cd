"""Find the user's cache folder.

Its contents save time and may be deleted at any moment, but for the stored sessions and schemas in `kv/records`
(`disk_folders.py`).
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return `$XDG_CACHE_HOME/trunkline` or `~/.cache/trunkline`, which may not exist yet; None without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the standard says to ignore relative ones
        return Path(given) / "trunkline"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "trunkline" if home.is_dir() else None
