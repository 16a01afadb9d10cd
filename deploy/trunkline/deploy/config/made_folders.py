"""Folders of the user's cache that stand for a checkpoint: links to files elsewhere, and files that are made.

What reads a checkpoint (workers, routers, digests that name KV) needs no other way then for a model in another
form.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trunkline.deploy.config.machine import cache_folder
from trunkline.deploy.errors import UserError

CONFIG: Final = "config.json"
"""The file that every made folder has."""


def made_folder(
    kind: str, name: str, links: Mapping[str, Path], texts: Callable[[], Mapping[str, str]], why: str
) -> Path:
    """Return a folder with links and files. It is made whole or not at all, and never changed.

    Args:
        kind: The folder in the cache that such folders are in.
        name: What the folder's content depends on, beside the links.
        links: The linked files, by the links' names.
        texts: Function that returns the content of the other files by their names, `CONFIG` among them. It is
            called if the folder does not exist.
        why: What needs the cache, for messages.

    Raises:
        UserError: It cannot be made.
    """
    cache = cache_folder()
    if cache is None:
        raise UserError(f"{why} needs the user's cache folder; set XDG_CACHE_HOME or HOME")
    named = "\n".join([name, *(str(path.resolve()) for path in links.values())])
    place = cache / kind / hashlib.blake2b(named.encode(), digest_size=12).hexdigest()
    if (place / CONFIG).is_file():
        return place
    content = texts()
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="new-", dir=place.parent))
        try:
            for link, path in links.items():
                (made / link).symlink_to(path.resolve())
            for file, text in content.items():
                (made / file).write_text(text, encoding="utf-8")
            os.rename(made, place)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not (place / CONFIG).is_file():  # else another process has made it meanwhile
                raise
    except OSError as error:
        raise UserError(f"{place} cannot be made: {error.strerror}") from error
    return place
