"""What pulls and pushes have in common on their way to a peer: its link, and how their errors are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpull_async.managers import peers
from kvpull_async.managers.dialect import CACHE, KV
from kvpull_async.observe import Counters, Log, Report
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.loop_nodes import event_log

LINK = object()


def node(links: dict[int, object]) -> Any:
    return SimpleNamespace(find_link=links.get, settings=SimpleNamespace(cluster_id=2))


def test_the_link_of_a_cluster_is_found() -> None:
    assert peers.link_to(node({1: LINK}), 1) is LINK


def test_a_cluster_without_a_link_may_be_linked_and_asked_again() -> None:
    with pytest.raises(LLMException, match="no link to cluster 9") as caught:
        peers.link_to(node({1: LINK}), 9)
    assert (caught.value.status_code, caught.value.retry_safe) == (LLMStatusCode.LLM_NOT_YET_LINK, True)


def test_a_nodes_own_id_is_a_wrong_argument_unless_it_is_linked() -> None:
    """Two nodes of one id may be linked: then the other one is meant."""
    with pytest.raises(LLMException, match="cluster 2 is this node itself") as caught:
        peers.link_to(node({}), 2)
    assert (caught.value.status_code, caught.value.retry_safe) == (LLMStatusCode.LLM_PARAM_INVALID, False)
    assert peers.link_to(node({2: LINK}), 2) is LINK


@pytest.mark.parametrize("dialect", [KV, CACHE], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("unsafe", [False, True])
def test_a_timeout_has_the_status_of_the_manager_and_keeps_what_it_says(dialect: Any, unsafe: bool) -> None:
    error = LLMTimeoutError("too long", retry_safe=not unsafe)
    error.destination_unsafe = unsafe
    known = peers.described(error, dialect, Report("pull_cache", "p", cluster_id=7))
    assert isinstance(known, LLMTimeoutError)
    assert (str(known), known.status_code) == ("too long", dialect.timeout_status)
    assert (known.retry_safe, known.destination_unsafe) == (not unsafe, unsafe)


def test_an_error_names_operation_time_and_peer() -> None:
    report = Report("push_cache", "p", cluster_id=7)
    report.started -= 1
    known = peers.described(LLMException("x"), CACHE, report)
    assert (known.operation, known.peer) == ("push_cache", 7)
    assert known.elapsed_ms is not None
    assert known.elapsed_ms >= 1000
    report.peer = "10.0.0.1:5"
    assert peers.described(LLMException("x"), CACHE, report).peer == "10.0.0.1:5"
    assert peers.described(LLMException("x", peer="who refused"), CACHE, report).peer == "who refused"


@pytest.mark.parametrize("push", [False, True])
def test_other_bytes_are_counted_told_and_may_be_moved_again(push: bool) -> None:
    counters = Counters()
    with event_log() as log:
        asking = SimpleNamespace(counters=counters, log=Log())
        report = Report("an operation", "an-id", peer="a peer", push=push)
        error = peers.mismatch(asking, report, "crc32", source=b"\x01\x02", destination=b"\xab")  # type: ignore[arg-type]
        (event,) = log.named("verify.failed")
    assert (error.status_code, error.retry_safe) == (LLMStatusCode.LLM_FAILED, True)
    assert (event["sum"], event["source"], event["destination"]) == ("crc32", "0102", "ab")
    assert "their crc32 is ab, that of the source 0102" in str(error)
    assert "a peer" in str(error)
    assert counters.snapshot() == {"verify_failed": 1}


def test_a_source_that_made_no_sum_is_no_mismatch() -> None:
    counters = Counters()
    asking = SimpleNamespace(counters=counters, log=Log())
    error = peers.mismatch(asking, Report("pull_cache", "an-id"), "xxh3", source=b"", destination=b"\xab")  # type: ignore[arg-type]
    assert (error.status_code, error.retry_safe) == (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, True)
    assert counters.snapshot() == {}


@pytest.mark.parametrize(("calls", "push"), [("pulls", False), ("pushes", True)])
@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (LLMTimeoutError("late"), ["timed_out"]),
        (LLMException("x", status_code=LLMStatusCode.LLM_LINK_FAILED), ["failed", "failed_link"]),
        (LLMException("x", status_code=LLMStatusCode.LLM_NOT_YET_LINK), ["failed", "failed_link"]),
        (LLMException("x", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), ["failed", "failed_missing"]),
        (LLMException("x", status_code=LLMStatusCode.LLM_FAILED), ["failed", "failed_other"]),
    ],
)
def test_a_failure_is_counted_once_by_its_kind(calls: str, push: bool, error: LLMException, kinds: list[str]) -> None:
    counters = Counters()
    peers.count_failure(SimpleNamespace(counters=counters), error, push=push)  # type: ignore[arg-type]
    assert counters.snapshot() == {f"{calls}_{kind}": 1 for kind in kinds}
