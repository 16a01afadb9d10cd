"""Whether a rank that says hello can belong to a group: those on other hosts are configured by others. Pure.

Different weights, or sizes that differ, would not fail: they would compute wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping

from trunkline.controller.messages import WorkerHello


def disagreement(terms: Mapping[str, str], hello: WorkerHello) -> str:
    """What differs, for people; "": nothing that both know of."""
    for name, mine in terms.items():
        theirs = hello.terms.get(name, "")
        if mine and theirs and theirs != mine:
            what = "another checkpoint or quantization" if name == "model" else f"another {name}"
            return f"rank {hello.rank} has {what} ({theirs[:80]}) than the group ({mine})"
    return ""
