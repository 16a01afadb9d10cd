"""The format of the file that describes a cluster: records, their rules, and a JSON schema. Pure.

`docs/launch.md` and `trunkline launch schema` show these records: a field's description is its documentation in
both. Rules that concern several fields at once, or several hosts, are in `plan.py`.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from trunkline.deploy.config.cli_option import Scalar
from trunkline.deploy.config.option_values import nearest, parse_bytes
from trunkline.deploy.errors import UserError
from trunkline.deploy.launch.document import Document, Path
from trunkline.router.config import problem_of_model_name

VERSION: Final = 1
NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names of clusters, hosts, groups and routers, which become names of folders."""
_NAME_RULE: Final = "names are made of a-z, 0-9 and -, 40 at most, with a letter or digit first and last"
_ADDRESS: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]{2,45}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Options = dict[str, Scalar]
Environment = dict[str, str | int | float]
Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1, le=4096)]
T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts of the file."""


class Ssh(Record, frozen=True):
    """How to reach a host with the `ssh` command of this machine, which also reads `~/.ssh/config`."""

    host: Annotated[str, Meta(description="The host's name or address, or a `Host` of ~/.ssh/config.")]
    user: Annotated[str, Meta(description="Login name. Default: the one that ssh chooses.")] = ""
    port: Annotated[int | None, Meta(description="Port of the SSH server. Default: the one that ssh chooses.")] = (
        None
    )
    identity: Annotated[str, Meta(description="File with the private key.")] = ""
    options: Annotated[
        list[str],
        Meta(description="More `-o` options of ssh, such as `ProxyJump=gateway`. They stand before all others."),
    ] = []
    share_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=86400,
            description="Seconds for which the connection stays open for the next command; 0: it closes at once.",
        ),
    ] = 60


class Host(Record, frozen=True):
    """A machine of the cluster. Without `ssh` and `command` it is this machine."""

    ssh: Annotated[Ssh | str | None, Meta(description="How to reach the host with ssh; or just `USER@HOST`.")] = (
        None
    )
    command: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None,
        Meta(description="Words before a command that run it on the host, such as `[ip, netns, exec, h1]`."),
    ] = None
    address: Annotated[
        str,
        Meta(
            description="Address at which the cluster's other hosts reach this one. Default: the host of `ssh`; "
            "for this machine 127.0.0.1."
        ),
    ] = ""
    trunkline: Annotated[
        str,
        Meta(
            description="The `trunkline` command on the host. Default: `trunkline` over ssh, else the command "
            "that runs now."
        ),
    ] = ""
    state: Annotated[
        str, Meta(description="Folder on the host for logs, keys and states. Default: `~/.local/state/trunkline`.")
    ] = ""
    environment: Annotated[Environment, Meta(description="Environment variables of all units on the host.")] = {}
    cores: Annotated[
        Positive | None,
        Meta(
            description="Number of CPU cores that units on the host may use. Default: all that the host reports."
        ),
    ] = None
    memory: Annotated[
        str,
        Meta(
            description="Memory that units on the host may use, such as 64GiB. Default: all that the host reports."
        ),
    ] = ""
    gpus: Annotated[
        Annotated[int, Meta(ge=0, le=64)] | None,
        Meta(
            description="Number of GPUs on the host; each rank gets one of its own. Default: those that the host "
            "reports; 0: ranks are not given GPUs of their own."
        ),
    ] = None


class Tiers(Record, frozen=True):
    """Where KV is kept, and how much of it."""

    kv_memory: Annotated[str, Meta(description="`--kv-memory`: device memory per worker.")] = ""
    host: Annotated[str | int, Meta(description="`--host-tier`: host memory per worker; 0: none.")] = ""
    disk: Annotated[
        str | int,
        Meta(
            description="`--disk-tier`: SIZE, PATH:SIZE or 0, for each group on each of its hosts. A group's "
            "folder is PATH/GROUP."
        ),
    ] = ""
    remote: Annotated[
        str, Meta(description="`--remote-tier`: URL of a Redis or Valkey server, or of a bucket.")
    ] = ""
    policy: Annotated[str, Meta(description="`--tier-policy`: the rule by which chunks leave a full tier.")] = ""
    peers: Annotated[
        bool | None, Meta(description="`--peers`: whether groups take cached KV from each other. Default: `true`.")
    ] = None


class Group(Record, frozen=True):
    """A controller and its workers, or several such groups that are alike."""

    name: Annotated[str, Meta(description="The group's name. Default: `group-N`.")] = ""
    count: Annotated[
        Positive | None,
        Meta(
            description="Number of such groups, named `NAME-0`, `NAME-1` and so on, all on the same hosts. "
            "Default: one group, named `NAME`."
        ),
    ] = None
    model: Annotated[
        str, Meta(description="Name of the group's model in `models`. Default: the cluster's `model`.")
    ] = ""
    tp: Annotated[
        Positive | None,
        Meta(
            description="Tensor-parallel workers (ranks). Default: on a host with GPUs one per GPU of "
            "the group's equal part, as far as the model can be split; else 1."
        ),
    ] = None
    hosts: Annotated[
        str | list[str] | dict[str, Positive] | None,
        Meta(
            description="A host; or a list of hosts with equally many ranks each; or the number of ranks by host. "
            "The first host runs the controller. Default: the only host."
        ),
    ] = None
    port: Annotated[
        Port | None, Meta(description="First of the group's five ports. Default: the next free ones.")
    ] = None
    tiers: Annotated[
        Tiers | None, Meta(description="Tiers of this group: each field given here replaces the cluster's.")
    ] = None
    options: Annotated[
        Options, Meta(description="Options of `trunkline group`; they take precedence over the cluster's.")
    ] = {}
    environment: Annotated[
        Environment,
        Meta(description="Environment variables of the group's units; they take precedence over the hosts'."),
    ] = {}


class Router(Record, frozen=True):
    """Router processes on one host that share a port."""

    name: Annotated[
        str, Meta(description="The router's name. Default: `router`, or `router-HOST` if there are several.")
    ] = ""
    host: Annotated[str, Meta(description="Host on which the router runs. Default: the only host.")] = ""
    listen: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 lets other machines connect.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="Port of the HTTP API.")] = 8000
    processes: Annotated[
        Annotated[int, Meta(ge=1, le=64)], Meta(description="Number of processes that share the port.")
    ] = 1
    options: Annotated[
        Options, Meta(description="Options of `trunkline router`; they take precedence over the cluster's.")
    ] = {}
    environment: Annotated[
        Environment, Meta(description="Environment variables of the router; they take precedence over the host's.")
    ] = {}


class Ports(Record, frozen=True):
    """The first ports that are given to units for which the file names none."""

    groups: Annotated[
        Port, Meta(description="First port of the groups: each group takes five on its first host.")
    ] = 7400
    health: Annotated[
        Port, Meta(description="First port of the health endpoints: one per unit, on the loopback address.")
    ] = 7300


class Security(Record, frozen=True):
    """Paths of the files with keys, relative to this file. The files are copied to the hosts that need them."""

    wire_keys: Annotated[
        str,
        Meta(
            description="File of wire keys, made by `trunkline key wire`. Default: keys are generated at the "
            "first start, and kept."
        ),
    ] = ""
    plain_tcp: Annotated[
        bool, Meta(description="Let processes of the cluster talk without keys. For laboratories only.")
    ] = False
    api_keys: Annotated[
        str,
        Meta(description="File with the keys and limits of tenants: `--tenants` of the routers. Default: none."),
    ] = ""


class Cluster(Record, frozen=True):
    """The whole file: a cluster."""

    version: Annotated[int, Meta(description="Version of this file format: 1.")]
    name: Annotated[
        str, Meta(description="The cluster's name, from which its folders get theirs. Default: the file's name.")
    ] = ""
    model: Annotated[
        str, Meta(description="The model, as for `trunkline serve`; ./PATH is relative to this file.")
    ] = "demo"
    models: Annotated[
        dict[str, str],
        Meta(
            description="Further models by the names that requests use; each is served by the groups that name "
            "it as their `model`."
        ),
    ] = {}
    hosts: Annotated[dict[str, Host], Meta(description="Hosts by name. Default: `local`, this machine.")] = {}
    groups: Annotated[
        list[Group],
        Meta(description="Groups of a controller and its workers. Default: one group with one worker."),
    ] = []
    routers: Annotated[list[Router], Meta(description="Routers. Default: one, on the first host.")] = []
    tiers: Annotated[Tiers, Meta(description="Tiers of all groups.")] = Tiers()
    records: Annotated[
        str,
        Meta(
            description="`--records` of the routers: where sessions, schemas and kept answers are. Routers on "
            "several hosts need a Redis or Valkey server: redis://HOST:PORT/DB. Default: that of `tiers.remote`, "
            "if it is given; else a file on the routers' host."
        ),
    ] = ""
    members: Annotated[
        Literal["", "records"],
        Meta(
            description="records: groups register in the server of `records`, as any other group can by "
            "`trunkline group --join`. Default: routers serve the groups of this file."
        ),
    ] = ""
    options: Annotated[
        Options, Meta(description="Options for all units whose command has them; names without dashes.")
    ] = {}
    ports: Ports = Ports()
    security: Security = Security()
    stop_seconds: Annotated[
        Annotated[float, Meta(ge=1, le=7200)],
        Meta(description="Seconds that a unit may take to stop, its drain included, before it is killed."),
    ] = 60.0


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors."""
    found: dict[str, Any] = msgspec.json.schema(Cluster)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"trunkline launch, version {VERSION}",
        **found,
    }


