"""A small Kubernetes API server: EndpointSlices over HTTP, with pages, watches, bookmarks and versions that are
compacted away."""

from __future__ import annotations

import asyncio
import copy
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from router.membership.following import eventually

PATH = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
Json = dict[str, Any]


def slice_of(name: str, *pods: str, **more: Any) -> Json:
    """A slice with pods "name=address"."""
    endpoints = [
        {
            "addresses": [pod.split("=")[1]],
            "conditions": {"ready": True, "serving": True, "terminating": False},
            "targetRef": {"kind": "Pod", "name": pod.split("=")[0]},
            "nodeName": f"node of {pod.split('=')[0]}",
        }
        for pod in pods
    ]
    ports = [{"name": "requests", "port": 7400}, {"name": "events", "port": 7401}]
    labels = {"kubernetes.io/service-name": "groups"}
    return {
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": ports,
        "metadata": {"name": name, "labels": labels},
    } | more


class FakeKubernetes:
    """Use it as an async context manager. It listens on a free port of loopback."""

    def __init__(self, token: str) -> None:
        self.tokens = {token}
        """The tokens that it takes."""
        self.page = 2
        """Largest number of slices in a page."""
        self.is_away = False
        """Whether it closes each connection without an answer."""
        self.gone_as_status = False
        """Whether a watch of a version that it has forgotten is answered with 410, not with an event."""
        self.lists = 0
        self.watches: list[int] = []
        """The versions from which watches were begun."""
        self.refused = 0
        self._slices: dict[str, Json] = {}
        self._version = 100
        self._oldest = 0
        self._events: list[tuple[int, Json]] = []
        self._changed = asyncio.Condition()
        self._ends = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> FakeKubernetes:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.drop()
        await self.end_watches()
        await eventually(lambda: not self._writers)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    # What happens in the cluster

    async def put(self, each: Json) -> None:
        """Make or change a slice."""
        name = each["metadata"]["name"]
        await self._event("MODIFIED" if name in self._slices else "ADDED", copy.deepcopy(each))

    async def delete(self, name: str) -> None:
        """Delete a slice."""
        await self._event("DELETED", self._slices[name])

    async def bookmark(self) -> int:
        """Tell all watches of a new version, without any change; return it."""
        await self._event("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})
        return self._version

    async def silently(self, each: Json) -> None:
        """Change a slice so that no watch learns of it."""
        each["metadata"]["resourceVersion"] = str(self._version)
        self._slices[each["metadata"]["name"]] = each

    def compact(self) -> None:
        """Forget all changes so far."""
        self._version += 1
        self._oldest = self._version
        self._events.clear()

    async def end_watches(self) -> None:
        """End all watches, as after their time."""
        async with self._changed:
            self._ends += 1
            self._changed.notify_all()

    def drop(self) -> None:
        """Break all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _event(self, kind: str, each: Json) -> None:
        async with self._changed:
            self._version += 1
            each = copy.deepcopy(each)
            each["metadata"]["resourceVersion"] = str(self._version)
            if kind == "DELETED":
                del self._slices[each["metadata"]["name"]]
            elif kind != "BOOKMARK":
                self._slices[each["metadata"]["name"]] = each
            self._events.append((self._version, {"type": kind, "object": each}))
            self._changed.notify_all()

    # Connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while not self.is_away:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                await self._answer(head[0].split()[1], headers, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, target: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            self.refused += 1
            await _send(writer, 401, {"kind": "Status", "code": 401, "message": "Unauthorized"})
        elif parts.path != PATH or query.get("labelSelector") != "kubernetes.io/service-name=groups":
            await _send(writer, 403, {"kind": "Status", "code": 403, "message": "not this service"})
        elif query.get("watch") == "true":
            assert query["allowWatchBookmarks"] == "true"
            assert int(query["timeoutSeconds"]) > 0
            await self._watch(int(query["resourceVersion"]), writer)
        else:
            await self._list(query, writer)

    async def _list(self, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        self.lists += "continue" not in query
        begin = int(query.get("continue", 0))
        end = begin + min(self.page, int(query["limit"]))
        items = list(self._slices.values())
        metadata = {"resourceVersion": str(self._version)}
        if end < len(items):
            metadata["continue"] = str(end)
        await _send(writer, 200, {"kind": "EndpointSliceList", "metadata": metadata, "items": items[begin:end]})

    async def _watch(self, version: int, writer: asyncio.StreamWriter) -> None:
        self.watches.append(version)
        gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
        if version < self._oldest and self.gone_as_status:
            await _send(writer, 410, gone)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        ends = self._ends
        if version < self._oldest:
            _chunk(writer, {"type": "ERROR", "object": gone})
        else:
            async with self._changed:
                while not writer.transport.is_closing():
                    for number, event in self._events:
                        if number > version:
                            _chunk(writer, event)
                            version = number
                    if self._ends != ends:
                        break
                    await self._changed.wait()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _chunk(writer: asyncio.StreamWriter, event: Json) -> None:
    """Write an event in two pieces, as a network may cut it."""
    line = msgspec.json.encode(event) + b"\n"
    for piece in (line[:20], line[20:]):
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")


async def _send(writer: asyncio.StreamWriter, status: int, body: Json) -> None:
    content = msgspec.json.encode(body)
    writer.write(f"HTTP/1.1 {status} -\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
