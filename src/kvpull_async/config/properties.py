"""LLMConfig: what callers set, as properties, and the option strings that it makes of them.

It checks each value by itself; what the options mean together is decided by Settings.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

from kvpull_async.config import kinds, settings
from kvpull_async.values import ip_to_int
from kvpull_async.values._check import Checked, index, instance, integer, require, uint32

T = TypeVar("T")
_DEFAULTS = {field.name: field.default for field in fields(settings.Settings)}


class _Option(Checked[T]):
    """A property with an option key. ``render`` gives its text, or None when the value counts as not set.

    Its ``__doc__`` is the text given, and then by which other names the option goes.
    """

    def __init__(
        self,
        key: str,
        check: Callable[[str, object], T],
        render: Callable[[T], str | None],
        text: str,
        *,
        default: T,
        variable: str = "",
    ) -> None:
        super().__init__(check, default=default)
        self.key = key
        self.render = render
        names = f"Option {key}" + (f", environment {variable}" if variable else "")
        self.__doc__ = f"{text}\n\n{names}; {default!r} unless set."

    def __delete__(self, obj: object) -> None:
        vars(obj).pop(self._name, None)

    def write(self, obj: object, options: dict[str, str]) -> None:
        """Put the text into *options* when the property is set."""
        text = self.render(vars(obj)[self._name]) if self._name in vars(obj) else None
        if text is not None:
            options[self.key] = text


def _own(name: str, text: str, *, default: Any = None) -> _Option[Any]:
    kind, variable = kinds.OWN[name], kinds.own_variable(name)
    if default is None:
        default = _DEFAULTS[settings.own_field(name)]
    return _Option(kinds.own_key(name), kind.check, kind.render, text, default=default, variable=variable)


def _text(key: str, text: str) -> _Option[str]:
    return _Option(key, kinds.string, lambda value: value or None, text, default="")


def _switch(key: str, text: str) -> _Option[bool | None]:
    return _Option(key, _optional_bool, lambda value: None if value is None else str(int(value)), text, default=False)


def _uint32(key: str) -> _Option[int | None]:
    return _Option(key, uint32, str, "uint32. Accepted, without a meaning here.", default=None)


def _optional_bool(name: str, value: object) -> bool | None:
    return None if value is None else kinds.boolean(name, value)


def _devices(name: str, value: object) -> int | list[int]:
    if not isinstance(value, (list, tuple)):
        return kinds.device_id(name, value)
    require(len(value) > 0, f"{name} must not be empty")
    return [kinds.device_id(name, item) for item in value]


def _join(devices: object) -> str:
    return ";".join(map(str, devices)) if isinstance(devices, list) else str(devices)


def _wait_time(name: str, value: object) -> int:
    if isinstance(value, str):
        require(kinds.is_decimal(value), f"{name} must be a decimal number, got {value!r}")
        value = int(value)
    require(index(name, value) > 0, f"{name} must be above 0, got {value}")
    return integer(name, value, low=1, high=kinds.INT32_MAX)


def _bounded(low: int, high: int) -> Callable[[str, object], int]:
    """LLM-DataDist documentation: for these two out of range is LLM_PARAM_INVALID, not ValueError."""

    def check(name: str, value: object) -> int:
        number = index(name, value)
        require(low <= number <= high, f"{name} must be in {low}..{high}, got {number}")
        return number

    return check


def _fraction(name: str, value: object) -> float:
    share = float(instance(name, value, float))
    require(0 <= share <= 1, f"{name} must be in 0..1, got {share}")
    return share


def _cluster_info(name: str, value: object) -> str:
    text = kinds.string(name, value)
    _with_numeric_ips(text)
    return text


def _with_numeric_ips(text: str) -> str | None:
    """The JSON with the addresses in its ``listen_ip_info`` as little-endian integers."""
    if not text:
        return None
    info = json.loads(text)
    for entry in info.get("listen_ip_info", ()) if isinstance(info, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("ip"), str):
            entry["ip"] = ip_to_int(entry["ip"])
    return json.dumps(info)


class LLMConfig:
    """Options for ``LLMDataDist.init``: set properties, then pass ``generate_options()``.

    Errors on assignment: TypeError for a wrong type (None too, except for the switches), ValueError or
    LLMException(LLM_PARAM_INVALID) for a wrong value. ``del config.name``, or "" for a text, takes a value back.
    Names and defaults are those of the LLM-DataDist documentation; the last group is this project's own, and each of
    its members may come from the environment instead (``settle_timeout``: ``KVPULL_SETTLE_TIMEOUT``).
    ``LLMConfig.settle_timeout.__doc__`` says what it does; docs/options.md has them all.
    Differs from the original: another name is an AttributeError, since a misspelt option would silently be none.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            near = difflib.get_close_matches(name, [own for own in dir(type(self)) if not own.startswith("_")], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise AttributeError(f"LLMConfig has no option {name}{hint}")
        super().__setattr__(name, value)

    device_id: _Option[int | list[int] | tuple[int, ...] | None] = _Option(
        settings.DEVICES,
        _devices,
        _join,
        "Device id, or list or tuple of them (int32, not negative). A label, unless an NPU is there.",
        default=None,
    )
    sync_kv_timeout: _Option[int | str | None] = _Option(
        settings.SYNC_TIMEOUT,
        _wait_time,
        str,
        "Deadline of a pull in ms, above 0, int32; a digit string is taken too. Without it 1000 ms count.",
        default=None,
    )
    deploy_res_path: _Option[str] = _text("llm.deployResPath", "Accepted, without a meaning here.")
    buf_pool_cfg: _Option[str] = _text("llm.BufPoolCfg", "Accepted, without a meaning here.")
    mem_pool_cfg: _Option[str] = _text(
        settings.DEVICE_POOL,
        'Budget of device memory as JSON: {"memory_size": bytes, "page_shift": 10..30}; unlimited without it.',
    )
    host_mem_pool_cfg: _Option[str] = _text(
        settings.HOST_POOL, "Budget of host memory, in the form of mem_pool_cfg; unlimited without it."
    )
    enable_cache_manager: _Option[bool | None] = _switch(
        settings.CACHE_MANAGER,
        "Whether cache_manager is the manager in use; else it is kv_cache_manager. None takes the value back.",
    )
    enable_remote_cache_accessible: _Option[bool | None] = _switch(
        settings.REMOTE_ACCESS, "Whether pulls may read without asking the source. None takes the value back."
    )
    listen_ip_info: _Option[str] = _text(
        settings.LISTEN, "ip:port to listen on; port 0 is any free one. Without it the node does not listen."
    )
    link_total_time: _Option[int] = _Option(
        settings.TOTAL_TIME,
        _bounded(0, 2**32 - 1),
        str,
        "Seconds that the members of a `link` have to meet, uint32; 0 = as rank_link_timeout says.",
        default=0,
    )
    link_retry_count: _Option[int] = _Option(
        settings.RETRY_COUNT, _bounded(1, 100), str, "Attempts per link of link_clusters, 1..100.", default=1
    )
    rdma_traffic_class: _Option[int | None] = _uint32(settings.TRAFFIC_CLASS)
    rdma_service_level: _Option[int | None] = _uint32(settings.SERVICE_LEVEL)
    local_comm_res: _Option[str] = _Option(
        settings.COMM_RES,
        kinds.string,
        str,
        'Local communication resources. Set, even to "", it switches on the cache manager and remote access.',
        default="",
    )
    transfer_backend: _Option[str] = _text(
        settings.BACKEND,
        '"hixl" (needs listen_ip_info and the cache manager), or ours: "auto" (what counts without it), "inproc", '
        '"shm", "tcp".',
    )
    global_resource_config: _Option[str] = _text("llm.GlobalResourceConfig", "Accepted, without a meaning here.")
    cluster_info: _Option[str] = _Option(
        settings.CLUSTER_INFO,
        _cluster_info,
        _with_numeric_ips,
        "JSON text (else JSONDecodeError). Accepted, without a meaning here.",
        default="",
    )
    output_max_size: _Option[int | None] = _Option(
        settings.OUTPUT_SIZE, index, str, "Integer. Accepted, without a meaning here.", default=None
    )
    enable_switch_role: _Option[bool] = _Option(
        settings.SWITCH_ROLE,
        kinds.boolean,
        lambda value: "1" if value else None,
        "Whether switch_role may be called (older manager).",
        default=False,
    )
    mem_utilization: _Option[float] = _Option(
        settings.MEM_UTILIZATION,
        _fraction,
        str,
        "float in 0..1, always written. Accepted, without a meaning here.",
        default=0.95,
    )

    link_secret: _Option[str] = _own(
        "link_secret",
        "Secret that both ends of a link must share. It authenticates, it does not encrypt. Not white space alone; "
        "16 bytes or more, else a warning.\n\nFrom the environment also as the content of the file that "
        "KVPULL_LINK_SECRET_FILE names.",
        default="",
    )
    link_secrets: _Option[str] = _own(
        "link_secrets",
        'Secrets that belong to one peer each, by cluster id: a dict, or its JSON text (`{"2": "..."}`). Both ends of '
        "such a link need the same, each under the other's id. Peers that are not named need "
        "`link_secret`, or cannot link.\n\nFrom the environment also as the content of the file that "
        "KVPULL_LINK_SECRETS_FILE names.",
        default="",
    )
    allowed_clusters: _Option[str | Iterable[int]] = _own(
        "allowed_clusters",
        'Ids of the clusters that may link with this node: an iterable, or joined by semicolons ("1;2;7"). Others are '
        "refused when they greet; whom this node itself links with is its own choice. The ids are what the peers say, "
        "unless each has a secret of its own (`link_secrets`) or a certificate.",
        default="",
    )
    tls_certificate: _Option[str] = _own(
        "tls_certificate",
        "Path of a PEM file: this node's certificate, and those between it and the authority. With it links over TCP "
        "are encrypted (TLS 1.3), and both sides must show a certificate. It names what it may speak for as a URI "
        "among its alternative names: `kvpull:cluster:7`, several of these, or `kvpull:cluster:*`.",
    )
    tls_key: _Option[str] = _own(
        "tls_key", "Path of the PEM file of its private key, unencrypted; the certificate's own file unless set."
    )
    tls_authority: _Option[str] = _own(
        "tls_authority", "Path of a PEM file: the authorities that must have signed the peers' certificates."
    )
    allow_insecure_network: _Option[bool] = _own(
        "allow_insecure_network", "Whether to listen beyond this machine without authentication."
    )
    link_busy_policy: _Option[str] = _own(
        "link_busy_policy",
        'What a pull does while its link is busy: wait its turn ("queue"), or raise LLM_LINK_BUSY ("raise").',
    )
    queue_limit: _Option[int] = _own("queue_limit", "Pulls that may wait on one link.")
    settle_timeout: _Option[int] = _own(
        "settle_timeout", "ms that a cancelled pull may take to settle before its destination is quarantined."
    )
    close_timeout: _Option[int] = _own("close_timeout", "ms that finalize may take to close links and join threads.")
    heartbeat_interval: _Option[int] = _own("heartbeat_interval", "ms between heartbeats on an idle link.")
    heartbeat_timeout: _Option[int] = _own(
        "heartbeat_timeout", "ms of silence after which a link is lost; above heartbeat_interval."
    )
    handshake_timeout: _Option[int] = _own("handshake_timeout", "ms that a new connection has to introduce itself.")
    lease_margin: _Option[int] = _own(
        "lease_margin", "ms that a source keeps memory pinned beyond the remaining time of the request."
    )
    reconnect_grace: _Option[int] = _own(
        "reconnect_grace", "ms that a lost link may take to come back before waiting pulls fail."
    )
    inline_limit: _Option[int] = _own(
        "inline_limit", "Largest payload in bytes that rides on the control connection; at most 1 MiB."
    )
    rank_hosts: _Option[str] = _own(
        "rank_hosts",
        'Addresses to use instead of what stands in a rank table: "10.1.1.1=192.168.0.4,node_0=192.168.0.5".',
        default="",
    )
    rank_port_base: _Option[int] = _own(
        "rank_port_base",
        "First of the ports on which members of a rank table meet; all members of a comm need the same.",
    )
    rank_link_timeout: _Option[int] = _own(
        "rank_link_timeout", "ms that the members of a `link` have to meet, unless link_total_time is above 0."
    )
    device_backend: _Option[str] = _own(
        "device_backend",
        'Where Placement.DEVICE is: "acl" is the memory of the NPU that device_id names (init raises '
        'LLM_FEATURE_NOT_ENABLED without CANN); "host" is host memory, without looking for CANN; "auto" is the NPU if '
        "CANN and the device can be used, else host memory, and the event memory.chosen says why.",
    )
    allow_process_vm_read: _Option[str] = _own(
        "allow_process_vm_read",
        "Whether processes of one user and host read each other's registered memory through the kernel: "
        '"auto" where it lets them, "off" never (such memory is streamed), "on" also asks it for an exception where '
        "it is strict (Yama).",
    )
    verify: _Option[str] = _own(
        "verify",
        'The sum by which both sides make sure that the bytes which landed are those of the source: "none", "crc32" '
        'or "xxh3", which is faster and needs the package xxhash on both (`pip install kvpull[verify]`). A call may '
        "say another with `verify=`.",
    )

    def __init__(self) -> None:
        self._ge_options: dict[str, str] = {}

    @property
    def ge_options(self) -> dict[str, str]:
        """Further options by key: the caller's own dict, read anew by each ``generate_options()``."""
        return self._ge_options

    @ge_options.setter
    def ge_options(self, options: dict[str, str]) -> None:
        for name, text in instance("ge_options", options, dict).items():
            kinds.string("ge_options: a key", name)
            kinds.string(f"ge_options: {name}", text)
        self._ge_options = options

    def generate_options(self) -> dict[str, str]:
        """The options as a new dict that the caller may edit: ``ge_options`` first, then what is set now.

        Differs from the original, whose options only ever grow.
        """
        options = {settings.MEM_UTILIZATION: str(self.mem_utilization), **self._ge_options}
        for option in _OPTIONS:
            option.write(self, options)
        if "device_id" in vars(self):
            options[settings.SESSION_DEVICE] = options[settings.DEVICES].split(";")[0]
        return options

    def gen_options(self) -> dict[str, str]:
        """The older name of ``generate_options``."""
        return self.generate_options()

    @property
    def options(self) -> dict[str, str]:
        """What ``generate_options()`` gives now."""
        return self.generate_options()

    def __repr__(self) -> str:
        names = sorted(name for name in vars(self) if not name.startswith("_"))
        return f"<LLMConfig with {', '.join(names) or 'defaults'}>"


_OPTIONS = [option for option in vars(LLMConfig).values() if isinstance(option, _Option)]
LlmConfig = LLMConfig
