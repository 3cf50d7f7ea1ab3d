"""Section 7.7: nodes, links and waiting, the configuration, key values."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpull_async import CacheKey, CacheKeyByIdAndIndex, LLMConfig, LLMRole, LLMStatusCode, LLMTimeoutError
from tests.conformance.row import PI, Row, all_there, failure, is_error, raises, returns, succeeds
from tests.conformance.scene import BOTH, NEW, OLD, SOURCE, Layout, Scene, cluster_info, stalled

UNLINKED = {"linked": False}
NOTHING = {"nodes": False}
SUCCESS = LLMStatusCode.LLM_SUCCESS
TIMEOUT = LLMStatusCode.LLM_TIMEOUT


def no_node(number: int, call: Callable[[Scene], Any], expect: Any, *, differs: str | None = None) -> Row:
    """A row without a node, so without a transport; it counts for both managers and runs once."""

    async def asynchronous(f: Scene) -> Any:
        return call(f)

    return Row(number, NEW, asynchronous, expect, differs=differs, setup=NOTHING, transports=())


# -- nodes and links ---------------------------------------------------------------------------------------------------


async def reaches_the_older_manager(f: Scene) -> None:
    manager = f.destination.kv_cache_manager
    assert manager.is_initialized()
    await f.api.do(manager.pull_cache, CacheKeyByIdAndIndex(SOURCE, f.s.cache_id, 1), f.d)
    assert np.array_equal(f.content(f.d)[:, 0], f.image(f.s)[:, 1])


def links(**kwargs: Any) -> Any:
    async def call(f: Scene) -> Any:
        info = cluster_info(SOURCE, f.source.listen_address)
        return await f.api.do(f.destination.link_clusters, [info], **kwargs)

    return call


async def links_to_a_closed_port(f: Scene) -> Any:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: it refuses, and nobody else can have it meanwhile
        info = cluster_info(SOURCE, taken.getsockname())
        return await f.api.do(f.destination.link_clusters, [info], timeout=3000)


async def unlink(f: Scene, **kwargs: Any) -> Any:
    info = cluster_info(SOURCE, f.address)
    return await f.api.do(f.destination.unlink_clusters, [info], **kwargs)


async def unlinks_from_a_peer_that_is_gone(f: Scene) -> None:
    f.address = f.source.listen_address
    await f.api.do(f.source.finalize)
    refused = LLMStatusCode.LLM_UNLINK_FAILED
    assert await unlink(f) == (refused, [refused])
    error = await failure(lambda: f.pull(f.r[0], f.d))
    assert is_error(error, LLMStatusCode.LLM_LINK_FAILED), f"the link should have been kept, got {error!r}"
    assert await unlink(f, force=True) == (SUCCESS, [SUCCESS])
    error = await failure(lambda: f.pull(f.r[0], f.d))
    assert is_error(error, LLMStatusCode.LLM_NOT_YET_LINK), f"the link should be gone, got {error!r}"
    assert await unlink(f, force=True) == (SUCCESS, [SUCCESS]), "forcing may be repeated"


async def unlinks_from_a_peer_that_is_silent(f: Scene) -> None:
    f.address = f.source.listen_address
    with stalled(f.source):
        assert await unlink(f, timeout=100) == (TIMEOUT, [TIMEOUT])
    await all_there(f)
    with stalled(f.source):
        assert await unlink(f, force=True) == (SUCCESS, [SUCCESS])


async def takes_the_same_role(f: Scene) -> Any:
    return await f.api.do(f.destination.switch_role, LLMRole.DECODER)


async def links_as_prompt(f: Scene) -> Any:
    info = cluster_info(7, ("127.0.0.1", 1))
    return await f.api.do(f.source.link_clusters, [info])


async def local_comm_res_alone(f: Scene) -> None:
    """Cache manager mode, and remote access: only keys by id are accepted."""
    node = f.api.package.LLMDataDist(LLMRole.MIX, 5)
    f._nodes.append(node)
    await f.api.do(node.init, {"llm.LocalCommRes": ""})
    assert is_error(await failure(lambda: f.api.do(node.check_link_status, 1)), PI)
    cache = await f.allocate(node=node)
    error = await failure(lambda: f.api.do(node.cache_manager.pull_cache, CacheKey(1, 0), cache))
    assert type(error) is TypeError, repr(error)
    error = await failure(lambda: f.api.do(node.cache_manager.pull_cache, CacheKeyByIdAndIndex(1, 1), cache))
    assert is_error(error, LLMStatusCode.LLM_NOT_YET_LINK)


# -- several calls on one link, and waiting ----------------------------------------------------------------------------


def counted(node: Any, name: str) -> int:
    counters: dict[str, int] = node.counters
    return counters.get(name, 0)


async def waits_its_turn(f: Scene) -> None:
    """Two calls at once: the second waits, unless the link is told to refuse."""
    with stalled(f.source):
        first = f.api.start(lambda: f.pull(f.r[0], f.d, 0))
        await f.api.until(lambda: counted(f.destination, "pulls_started") == 1)
        second = f.api.start(lambda: f.pull(f.r[1], f.d, 1))
        await f.api.until(lambda: counted(f.destination, "pulls_started") == 2)
    for pull in (first, second):
        assert await pull.outcome() is None
    assert np.array_equal(f.content(f.d)[:, :2], f.image(f.s)[:, :2])


async def is_told_at_once(f: Scene) -> None:
    with stalled(f.source):
        first = f.api.start(lambda: f.pull(f.r[0], f.d, 0))
        await f.api.until(lambda: counted(f.destination, "pulls_started") == 1)
        error = await failure(lambda: f.pull(f.r[1], f.d, 1))
    assert is_error(error, LLMStatusCode.LLM_LINK_BUSY), repr(error)
    assert await first.outcome() is None
    await f.pull(f.r[1], f.d, 1)
    assert np.array_equal(f.content(f.d)[:, :2], f.image(f.s)[:, :2])


async def two_threads(f: Scene) -> None:
    pulls = [f.api.start(lambda number=number: f.pull(f.r[number], f.d, number)) for number in range(4)]
    for pull in pulls:
        assert await pull.outcome() is None
    assert np.array_equal(f.content(f.d), f.image(f.s))


async def gives_up_on_a_stalled_source(f: Scene) -> None:
    """The code is the manager's; the link survives, and the late answer reaches nobody."""
    expected = TIMEOUT if f.setup.manager == NEW else LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    with stalled(f.source):
        began = time.monotonic()
        error = await failure(lambda: f.pull(f.r[0], f.d))
        took = time.monotonic() - began
    assert isinstance(error, LLMTimeoutError)
    assert error.status_code == expected
    assert 0.1 <= took < 10, took  # far from prompt only because the machine may be busy
    assert not f.content(f.d).any()
    spare = await f.allocate(Layout())
    for number, key in enumerate(f.r):
        await f.pull(key, spare, number, timeout=20_000)
    assert np.array_equal(f.content(spare), f.image(f.s))
    assert not f.content(f.d).any(), "the answer that came too late was written after all"


