"""A schema, and calls of the schemas API that several tests make."""

from __future__ import annotations

from typing import Any, Final

import httpx

from trunkline.controller.messages import Submit
from trunkline.kvstore.chunks import unpack_int32

TRIP: Final = """<schema name="trip">
You plan trips.
<module name="city">The city is warm. Stay for <param name="days" len="6"/> there.</module>
<union>
<module name="sea">There is a sea.</module>
<module name="hill">There are many hills around it, and they are high.</module>
</union>
</schema>"""
PLAN: Final = '<prompt schema="trip"><city days="two days"/><sea/>Where do I sleep?</prompt>'
PLAN_OBJECT: Final[dict[str, Any]] = {
    "schema": "trip",
    "modules": [{"path": "city", "args": {"days": "two days"}}, {"path": "sea"}],
    "text": "Where do I sleep?",
}


def post(http: httpx.Client, source: str = TRIP, **fields: Any) -> Any:
    """Make a schema."""
    answer = http.post("/v1/schemas", json={"pml": source, **fields})
    assert answer.status_code == 201, answer.text
    return answer.json()


def look(http: httpx.Client, name: str = "trip", **query: str) -> Any:
    answer = http.get(f"/v1/schemas/{name}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(http: httpx.Client, pml: str = PLAN, **fields: Any) -> httpx.Response:
    """A completion of modules."""
    return http.post("/v1/completions", json={"pml": pml, **fields})


def texts_of(submit: Submit) -> list[tuple[list[int], int, list[list[int]]]]:
    """Tokens, position and seen ranges of the texts of a request's modules."""
    assert submit.layout is not None
    return [
        (unpack_int32(text.tokens).tolist(), text.position, unpack_int32(text.seen, 2).tolist())
        for text in submit.layout.texts
    ]


def runs_of(submit: Submit) -> list[list[int]]:
    """Position and count of a request's own runs of tokens."""
    assert submit.layout is not None
    runs: list[list[int]] = unpack_int32(submit.layout.runs, 2).tolist()
    return runs
