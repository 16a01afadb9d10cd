"""Areas: tests that cost much and matter when few files change, and the paths that they watch.

`make test` leaves them out and `make test-all` runs them; continuous integration runs those of them whose paths
changed since the last release, or in the last 20 commits. `@pytest.mark.area("site")` puts a test into an area.

    python tests/areas.py changed            the areas whose paths changed, in a line
    python tests/areas.py native changed     exit code 0 if the area is among those that changed
    python tests/areas.py native all         exit code 0: every area is
"""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
COMMITS: Final = 20

AREAS: Final[dict[str, tuple[str, ...]]] = {
    # The CPU kernels, compiled with sanitizers, over all cases (`make check-native`).
    "native": ("kernels/trunkline/kernels/csrc/*", "CMakeLists.txt", "tests/kernels/*"),
    # The CUDA kernels, compiled for every device with warnings as errors, and emulated at length.
    "cuda": (
        "kernels/trunkline/kernels/csrc/cuda/*",
        "kernels/trunkline/kernels/csrc/common/*",
        "kernels/trunkline/kernels/cuda*",
        "CMakeLists.txt",
        "tests/kernels/*cuda*",
        "tests/kernels/*emulat*",
    ),
    # A cluster with adapters that come and go.
    "adapters": ("*adapter*", "tests/worker/peft_folders.py", "router/trunkline/router/request_context.py"),
    # What a visit to a machine with GPUs runs, as far as it goes without one.
    "gpu-kit": ("benchmarks/gpu*", "tests/kernels/test_gpu*", "tests/kernels/*emulat*"),
    # The wheel and the source archive, built and installed.
    "wheel": (
        "pyproject.toml",
        "constraints.txt",
        "CMakeLists.txt",
        ".dockerignore",
        "tests/deploy/test_packaging.py",
    ),
    # The documentation as a site, with all links checked.
    "site": ("docs/*", "mkdocs.yml", "tests/docs/*"),
    # The dashboard in a browser.
    "browser": ("router/trunkline/router/ui/*", "tests/ui/*", "tests/cluster/test_dashboard.py"),
    # Charts, kustomizations, images, dashboards of Grafana, over many values.
    "kubernetes": (
        "deploy/helm/*",
        "deploy/kustomize/*",
        "deploy/docker/*",
        "deploy/[gp]r*",
        "tests/kubernetes/*",
    ),
    # Clusters over several hosts, long chaos, cut cables, slow disks: what is slow to test of what survives.
    "survival": (
        *("controller/trunkline/controller/service/*", "router/trunkline/router/streams/*", "runtime/*"),
        *(
            *("worker/trunkline/worker/service.py", "worker/trunkline/worker/link.py"),
            *("worker/trunkline/worker/tensor_parallel.py", "worker/trunkline/worker/rendezvous.py"),
            "worker/trunkline/worker/collective_errors.py",
        ),
        *(f"deploy/trunkline/deploy/{part}/*" for part in ("launch", "node", "supervisor")),
        *(f"deploy/trunkline/deploy/config/{name}.py" for name in ("node_settings", "plans", "window_share")),
        *(f"router/trunkline/router/{name}.py" for name in ("http/idempotency", "http/replay", "server")),
        *("controller/trunkline/controller/engine/recovery.py", "deploy/trunkline/deploy/errors.py"),
        *("kvstore/trunkline/kvstore/records/*", "router/trunkline/router/stores/*"),
        *("tests/cluster/*", "tests/router/*frozen*"),
    ),
    # `trunkline launch` over ssh.
    "ssh": ("deploy/trunkline/deploy/launch/*", "tests/deploy/launch/*"),
    # The longest turn of a router's event loop over every hostile body.
    "loop": ("router/trunkline/router/http/*", "router/trunkline/router/api/*", "tests/router/*loop*"),
}


def git(*arguments: str) -> str:
    """Return what git prints; "" if it fails, as without a repository or a tag."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def changed_paths() -> list[str] | None:
    """Return the paths changed since the last release tag and in the last commits; None if git cannot tell."""
    starts = [git("describe", "--tags", "--abbrev=0"), git("rev-parse", "--verify", "-q", f"HEAD~{COMMITS}")]
    found = [git("diff", "--name-only", start, "HEAD") for start in starts if start]
    return "\n".join(found).split("\n") if found else None


def changed_areas(paths: Iterable[str] | None) -> set[str]:
    """Return the areas that watch one of `paths`; all areas where `paths` is None."""
    if paths is None:
        return set(AREAS)
    listed = list(paths)
    return {area for area, patterns in AREAS.items() for pattern in patterns if fnmatch.filter(listed, pattern)}


def selected(choice: str) -> set[str]:
    """Return the areas that a choice means: "all", "changed", "none", or names with commas.

    Raises:
        ValueError: There is no area of such a name.
    """
    if choice in ("all", "changed", "none"):
        return {"all": set(AREAS), "changed": changed_areas(changed_paths()), "none": set()}[choice]
    names = set(choice.split(","))
    if unknown := names - set(AREAS):
        raise ValueError(f"no such area: {', '.join(sorted(unknown))}; areas are {', '.join(AREAS)}")
    return names


def main(arguments: Sequence[str]) -> int:
    """Print the areas of a choice, or say by the exit code whether an area is among them."""
    *area, choice = arguments
    if not area:
        print(" ".join(sorted(selected(choice))))
        return 0
    return int(area[0] not in selected(choice))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
