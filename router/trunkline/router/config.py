"""The settings of a router process. Read from a JSON file at its start, checked once, never changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from trunkline.kvstore.records import problem_of_records
from trunkline.router.membership.open_source import problem_of_members
from trunkline.router.text.reasoning_styles import REASONING_PARSERS
from trunkline.router.text.tool_styles import OPTIONS
from trunkline.router.text.volatile_lines import problem_of_rules
from trunkline.runtime.wire_keys import Role, problem_of

TOOL_CALL_PARSERS = ("auto", *OPTIONS)
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
ORIGIN: Final = re.compile(r"https?://[^\s/]+")
MODEL_NAME_CHARACTERS_MAX: Final = 256
HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
LOG_LEVELS = ("debug", "info", "warning", "error")
HEADER_NAME: Final = re.compile(r"(?!(?i:authorization|x-api-key|cookie)\Z)[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
"""Matches the names that the header with a tenant's name may have. Headers that hold secrets are excluded."""
IDEMPOTENCY_TTL_S_MAX: Final = 86_400.0
LIMIT_MAX: Final = 10**12
"""Largest value of a tenant's limit; a larger one would have no effect."""


def problem_of_model_name(name: str) -> str:
    """Return why no model can be served under this name; "": a model can. Names go into answers and logs."""
    if not 1 <= len(name) <= MODEL_NAME_CHARACTERS_MAX:
        return f"{name[:40]!r} has {len(name)} characters; allowed are 1 to {MODEL_NAME_CHARACTERS_MAX}"
    bad = next((character for character in name if not character.isprintable()), "")
    if bad or name != name.strip():
        what = f"has the character {bad!a}" if bad else "begins or ends with a blank"
        return f"{name[:80]!a} {what}; allowed are printable characters, without blanks at the ends"
    return ""


