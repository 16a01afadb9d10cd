"""The health of a part of a cluster, by which Kubernetes decides whether to restart it or to send it requests.

    livez     the supervisor's loop turns, and nothing here was given up; or it is not there yet
    readyz    group: its controller is ready, and a token was generated
              workers: the ranks here are in the group's epoch
              router: `/health` says so
    startupz  has been ready once; a router: answers over HTTP

A fault elsewhere (a router without groups, ranks without their leader) makes a part not ready, but never dead:
restarting it would not help.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from trunkline.deploy.config.node_settings import Kind
from trunkline.deploy.config.plans import local_endpoint
from trunkline.deploy.node.node_probe import TokenProbe, Verdict
from trunkline.deploy.supervisor.control_client import ControlError, ask
from trunkline.deploy.supervisor.control_commands import Command
from trunkline.deploy.supervisor.registry import control_path

_LOOP_S_MAX: Final = 5.0
"""The supervisor's loop never waits for anything: if it does not answer in this time, it hangs."""
_ROUTER_S_MAX: Final = 4.0
_FRESH_S: Final = 1.0
"""An answer is given again for this time, however many ask."""
_PREPARES: Final = "it reads the model"

Probe = Callable[[], tuple[Verdict, Verdict]]
"""Asks a part itself whether it has started, and whether it is ready."""


class NodeHealth:
    """Answers questions about health, from any thread."""

    def __init__(self) -> None:
        self._asked: tuple[Path, Probe] | None = None
        """The run folder and what to ask; None: there is no supervisor yet."""
        self._lock = threading.Lock()
        self._last: tuple[Verdict, Verdict] | None = None
        self._last_at = float("-inf")
        self._has_started = False

    def begin(self, folder: Path, probe: Probe) -> None:
        """Begin to ask the supervisor, which exists from now on.

        Before, weights may be read for minutes: the part lives, and has not started.

        Args:
            folder: The run folder, where the supervisor's control socket is.
            probe: Asks the part itself, beside its supervisor.
        """
        self._asked = folder, probe

    def livez(self) -> Verdict:
        """Return whether the part should be left running."""
        if self._asked is None:
            return Verdict(True, _PREPARES)
        status = self._status()
        return alive(status) if isinstance(status, dict) else status

    def startupz(self) -> Verdict:
        """Return whether the part has ever been ready."""
        if self._has_started:
            return Verdict(True, "it has started")
        return self._verdicts()[0]

    def readyz(self) -> Verdict:
        """Return whether the part is ready for requests now."""
        return self._verdicts()[1]

    def _verdicts(self) -> tuple[Verdict, Verdict]:
        if self._asked is None:
            return (unstarted := Verdict(False, _PREPARES)), unstarted
        _, probe = self._asked
        with self._lock:
            status = self._status()
            if not isinstance(status, dict):
                return status, status
            problem = unready(status)
            if problem is not None:  # at once, whatever was true a moment ago
                self._last = None
                return problem, problem
            if self._last is None or time.monotonic() - self._last_at >= _FRESH_S:
                self._last = probe()
                self._last_at = time.monotonic()
            self._has_started = self._has_started or self._last[0].ok
            return self._last

    def _status(self) -> dict[str, Any] | Verdict:
        if self._asked is None:
            return Verdict(False, _PREPARES)
        try:
            for reply in ask(control_path(self._asked[0]), Command("status"), timeout_s=_LOOP_S_MAX):
                if reply.status is not None:
                    return reply.status
        except ControlError as error:
            return Verdict(False, str(error))
        return Verdict(False, "the supervisor does not say how it is")


def alive(status: Mapping[str, Any]) -> Verdict:
    """Return whether a part lives, by the supervisor's status."""
    rows = [(f"group {group['group']}", group) for group in status["groups"] if group["state"] == "lost"]
    rows += [(row["name"], row) for row in status["processes"] if row["state"] == "given up"]
    lost = [f"{name} ({row['why']})" if row.get("why") else name for name, row in rows]
    return Verdict(False, f"given up: {', '.join(lost)}") if lost else Verdict(True, "the supervisor answers")


def unready(status: Mapping[str, Any]) -> Verdict | None:
    """Return why the supervisor's status alone says that a part is not ready; None if it does not say so."""
    if status["phase"] != "serving":
        return Verdict(False, f"it is {status['phase']}")
    for group in status["groups"]:
        if group["state"] != "ready":
            waits = [f"{r['name']} {r['state']}" for r in status["processes"] if r["state"] != "ready"]
            return Verdict(False, f"the group is {group['state']}: {', '.join(waits)}")
    return None


def group_probe(probe: TokenProbe) -> Probe:
    """Return the probe of a group, which asks for a token."""

    def check() -> tuple[Verdict, Verdict]:
        verdict = probe.check()
        return verdict, verdict

    return check


def workers_probe() -> tuple[Verdict, Verdict]:
    """Probe workers, about whom the supervisor's status says everything."""
    verdict = Verdict(True, "the ranks here are in the group's epoch")
    return verdict, verdict


def router_probe(host: str, port: int) -> Probe:
    """Return the probe of routers, which asks one of them for `/health`."""

    def check() -> tuple[Verdict, Verdict]:
        with closing(http.client.HTTPConnection(host, port, timeout=_ROUTER_S_MAX)) as connection:
            try:
                connection.request("GET", "/health")
                response = connection.getresponse()
                body = json.loads(response.read() or b"{}")
            except (OSError, ValueError, http.client.HTTPException) as error:
                verdict = Verdict(False, f"no router answers: {error}")
                return verdict, verdict
        reason = str(body.get("reason", "")) if isinstance(body, dict) else ""
        return Verdict(True, "a router answers"), Verdict(response.status == 200, reason or "ready")

    return check


def probe_of(kind: Kind, folder: Path, host: str, port: int) -> Probe:
    """Return the probe of a part of a cluster that runs here.

    Args:
        folder: The run folder.
        host, port: The address of its routers, if it has any.
    """
    match kind:
        case Kind.GROUP:
            return group_probe(TokenProbe(local_endpoint(folder)))
        case Kind.WORKERS:
            return workers_probe
        case Kind.ROUTER:
            return router_probe(host, port)
