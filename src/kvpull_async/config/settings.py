"""Settings: the options of ``init`` and the environment, read once, checked, and frozen.

An option goes before the environment, and that before the default. Nothing here changes afterwards or knows LLMConfig.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvpull_async import sums
from kvpull_async.config import kinds
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import LLMRole, Placement, int_to_ip, ip_to_int
from kvpull_async.values._check import UINT64_MAX, instance, require, type_error, uint64

T = TypeVar("T")
D = TypeVar("D")

ROLE = "llm.Role"
LISTEN = "llm.listenIpInfo"
DEVICES = "ge.exec.deviceId"
SESSION_DEVICE = "ge.session_device_id"
SYNC_TIMEOUT = "llm.SyncKvCacheWaitTime"
DEVICE_POOL = "llm.MemPoolConfig"
HOST_POOL = "llm.HostMemPoolConfig"
CACHE_MANAGER = "llm.EnableCacheManager"
REMOTE_ACCESS = "llm.EnableRemoteCacheAccessible"
SWITCH_ROLE = "llm.EnableSwitchRole"
RETRY_COUNT = "llm.LinkRetryCount"
TOTAL_TIME = "llm.LinkTotalTime"
COMM_RES = "llm.LocalCommRes"
BACKEND = "llm.TransferBackend"
MEM_UTILIZATION = "llm.MemoryUtilization"
TRAFFIC_CLASS = "llm.RdmaTrafficClass"
SERVICE_LEVEL = "llm.RdmaServiceLevel"
CLUSTER_INFO = "llm.ClusterInfo"
OUTPUT_SIZE = "llm.OutputMaxSize"
_GRAPH_MEMORY = "ge.flowGraphMemMaxSize"
_FILE_VARIABLE = f"{kinds.own_variable('link_secret')}_FILE"
_TABLE_FILE_VARIABLE = f"{kinds.own_variable('link_secrets')}_FILE"
SAFEGUARDS = (
    f"a shared secret (option {kinds.own_key('link_secret')}, environment {kinds.own_variable('link_secret')} or "
    f"{_FILE_VARIABLE}), or one for each peer ({kinds.own_key('link_secrets')}); TLS (options "
    f"{kinds.own_key('tls_certificate')} and {kinds.own_key('tls_authority')}, environment "
    f"{kinds.own_variable('tls_certificate')} and {kinds.own_variable('tls_authority')}); or the explicit opt-out "
    f"(option {kinds.own_key('allow_insecure_network')}, environment {kinds.own_variable('allow_insecure_network')}=1)"
)

_READ = frozenset(
    {LISTEN, DEVICES, SESSION_DEVICE, SYNC_TIMEOUT, DEVICE_POOL, HOST_POOL, CACHE_MANAGER, REMOTE_ACCESS, SWITCH_ROLE}
    | {RETRY_COUNT, TOTAL_TIME, COMM_RES, BACKEND}
    | {kinds.own_key(name) for name in kinds.OWN}
)
_UINT32 = partial(kinds.number, high=2**32 - 1)
_CHECKED: dict[str, Callable[[str, str], object]] = {
    TRAFFIC_CLASS: _UINT32,
    SERVICE_LEVEL: _UINT32,
    CLUSTER_INFO: kinds.from_json,
    OUTPUT_SIZE: kinds.whole,
    MEM_UTILIZATION: kinds.fraction,
    _GRAPH_MEMORY: partial(kinds.number, high=UINT64_MAX),  # bytes of a device, often above 2 GiB
}
"""Options without a meaning here whose texts must be right all the same."""
_IGNORED = frozenset(
    {ROLE, "llm.ListenIp", "llm.ListenPort", "llm.deployResPath", "llm.BufPoolCfg", "llm.GlobalResourceConfig"}
    | set(_CHECKED)
)
_KNOWN = {name.lower(): name for name in _READ | _IGNORED}
_PREFIX = kinds.own_variable("")
_VARIABLES = {
    name.removeprefix(_PREFIX): name
    for name in (
        *map(kinds.own_variable, kinds.OWN),
        _FILE_VARIABLE,
        _TABLE_FILE_VARIABLE,
        kinds.own_variable("no_extension"),
    )
}
_BACKENDS = ("hixl", "auto", "inproc", "shm", "tcp")
_LATER_BACKENDS = ("nixl", "mooncake")
WEAK_BELOW = 16
"""Bytes of a secret below which `init` warns: it could be tried out."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine runs on. Times are milliseconds, sizes bytes.

    ``transfer_backend`` "hixl" asks for the original's preconditions and means "auto" otherwise. ``device_ids`` are
    labels where host memory serves ``Placement.DEVICE``; device memory is that of the one NPU they name.
    ``ignored_options`` are accepted names without a meaning here; ``unknown_options`` are unknown ``ge.*`` and
    ``llm.*`` names, ``unknown_variables`` ``KVPULL_*`` ones, each with the nearest known one or None.
    """

    role: LLMRole
    cluster_id: int
    cache_manager_mode: bool = False
    remote_cache_access: bool = False
    listen: tuple[str, int] | None = None
    device_ids: tuple[int, ...] = (0,)
    sync_kv_timeout_ms: int = 1000
    device_pool_bytes: int | None = None
    host_pool_bytes: int | None = None
    enable_switch_role: bool = False
    link_retry_count: int = 1
    link_total_time_s: int = 0
    transfer_backend: str = "auto"
    link_secret: bytes | None = field(default=None, repr=False)
    link_secrets: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    allowed_clusters: frozenset[int] | None = None
    tls_certificate: str = ""
    tls_key: str = ""
    tls_authority: str = ""
    allow_insecure_network: bool = False
    link_busy_policy: str = "queue"
    queue_limit: int = 1024
    settle_timeout_ms: int = 1000
    close_timeout_ms: int = 5000
    heartbeat_interval_ms: int = 1000
    heartbeat_timeout_ms: int = 5000
    handshake_timeout_ms: int = 3000
    lease_margin_ms: int = 1000
    reconnect_grace_ms: int = 500
    inline_limit: int = 65536
    max_links: int = 512
    max_comms: int = 512
    rank_hosts: str = ""
    rank_port_base: int = 21000
    rank_link_timeout_ms: int = 120_000
    device_backend: str = "auto"
    allow_process_vm_read: str = "auto"
    verify: str = sums.NONE
    ignored_options: tuple[str, ...] = ()
    unknown_options: tuple[tuple[str, str | None], ...] = ()
    unknown_variables: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_tls(self)
        _check_exposure(self)
        require(
            self.heartbeat_timeout_ms > self.heartbeat_interval_ms,
            f"heartbeat_timeout ({self.heartbeat_timeout_ms} ms) must exceed heartbeat_interval "
            f"({self.heartbeat_interval_ms} ms)",
        )

    @classmethod
    def from_options(
        cls, role: LLMRole, cluster_id: int, options: Mapping[str, str], *, environ: Mapping[str, str]
    ) -> Settings:
        """Read *options* (str to str) and the ``KVPULL_*`` names of *environ*; neither is changed or kept.

        Errors: TypeError for a wrong type; ValueError for a listen port that is none; LLM_FEATURE_NOT_ENABLED for a
        transfer backend that this version lacks; LLM_PARAM_INVALID for all else, such as an unknown name
        that starts with neither ``ge.`` nor ``llm.``, or a listen address off this machine without a safeguard.
        """
        instance("role", role, LLMRole)
        unknown = unknown_names(options)
        given = _with_defaults(dict(options))
        return cls(
            role=role,
            cluster_id=uint64("cluster_id", cluster_id),
            ignored_options=_without_meaning(given),
            unknown_options=unknown,
            unknown_variables=_unknown_variables(environ),
            **_standard(given),
            **_own(given, environ),
        )

    @property
    def budgets(self) -> dict[Placement, int | None]:
        """Bytes by placement, None for no limit."""
        return {Placement.DEVICE: self.device_pool_bytes, Placement.HOST: self.host_pool_bytes}

    @property
    def meeting_ms(self) -> int:
        """The time that the members of a rank table have to meet. LLM-DataDist documentation: LinkTotalTime counts in
        seconds, and 0 leaves it to a default of 120 s.
        """
        return self.link_total_time_s * 1000 or self.rank_link_timeout_ms

    @property
    def sum_name(self) -> str:
        """What pulls and pushes verify their bytes with unless told otherwise, "" for nothing."""
        return "" if self.verify == sums.NONE else self.verify

    @property
    def weak_secret(self) -> bool:
        """Whether there is a secret that is so short that it could be tried out."""
        secrets = (self.link_secret, *dict(self.link_secrets).values())
        return any(secret is not None and len(secret) < WEAK_BELOW for secret in secrets)

    @property
    def tls(self) -> bool:
        """Whether links over a network are encrypted, and both sides show certificates."""
        return bool(self.tls_certificate)

    def may_listen_on(self, host: str) -> bool:
        """Whether peers there are on this machine, or authenticated, or trusted by explicit wish."""
        return host.startswith("127.") or self.authenticates or self.allow_insecure_network

    @property
    def authenticates(self) -> bool:
        """Whether peers have to prove who they are, by a secret or a certificate."""
        return bool(self.link_secret) or bool(self.link_secrets) or self.tls

    def with_listen(self, text: str | None) -> Settings:
        """These settings listening on *text* (``ip:port``), or not at all; errors as for ``from_options``."""
        return replace(self, listen=None if text is None else parse_listen(text))


def parse_listen(text: str) -> tuple[str, int]:
    """``ip:port`` as (dotted address, port); port 0 is any free one.

    LLM-DataDist documentation: LLM_PARAM_INVALID unless there is exactly one colon (so no IPv6), ValueError for a port
    that is no number. Ours: ValueError above 65535 too, LLM_PARAM_INVALID for a host that is no IPv4 address.
    """
    require(text.count(":") == 1, f"{LISTEN} must be ip:port, got {text!r}")
    host, port = text.split(":")
    try:
        address = int_to_ip(ip_to_int(host))
    except RuntimeError as error:
        raise LLMException(f"{LISTEN}: {error}", status_code=LLMStatusCode.LLM_PARAM_INVALID) from error
    return address, kinds.number(f"{LISTEN}: port", port, high=65535)


def _check_tls(settings: Settings) -> None:
    given = [settings.tls_certificate, settings.tls_authority]
    keys = " and ".join(map(kinds.own_key, ("tls_certificate", "tls_authority")))
    require(all(given) or not any((*given, settings.tls_key)), f"TLS needs both {keys}")


def _check_exposure(settings: Settings) -> None:
    host = settings.listen[0] if settings.listen else "127.0.0.1"
    require(settings.may_listen_on(host), f"listening on {host}, beyond this machine, needs one of: {SAFEGUARDS}")


def unknown_names(options: Mapping[str, str]) -> tuple[tuple[str, str | None], ...]:
    """The unknown names among *options*, each with the nearest known one or None.

    Errors: TypeError unless they are str to str; LLM_PARAM_INVALID for one that starts with neither ``ge.`` nor
    ``llm.``.
    """
    if not isinstance(options, Mapping):
        raise type_error("options", options, "a dict of str to str")
    for name, text in options.items():
        instance("each option's name", name, str)
        instance(f"option {name}", text, str)
    unknown = [(name, _nearest(name.lower(), _KNOWN)) for name in options if name not in _READ | _IGNORED]
    for name, near in unknown:
        hint = f"; did you mean {near}?" if near else ""
        require(name.startswith(("ge.", "llm.")), f"there is no option {name}{hint}")
    return tuple(unknown)


def _with_defaults(given: dict[str, str]) -> dict[str, str]:
    """Add what the presence of one option implies for others, and test what it requires of them.

    LLM-DataDist documentation: a local comm resource, even empty, switches on the cache manager and remote access; the
    hixl backend needs both and a listen address.
    """
    if COMM_RES in given:
        given = {CACHE_MANAGER: "1", REMOTE_ACCESS: "1", **given}
        require(given[CACHE_MANAGER] != "0", f"{COMM_RES} needs {CACHE_MANAGER} to be 1")
    if given.get(BACKEND) == "hixl":
        given = {REMOTE_ACCESS: "1", **given}
        for name in (CACHE_MANAGER, REMOTE_ACCESS):
            require(given.get(name) == "1", f"{BACKEND} hixl needs {name} to be 1")
        require(LISTEN in given, f"{BACKEND} hixl needs {LISTEN}")
    return given


def _without_meaning(given: Mapping[str, str]) -> tuple[str, ...]:
    """The known names whose values have no meaning here."""
    # LLMConfig always writes this one, so its default says nothing about what the caller wanted.
    ignored = [name for name in given if name in _IGNORED and (name, given[name]) != (MEM_UTILIZATION, "0.95")]
    if given.get(COMM_RES):  # that it is there counts, what it says does not
        ignored.append(COMM_RES)
    return tuple(ignored)


def _unknown_variables(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those that look misspelt, each with what was meant. Others may be nobody's mistake: where a service is called
    kvpull, some schedulers put its address into the environment under such names.
    """
    names = sorted(name for name in environ if name.upper().startswith(_PREFIX) and name not in _VARIABLES.values())
    nearest = ((name, _nearest(name.upper().removeprefix(_PREFIX), _VARIABLES)) for name in names)
    return tuple((name, near) for name, near in nearest if near is not None)