def is_pattern(name: str) -> bool:
    """Return whether a served name stands for all names that begin like it: "claude-*", or "*" for every name."""
    return name.endswith("*")


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a tenant. In each field None means that there is no limit."""

    requests: int | None = None
    """Largest number of requests at once."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Largest number of tokens in a minute, of prompts and answers together."""
    priority: int | None = None
    """Priority of requests that ask for none, and at the same time the most urgent priority that a request gets.
    Smaller numbers are more urgent."""
    records_bytes: int | None = None
    """Size in bytes of the tenant's records from which on it can make no more."""
    pins: float | None = None
    """Part of a group's room for pins, from 0 to 1, that the tenant's schemas may take."""
    kv_floor: float | None = None
    """Part of each KV tier of a group, from 0 to 1, that other tenants cannot evict. None: nothing is kept."""
    kv_ceiling: float | None = None
    """Part of each KV tier of a group, from 0 to 1, above which the tenant's chunks are evicted first."""

    def problem(self) -> str:
        """Return what is wrong with the limits; "": nothing."""
        for name in ("requests", "requests_per_minute", "tokens_per_minute", "records_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                return f"{name} is {value}; it must be at least 1, or null for no limit"
            if value is not None and value > LIMIT_MAX:
                return f"{name} has {len(str(value))} digits; allowed are 1 to {LIMIT_MAX}, or null for no limit"
        floor, ceiling = self.kv_share
        if not 0.0 <= floor <= ceiling <= 1.0:
            return f"kv_floor is {floor} and kv_ceiling {ceiling}; parts of each tier, 0 <= floor <= ceiling <= 1"
        if self.pins is not None and not 0.0 <= self.pins <= 1.0:
            return f"pins is {self.pins}; it is a part, from 0 to 1, of the pins of a group"
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            return f"priority is {self.priority}; it is a 32-bit integer"
        return ""

    @property
    def kv_share(self) -> tuple[float, float]:
        """Floor and ceiling of the tenant's part of each KV tier."""
        return self.kv_floor or 0.0, 1.0 if self.kv_ceiling is None else self.kv_ceiling


NO_LIMITS: Final = TenantLimits()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that a router serves."""

    model_path: str
    """Folder with the model's tokenizer and configuration (the weights are not read)."""
    names: list[str] = []
    """Names by which requests may ask for the model, the main one first. Empty: the folder's name. A name with a
    star at its end stands for all names that begin like it, unless a model has them."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls, one of `TOOL_CALL_PARSERS`; "auto": as its files suggest."""
    reasoning_parser: str = "auto"
    """How the model marks its thoughts, one of `REASONING_PARSERS`; "auto": as its files suggest."""
    max_context: int = 0
    """Largest number of tokens of prompt and output together; 0: what the model's configuration says."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """Every name of the model, the main one first."""
        return tuple(self.names) or (Path(self.model_path).resolve().name,)

    @property
    def name(self) -> str:
        """The model's main name."""
        return self.all_names[0]

    def rules(self) -> tuple[tuple[bool, str], ...]:
        """Return the rules that its fields keep or break, each with the sentence about a breach."""
        problem = next(filter(None, map(problem_of_model_name, self.all_names)), "")
        return (
            (
                Path(self.model_path, "tokenizer.json").is_file(),
                f"model_path: {self.model_path!r} has no tokenizer.json",
            ),
            (not problem, f"model name: {problem}"),
            (
                not is_pattern(self.name),
                f"model name: {self.name!r} stands for many names; the first name is the one in answers",
            ),
            (self.max_context >= 0, f"max_context: {self.max_context} is negative; 0 means the model's own"),
            (
                self.tool_call_parser in TOOL_CALL_PARSERS,
                f"tool_call_parser: {self.tool_call_parser!r} is none of {', '.join(TOOL_CALL_PARSERS)}",
            ),
            (
                self.reasoning_parser in REASONING_PARSERS,
                f"reasoning_parser: {self.reasoning_parser!r} is none of {', '.join(REASONING_PARSERS)}",
            ),
        )


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one router process. Sizes in bytes, times in seconds.

    `validate` checks what types cannot say; call it before anything else.
    """

    model_path: str
    """Folder with the model's tokenizer and configuration (the weights are not read)."""
    controllers: list[str]
    """ZeroMQ endpoints of the controllers' ROUTER sockets, e.g. "ipc:///run/trunkline/controller-0"."""
    events: list[str] = []
    """ZeroMQ endpoints of the controllers' PUB sockets with KV events, in the order of `controllers`; empty: the
    controllers publish no events."""
    members: str = ""
    """URL of the source that tells which groups there are (`membership/open_source.py`), instead of `controllers`
    and `events`; "": these lists, which do not change."""
    policy: str = "prefix"
    """Rule by which the controller for a request is chosen: a name from `routing.policies.POLICIES`."""
    host: str = "127.0.0.1"
    """Address to listen on. Local by default: without keys the server listens nowhere else."""
    port: int = 8000
    """TCP port; 0 lets the system choose one (it is logged)."""
    listen_fd: int = 0
    """Descriptor of an inherited listening socket, from which other routers may accept, too; `host` and `port`
    then only name its address. 0: there is none, and the process binds a socket of its own."""
    status_path: str = ""
    """Socket on which the supervisor gets this process's status (`trunkline.runtime.process`); "": none."""
    served_model_name: str = ""
    """Name of the model for clients; empty: the name of the folder `model_path`."""
    model_is_named: bool = False
    """Whether the name was given for groups, too: groups that were given another one are not used."""
    served_model_aliases: list[str] = []
    """More names under which clients may ask for the model; as in `ModelConfig.names`."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls, one of `TOOL_CALL_PARSERS`; "auto": as its files suggest."""
    reasoning_parser: str = "auto"
    """How the model marks its thoughts, one of `REASONING_PARSERS`; "auto": as its files suggest."""
    lora_updates: bool = False
    """Whether adapters may be loaded and unloaded by requests."""
    show_lines: list[str] = []
    """Names of the rules for volatile lines (`text/volatile_lines.py`) that are switched off."""
    max_context: int = 0
    """Largest number of tokens of prompt and output together; 0: what the model's configuration says. A controller
    that can hold fewer (its `State.max_context`) lowers it further."""
    models: list[ModelConfig] = []
    """Further models, each with groups of its own. The fields above describe the first one, which requests mean
    that name none."""
    max_body_bytes: int = 16 << 20
    """Largest size of a request's body; larger ones are refused (413). 16 MiB holds a million-token prompt several
    times."""
    file_bytes_max: int = 200 << 20
    """Largest size of a file that clients upload; larger ones are refused (413)."""
    max_header_bytes: int = 64 << 10
    """Largest size of a request's first line and headers together; more is refused (431). Browsers send less than
    8 KiB."""
    max_headers: int = 128
    """Largest number of a request's headers; more are refused (431). Clients send about a dozen, and proxies add a
    few."""
    max_url_bytes: int = 8 << 10
    """Largest length of a request's address; longer ones are refused (414). The API's longest ones have some
    hundred bytes."""
    header_seconds: float = 15.0
    """Time for the headers of a request; slower requests are refused (408): slow clients must not hold connections
    for nothing."""
    body_seconds: float = 60.0
    """Time for the body of a request; slower requests are refused (408). A body of `max_body_bytes` takes this
    time at 2 Mbit/s."""
    max_connections: int = 8192
    """Largest number of connections; more are refused (503). Twice `max_inflight`, since clients keep idle
    connections; each costs some 20 KiB."""
    max_inflight: int = 4096
    """Largest number of requests that this router works on at once; more are refused (429), so that its memory is
    bounded."""
    request_timeout_seconds: float = 3600.0
    """Time for a request, after which it is aborted (504); 0: there is no limit. An hour bounds leaks, not long
    answers."""
    drain_seconds: float = 30.0
    """Time for which running requests may go on after SIGTERM. Kubernetes kills a process after 30 seconds by
    default."""
    resume_seconds: float = 60.0
    """Longest time for which a request, or a stream that has lost its controller, waits until a controller is
    ready. 0: a request fails at once, and a stream that loses its controller ends with an error."""
    silence_seconds: float = 5.0
    """Time without a message after which a controller counts as dead (it answers a ping each second)."""
    tenants: str = ""
    """JSON file with the tenants' keys and limits (`tenant_file.py`), reloaded when it changes. Empty: there is no
    file."""
    tenants_kept: str = ""
    """Path where the last correct version of the file `tenants` is kept, for a router that is started while the
    file is wrong. Empty: no version is kept."""
    tenant_limits: TenantLimits = NO_LIMITS
    """Limits of tenants that the file `tenants` does not name. There are no limits by default."""
    tenant_header: str = ""
    """Header in which a trusted gateway names the tenant, "X-Tenant" for example; empty: keys tell tenants apart.
    Clients must not be able to send it themselves."""
    api_key_digest: str = ""
    """SHA-256 in hexadecimal of the one key that all clients share if there is no file of tenants; "": there is no
    such key."""
    admin_key_digest: str = ""
    """SHA-256 in hexadecimal of the key of role admin that commands on this machine use. The key is drawn at
    each start of a cluster. "": there is none."""
    needs_keys: bool = False
    """Whether requests need keys even if the router knows no key. It is decided when the cluster starts: if the
    file of tenants loses its last key, a router that is started later must not be open to everyone."""
    allow_anonymous: bool = False
    """Whether a server without keys may listen on an address that other machines reach."""
    allowed_hosts: list[str] = []
    """Names of this machine that a server without keys answers to, besides addresses and localhost. A page that
    was loaded under another name may be a stranger's (DNS rebinding)."""
    cors_origins: list[str] = []
    """Origins of web pages that may use this server from a browser, such as `https://chat.example.com`."""
    routers: int = 1
    """Number of router processes on the same port. If they do not share a record store, or it is away, each grants
    an equal part of every tenant's limit."""
    number: int = 0
    """Number of this router among the `routers` processes, from 0 on."""
    metrics_path: str = ""
    """Path, without the number at its end, of the sockets by which router processes ask each other for metrics
    (`metrics_page.py`); "": there are none."""
    prompt_memory_bytes: int = 256 << 20
    """Memory for prompts and answers of conversations that clients send again as a whole
    (`text/prompt_memory.py`), in bytes; 0: nothing is remembered, and each prompt is encoded anew. The same
    conversations as messages (`text/conversation_memory.py`) take up to half as much again."""
    idempotency_ttl_seconds: float = 600.0
    """Time for which an answer is kept for a client that repeats its request with the same `Idempotency-Key`; 0:
    these keys are ignored."""
    records: str = "sqlite::memory:"
    """URL of the store of sessions, schemas and kept answers, which all routers share (`kvstore/records/`). The
    default is a store of this process alone, which ends with it."""
    records_bytes_max: int = 8 << 30
    """Largest size in bytes of all records together; 0: there is no limit. Beyond it, records that were not used
    for the longest time are deleted."""
    records_tenant_bytes: int = 0
    """Size in bytes of a tenant's records from which on it can make no more (429), unless `tenant_limits` or the
    file of tenants has another `records_bytes`; 0: there is no limit."""
    wire_keys: str = ""
    """File with the keys of sockets between hosts (`trunkline key wire`); "": there is none."""
    plain_tcp: bool = False
    """Whether sockets between hosts need no keys: for tests, and for networks without other users."""
    parent_pid: int = 0
    """Process id of the supervisor. When the supervisor ends, this process ends, too. 0: there is no
    supervisor."""
    log_level: str = "info"
    """Lowest level of messages that are logged, one of `LOG_LEVELS`."""
    log_format: str = "auto"
    """Form of log lines: "json", "text", or "auto", which is text on a terminal and else JSON."""
    otlp_endpoint: str = ""
    """Address of the collector that spans are sent to; "": the one in OpenTelemetry's environment variables
    (`runtime/tracing.py`)."""
    trace_sample: float | None = None
    """Part of the requests that is traced, from 0 to 1, unless the caller has decided. None: the part in
    OpenTelemetry's environment variables or, without them, all requests."""

    def validate(self) -> None:
        """Check the settings against each other and the file system.

        Raises:
            ValueError: naming the field, what was given and what is allowed.
        """
        rules = (
            *self._controller_rules(),
            *self._model_rules(),
            (self.listen_fd >= 0, f"listen_fd: {self.listen_fd} is negative; 0 means none"),
            (bool(self.host), "host: must not be empty; 0.0.0.0 listens on all addresses"),
            (0 <= self.port <= 65535, f"port: {self.port} is not between 0 and 65535"),
            *self._limit_rules(),
            (
                self.request_timeout_seconds >= 0,
                f"request_timeout_seconds: {self.request_timeout_seconds} is negative; 0 means no limit",
            ),
            (
                self.prompt_memory_bytes >= 0,
                f"prompt_memory_bytes: {self.prompt_memory_bytes} is negative; 0 means that nothing is remembered",
            ),
            (self.resume_seconds >= 0, f"resume_seconds: {self.resume_seconds} is negative; 0 means not to wait"),
            (self.drain_seconds >= 0, f"drain_seconds: {self.drain_seconds} is negative"),
            (
                self.silence_seconds >= 2,
                f"silence_seconds: {self.silence_seconds} is less than 2 (pings go out once a second)",
            ),
            (not self.tenant_limits.problem(), f"tenant_limits: {self.tenant_limits.problem()}"),
            *self._access_rules(),
            *self._records_rules(),
            (self.routers >= 1, f"routers: {self.routers} is less than 1"),
            (0 <= self.number < self.routers, f"number: {self.number} is not between 0 and {self.routers - 1}"),
            (
                self.idempotency_ttl_seconds == 0 or 1 <= self.idempotency_ttl_seconds <= IDEMPOTENCY_TTL_S_MAX,
                f"idempotency_ttl_seconds: {self.idempotency_ttl_seconds:g} is neither 0 (off) nor between 1 and "
                f"{IDEMPOTENCY_TTL_S_MAX:.0f}",
            ),
            (self.parent_pid >= 0, f"parent_pid: {self.parent_pid} is negative"),
            (self.log_level in LOG_LEVELS, f"log_level: {self.log_level!r} is none of {LOG_LEVELS}"),
            (
                self.trace_sample is None or 0 <= self.trace_sample <= 1,
                f"trace_sample: {self.trace_sample} is not between 0 and 1",
            ),
        )
        for holds, sentence in rules:
            if not holds:
                raise ValueError(sentence)
        endpoints = [*self.controllers, *self.events]
        if problem := problem_of(endpoints, self.wire_keys, Role.ROUTER, plain_tcp=self.plain_tcp):
            raise ValueError(problem)

    def _controller_rules(self) -> tuple[tuple[bool, str], ...]:
        """Return the rules about the controllers, or the source that names them."""
        return (
            (
                bool(self.controllers) != bool(self.members),
                f"controllers: {self.controllers!r}; at least one endpoint is needed, or else `members`",
            ),
            (
                not self.members or not problem_of_members(self.members),
                f"members: {problem_of_members(self.members)}",
            ),
            (
                all(endpoint.startswith(("ipc://", "tcp://", "inproc://")) for endpoint in self.controllers),
                f"controllers: {self.controllers!r}; endpoints begin with ipc:// or tcp://",
            ),
            (
                len(set(self.controllers)) == len(self.controllers),
                f"controllers: {self.controllers!r}; an endpoint is listed twice",
            ),
            (
                len(self.events) in (0, len(self.controllers)),
                f"events: {len(self.events)} endpoints for {len(self.controllers)} controllers; one each, or none",
            ),
        )

    def _model_rules(self) -> tuple[tuple[bool, str], ...]:
        """Return the rules about the models."""
        names = [name for model in self.all_models for name in model.all_names]
        twice = sorted({name for name in names if names.count(name) > 1})
        return (
            *(rule for model in self.all_models for rule in model.rules()),
            (not problem_of_rules(self.show_lines), f"show_lines: {problem_of_rules(self.show_lines)}"),
            (not self.models or not twice, f"models: two have the name {', '.join(map(repr, twice))}"),
        )

    def _limit_rules(self) -> tuple[tuple[bool, str], ...]:
        """Return the rules about the limits of requests and connections."""
        return (
            (self.file_bytes_max >= 1024, f"file_bytes_max: {self.file_bytes_max} is less than 1024"),
            (self.max_body_bytes >= 1024, f"max_body_bytes: {self.max_body_bytes} is less than 1024"),
            (
                1024 <= self.max_header_bytes <= 1 << 20,
                f"max_header_bytes: {self.max_header_bytes} is not between 1024 and {1 << 20}",
            ),
            (8 <= self.max_headers <= 10_000, f"max_headers: {self.max_headers} is not between 8 and 10000"),
            (
                256 <= self.max_url_bytes <= self.max_header_bytes,
                f"max_url_bytes: {self.max_url_bytes} is not between 256 and max_header_bytes",
            ),
            *(
                (0 < seconds <= 3600, f"{name}: {seconds:g} is not more than 0 and at most 3600")
                for name, seconds in (("header_seconds", self.header_seconds), ("body_seconds", self.body_seconds))
            ),
            (self.max_connections >= 1, f"max_connections: {self.max_connections} is less than 1"),
            (self.max_inflight >= 1, f"max_inflight: {self.max_inflight} is less than 1"),
        )

    def _access_rules(self) -> tuple[tuple[bool, str], ...]:
        """Return the rules about keys, tenants and web pages."""
        return (
            (
                not self.tenant_header or HEADER_NAME.fullmatch(self.tenant_header) is not None,
                f"tenant_header: {self.tenant_header!r} is no name of a header, such as X-Tenant",
            ),
            *(
                (not digest or DIGEST.fullmatch(digest) is not None, f"{name}: this is no SHA-256 in hexadecimal")
                for name, digest in (
                    ("api_key_digest", self.api_key_digest),
                    ("admin_key_digest", self.admin_key_digest),
                )
            ),
            *(
                (
                    ORIGIN.fullmatch(origin) is not None,
                    f"cors_origins: {origin!r} is no origin, as https://a.example is",
                )
                for origin in self.cors_origins
            ),
            *(
                (
                    HOST.fullmatch(host) is not None,
                    f"allowed_hosts: {host!r} is no name of a machine (without a port)",
                )
                for host in self.allowed_hosts
            ),
        )

    def _records_rules(self) -> tuple[tuple[bool, str], ...]:
        """Return the rules about the store of records."""
        return (
            (not problem_of_records(self.records), f"records: {problem_of_records(self.records)}"),
            *(
                (count >= 0, f"{name}: {count} is negative; 0 means no limit")
                for name, count in (
                    ("records_bytes_max", self.records_bytes_max),
                    ("records_tenant_bytes", self.records_tenant_bytes),
                )
            ),
        )

    @property
    def shares_records(self) -> bool:
        """Whether other routers may use the same record store."""
        if self.records.startswith("sqlite::memory:"):
            return False
        return self.routers > 1 or not self.records.startswith("sqlite:")

    @property
    def model_name(self) -> str:
        """The first model's name in answers."""
        return self.served_model_name or Path(self.model_path).resolve().name

    @property
    def all_models(self) -> list[ModelConfig]:
        """All models, the first one first."""
        first = ModelConfig(
            model_path=self.model_path,
            names=[self.model_name, *self.served_model_aliases],
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            max_context=self.max_context,
        )
        return [first, *self.models]


def load_config(path: str) -> RouterConfig:
    """Read and check a JSON configuration file.

    Raises:
        ValueError: the file cannot be read, or breaks a rule, which the error names.
    """
    try:
        config = msgspec.json.decode(Path(path).read_bytes(), type=RouterConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    config.validate()
    return config