RAISE = {"options": (("kvpull.LinkBusyPolicy", "raise"),)}
SHORT = {"options": (("llm.SyncKvCacheWaitTime", "100"),)}

LIVING = [
    no_node(141, lambda f: f.api.package.LLMDataDist(1, 1), raises(TypeError)),
    Row(147, NEW, reaches_the_older_manager, succeeds(), differs="both-managers-in-both-modes"),
    Row(147, NEW, lambda f: f.api.do(f.destination.check_link_status, 1), raises(PI)),
    Row(148, NEW, links(timeout=0), raises(PI), setup=UNLINKED),
    Row(149, NEW, links(timeout=2**31), raises(ValueError), setup=UNLINKED),
    Row(150, NEW, lambda f: f.api.do(f.destination.link_clusters, []), returns((PI, [])), setup=UNLINKED),
    Row(
        151, NEW, links_to_a_closed_port,
        returns((LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])), setup=UNLINKED,
    ),
    Row(154, NEW, unlinks_from_a_peer_that_is_gone, succeeds()),
    Row(154, NEW, unlinks_from_a_peer_that_is_silent, succeeds()),
    Row(157, NEW, takes_the_same_role, succeeds(), setup=UNLINKED),
    Row(157, OLD, takes_the_same_role, raises(PI), setup=UNLINKED),
    Row(160, OLD, links_as_prompt, returns((PI, [])), setup=UNLINKED),
    Row(162, OLD, waits_its_turn, succeeds(), differs="calls-on-one-link-queue"),
    Row(162, OLD, is_told_at_once, succeeds(), differs="calls-on-one-link-queue", setup=RAISE),
    Row(163, NEW, two_threads, succeeds()),
    Row(164, BOTH, gives_up_on_a_stalled_source, succeeds(), differs="links-survive-timeouts", setup=SHORT),
]  # fmt: skip


# -- configuration and values ------------------------------------------------------------------------------------------


def assigns(name: str, value: Any) -> Any:
    return lambda f: setattr(f.api.package.LLMConfig(), name, value)


def generated(**properties: Any) -> Callable[[Scene], dict[str, str]]:
    def call(f: Scene) -> dict[str, str]:
        config: LLMConfig = f.api.package.LLMConfig()
        for name, value in properties.items():
            setattr(config, name, value)
        return config.generate_options()

    return call


def sees_two_devices(f: Scene) -> None:
    options = generated(device_id=[0, 1])(f)
    assert options["ge.exec.deviceId"] == "0;1"
    assert options["ge.session_device_id"] == "0"


CONFIGURATION = [
    *(no_node(166, assigns("sync_kv_timeout", value), raises(PI)) for value in (0, "0", "abc")),
    no_node(166, assigns("sync_kv_timeout", 2**31), raises(ValueError)),
    no_node(166, assigns("sync_kv_timeout", 1.5), raises(TypeError)),
    no_node(167, assigns("mem_utilization", 1), raises(TypeError)),
    no_node(167, assigns("mem_utilization", 1.1), raises(PI)),
    no_node(168, sees_two_devices, succeeds()),
    *(no_node(169, assigns("link_retry_count", value), raises(PI)) for value in (0, 101)),
    no_node(170, generated(), returns({"llm.MemoryUtilization": "0.95"})),
    Row(173, NEW, local_comm_res_alone, succeeds(), setup=NOTHING, transports=()),
    no_node(175, lambda f: f.api.package.CacheKey(1), raises(PI)),
    no_node(175, lambda f: f.api.package.CacheKey(1, 2, 3, 4, 5), raises(PI)),
    no_node(175, lambda f: f.api.package.CacheKey(1, 2, x=1), raises(PI)),
    no_node(176, lambda f: f.api.package.CacheKey(1, 2) == f.api.package.CacheKey(1, 2), returns(False)),
]

ROWS = [*LIVING, *CONFIGURATION]
