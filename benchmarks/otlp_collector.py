"""A collector for benchmarks and tests: takes OTLP over HTTP on a port of this machine, keeps what it was sent."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan


class Seen(NamedTuple):
    """A span as it arrived."""

    service: str
    instance: str
    span: ProtoSpan

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def id(self) -> bytes:
        return self.span.span_id

    @property
    def parent(self) -> bytes:
        return self.span.parent_span_id

    @property
    def attributes(self) -> dict[str, Any]:
        return _plain(self.span.attributes)

    @property
    def is_error(self) -> bool:
        return bool(self.span.status.code == 2)


class Collector:
    """Listens from its making until `close`."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != "/v1/traces":
                    self.send_response(404)
                else:
                    collector.take(body)
                    self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        """Decode and keep."""
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            for group in request.resource_spans:
                about = _plain(group.resource.attributes)
                for scope in group.scope_spans:
                    self.spans += [
                        Seen(about["service.name"], about["service.instance.id"], span) for span in scope.spans
                    ]
            self._changed.notify_all()

    def of(self, trace: str) -> list[Seen]:
        """The spans of a trace so far."""
        with self._changed:
            return [seen for seen in self.spans if seen.span.trace_id.hex() == trace]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _plain(attributes: Any) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in cast(list[KeyValue], attributes)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, str(kind))
