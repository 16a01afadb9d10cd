"""What it costs that KV travels between groups, and what it brings.

    python benchmarks/kv_travel.py [--quick] [--json PATH] [--parts copies remote turn exporter drain warm roles]

- `copies`: how fast a rank pulls chunks from the host memory of another process, with checksums on both sides,
  beside a plain copy of the same bytes by one thread. `memory`: read in the other process's memory, as on one
  host. `tcp` and `curve`: by a socket on the loopback address, without and with wire keys, as between hosts.
  Chunks are those of the demo model and of the 110 M Llama of `small_model`. `again`: the exporter still has the
  checksums of its chunks; else each is asked for the first time. `share` is that of the plain copy.
- `remote`: how fast a rank reads 24 and 96 chunks from Redis and S3, both on this machine (`kv_travel_remote`).
- `turn`: the time to the first token of a turn whose KV is elsewhere (`kv_travel_turns`).
- `exporter`: the time between tokens of a rank's streams while others pull from it (`kv_travel_exporter`).
- `drain`, `warm`: what is found of conversations of a group that left; how a group begins (`kv_travel_handover`).
- `roles`: what running streams notice of long prompts, with and without roles (`kv_travel_roles`).

The ways take turns, so that a noisy machine hits all of them; each figure is the median of the runs.
"""

from __future__ import annotations

from typing import Final

from kv_travel_copies import measure_copies
from kv_travel_exporter import measure_exporter
from kv_travel_handover import measure_drain, measure_warm
from kv_travel_remote import measure_remote
from kv_travel_roles import measure_roles
from kv_travel_turns import measure_turns
from report import Report, argument_parser

PARTS: Final = {
    "copies": measure_copies,
    "remote": measure_remote,
    "turn": measure_turns,
    "exporter": measure_exporter,
    "drain": measure_drain,
    "warm": measure_warm,
    "roles": measure_roles,
}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    arguments = parser.parse_args()
    report = Report("kv_travel")
    for part in arguments.parts:
        PARTS[part](report, quick=arguments.quick)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