def read(document: Document) -> Cluster:
    """Return the records that a document describes.

    Raises:
        FileError: A value is wrong. The text has its line, what is given and what is allowed.
    """
    raw = document.value
    if not isinstance(raw, dict):
        raise document.error((), "the file is a mapping, with `version: 1` first")
    if raw.get("version") != VERSION or isinstance(raw.get("version"), bool):
        said = repr(raw["version"]) if "version" in raw else "not given"
        raise document.error(("version",), f"is {said}; this program reads version {VERSION}")
    _check_fields(document, raw, Cluster, ())
    # One by one: the library's errors do not say which key of a mapping is meant.
    given = raw.get("hosts", {})
    if not isinstance(given, dict):
        raise document.error(("hosts",), "is a mapping of names to hosts, such as `a: {ssh: USER@HOST}`")
    hosts = {
        name: _convert(document, {} if host is None else host, Host, ("hosts", name))
        for name, host in given.items()
    }
    cluster = _convert(document, {**raw, "hosts": {}}, Cluster, ())
    cluster = msgspec.structs.replace(cluster, hosts=hosts)
    _check_values(document, cluster)
    return cluster


def _convert(document: Document, raw: Any, kind: type[T], path: Path) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        inside = [
            int(part) if part.isdigit() else part
            for part in re.findall(r"[\w-]+", where.partition("[...]")[0].removesuffix("`"))
        ]
        raise document.error((*path, *inside), f"{problem[:1].lower()}{problem[1:]}") from error


