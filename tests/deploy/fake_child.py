"""A stand-in for a process of a cluster, which tests tell how to behave: `fake_child.py role=router port=8000`.

    role          a router answers /health, at `port` or on an inherited socket (`fd`), until SIGUSR1
    healthy=no    its answer is 503
    status=PATH   says that it is ready, to the supervisor's socket there
    say, code     writes a line and ends with this exit code, after a `file` has appeared if one is named
    stubborn      ignores SIGTERM

It imports little, and runs without the environment's packages (`-I -S`): so it starts in some milliseconds.
"""

import os
import signal
import socket
import sys
import threading
import time

options = dict(word.partition("=")[::2] for word in sys.argv[1:])
stop = threading.Event()


def serve_health() -> None:
    """Answer every request with the same status."""
    listener = socket.socket(fileno=int(options["fd"])) if "fd" in options else socket.socket()
    if "fd" not in options:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(options["port"])))
        listener.listen()
    status = b"503 Starting" if options.get("healthy") == "no" else b"200 OK"
    while True:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.0 " + status + b'\r\nContent-Length: 22\r\n\r\n{"status": "starting"}')
        connection.close()


def main() -> int:
    """Behave as the options say."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in options else lambda *_: stop.set())
    signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    if options["role"] == "router":
        threading.Thread(target=serve_health, daemon=True).start()
    if "status" in options:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b'{"pid": %d, "status": "ready"}' % os.getpid(), options["status"])
    if "code" in options:
        while "file" in options and not os.path.exists(options["file"]):
            time.sleep(0.01)
        print(options["say"], file=sys.stderr, flush=True)
        return int(options["code"])
    stop.wait(60.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
