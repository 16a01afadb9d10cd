"""A cluster whose processes talk over TCP with wire keys, among strangers, and a router that talks nonsense."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from cluster.faults import launcher
from cluster.harness import Cluster, wait_for
from controller.hostile_peers import requests
from deploy.waiting import free_ports
from simulation.hostile import altered

from trunkline.runtime.wire_keys import PARTS, Role, generate, write
from trunkline.runtime.wire_peer import WirePeer

pytestmark = pytest.mark.processes

SMALL = ("--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB", "--disk-tier", "0", "--tp", "2")
ASKED = {"model": "trunkline-demo", "prompt": "def join(", "max_tokens": 24, "temperature": 0}
MESSAGES = 3000


def text_of(cluster: Cluster) -> str:
    answer: dict[str, Any] = cluster.post("/v1/completions", ASKED)
    text: str = answer["choices"][0]["text"]
    return text


def disturb(endpoint: str, keys: Path) -> None:
    """As a router with the right keys that has lost its mind."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mad = context.socket(zmq.DEALER)
    mad.set(zmq.LINGER, 2000)
    WirePeer(str(keys), Role.ROUTER).connect(mad, endpoint)
    chosen = random.Random(1)
    for _ in range(MESSAGES):
        mad.send(altered(chosen, chosen.choice(requests(chosen))))
    mad.close()
    context.term()


def test_strangers_and_nonsense_change_nothing(tmp_path: Path) -> None:
    whole = generate()
    for part, roles in PARTS.items():
        write(whole.part(roles), tmp_path / part)
    write(generate(), tmp_path / "other")
    names = ("plan_endpoint", "report_endpoint", "router_endpoint", "events_endpoint")
    places = {name: f"tcp://127.0.0.1:{port}" for port, name in enumerate(names, free_ports(len(names)))}
    to_workers = {name: places[name] for name in names[:2]}
    to_routers = {
        "members": "",
        "controllers": [places["router_endpoint"]],
        "events": [places["events_endpoint"]],
    }
    changes = {
        "router": {"config": {**to_routers, "wire_keys": str(tmp_path / "router")}},
        "controller": {"config": {**places, "wire_keys": str(tmp_path / "group")}},
        "worker": {"config": {**to_workers, "wire_keys": str(tmp_path / "workers")}},
    }
    with Cluster(*SMALL, launcher=launcher(tmp_path, changes)) as cluster:
        text = text_of(cluster)
        mad = threading.Thread(target=disturb, args=(places["router_endpoint"], tmp_path / "router"))
        mad.start()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        strangers: list[zmq.Socket[bytes]] = []
        scanners: list[socket.socket] = []
        for endpoint in places.values():
            for path in ("", str(tmp_path / "other")):
                stranger = context.socket(zmq.DEALER)
                WirePeer(path).connect(stranger, endpoint)
                stranger.send(b"let me in")
                strangers.append(stranger)
            host, port = endpoint.removeprefix("tcp://").split(":")
            scanners.append(socket.create_connection((host, int(port))))
            scanners[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        while mad.is_alive():
            assert text_of(cluster) == text
        assert text_of(cluster) == text
        for scanner in scanners:
            scanner.close()
        context.destroy(linger=0)
        wait_for(lambda: "another cluster's wire keys" in cluster.log, 10)
        wait_for(lambda: "router message cannot be decoded; ignored" in cluster.log, 10)
        assert "Traceback" not in cluster.log
        cluster.wait_healthy()
        assert cluster.stop() == 0
