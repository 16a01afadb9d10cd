"""A stand-in for a cluster process: tests tell it how to behave.

    fake_child.py --role router --port N [--ignore-term] [--exit-after S] [--code C] [--say TEXT]

A router answers /health: 503 until all is up (`--ready-after`), then 200; on a port of its own or on an inherited
socket (`--listen-fd`), which it leaves to others on SIGUSR1. With `--status` a child says that it is ready.
"""

from __future__ import annotations

import argparse
import http.server
import signal
import socket
import sys
import threading
import time


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", default="worker")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--exit-after", type=float, default=0.0)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--say", default="")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--listen-fd", type=int, default=0)
    parser.add_argument("--status", default="")
    return parser.parse_args()


def serve_health(port: int, listen_fd: int, ready_at: float) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if time.monotonic() >= ready_at else 503)
            self.end_headers()
            self.wfile.write(b'{"status": "starting"}')

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler, bind_and_activate=not listen_fd)
    if listen_fd:
        server.socket.close()
        server.socket = socket.socket(fileno=listen_fd)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> int:
    options = parse()
    stop = threading.Event()
    if options.parent:
        from trunkline.runtime.process import enter_role  # noqa: PLC0415

        enter_role(options.role, parent_pid=options.parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_term else lambda *_: stop.set())
    if options.role == "router":
        serve_health(options.port, options.listen_fd, time.monotonic() + options.ready_after)
        signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    if options.status:
        from trunkline.runtime.notify import report_status  # noqa: PLC0415

        report_status(options.status, "ready")
    if options.say:
        print(options.say, file=sys.stderr, flush=True)
    stop.wait(options.exit_after or 60.0)
    return int(options.code)


if __name__ == "__main__":
    sys.exit(main())
