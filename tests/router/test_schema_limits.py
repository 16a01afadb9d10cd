"""Schemas that would be too much work are refused before it begins."""

from __future__ import annotations

import threading

import httpx
import pytest
from router.fake_controller import FakeController
from router.schema_calls import post
from router.session_calls import error_of

BOMBS = (
    '<!DOCTYPE x [<!ENTITY a "lol">'
    + "".join(f'<!ENTITY a{i} "{"&a;" * 10}">' for i in range(99))
    + ']><schema name="x">&a98;</schema>',
    '<schema name="x"><union>'
    + "".join(f'<module name="m{i}"><param name="p" len="2000"/></module>' for i in range(30_000))
    + "</union></schema>",
)


@pytest.mark.parametrize("source", BOMBS, ids=["laughs", "positions"])
def test_bombs_disturb_no_one_else(http: httpx.Client, fake: FakeController, source: str) -> None:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(http.post("/v1/schemas", json={"pml": source})))
    thread.start()
    while thread.is_alive():
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    status, code, _ = error_of(answers[0])
    assert (status, code) in ((400, "E_XML"), (400, "E_SCHEMA_TOO_LONG"))
    assert not fake.behaviour.modules.calls


def many_scaffolds(count: int) -> str:
    """200 modules and `count` scaffolds over 199 of them: each computes its members once more."""
    modules = "".join(f"<module name='m{i}'>x</module>" for i in range(200))
    scaffolds = "".join(
        f"<scaffold name='s{j}' modules='{' '.join(f'm{i}' for i in range(200) if i != j)}'/>"
        for j in range(count)
    )
    return f"<schema name='many'>{modules}{scaffolds}</schema>"


def test_what_no_client_would_wait_for_is_not_begun(http: httpx.Client, fake: FakeController) -> None:
    """By what the call computes, not by what it says: each scaffold is a short text and long work."""
    answer = http.post("/v1/schemas", json={"pml": many_scaffolds(200)})
    assert error_of(answer) == (400, "E_SCHEMA_TOO_LONG", "pml")
    error = answer.json()["error"]
    texts = error["got"] // 64
    assert texts > 200 + 199 * 200 / 2, "those behind the module that is left out, for each"
    assert error["limit"] == 1 << 20
    for told in (f"{texts} texts", "200 scaffolds", str(error["got"]), str(error["limit"]), '"warm": false'):
        assert told in error["message"]
    assert not fake.behaviour.modules.calls
    assert http.get("/v1/schemas/many").status_code == 404
    assert post(http, many_scaffolds(3))["status"] == "ready"
    post(http, many_scaffolds(200), warm=False)
    calls = [call.op for call in fake.behaviour.modules.calls]
    answer = http.patch("/v1/schemas/many", json={"pin": True})
    assert error_of(answer) == (400, "E_SCHEMA_TOO_LONG", "schema")
    assert [call.op for call in fake.behaviour.modules.calls] == calls
    assert http.get("/v1/schemas/many").json()["pin"] is False
    assert http.patch("/v1/schemas/many", json={"ttl": 60}).status_code == 200
