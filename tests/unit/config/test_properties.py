"""LLMConfig's properties and the option strings that they become."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvpull_async.config import LLMConfig, LlmConfig
from kvpull_async.status import LLMException, LLMStatusCode

PI = LLMStatusCode.LLM_PARAM_INVALID


def test_row_170_a_fresh_config_writes_one_option() -> None:
    assert LLMConfig().generate_options() == {"llm.MemoryUtilization": "0.95"}
    assert LlmConfig is LLMConfig


ORIGINAL = [
    # name, default, value, option, text
    ("device_id", None, 3, "ge.exec.deviceId", "3"),
    ("sync_kv_timeout", None, 500, "llm.SyncKvCacheWaitTime", "500"),
    ("sync_kv_timeout", None, "500", "llm.SyncKvCacheWaitTime", "500"),
    ("sync_kv_timeout", None, np.int32(500), "llm.SyncKvCacheWaitTime", "500"),
    ("deploy_res_path", "", "/p", "llm.deployResPath", "/p"),
    ("buf_pool_cfg", "", "{}", "llm.BufPoolCfg", "{}"),
    ("mem_pool_cfg", "", "{}", "llm.MemPoolConfig", "{}"),
    ("host_mem_pool_cfg", "", "{}", "llm.HostMemPoolConfig", "{}"),
    ("enable_cache_manager", False, True, "llm.EnableCacheManager", "1"),
    ("enable_cache_manager", False, False, "llm.EnableCacheManager", "0"),
    ("enable_remote_cache_accessible", False, True, "llm.EnableRemoteCacheAccessible", "1"),
    ("listen_ip_info", "", "127.0.0.1:1", "llm.listenIpInfo", "127.0.0.1:1"),
    ("link_total_time", 0, 0, "llm.LinkTotalTime", "0"),
    ("link_retry_count", 1, 100, "llm.LinkRetryCount", "100"),
    ("rdma_traffic_class", None, 132, "llm.RdmaTrafficClass", "132"),
    ("rdma_service_level", None, 0, "llm.RdmaServiceLevel", "0"),
    ("local_comm_res", "", "", "llm.LocalCommRes", ""),
    ("transfer_backend", "", "hixl", "llm.TransferBackend", "hixl"),
    ("global_resource_config", "", "{}", "llm.GlobalResourceConfig", "{}"),
    ("output_max_size", None, 7, "llm.OutputMaxSize", "7"),
    ("enable_switch_role", False, True, "llm.EnableSwitchRole", "1"),
    ("mem_utilization", 0.95, 0.5, "llm.MemoryUtilization", "0.5"),
]


@pytest.mark.parametrize(("name", "default", "value", "option", "text"), ORIGINAL)
def test_the_originals_properties(name: str, default: Any, value: Any, option: str, text: str) -> None:
    config = LLMConfig()
    assert getattr(config, name) == default
    setattr(config, name, value)
    assert config.generate_options()[option] == text
    assert config.options == config.gen_options() == config.generate_options()
    delattr(config, name)
    assert getattr(config, name) == default
    assert config.generate_options() == {"llm.MemoryUtilization": "0.95"}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("device_id", None, TypeError),
        ("device_id", True, TypeError),
        ("device_id", "0", TypeError),
        ("device_id", [0, None], TypeError),
        ("device_id", -1, PI),
        ("device_id", [0, -1], PI),
        ("device_id", [], PI),
        ("device_id", 2**31, ValueError),
        ("sync_kv_timeout", 0, PI),
        ("sync_kv_timeout", "0", PI),
        ("sync_kv_timeout", "abc", PI),
        ("sync_kv_timeout", "", PI),
        ("sync_kv_timeout", "²", PI),
        ("sync_kv_timeout", -1, PI),
        ("sync_kv_timeout", 2**31, ValueError),
        ("sync_kv_timeout", "2147483648", ValueError),
        ("sync_kv_timeout", 1.5, TypeError),
        ("sync_kv_timeout", None, TypeError),
        ("sync_kv_timeout", True, TypeError),
        ("mem_utilization", 1, TypeError),
        ("mem_utilization", None, TypeError),
        ("mem_utilization", 1.1, PI),
        ("mem_utilization", float("nan"), PI),
        ("link_retry_count", 0, PI),
        ("link_retry_count", 101, PI),
        ("link_retry_count", None, TypeError),
        ("link_total_time", -1, PI),
        ("link_total_time", 2**32, PI),
        ("rdma_traffic_class", -1, ValueError),
        ("rdma_service_level", 2**32, ValueError),
        ("listen_ip_info", None, TypeError),
        ("mem_pool_cfg", {}, TypeError),
        ("enable_cache_manager", 1, TypeError),
        ("enable_switch_role", None, TypeError),
        ("output_max_size", "1", TypeError),
        ("cluster_info", "{", json.JSONDecodeError),
        ("cluster_info", None, TypeError),
        ("cluster_info", '{"listen_ip_info": [{"ip": "x", "port": 1}]}', RuntimeError),
        ("ge_options", None, TypeError),
        ("ge_options", {1: "a"}, TypeError),
        ("ge_options", {"a": 1}, TypeError),
        ("settle_timeout", -1, ValueError),
        ("settle_timeout", "1", TypeError),
        ("inline_limit", 2**20 + 1, ValueError),
        ("queue_limit", 0, ValueError),
        ("link_busy_policy", "drop", ValueError),
        ("link_secret", b"x", TypeError),
        ("link_secret", " \n", PI),
        ("allow_insecure_network", 1, TypeError),
    ],
)
def test_rows_166_167_169_refusals_leave_the_value_alone(name: str, value: Any, error: Any) -> None:
    config = LLMConfig()
    before = getattr(config, name)
    with pytest.raises(error if isinstance(error, type) else LLMException) as caught:
        setattr(config, name, value)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is error
    assert getattr(config, name) == before


@pytest.mark.parametrize("ids", [[0, 1], (0, 1), [np.int64(0), 1]])
def test_row_168_several_devices_write_two_options(ids: Any) -> None:
    config = LLMConfig()
    config.device_id = ids
    options = config.generate_options()
    assert (options["ge.exec.deviceId"], options["ge.session_device_id"]) == ("0;1", "0")


@pytest.mark.parametrize(("name", "cleared"), [("listen_ip_info", ""), ("mem_pool_cfg", ""), ("link_secret", "")])
def test_an_empty_text_takes_the_value_back(name: str, cleared: Any) -> None:
    config = LLMConfig()
    setattr(config, name, "x")
    setattr(config, name, cleared)
    assert list(config.generate_options()) == ["llm.MemoryUtilization"]


def test_none_takes_a_switch_back() -> None:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_cache_manager = None
    assert "llm.EnableCacheManager" not in config.generate_options()


def test_cluster_info_has_its_addresses_turned_to_integers() -> None:
    config = LLMConfig()
    config.cluster_info = '{"cluster_id": 1, "listen_ip_info": [{"ip": "127.0.0.1", "port": 5}, {"ip": 7, "port": 6}]}'
    info = json.loads(config.generate_options()["llm.ClusterInfo"])
    assert info == {"cluster_id": 1, "listen_ip_info": [{"ip": 0x0100007F, "port": 5}, {"ip": 7, "port": 6}]}


def test_ge_options_is_the_callers_dict_read_anew() -> None:
    config = LLMConfig()
    mine = {"ge.x": "1"}
    config.ge_options = mine
    mine["ge.y"] = "2"
    config.ge_options["llm.MemoryUtilization"] = "0.1"
    assert config.generate_options() == {"llm.MemoryUtilization": "0.1", "ge.x": "1", "ge.y": "2"}
    del mine["ge.x"]
    assert "ge.x" not in config.generate_options()


def test_generated_options_are_the_callers_to_edit() -> None:
    config = LLMConfig()
    config.generate_options()["llm.listenIpInfo"] = "x"
    assert "llm.listenIpInfo" not in config.generate_options()


def test_repr_names_what_is_set_and_hides_the_secret() -> None:
    config = LLMConfig()
    config.link_secret = "hush"
    assert repr(config) == "<LLMConfig with link_secret>"


def test_every_option_says_what_it_means_and_how_else_it_is_set() -> None:
    config = LLMConfig()
    for name, option in vars(LLMConfig).items():
        if hasattr(option, "key"):
            text = option.__doc__
            assert text.partition("\n")[0].endswith("."), name
            assert f"Option {option.key}" in text, name
            assert f"{getattr(config, name)!r} unless set" in text, name
            assert ("KVPULL_" + name.upper() in text) == option.key.startswith("kvpull."), name
    assert "quarantined" in str(LLMConfig.settle_timeout.__doc__)


def test_a_misspelt_option_is_refused_with_the_nearest_name() -> None:
    config = LLMConfig()
    with pytest.raises(AttributeError, match="no option listen_ip; did you mean listen_ip_info"):
        config.listen_ip = "127.0.0.1:0"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no option wholly_unknown"):
        config.wholly_unknown = 1  # type: ignore[attr-defined]
    assert "llm.listenIpInfo" not in config.generate_options()
