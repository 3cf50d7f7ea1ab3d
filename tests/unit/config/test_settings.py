"""Settings: what options and environment mean together, and which are refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from kvpull_async.config import LLMConfig, Settings, parse_listen
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import LLMRole, Placement

PI = LLMStatusCode.LLM_PARAM_INVALID
NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


def settings(options: Any = None, environ: dict[str, str] | None = None) -> Settings:
    return Settings.from_options(LLMRole.PROMPT, 1, {} if options is None else options, environ=environ or {})


def refused(options: Any, environ: dict[str, str] | None = None, *, code: LLMStatusCode = PI) -> str:
    with pytest.raises(LLMException) as caught:
        settings(options, environ)
    assert caught.value.status_code is code
    return str(caught.value)


def test_defaults() -> None:
    made = settings()
    assert (made.role, made.cluster_id, made.listen, made.device_ids) == (LLMRole.PROMPT, 1, None, (0,))
    assert (made.cache_manager_mode, made.remote_cache_access, made.transfer_backend) == (False, False, "auto")
    assert (made.sync_kv_timeout_ms, made.device_pool_bytes, made.host_pool_bytes) == (1000, None, None)
    assert (made.link_retry_count, made.link_total_time_s, made.max_links) == (1, 0, 512)
    assert (made.link_secret, made.ignored_options, made.unknown_options) == (None, (), ())
    assert made == Settings(LLMRole.PROMPT, 1)
    with pytest.raises(FrozenInstanceError):
        made.cluster_id = 2  # type: ignore[misc]


def test_what_a_config_says() -> None:
    config = LLMConfig()
    config.device_id = [2, 3]
    config.listen_ip_info = "127.0.0.2:26000"
    config.sync_kv_timeout = "250"
    config.mem_pool_cfg = '{"memory_size": 1024, "page_shift": 10}'
    config.host_mem_pool_cfg = '{"memory_size": 18446744073709551615}'
    config.enable_cache_manager = config.enable_switch_role = config.enable_remote_cache_accessible = True
    config.link_retry_count, config.link_total_time = 3, 2**32 - 1
    made = settings(config.generate_options())
    assert (made.device_ids, made.listen, made.sync_kv_timeout_ms) == ((2, 3), ("127.0.0.2", 26000), 250)
    assert (made.device_pool_bytes, made.host_pool_bytes) == (1024, 2**64 - 1)
    assert (made.cache_manager_mode, made.remote_cache_access, made.enable_switch_role) == (True, True, True)
    assert (made.link_retry_count, made.link_total_time_s) == (3, 2**32 - 1)
    assert made.ignored_options == ()


@pytest.mark.parametrize(
    ("role", "cluster_id", "options", "error"),
    [
        (1, 1, {}, TypeError),
        (None, 1, {}, TypeError),
        (LLMRole.MIX, None, {}, TypeError),
        (LLMRole.MIX, -1, {}, ValueError),
        (LLMRole.MIX, 1, None, TypeError),
        (LLMRole.MIX, 1, [], TypeError),
        (LLMRole.MIX, 1, {1: "1"}, TypeError),
        (LLMRole.MIX, 1, {"llm.LinkRetryCount": 1}, TypeError),
    ],
)
def test_wrong_types(role: Any, cluster_id: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Settings.from_options(role, cluster_id, options, environ={})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llm.SyncKvCacheWaitTime", "True"),
        ("llm.SyncKvCacheWaitTime", "0"),
        ("llm.SyncKvCacheWaitTime", "2147483648"),
        ("ge.exec.deviceId", "0;x"),
        ("ge.exec.deviceId", ""),
        ("llm.LinkRetryCount", "101"),
        ("llm.LinkTotalTime", "-1"),
        ("llm.LinkTotalTime", "4294967296"),
        ("llm.LinkRetryCount", "0"),
        ("ge.session_device_id", "x"),
        ("ge.session_device_id", "0;1"),
        ("llm.RdmaTrafficClass", "-1"),
        ("llm.RdmaTrafficClass", "4294967296"),
        ("llm.RdmaTrafficClass", ""),
        ("llm.RdmaServiceLevel", "high"),
        ("llm.OutputMaxSize", "1.5"),
        ("llm.OutputMaxSize", "--1"),
        ("llm.MemoryUtilization", "1.1"),
        ("llm.MemoryUtilization", "nan"),
        ("llm.MemoryUtilization", "most"),
        ("llm.ClusterInfo", "{"),
        ("llm.ClusterInfo", ""),
        ("llm.MemPoolConfig", "{"),
        ("llm.MemPoolConfig", "[" * 100_000),
        ("llm.MemPoolConfig", "[]"),
        ("llm.MemPoolConfig", "{}"),
        ("llm.MemPoolConfig", '{"memory_size": -1}'),
        ("llm.MemPoolConfig", '{"memory_size": "1"}'),
        ("llm.MemPoolConfig", '{"memory_size": 18446744073709551616}'),
        ("llm.MemPoolConfig", '{"memory_size": true}'),
        ("llm.MemPoolConfig", '{"memory_size": 1, "page_shift": 9}'),
        ("llm.HostMemPoolConfig", '{"memory_size": 1, "page_shift": 31}'),
        ("ge.flowGraphMemMaxSize", "1,2"),
        ("llm.TransferBackend", "rdma"),
        ("llm.TransferBackend", ""),
        ("kvpull.QueueLimit", "0"),
        ("kvpull.QueueLimit", ""),
        ("kvpull.LinkSecret", ""),
        ("kvpull.LinkSecret", " \t\n"),
        ("kvpull.LinkBusyPolicy", "drop"),
        ("kvpull.AllowInsecureNetwork", "maybe"),
    ],
)
def test_bad_text_is_param_invalid_and_names_the_option(name: str, text: str) -> None:
    assert name in refused({name: text})


def test_bad_text_in_the_environment_names_the_variable() -> None:
    assert "KVPULL_QUEUE_LIMIT" in refused({}, {"KVPULL_QUEUE_LIMIT": "many"})


def test_an_option_goes_before_the_environment() -> None:
    environ = {"KVPULL_QUEUE_LIMIT": "5", "KVPULL_LINK_SECRET": "env"}
    made = settings({"kvpull.QueueLimit": "6", "kvpull.LinkSecret": "option"}, environ)
    assert (made.queue_limit, made.link_secret) == (6, b"option")


def test_the_memory_of_a_whole_device_is_a_number() -> None:
    settings({"ge.flowGraphMemMaxSize": str(9 * 2**30), "llm.MemPoolConfig": '{"memory_size": 18737418240}'})
    refused({"ge.flowGraphMemMaxSize": str(2**64)})


SWITCHES = {
    "llm.EnableCacheManager": "cache_manager_mode",
    "llm.EnableRemoteCacheAccessible": "remote_cache_access",
    "llm.EnableSwitchRole": "enable_switch_role",
}


@pytest.mark.parametrize(("name", "field"), SWITCHES.items())
def test_a_switch_is_1_or_0_and_nothing_else_is_taken_for_off(name: str, field: str) -> None:
    assert getattr(settings({name: "1"}), field) is True
    assert getattr(settings({name: "0"}), field) is False
    for text in ("true", "True", "2", "", " 1", "on"):
        assert name in refused({name: text})


def test_row_173_a_local_comm_res_alone_switches_both_on() -> None:
    made = settings({"llm.LocalCommRes": ""})
    assert (made.cache_manager_mode, made.remote_cache_access) == (True, True)
    made = settings({"llm.LocalCommRes": "", "llm.EnableRemoteCacheAccessible": "0"})
    assert (made.cache_manager_mode, made.remote_cache_access) == (True, False)
    refused({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"})


HIXL = {"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1:1"}


def test_hixl_implies_remote_access() -> None:
    made = settings(HIXL)
    assert (made.transfer_backend, made.remote_cache_access) == ("hixl", True)


@pytest.mark.parametrize(
    "change",
    [{"llm.EnableCacheManager": "0"}, {"llm.EnableRemoteCacheAccessible": "0"}, {"llm.listenIpInfo": None}],
)
def test_hixl_insists_on_its_conditions(change: dict[str, str | None]) -> None:
    assert next(iter(change)) in refused({k: v for k, v in {**HIXL, **change}.items() if v is not None})


@pytest.mark.parametrize("backend", ["auto", "inproc", "shm", "tcp"])
def test_our_backends_need_nothing(backend: str) -> None:
    assert settings({"llm.TransferBackend": backend}).transfer_backend == backend


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_backends_to_come_say_so(backend: str) -> None:
    assert backend in refused({"llm.TransferBackend": backend}, code=NOT_ENABLED)


@pytest.mark.parametrize("backend", ["auto", "host", "acl"])
def test_a_device_backend_is_for_init_to_find(backend: str) -> None:
    assert settings({"kvpull.DeviceBackend": backend}).device_backend == backend
    assert settings({}, {"KVPULL_DEVICE_BACKEND": backend}).device_backend == backend


def test_an_unknown_device_backend_is_refused() -> None:
    assert "auto, host, acl" in refused({"kvpull.DeviceBackend": "npu"})


def test_the_budgets_are_those_of_the_pools() -> None:
    pools = {"llm.MemPoolConfig": '{"memory_size": 4096}', "llm.HostMemPoolConfig": '{"memory_size": 8192}'}
    assert settings(pools).budgets == {Placement.DEVICE: 4096, Placement.HOST: 8192}
    assert set(settings({}).budgets.values()) == {None}


def test_both_device_options_are_checked_and_the_ids_are_those_of_the_longer_one() -> None:
    assert settings({"ge.exec.deviceId": "2;3", "ge.session_device_id": "2"}).device_ids == (2, 3)
    assert settings({"ge.session_device_id": "5"}).device_ids == (5,)
    assert "ge.session_device_id" in refused({"ge.exec.deviceId": "2", "ge.session_device_id": "x"})


def test_what_has_no_meaning_here_is_accepted_where_it_is_right() -> None:
    right = {
        "llm.RdmaTrafficClass": "4294967295",
        "llm.RdmaServiceLevel": "0",
        "llm.OutputMaxSize": "-1",
        "llm.MemoryUtilization": "1",
        "llm.ClusterInfo": '{"cluster_id": 1}',
        "llm.GlobalResourceConfig": "",
        "llm.deployResPath": "",
        "ge.flowGraphMemMaxSize": "1",
    }
    assert settings(right).ignored_options == tuple(right)


def test_what_a_local_comm_res_says_has_no_meaning_but_that_it_is_there_has() -> None:
    assert settings({"llm.LocalCommRes": ""}).ignored_options == ()
    assert settings({"llm.LocalCommRes": '{"version": "1.0"}'}).ignored_options == ("llm.LocalCommRes",)


def test_known_names_without_a_meaning_are_reported() -> None:
    made = settings(
        {"llm.BufPoolCfg": "x", "llm.MemoryUtilization": "0.5", "llm.RdmaTrafficClass": "0", "llm.Role": "x"}
    )
    assert made.ignored_options == ("llm.BufPoolCfg", "llm.MemoryUtilization", "llm.RdmaTrafficClass", "llm.Role")
    assert settings(LLMConfig().generate_options()).ignored_options == ()


def test_unknown_vendor_names_are_reported_with_the_nearest() -> None:
    made = settings({"llm.ListenIpInfo": "x", "ge.zzz": "1"})
    assert made.unknown_options == (("llm.ListenIpInfo", "llm.listenIpInfo"), ("ge.zzz", None))


def test_unknown_variables_are_reported_with_the_nearest() -> None:
    wrong = {"KVPULL_QUEUE_LIMITS": "5", "kvpull_settle_timeout": "1", "KVPULL_SECRET_FILE": "f"}
    wrong["KVPULL_SERVICE_HOST"] = "10.0.0.1"  # as schedulers write them for a service of that name
    right = {"KVPULL_QUEUE_LIMIT": "5", "KVPULL_NO_EXTENSION": "1", "KVPULL_LINK_SECRET_FILE": "", "XKVPULL_A": "1"}
    made = settings({}, {**wrong, **right})
    assert made.queue_limit == 5
    assert made.unknown_variables == (
        ("KVPULL_QUEUE_LIMITS", "KVPULL_QUEUE_LIMIT"),
        ("KVPULL_SECRET_FILE", "KVPULL_LINK_SECRET_FILE"),
        ("kvpull_settle_timeout", "KVPULL_SETTLE_TIMEOUT"),
    )


@pytest.mark.parametrize(
    ("name", "near"), [("kvpull.QueueLimits", "kvpull.QueueLimit"), ("listen_ip_info", "llm.listenIpInfo"), ("qqq", "")]
)
def test_other_unknown_names_are_refused_with_the_nearest(name: str, near: str) -> None:
    message = refused({name: "1"})
    assert name in message
    assert near in message


def test_heartbeats_must_fit_their_timeout() -> None:
    assert "heartbeat_timeout" in refused({"kvpull.HeartbeatTimeout": "1000", "kvpull.HeartbeatInterval": "1000"})


# --- listening ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:26000", ("127.0.0.1", 26000)), ("127.1:0", ("127.0.0.1", 0)), ("0.0.0.0:65535", ("0.0.0.0", 65535))],
)
def test_parse_listen(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", "127.0.0.1", "127.0.0.1:1:2", "::1", "localhost:1", ":1"])
def test_parse_listen_refuses(text: str) -> None:
    with pytest.raises(LLMException) as caught:
        parse_listen(text)
    assert caught.value.status_code is PI


@pytest.mark.parametrize("port", ["", "x", "-1", "65536", " 1", "1_0"])
def test_a_port_that_is_none_is_a_value_error(port: str) -> None:
    with pytest.raises(ValueError, match="port"):
        parse_listen(f"127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3"])
def test_listening_beyond_this_machine_needs_a_safeguard(host: str) -> None:
    message = refused({"llm.listenIpInfo": f"{host}:1"})
    for way in ("kvpull.LinkSecret", "KVPULL_LINK_SECRET", "KVPULL_LINK_SECRET_FILE", "TLS"):
        assert way in message
    for way in ("kvpull.AllowInsecureNetwork", "KVPULL_ALLOW_INSECURE_NETWORK"):
        assert way in message


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ({"kvpull.LinkSecret": "s"}, {}),
        ({"kvpull.AllowInsecureNetwork": "1"}, {}),
        ({}, {"KVPULL_LINK_SECRET": "s"}),
        ({}, {"KVPULL_ALLOW_INSECURE_NETWORK": "true"}),
    ],
)
def test_each_safeguard_lets_it_listen(options: dict[str, str], environ: dict[str, str]) -> None:
    assert settings({"llm.listenIpInfo": "0.0.0.0:1", **options}, environ).listen == ("0.0.0.0", 1)


def test_listening_elsewhere_later_is_checked_alike() -> None:
    made = settings({"llm.listenIpInfo": "127.0.0.1:1"})
    assert made.with_listen("127.0.0.3:2").listen == ("127.0.0.3", 2)
    assert made.with_listen(None).listen is None
    with pytest.raises(LLMException):
        made.with_listen("0.0.0.0:1")
    with pytest.raises(LLMException):
        replace(made, listen=("10.0.0.1", 1))


def test_the_secret_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"from file\r\n")
    environ = {"KVPULL_LINK_SECRET_FILE": str(file)}
    assert settings({}, environ).link_secret == b"from file"
    assert settings({}, {**environ, "KVPULL_LINK_SECRET": "direct"}).link_secret == b"direct"
    assert settings({"kvpull.LinkSecret": "option"}, environ).link_secret == b"option"


def test_a_secret_file_that_is_empty_or_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    assert "is empty" in refused({}, {"KVPULL_LINK_SECRET_FILE": str(tmp_path / "empty")})
    assert "KVPULL_LINK_SECRET_FILE" in refused({}, {"KVPULL_LINK_SECRET_FILE": str(tmp_path / "none")})


def test_a_secret_of_white_space_alone_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    (tmp_path / "blank").write_text(" \t \n")
    assert "white space" in refused({}, {"KVPULL_LINK_SECRET_FILE": str(tmp_path / "blank")})
    assert "KVPULL_LINK_SECRET" in refused({}, {"KVPULL_LINK_SECRET": "  "})
    assert "kvpull.LinkSecret" in refused({"kvpull.LinkSecret": "  "}, {"KVPULL_LINK_SECRET": "s" * 16})
    assert settings({"kvpull.LinkSecret": " in between "}).link_secret == b" in between "


@pytest.mark.parametrize(("secret", "weak"), [(None, False), ("s" * 15, True), ("s" * 16, False), ("\xe9" * 8, False)])
def test_a_short_secret_is_weak(secret: str | None, weak: bool) -> None:
    assert settings({} if secret is None else {"kvpull.LinkSecret": secret}).weak_secret is weak


def test_settings_never_show_the_secret() -> None:
    assert "hush" not in repr(settings({"kvpull.LinkSecret": "hush"}))
