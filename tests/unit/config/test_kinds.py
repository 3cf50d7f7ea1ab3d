"""The project's own options: one name as property, option key, environment variable and Settings field."""

from __future__ import annotations

from typing import Any

import pytest

from kvpull_async.config import LLMConfig, Settings
from kvpull_async.config.kinds import OWN, own_key, own_variable
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import LLMRole


def settings(options: dict[str, str], environ: dict[str, str]) -> Settings:
    return Settings.from_options(LLMRole.PROMPT, 1, options, environ=environ)


OWN_VALUES = [
    ("link_secret", "s3", "kvpull.LinkSecret", "s3", "link_secret", b"s3"),
    ("link_secrets", '{"2": "s3"}', "kvpull.LinkSecrets", '{"2": "s3"}', "link_secrets", ((2, b"s3"),)),
    ("allowed_clusters", {7, 1}, "kvpull.AllowedClusters", "1;7", "allowed_clusters", frozenset({1, 7})),
    ("allow_insecure_network", True, "kvpull.AllowInsecureNetwork", "1", "allow_insecure_network", True),
    ("link_busy_policy", "raise", "kvpull.LinkBusyPolicy", "raise", "link_busy_policy", "raise"),
    ("queue_limit", 3, "kvpull.QueueLimit", "3", "queue_limit", 3),
    ("settle_timeout", 0, "kvpull.SettleTimeout", "0", "settle_timeout_ms", 0),
    ("close_timeout", 4, "kvpull.CloseTimeout", "4", "close_timeout_ms", 4),
    ("heartbeat_interval", 4, "kvpull.HeartbeatInterval", "4", "heartbeat_interval_ms", 4),
    ("heartbeat_timeout", 4000, "kvpull.HeartbeatTimeout", "4000", "heartbeat_timeout_ms", 4000),
    ("handshake_timeout", 4, "kvpull.HandshakeTimeout", "4", "handshake_timeout_ms", 4),
    ("lease_margin", 4, "kvpull.LeaseMargin", "4", "lease_margin_ms", 4),
    ("reconnect_grace", 4, "kvpull.ReconnectGrace", "4", "reconnect_grace_ms", 4),
    ("inline_limit", 4, "kvpull.InlineLimit", "4", "inline_limit", 4),
    ("rank_hosts", "node_0=10.0.0.4", "kvpull.RankHosts", "node_0=10.0.0.4", "rank_hosts", "node_0=10.0.0.4"),
    ("rank_port_base", 30000, "kvpull.RankPortBase", "30000", "rank_port_base", 30000),
    ("rank_link_timeout", 4, "kvpull.RankLinkTimeout", "4", "rank_link_timeout_ms", 4),
    ("device_backend", "host", "kvpull.DeviceBackend", "host", "device_backend", "host"),
    ("allow_process_vm_read", "off", "kvpull.AllowProcessVmRead", "off", "allow_process_vm_read", "off"),
    ("verify", "crc32", "kvpull.Verify", "crc32", "verify", "crc32"),
]


@pytest.mark.parametrize(("name", "value", "option", "text", "field", "read"), OWN_VALUES)
def test_own_properties_reach_settings_as_option_or_variable(
    name: str, value: Any, option: str, text: str, field: str, read: Any
) -> None:
    config = LLMConfig()
    default = getattr(settings({}, {}), field)
    assert getattr(config, name) == ("" if name in ("link_secret", "link_secrets", "allowed_clusters") else default)
    setattr(config, name, value)
    options = config.generate_options()
    assert (own_key(name), options[option]) == (option, text)
    assert getattr(settings(options, {}), field) == read
    variable = "KVPULL_" + option.removeprefix("kvpull.")
    assert own_variable(name).replace("_", "") == variable.upper().replace("_", "")
    assert getattr(settings({}, {own_variable(name): text}), field) == read
    assert getattr(settings({}, {own_variable(name): ""}), field) == default


def test_every_own_property_is_tested() -> None:
    together = {"tls_certificate", "tls_key", "tls_authority"}  # see test_settings
    assert {row[0] for row in OWN_VALUES} | together == set(OWN)


@pytest.mark.parametrize(
    ("value", "text"), [([7, 1, 7], "1;7"), ("2;1", "2;1"), (iter([2**64 - 1]), str(2**64 - 1)), ("", "")]
)
def test_allowed_clusters_are_given_in_many_ways(value: Any, text: str) -> None:
    config = LLMConfig()
    config.allowed_clusters = value
    assert config.allowed_clusters == text
    read = settings(config.generate_options(), {}).allowed_clusters
    assert read == (frozenset(map(int, text.split(";"))) if text else None)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([], ValueError),
        ([-1], ValueError),
        ([2**64], ValueError),
        ([True], TypeError),
        (7, TypeError),
        (b"7", TypeError),
    ]
    + [(text, LLMException) for text in ("1;", ";", "1,2", "-1", "one", str(2**64))],
)
def test_allowed_clusters_that_make_no_sense_are_refused(value: Any, error: type[Exception]) -> None:
    """An empty list is not "everyone"."""
    with pytest.raises(error):
        LLMConfig().allowed_clusters = value
    if isinstance(value, str):
        with pytest.raises(LLMException):
            settings({"kvpull.AllowedClusters": value}, {})


@pytest.mark.parametrize("text", ['{"2": "hush", "02": "hush hush"}', '{"2": "hush", "2": "hush"}'])
def test_two_secrets_for_one_cluster_are_refused_and_not_told(text: str) -> None:
    with pytest.raises(LLMException, match="link_secrets") as own:
        LLMConfig().link_secrets = text
    with pytest.raises(LLMException, match=r"kvpull\.LinkSecrets") as read:
        settings({"kvpull.LinkSecrets": text}, {})
    for caught in (own, read):
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "7", '[["2", "hush"]]', '{"two": "hush"}', '{"2": {"3": "hush"}}', '{"2": 7}'])
def test_secrets_that_are_no_table_are_refused(text: str) -> None:
    with pytest.raises(LLMException, match=r"kvpull\.LinkSecrets") as caught:
        settings({"kvpull.LinkSecrets": text}, {})
    assert "hush" not in str(caught.value)
