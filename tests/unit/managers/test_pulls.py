"""A pull from its arguments to the link: whom it finds there, and what the caller's error says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvpull_async import (
    CacheKeyByIdAndIndex,
    LLMException,
    LLMStatusCode,
    LLMTimeoutError,
)
from kvpull_async.managers.dialect import CACHE, KV, Dialect
from tests.unit.managers.pulling import KEY, OWN, PARAM_INVALID, UNLINKED, Table, refused


@pytest.fixture
async def table() -> AsyncIterator[Table]:
    made = Table()
    yield made
    made.close()


@pytest.fixture
async def newer() -> AsyncIterator[Table]:
    made = Table(CACHE, remote_cache_access=True)
    yield made
    made.close()


async def test_a_cache_that_is_not_here(table: Table) -> None:
    table.registry.release(table.registry.entries()[0])
    await refused(table.pull(), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, text="does not exist on this node")
    stranger = Table()
    await refused(table.pull(cache=stranger.blocks), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, text="another LLMDataDist")
    stranger.close()


async def test_without_a_link_there_is_nobody_to_ask(table: Table) -> None:
    error = await refused(table.pull(UNLINKED), LLMStatusCode.LLM_NOT_YET_LINK, text="no link to cluster 9")
    assert (error.peer, error.operation, error.retry_safe) == (9, "pull_cache", True)
    await refused(table.pull(OWN), text="cluster 2 is this node itself")


async def test_with_remote_access_the_destination_must_be_accessible_too(newer: Table) -> None:
    by_id = CacheKeyByIdAndIndex(1, 5, 0)
    await newer.pull(by_id)
    assert newer.asked.remote_access
    newer.registry.entries()[0].remote_accessible = False
    await refused(newer.pull(by_id), text="must be remote accessible too")


# -- what the caller's error says --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "status"), [(KV, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT), (CACHE, LLMStatusCode.LLM_TIMEOUT)]
)
async def test_p10_a_timeout_has_its_managers_code_and_every_field(dialect: Dialect, status: LLMStatusCode) -> None:
    made = Table(dialect)
    made.link.silent = True
    error = await refused(made.pull(timeout=20), status)
    assert isinstance(error, LLMTimeoutError)
    assert (error.peer, error.operation) == ("peer:1", "pull_cache")
    assert error.elapsed_ms is not None
    assert error.elapsed_ms >= 20
    assert (error.retry_safe, error.destination_unsafe) == (True, False)
    made.close()


async def test_p10_a_refusal_has_every_field(table: Table) -> None:
    table.link.refusal = LLMException("not here", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, retry_safe=True)
    error = await refused(table.pull_blocks(KEY, [], [0]), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    assert (error.peer, error.operation, error.retry_safe) == ("peer:1", "pull_blocks", True)
    assert error.elapsed_ms is not None


async def test_the_counters_tell_each_end(table: Table) -> None:
    await table.pull()
    table.link.refusal = LLMException("no", status_code=PARAM_INVALID)
    await refused(table.pull())
    for status in (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_LINK_FAILED):
        table.link.refusal = LLMException("no", status_code=status)
        await refused(table.pull(), status)
    await refused(table.pull(UNLINKED), LLMStatusCode.LLM_NOT_YET_LINK)
    table.link.silent = True
    await refused(table.pull(timeout=10), LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
    task = asyncio.ensure_future(table.pull())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert table.counters.snapshot() == {
        "pulls_started": 7,
        "pulls_finished": 1,
        "bytes_pulled": 400,
        "pulls_failed": 4,
        "pulls_failed_link": 2,
        "pulls_failed_missing": 1,
        "pulls_failed_other": 1,
        "pulls_timed_out": 1,
        "pulls_cancelled": 1,
    }