def _check_fields(document: Document, raw: Any, kind: Any, path: Path) -> None:
    """Refuse unknown names, with the nearest known one. Wrong types are left to the conversion."""
    record, container = _record_of(kind)
    if record is None:
        return
    if container is dict and isinstance(raw, dict):
        for key, value in raw.items():
            _check_fields(document, value, record, (*path, key))
    elif container is list and isinstance(raw, list):
        for index, value in enumerate(raw):
            _check_fields(document, value, record, (*path, index))
    elif container is None and isinstance(raw, dict):
        hints = _hints(record)
        for key, value in raw.items():
            if key not in hints:
                raise document.error((*path, key), f"is unknown; {nearest(key, list(hints))}")
            _check_fields(document, value, hints[key], (*path, key))


@functools.cache
def _hints(record: type[Record]) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _record_of(kind: Any) -> tuple[type[Record] | None, type | None]:
    """Return the record in an annotation, and the container if it is a list or a mapping of records."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind, None
    if origin in (list, dict):
        return _record_of(arguments[-1])[0], origin
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            if found := _record_of(argument)[0]:
                return found, None
    return None, None


def _check_values(document: Document, cluster: Cluster) -> None:
    _check_name(document, cluster.name, ("name",))
    for name, host in cluster.hosts.items():
        _check_host(document, name, host)
    for index, group in enumerate(cluster.groups):
        path: Path = ("groups", index)
        _check_name(document, group.name, (*path, "name"))
        _check_environment(document, group.environment, (*path, "environment"))
        if group.model and group.model not in cluster.models:
            raise document.error((*path, "model"), f"is {group.model!r}, which is not in `models`")
        if group.port is not None and (group.count or 1) > 1:
            raise document.error((*path, "port"), "is for one group; leave it out, or write groups one by one")
    for name, model in cluster.models.items():
        if problem := problem_of_model_name(name) or ("" if "," not in f"{name}{model}" else "has a comma"):
            raise document.error(("models", name), problem)
        if all(group.model != name for group in cluster.groups):
            raise document.error(("models", name), "is served by no group; give one `model: " + name + "`")
    for index, router in enumerate(cluster.routers):
        path = ("routers", index)
        _check_name(document, router.name, (*path, "name"))
        _check_environment(document, router.environment, (*path, "environment"))
        _check_address(document, router.listen, (*path, "listen"), with_ipv6=True)
    if cluster.security.plain_tcp and cluster.security.wire_keys:
        raise document.error(("security", "plain_tcp"), "is true, but wire_keys are given; leave one of them out")


def _check_host(document: Document, name: str, host: Host) -> None:
    path: Path = ("hosts", name)
    if not NAME.fullmatch(name):
        raise document.error(path, f"is no name for a host; {_NAME_RULE}")
    if host.ssh is not None and host.command is not None:
        raise document.error(path, "has ssh and command; a host is reached in one way")
    _check_environment(document, host.environment, (*path, "environment"))
    target = host.ssh if isinstance(host.ssh, str) else host.ssh.host if host.ssh else None
    if target is not None and (not target or target.startswith("-") or re.search(r"\s", target)):
        raise document.error((*path, "ssh"), f"is {target!r}, which names no host; write USER@HOST")
    if host.address:
        _check_address(document, host.address, (*path, "address"))
    if isinstance(host.ssh, Ssh):
        if host.ssh.port is not None and not 1 <= host.ssh.port <= 65535:
            raise document.error((*path, "ssh", "port"), f"is {host.ssh.port}; allowed are 1 to 65535")
        if re.search(r"[\s@]", host.ssh.user) or host.ssh.user.startswith("-"):
            raise document.error((*path, "ssh", "user"), f"is {host.ssh.user!r}, which is no login name")
    for text, key in ((host.state, "state"), (host.trunkline, "trunkline")):
        if "\0" in text or "\n" in text:
            raise document.error((*path, key), "is no path")
    if host.state and not host.state.startswith(("/", "~/")):
        raise document.error((*path, "state"), f"is {host.state!r}; write an absolute path, or one with ~/")
    if host.memory:
        try:
            parse_bytes(host.memory, "memory")
        except UserError as error:
            raise document.error((*path, "memory"), str(error)) from error


def _check_name(document: Document, name: str, path: Path) -> None:
    if name and not NAME.fullmatch(name):
        raise document.error(path, f"is {name!r}; {_NAME_RULE}")


def _check_address(document: Document, address: str, path: Path, *, with_ipv6: bool = False) -> None:
    if not _ADDRESS.fullmatch(address) and not (with_ipv6 and _IPV6.fullmatch(address)):
        raise document.error(path, f"is {address!r}, which is no IPv4 address and no name of a machine")


def _check_environment(document: Document, environment: Environment, path: Path) -> None:
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name) or "\0" in str(value):
            raise document.error((*path, name), "cannot be an environment variable")