def _nearest(text: str, known: Mapping[str, str]) -> str | None:
    close = difflib.get_close_matches(text, known, n=1)
    return known[close[0]] if close else None


def _standard(given: Mapping[str, str]) -> dict[str, Any]:
    """The fields that the original's options set."""

    def get(name: str, parse: Callable[[str, str], T], default: D) -> T | D:
        return kinds.read(parse, name, given[name]) if name in given else default

    for name, parse in _CHECKED.items():
        get(name, parse, None)
    first = get(SESSION_DEVICE, kinds.number, 0)
    return {
        "cache_manager_mode": get(CACHE_MANAGER, kinds.switch, default=False),
        "remote_cache_access": get(REMOTE_ACCESS, kinds.switch, default=False),
        "listen": parse_listen(given[LISTEN]) if LISTEN in given else None,
        "device_ids": get(DEVICES, kinds.device_ids, (first,)),
        "sync_kv_timeout_ms": get(SYNC_TIMEOUT, partial(kinds.number, low=1), 1000),
        "device_pool_bytes": get(DEVICE_POOL, kinds.pool_bytes, None),
        "host_pool_bytes": get(HOST_POOL, kinds.pool_bytes, None),
        "enable_switch_role": get(SWITCH_ROLE, kinds.switch, default=False),
        "link_retry_count": get(RETRY_COUNT, partial(kinds.number, low=1, high=100), 1),
        "link_total_time_s": get(TOTAL_TIME, _UINT32, 0),
        "transfer_backend": get(BACKEND, _backend, "auto"),
    }


