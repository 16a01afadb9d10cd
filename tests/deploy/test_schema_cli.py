"""`trunkline schema`: files offline, and a server's schemas over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from trunkline.deploy.cli.app import app

SCHEMA = """<schema name="trip">
  You plan trips.
  <module name="plan">For <param name="days" len="4"/> days.</module>
  <module name="unused">Nothing of this.</module>
  <union>
    <module name="lisbon">Lisbon lies on hills above a river.</module>
    <module name="oslo">Oslo lies at a fjord.</module>
  </union>
  <module name="rest">The rest.</module>
</schema>
"""
PROMPT = '<prompt schema="trip"><plan days="two"/>Now.<oslo/>Go ahead.</prompt>'
PLAN = {"path": "plan", "start": 4, "length": 6, "tokens": 6, "bytes": 65536, "tier": "device"}
OSLO = {"path": "oslo", "start": 10, "length": 9, "tokens": 9, "params": [], "bytes": 0, "tier": None}
DAYS = {"name": "days", "length": 4, "required": False, "default": None}
ANSWER = {
    "id": "trip",
    "object": "schema",
    "name": "trip",
    "version": 2,
    "status": "ready",
    "extent": 40,
    "usage": {},
    "modules": [{**PLAN, "params": [DAYS]}, OSLO],
    "expires_at": 4102444800,
    "warnings": ["module plan is short"],
}


def schema(*arguments: str | Path, columns: int = 120, **environment: str) -> Result:
    env = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": str(columns), **environment}
    return CliRunner().invoke(app, ["schema", *map(str, arguments)], env=env, catch_exceptions=False)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "trip.pml").write_text(SCHEMA)
    (tmp_path / "prompt.pml").write_text(PROMPT)
    return tmp_path


# -- files


def test_lint_says_what_a_file_has(files: Path) -> None:
    done = schema("lint", files / "trip.pml")
    assert done.exit_code == 0
    assert f"{files / 'trip.pml'}: schema trip, 21 words" in done.stdout
    assert "plan" not in done.stdout


def test_lint_counts_tokens_of_a_model(files: Path) -> None:
    done = schema("lint", files / "trip.pml", "--model", "demo")
    assert done.exit_code == 0
    assert "tokens of trunkline-demo" in " ".join(done.stdout.split())  # a long path wraps the line
    [row] = [line.split() for line in done.stdout.splitlines() if line.startswith("lisbon")]
    assert int(row[2]) == int(row[3]) > 8
    assert "days[4]" in done.stdout
    assert f"{files / 'trip.pml'}:3:3: warning: the module" in done.stderr


LONG = f'<schema name="s">{"y" * 90}<union></union>{"z" * 90}</schema>'


@pytest.mark.parametrize(
    ("text", "place", "code", "line", "column"),
    [
        (
            '<schema name="s">\n  <module name="a">x</modul>\n</schema>',
            "2:",
            "E_XML",
            '  <module name="a">x',
            None,
        ),
        ('<schema name="s">\n\t<thing/>\n</schema>', "2:2", "E_TAG", " <thing/>", 2),
        ('<schema name="s"><module name="a b">x</module></schema>', "1:18", "E_NAME", '<schema name="s"><mod', 18),
        (LONG, "1:108", "E_UNION_EMPTY", "y" * 60 + "<union></union>zzz", 61),
    ],
)
def test_lint_points_at_mistakes(
    tmp_path: Path, text: str, place: str, code: str, line: str, column: int | None
) -> None:
    path = tmp_path / "s.pml"
    path.write_text(text)
    done = schema("lint", path)
    assert (done.exit_code, done.stdout) == (1, "")
    head, excerpt, caret = done.stderr.splitlines()
    assert head.startswith(f"{path}:{place}")
    assert f": {code}: " in head
    assert excerpt.startswith(f"{text[: text.index(line.strip()[:5])].count(chr(10)) + 1:>5} | {line}")
    if column is not None:
        assert caret == " " * 6 + "| " + " " * (column - 1) + "^"


def test_lint_goes_on_with_the_other_files(files: Path) -> None:
    (files / "bad.json").write_text('{"schema": "s",\n "items": [}')
    (files / "good.json").write_text('{"schema": "s", "items": ["a b"]}')
    done = schema("lint", files / "bad.json", files / "good.json")
    assert done.exit_code == 1
    assert f"{files / 'bad.json'}:2:12: E_XML: this is not JSON" in done.stderr
    assert f"{files / 'good.json'}: schema s, 2 words" in done.stdout


def test_render_shows_the_layout(files: Path) -> None:
    done = schema("render", files / "trip.pml", files / "prompt.pml")
    assert done.exit_code == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["0", "3", "text", "cached", "You", "plan", "trips."] in rows
    kinds = [row[2] for row in rows if row[1:] and row[1].isdigit()]
    assert kinds == ["text", "text", "argument", "hole", "text", "gap", "free", "text", "free", "trailing"]
    assert any(row[2:4] == ["argument", "computed"] and row[-1] == "two" for row in rows)
    assert any(row[2:3] == ["trailing"] and row[-2:] == ["Go", "ahead."] for row in rows)
    assert "The schema takes" in done.stdout
    assert "\x1b" not in done.stdout


def test_render_in_colour_and_with_a_model(files: Path) -> None:
    words = ("render", files / "trip.pml", files / "prompt.pml", "--model", "demo")
    done = schema(*words, FORCE_COLOR="1", NO_COLOR="", TERM="xterm")
    assert done.exit_code == 0
    assert "\x1b[" in done.stdout
    assert schema(*words, "--trailing", "compact").stdout != schema(*words).stdout


def test_render_points_at_mistakes_of_the_prompt(files: Path) -> None:
    (files / "prompt.pml").write_text(
        '<prompt schema="trip">\n  <plan days="one two three four five"/>\n</prompt>'
    )
    done = schema("render", files / "trip.pml", files / "prompt.pml")
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"{files / 'prompt.pml'}:2:3: E_ARG_TOO_LONG: " in done.stderr
    assert done.stderr.splitlines()[-1] == "      |   ^"


def test_what_a_terminal_would_obey_is_not_shown(files: Path) -> None:
    text = {"schema": "s", "items": ["a\x1b[31mb"]}
    (files / "s.json").write_text(json.dumps(text))
    (files / "p.json").write_text('{"schema": "s", "items": ["c\\u001b[0m"]}')
    done = schema("render", files / "s.json", files / "p.json")
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "a�[31mb" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lint", "/nonexistent.pml"], "/nonexistent.pml cannot be read"),
        (["lint", "FILE", "--scope", "all"], "--scope is 'all'; allowed are ancestors, self"),
        (["lint", "FILE", "--model", "/nonexistent"], "there is no folder /nonexistent"),
        (["render", "FILE", "FILE", "--trailing", "far"], "--trailing is 'far'; allowed are fixed, compact"),
        (["render", "FILE"], "Missing argument"),
    ],
)
def test_what_is_impossible_is_exit_code_2(files: Path, arguments: list[str], message: str) -> None:
    done = schema(*(str(files / "trip.pml") if word == "FILE" else word for word in arguments))
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_file_that_is_no_text_and_a_server_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "s.pml").write_bytes(b"<schema name='s'>\xff</schema>")
    done = schema("lint", tmp_path / "s.pml")
    assert done.exit_code == 2
    assert "is not UTF-8: invalid start byte at byte 17" in done.stderr
    done = schema("list", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "no server answers at http://127.0.0.1:9" in done.stderr


# -- a server


class Handler(BaseHTTPRequestHandler):
    """Knows one schema, and refuses what it is told to refuse."""

    seen: ClassVar[list[tuple[str, str, Any]]] = []
    refusal: ClassVar[dict[str, Any] | None] = None

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.seen.append((self.command, self.path, body))
        path = self.path.split("?")[0]
        answer: dict[str, Any] = ANSWER
        status = 200
        if self.refusal is not None:
            status, answer = 400, {"error": self.refusal}
        elif path == "/v1/schemas" and self.command == "GET":
            rows = [{"id": "trip", "expires_at": None}, {"id": "x", "expires_at": 0}]
            answer = {"data": rows, "has_more": False}
        elif path not in ("/v1/schemas", "/v1/schemas/trip"):
            status, answer = 404, {"error": {"message": "there is none", "code": "E_SCHEMA_UNKNOWN"}}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_DELETE = do_GET  # noqa: N815 (so the base class calls them)

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(Handler, "seen", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_add_sends_a_file_and_shows_what_came_of_it(files: Path, url: str) -> None:
    done = schema("add", files / "trip.pml", "--url", url, "--ttl", "60", "--no-warm", "--scope", "self")
    assert done.exit_code == 0
    sent = {"pml": SCHEMA, "ttl": 60, "pin": False, "warm": False, "encode_scope": "self"}
    assert Handler.seen == [("POST", "/v1/schemas", sent)]
    assert "trip, version 2: ready, 40 positions, expires 2100-01-01 00:00 UTC" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["plan", "4", "6", "6", "days[4]", "65536", "device"] in rows
    assert ["oslo", "10", "9", "9", "0", "-"] in rows
    assert "warning: module plan is short" in done.stdout


def test_json_is_sent_as_json(files: Path, url: str) -> None:
    (files / "s.json").write_text('{"schema": "s", "items": ["a b"]}')
    assert schema("add", files / "s.json", "--url", url, "--cache-salt", "x", "--pin").exit_code == 0
    assert Handler.seen[0][2]["json"] == {"schema": "s", "items": ["a b"]}
    assert (Handler.seen[0][2]["cache_salt"], Handler.seen[0][2]["pin"]) == ("x", True)


def test_list_show_and_rm(url: str) -> None:
    listed = schema("list", "--url", url)
    assert [line.strip().split(maxsplit=1) for line in listed.stdout.splitlines()] == [
        ["name", "expires"],
        ["trip", "never expires"],
        ["x", "expires 1970-01-01 00:00 UTC"],
    ]
    assert "version 2: ready" in schema("show", "trip", "--url", url).stdout
    assert schema("rm", "trip", "--url", url).exit_code == 0
    assert Handler.seen[-1][:2] == ("DELETE", "/v1/schemas/trip")
    missing = schema("rm", "trip", "nothing", "--url", url)
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "Error: there is none (E_SCHEMA_UNKNOWN)" in missing.stderr


def test_a_mistake_that_the_server_finds_is_shown_in_the_file(
    files: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = {"message": "too long", "code": "E_SCHEMA_TOO_LONG", "line": 4, "column": 3, "path": ""}
    monkeypatch.setattr(Handler, "refusal", refusal)
    done = schema("add", files / "trip.pml", "--url", url)
    assert done.exit_code == 1
    assert f"Error: {files / 'trip.pml'}:4:3: E_SCHEMA_TOO_LONG: too long" in done.stderr
    assert '    4 |   <module name="unused">Nothing of this.</module>\n      |   ^' in done.stderr


def test_a_mistake_in_the_file_is_not_even_sent(files: Path, url: str) -> None:
    (files / "bad.pml").write_text("<schema>")
    done = schema("add", files / "bad.pml", "--url", url)
    assert done.exit_code == 1
    assert f"{files / 'bad.pml'}:1:" in done.stderr
    assert Handler.seen == []
