"""A real server of S3's API (moto), in a process of its own, for tests of the remote tier."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request

import obstore
import pytest
from obstore.store import S3Store as Bucket
from worker.child_server import ChildServer

DEADLINE_S = 30.0
BUCKET = "kv-bucket"
SECRET = "a-secret-of-the-tests"


class S3Server(ChildServer):
    """One on a free port of this machine; may be killed and started again. It keeps nothing over its death."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.url = f"s3://{BUCKET}/some/prefix?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> None:
        """Returns when it answers and has the bucket, empty."""
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._ask("POST", "/moto-api/reset")
            except OSError:
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.05)
            else:
                break
        self._ask("PUT", f"/{BUCKET}")

    def begin_anew(self) -> None:
        """Hold nothing but the bucket, and let every client in; start again after `kill`."""
        if self._process is None:
            self.start()
            return
        self._ask("POST", "/moto-api/reset-auth", b"inf")
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{BUCKET}")

    def demand_rights(self) -> None:
        """Refuse all requests from now on: no key is known."""
        self._ask("POST", "/moto-api/reset-auth", b"0")

    def _ask(self, method: str, path: str, body: bytes = b"") -> None:
        request = urllib.request.Request(f"{self.endpoint}{path}", data=body, method=method)
        request.add_header("Content-Type", "text/plain")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request")
        with urllib.request.urlopen(request, timeout=5):
            pass

    def _bucket(self) -> Bucket:
        return Bucket(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id="k",
            secret_access_key=SECRET,
            client_options={"allow_http": True},
        )

    def places(self) -> list[str]:
        """All keys of objects in the bucket."""
        return sorted(str(entry["path"]) for entry in obstore.list(self._bucket()).collect())

    def value(self, place: str) -> bytes:
        return bytes(obstore.get(self._bucket(), place).bytes())

    def put(self, place: str, value: bytes) -> None:
        obstore.put(self._bucket(), place, value)


def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process an access key, as the environment of a server has it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
