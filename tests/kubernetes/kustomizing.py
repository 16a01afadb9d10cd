"""What Kustomize makes of our folders, by the engine in `kubectl` or `kustomize`, whichever is there."""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import Final

import pytest
from kubernetes.rendering import ROOT, Object, load_all

FOLDER: Final = ROOT / "deploy" / "kustomize"
OVERLAYS: Final = ("cpu-demo", "gpu", "multi-node", "monitoring")
_ENGINES: Final = (("kustomize", "build"), ("kubectl", "kustomize"))
ENGINE: Final = next((command for command in _ENGINES if shutil.which(command[0])), None)
needs_kustomize: Final = pytest.mark.skipif(ENGINE is None, reason="neither kustomize nor kubectl is installed")


@functools.cache
def _built(path: str) -> str:
    assert ENGINE is not None
    done = subprocess.run([*ENGINE, path], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return done.stdout


def build(overlay: str) -> list[Object]:
    """The objects of an overlay."""
    return load_all(_built(f"overlays/{overlay}"))
