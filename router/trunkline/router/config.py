"""What a router process is told at its start. Read from a JSON file, checked once, never changed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trunkline.router.tenants import HEADER_NAME, IDEMPOTENCY_TTL_S_MAX, NO_LIMITS, TenantLimits
from trunkline.router.tools.styles import STYLE_NAMES

TOOL_CALL_PARSERS = ("auto", *STYLE_NAMES)
LOG_LEVELS = ("debug", "info", "warning", "error")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one router process. Sizes in bytes, times in seconds.

    `validate` checks what types cannot say; call it before anything else.
    """

    model_path: str
    """Folder with the model's tokenizer and configuration (the weights are not read)."""
    controllers: list[str]
    """ZeroMQ endpoints of the controllers' ROUTER sockets, e.g. "ipc:///run/trunkline/controller-0"."""
    events: list[str] = []
    """Endpoints of their PUB sockets with KV events, in the same order; empty: the controllers publish none."""
    policy: str = "prefix"
    """How the controller for a request is chosen, a name from `routing.policies.POLICIES`."""
    host: str = "127.0.0.1"
    """Address to listen on. Local by default: there is no authentication."""
    port: int = 8000
    """TCP port; 0 lets the system choose one (it is logged)."""
    listen_fd: int = 0
    """Descriptor of an inherited listening socket, from which others may accept, too; `host` and `port` then
    only say where it listens. 0: none; the process binds its own."""
    status_path: str = ""
    """Socket of the supervisor for what this process says of itself (`trunkline.deploy.notify`); "": none."""
    served_model_name: str = ""
    """Name clients use; empty: the name of the folder `model_path`."""
    served_model_aliases: list[str] = []
    """More names for the same model."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls, one of `TOOL_CALL_PARSERS`; "auto": as its files suggest."""
    max_context: int = 0
    """Prompt + output at most, in tokens; 0: what the model's configuration says. A controller that can
    hold less (its `State.max_context`) lowers it further."""
    max_body_bytes: int = 16 << 20
    """Larger request bodies are refused (413). 16 MiB holds a million-token prompt several times."""
    max_inflight: int = 4096
    """Requests this router works on at once; more are refused (429), so that its memory is bounded."""
    request_timeout_seconds: float = 3600.0
    """A request that takes longer is aborted (504); 0: never. An hour bounds leaks, not long answers."""
    drain_seconds: float = 30.0
    """After SIGTERM, how long running requests may go on. Kubernetes kills after 30 by default."""
    resume_seconds: float = 60.0
    """How long a request, or a stream that has begun, waits for a controller when none is there (any more); 0: it
    fails at once, and a stream that loses its controller ends with an error."""
    silence_seconds: float = 5.0
    """A controller that says nothing for so long is dead (it answers a ping each second)."""
    tenants: str = ""
    """JSON file with what tenants may do (`tenant_file.py`); followed while the process runs. Empty: none."""
    tenants_kept: str = ""
    """Where the last version that was right is kept, for who starts while the file is wrong. Empty: nowhere."""
    tenant_limits: TenantLimits = NO_LIMITS
    """What each tenant may do of whom the file says nothing. No limits by default."""
    tenant_header: str = ""
    """Header in which a trusted gateway names the tenant, "X-Tenant" for example; empty: keys tell tenants apart.
    Clients must not be able to send it themselves."""
    routers: int = 1
    """Router processes on the same port. They share nothing, so each grants an equal part of every limit."""
    idempotency_ttl_seconds: float = 600.0
    """How long an answer is kept for a client that sends its request again with the same `Idempotency-Key`; 0:
    such keys are ignored."""
    parent_pid: int = 0
    """The supervisor, with which this process dies; 0: nobody supervises it."""
    log_level: str = "info"
    """One of `LOG_LEVELS`."""

    def validate(self) -> None:
        """Check the settings against each other and the file system.

        Raises:
            ValueError: naming the field, what was given and what is allowed.
        """
        rules = (
            (bool(self.controllers), f"controllers: {self.controllers!r}; at least one endpoint is needed"),
            (
                all(endpoint.startswith(("ipc://", "tcp://", "inproc://")) for endpoint in self.controllers),
                f"controllers: {self.controllers!r}; endpoints begin with ipc:// or tcp://",
            ),
            (
                len(set(self.controllers)) == len(self.controllers),
                f"controllers: {self.controllers!r}; an endpoint is listed twice",
            ),
            (
                Path(self.model_path, "tokenizer.json").is_file(),
                f"model_path: {self.model_path!r} has no tokenizer.json",
            ),
            (
                len(self.events) in (0, len(self.controllers)),
                f"events: {len(self.events)} endpoints for {len(self.controllers)} controllers; one each, or none",
            ),
            (self.listen_fd >= 0, f"listen_fd: {self.listen_fd} is negative; 0 means none"),
            (bool(self.host), "host: must not be empty; 0.0.0.0 listens on all addresses"),
            (0 <= self.port <= 65535, f"port: {self.port} is not between 0 and 65535"),
            (self.max_context >= 0, f"max_context: {self.max_context} is negative; 0 means the model's own"),
            (self.max_body_bytes >= 1024, f"max_body_bytes: {self.max_body_bytes} is less than 1024"),
            (self.max_inflight >= 1, f"max_inflight: {self.max_inflight} is less than 1"),
            (
                self.request_timeout_seconds >= 0,
                f"request_timeout_seconds: {self.request_timeout_seconds} is negative; 0 means no limit",
            ),
            (self.resume_seconds >= 0, f"resume_seconds: {self.resume_seconds} is negative; 0 means not to wait"),
            (self.drain_seconds >= 0, f"drain_seconds: {self.drain_seconds} is negative"),
            (
                self.silence_seconds >= 2,
                f"silence_seconds: {self.silence_seconds} is less than 2 (pings go out once a second)",
            ),
            (not self.tenant_limits.problem(), f"tenant_limits: {self.tenant_limits.problem()}"),
            (
                not self.tenant_header or HEADER_NAME.fullmatch(self.tenant_header) is not None,
                f"tenant_header: {self.tenant_header!r} is no name of a header, such as X-Tenant",
            ),
            (self.routers >= 1, f"routers: {self.routers} is less than 1"),
            (
                self.idempotency_ttl_seconds == 0 or 1 <= self.idempotency_ttl_seconds <= IDEMPOTENCY_TTL_S_MAX,
                f"idempotency_ttl_seconds: {self.idempotency_ttl_seconds:g} is neither 0 (off) nor between 1 and "
                f"{IDEMPOTENCY_TTL_S_MAX:.0f}",
            ),
            (self.parent_pid >= 0, f"parent_pid: {self.parent_pid} is negative"),
            (
                self.tool_call_parser in TOOL_CALL_PARSERS,
                f"tool_call_parser: {self.tool_call_parser!r} is none of {', '.join(TOOL_CALL_PARSERS)}",
            ),
            (self.log_level in LOG_LEVELS, f"log_level: {self.log_level!r} is none of {LOG_LEVELS}"),
        )
        for holds, sentence in rules:
            if not holds:
                raise ValueError(sentence)

    @property
    def model_name(self) -> str:
        """The name responses carry."""
        return self.served_model_name or Path(self.model_path).resolve().name

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name a request may use, the main one first."""
        return (self.model_name, *self.served_model_aliases)


def load_config(path: str) -> RouterConfig:
    """Read and check a JSON configuration file.

    Raises:
        ValueError: it cannot be read, or breaks a rule; the text says which.
    """
    try:
        config = msgspec.json.decode(Path(path).read_bytes(), type=RouterConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    config.validate()
    return config
