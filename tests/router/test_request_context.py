"""What is known of the request at hand, for log lines and in its headers."""

from __future__ import annotations

from trunkline.router.http.headers import headers_of
from trunkline.router.request_context import current, known, log_fields
from trunkline.router.telemetry.request_record import RequestRecord
from trunkline.router.tenancy.auth import Identity


def test_parts_are_known_inside_of_their_block_only() -> None:
    record = RequestRecord("r1", 0.0)
    with known(record=record):
        with known(identity=Identity("a")):
            assert current().record is record
            assert current().identity == Identity("a")
        assert current().identity is None
    assert current().record is None


def test_log_lines_say_whose_request_they_are_about() -> None:
    assert log_fields() == {}
    with known(record=RequestRecord("r1", 0.0)):
        assert log_fields() == {"request_id": "r1"}
        with known(identity=Identity("a", key="k")):
            assert log_fields() == {"request_id": "r1", "tenant": "a", "key": "k"}
        with known(identity=Identity("")):
            assert log_fields() == {"request_id": "r1"}


def test_headers_are_found_in_any_case_and_the_first_of_a_name_counts() -> None:
    raw = [(b"host", b"a"), (b"x-api-key", b"one"), (b"x-api-key", b"two"), (b"latin", b"\xe9")]
    scope = {"headers": raw}
    headers = headers_of(scope)
    assert headers_of(scope) is headers
    assert headers.repeats
    assert headers.get("X-Api-Key") == "one" == headers["x-api-key"]
    assert headers.getlist("x-api-key") == ["one", "two"]
    assert headers.get("latin") == "é"
    assert headers.get("missing") is None
    assert headers.get("missing", "") == ""
    assert "HOST" in headers
    assert "missing" not in headers
    assert not headers_of({"headers": raw[:2]}).repeats
