"""The `trunkline` command with changes that it has no options for. A script: `altered.py CHANGES serve …`.

`CHANGES` is a JSON file; by role ("router", "controller", "worker") or by a process's name ("worker-0.0"), which
counts more, it says

    config        fields of the process's configuration, over those that `trunkline serve` writes
    prefix        words before the process's command line, such as `ip netns exec NAME`
    environment   variables of the process
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trunkline.deploy.cli import app as cli
from trunkline.deploy.config.disk_folders import DiskFolders
from trunkline.deploy.supervisor import serve
from trunkline.deploy.supervisor.membership import ChildSpec

CHANGES: Final[dict[str, dict[str, Any]]] = json.loads(Path(sys.argv[1]).read_text())
unaltered = serve.children


def children(plan: serve.ClusterPlan, folder: Path, disk: DiskFolders | None = None) -> list[ChildSpec]:
    """As `serve.children`, with the changes."""
    return [_altered(spec, _changes_of(spec)) for spec in unaltered(plan, folder, disk)]


def _changes_of(spec: ChildSpec) -> dict[str, Any]:
    return {**CHANGES.get(spec.member.role.value, {}), **CHANGES.get(spec.member.name, {})}


def _altered(spec: ChildSpec, changes: dict[str, Any]) -> ChildSpec:
    path = Path(spec.argv[-1])
    config = json.loads(path.read_bytes())
    path.write_text(json.dumps({**config, **changes.get("config", {})}))
    variables = [f"{name}={value}" for name, value in changes.get("environment", {}).items()]
    prefix = [*changes.get("prefix", ()), *(["env", *variables] if variables else [])]
    return replace(spec, argv=(*prefix, *spec.argv))


if __name__ == "__main__":
    del sys.argv[1]
    # The script's folder is no place for modules.
    sys.path.pop(0)
    vars(serve)["children"] = children
    cli.main()
