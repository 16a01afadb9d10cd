"""Everything that has to be checked and measured on a GPU, in one command and under ten minutes.

    python benchmarks/gpu.py [--kit FOLDER] [--only PART,...] [--together] [--quick] [--out FOLDER]

Without `--kit` on a machine where Trunkline is installed; with it from a folder that `make gpu-kit` has made, on a
machine that has CUDA, Python and torch, and no network. The parts, their order and their time limits are those of
`gpu_visit.PARTS`. A part that fails or runs out of time is recorded, and the next one begins; only the first has
to succeed. Results are written after each part: `results.json`, and `results.md` for docs/measurements/gpu.md.
With `--only` the results of the other parts stay as they were. With `--together` all that checks and times nothing
runs at once. What was compiled of FlashInfer is kept beside the results, for a kit that brings it along.

Exit code: 0; 1 if anything is wrong (speed is reported, not judged); 2 without a GPU, or for a wrong argument.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final

from gpu_compiled import KERNELS, compiled_here, put_beside
from gpu_visit import NO_DEVICE, PARTS, VISIT_S, Part, VisitRun, chosen_parts, together
from report import commit

FOLDER: Final = Path(__file__).parent
COMMIT_FILE: Final = "commit.txt"
"""Inside a kit."""


def unpack(kit: Path, target: Path) -> None:
    """The kit's wheels, as installing them would do; no pip is needed, nor a network.

    Raises:
        SystemExit: there are none.
    """
    wheels = sorted((kit / "wheels").glob("*.whl"))
    if not wheels:
        sys.exit(f"{kit / 'wheels'} has no wheels; make gpu-kit makes such a folder")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        for folder in target.glob("*.data/*lib"):  # what a wheel wants beside its own packages
            for path in [path for path in folder.rglob("*") if path.is_file()]:
                moved = target / PurePosixPath(path.relative_to(folder))
                moved.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, moved)


def part_command(part: Part, kit: Path | None, *, quick: bool) -> list[str]:
    command = [sys.executable, str(FOLDER / "gpu_part.py"), part.name, str(part.seconds)]
    command += ["--kit", str(kit)] if kit is not None else []
    return [*command, "--quick"] if quick else command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, help="folder that make gpu-kit has made")
    parser.add_argument("--only", default="", help=f"parts, with commas: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--together", action="store_true", help="checks beside each other, then what is timed")
    parser.add_argument("--quick", action="store_true", help="fewer cells and trees")
    parser.add_argument("--seconds", type=float, default=VISIT_S, help="for all parts; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    arguments = parser.parse_args()
    try:
        parts = chosen_parts(arguments.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    kit = None if arguments.kit is None else arguments.kit.resolve()
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as site:
        measured = commit()
        if kit is not None:
            unpack(kit, Path(site))
            put_beside(kit / KERNELS, Path(site))
            os.environ["PYTHONPATH"] = os.pathsep.join(
                filter(None, [site, str(kit / "benchmarks"), os.environ.get("PYTHONPATH", "")])
            )
            measured = (kit / COMMIT_FILE).read_text().strip()
        run = VisitRun(arguments.out, lambda part: part_command(part, kit, quick=arguments.quick), measured)
        good = run.run(together(parts) if arguments.together else parts, arguments.seconds)
        compiled_here(arguments.out / f"{KERNELS}.tar.gz", None if kit is None else kit / KERNELS)
    print(f"\nResults are in {arguments.out}.")
    if any(run.found[part.name].exit_code == NO_DEVICE for part in parts if part.name in run.found):
        sys.exit(2)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