def _backend(name: str, text: str) -> str:
    later = text in _LATER_BACKENDS
    require(not later, f"{name} {text} is not in this version", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
    return kinds.choice(name, text, allowed=_BACKENDS)


def _own(given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields that the project's own options or variables set; an empty variable sets nothing."""
    values: dict[str, Any] = {}
    for name, kind in kinds.OWN.items():
        key, variable = kinds.own_key(name), kinds.own_variable(name)
        if key in given:
            values[own_field(name)] = kinds.read(kind.parse, key, given[key])
        elif environ.get(variable):
            values[own_field(name)] = kinds.read(kind.parse, variable, environ[variable])
    secret = values["link_secret"].encode() if "link_secret" in values else _from_file(environ, _FILE_VARIABLE)
    if "link_secrets" not in values and (table := _from_file(environ, _TABLE_FILE_VARIABLE)) is not None:
        text = table.decode(errors="replace")
        values["link_secrets"] = kinds.read(kinds.secrets_by_cluster, _TABLE_FILE_VARIABLE, text)
    sums.need(values.get("verify", sums.NONE), where="this side")
    return {**values, "link_secret": secret}


def own_field(name: str) -> str:
    """The Settings field of an own property: the same name, with the unit where there is one."""
    return name if name in {item.name for item in fields(Settings)} else f"{name}_ms"


def _from_file(environ: Mapping[str, str], variable: str) -> bytes | None:
    """What stands in the file that a variable names, without the line ends behind it."""
    path = environ.get(variable)
    if not path:
        return None
    try:
        secret = Path(path).read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise LLMException(f"{variable}: {error}", status_code=LLMStatusCode.LLM_PARAM_INVALID) from error
    require(bool(secret.strip()), f"{variable}: {path} is empty, or has white space alone")
    return secret
