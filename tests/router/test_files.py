"""`/v1/files`: what is uploaded comes back, part by part, to its tenant only."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from router.batch_calls import form_of, upload
from router.harness import STORES, RunningRouter, running, shared_records
from seeds import seeds

from trunkline.kvstore.records import RecordStore
from trunkline.router.stores import file_store
from trunkline.router.stores.owned_records import KEPT_S
from trunkline.router.tenancy.auth import hash_key
from trunkline.router.text.tokenizer import Tokenizer


def part_count(router: RunningRouter) -> int:
    records: RecordStore = router.service.records
    return len(router.call(records.page("file-part", "", "", 1000)))


def test_a_file_through_the_client(client: openai.OpenAI) -> None:
    made = client.files.create(file=("a.jsonl", b"one\ntwo\n"), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.object) == ("a.jsonl", 8, "batch", "file")
    assert abs(made.created_at - time.time()) < 60
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == b"one\ntwo\n"
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("kind", STORES)
def test_a_large_file_is_stored_in_parts(
    seed: int, kind: str, place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.router.api.upload.PART_BYTES", 1000)
    content = random.Random(seed).randbytes(12_345)
    with (
        shared_records(kind) as url,
        running(place, tokenizer, records=url) as (router, _),
        router.client() as http,
    ):
        file = upload(http, content, purpose="user_data")
        assert part_count(router) == 13
        got = http.get(f"/v1/files/{file}/content")
        assert got.content == content
        assert got.headers["content-disposition"] == "attachment"
        assert http.delete(f"/v1/files/{file}").json() == {"id": file, "object": "file", "deleted": True}
        assert part_count(router) == 0
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", "/v1/files/file-x", "/v1/files/x"):
            assert http.get(path).status_code == 404
        assert http.delete(f"/v1/files/{file}").status_code == 404


def test_a_list_begins_with_the_newest(http: httpx.Client) -> None:
    made = []
    for number in range(5):
        made.append(upload(http, b"x", purpose="batch" if number % 2 else "user_data"))
        time.sleep(0.002)  # ids are in the order of milliseconds
    first = http.get("/v1/files", params={"limit": 3}).json()
    assert [file["id"] for file in first["data"]] == made[:1:-1]
    assert first["has_more"]
    rest = http.get("/v1/files", params={"limit": 3, "after": first["last_id"]}).json()
    assert [file["id"] for file in rest["data"]] == made[1::-1]
    assert not rest["has_more"]
    some = http.get("/v1/files", params={"limit": 1, "purpose": "batch"}).json()
    assert [file["id"] for file in some["data"]] == [made[3]]
    assert some["has_more"]
    rest = http.get("/v1/files", params={"limit": 1, "purpose": "batch", "after": made[3]}).json()
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == ([made[1]], False)


def test_a_file_expires(http: httpx.Client, router: RunningRouter) -> None:
    plain = http.get(f"/v1/files/{upload(http, b'x')}").json()
    assert abs(plain["expires_at"] - plain["created_at"] - KEPT_S) < 120
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    short = http.get(f"/v1/files/{upload(http, b'x', **fields)}").json()
    assert short["expires_at"] - short["created_at"] == 7200
    records = router.service.records
    assert http.get(f"/v1/files/{short['id']}/content").content == b"x"
    parts = {each.key.id.partition("/")[0]: each for each in router.call(records.page("file-part", ""))}
    part = parts[short["id"]]
    assert 0 <= part.used + part.ttl - short["expires_at"] < 3700, "its parts go soon after it, read or not"
    assert parts[plain["id"]].ttl > KEPT_S
    fields["expires_after[seconds]"] = "60"
    assert http.post("/v1/files", **form_of(b"x", purpose="batch", **fields)).status_code == 400


BOUNDARY = b"--b\r\nContent-Disposition: form-data; name=%b\r\n\r\n"
WHOLE_FORM = b"batch\r\n" + BOUNDARY % b"file; filename=x" + b"x\r\n--b--"
"""Behind the head of the part with the purpose."""
LONG_HEADER = b"purpose\r\nX-Long: " + b"y" * 70_000
FORM = {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("request_of", "status", "code"),
    [
        ({"json": {}}, 415, "unsupported_media_type"),
        (form_of(b"x"), 400, "missing_required_parameter"),
        (form_of(b"x", purpose="poetry"), 400, None),
        (form_of(b"x", purpose="batch", more="y" * 70_000), 413, "body_too_large"),
        (form_of(b"x" * 3000, purpose="batch"), 413, "file_too_large"),
        ({"content": b"no form", "headers": FORM}, 400, "invalid_form"),
        ({"content": BOUNDARY % LONG_HEADER + WHOLE_FORM, "headers": FORM}, 400, "invalid_form"),
        ({"content": BOUNDARY % b"file" + b"cut", "headers": FORM}, 400, "invalid_form"),
        ({"content": BOUNDARY % b"purpose" + b"x\r\n--b--", "headers": FORM}, 400, "missing_required_parameter"),
    ],
)  # fmt: skip
def test_wrong_forms_leave_nothing(
    request_of: dict[str, Any], status: int, code: str | None, place: Path, tokenizer: Tokenizer
) -> None:
    with running(place, tokenizer, file_bytes_max=2000) as (router, _), router.client() as http:
        answer = http.post("/v1/files", **request_of)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert part_count(router) == 0
        assert http.get("/v1/files").json()["data"] == []


def test_a_quota_holds(place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.router.api.upload.PART_BYTES", 1000)
    with running(place, tokenizer, records_tenant_bytes=5000) as (router, _), router.client() as http:
        answer = http.post("/v1/files", **form_of(b"x" * 20_000, purpose="batch"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "records_quota")
        assert part_count(router) == 0
        upload(http, b"x" * 1000)


def test_files_belong_to_their_tenant(place: Path, tokenizer: Tokenizer) -> None:
    tenants = place / "tenants.json"
    named = {name: {"keys": [{"sha256": hash_key(name)}]} for name in ("ann", "bob")}
    tenants.write_text(json.dumps({"tenants": named}))
    with (
        running(place, tokenizer, tenants=str(tenants)) as (router, _),
        router.client(Authorization="Bearer ann") as ann,
        router.client(Authorization="Bearer bob") as bob,
    ):
        file = upload(ann, b"secret")
        for answer in (
            bob.get(f"/v1/files/{file}"),
            bob.get(f"/v1/files/{file}/content"),
            bob.delete(f"/v1/files/{file}"),
            bob.post(
                "/v1/batches",
                json={"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"},
            ),
        ):
            assert answer.status_code == 404, answer.text
        assert bob.get("/v1/files").json()["data"] == []
        assert ann.get(f"/v1/files/{file}/content").content == b"secret"
        assert router.client().get("/v1/files").status_code == 401


def test_parts_outlive_their_file() -> None:
    assert file_store._PART_TTL_S > KEPT_S
