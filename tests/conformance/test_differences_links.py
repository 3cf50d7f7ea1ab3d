"""The deliberate differences that no conformance row shows: links, time, nodes, options.

Each rule names the entry of docs/coming-from-llm_datadist.md that it holds to.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    CacheKeyByIdAndIndex,
    LLMRole,
    LLMStatusCode,
    LLMTimeoutError,
    RegisterMemStatus,
)
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import KNE, PI, all_there, failure, is_error, key, lacks
from tests.conformance.rule import RuleCase, Rules
from tests.conformance.scene import DESTINATION, INVALID_ID, NEW, OLD, SOURCE, Layout, Scene, cluster_info, stalled
from tests.ranks import device, table

RULES = Rules()
rule = RULES.rule

SUCCESS = LLMStatusCode.LLM_SUCCESS
NOTHING = {"nodes": False}
UNLINKED = {"linked": False}


# -- links by rank table -----------------------------------------------------------------------------------------------


def ranks(f: Scene, ip: str = "10.1.1.1") -> tuple[Any, ...]:
    """The arguments of `link`: both ranks on one server, whose devices' addresses lead nowhere here."""
    return (f"conformance {id(f)}", {SOURCE: 0, DESTINATION: 1}, table([device(0, ip), device(1, ip)]))


async def becomes(f: Scene, node: Any, comm_id: int, status: RegisterMemStatus = RegisterMemStatus.OK) -> None:
    give_up = time.monotonic() + 20
    while await f.api.do(node.query_register_mem_status, comm_id) is not status:
        assert time.monotonic() < give_up, status
        time.sleep(0.005)  # noqa: ASYNC251  (the blocking API has no loop; the engine has a thread)


async def meet(f: Scene, arguments: tuple[Any, ...]) -> list[int]:
    comms = [await f.api.do(node.link, *arguments) for node in (f.destination, f.source)]
    for node, comm_id in zip((f.destination, f.source), comms, strict=True):
        await becomes(f, node, comm_id)
    return comms


@rule(NEW, differs="rank-tables-need-no-device-network", **UNLINKED)
async def ranks_of_one_server_meet_on_the_loopback(f: Scene) -> None:
    assert await meet(f, ranks(f)) == [1, 1]
    await all_there(f)


@rule(NEW, differs="rank-tables-need-no-device-network", **UNLINKED)
async def a_rank_that_cannot_be_listened_for(f: Scene) -> None:
    name, members, _ = ranks(f)
    apart = table([device(0, "198.51.100.7")], [device(1, "198.51.100.8")])
    assert is_error(await failure(lambda: f.api.do(f.source.link, name, members, apart)), PI)


@rule(NEW, differs="comms-come-back", **UNLINKED)
async def a_comm_of_a_member_that_unlinked(f: Scene) -> None:
    arguments = ranks(f)
    await meet(f, arguments)
    await f.api.do(f.source.unlink, 1)
    await becomes(f, f.destination, 1, RegisterMemStatus.FAILED)
    await f.api.do(f.destination.unlink, 1)
    assert await meet(f, arguments) == [2, 2]
    await all_there(f)


# -- links and time ----------------------------------------------------------------------------------------------------


@rule(differs="timeouts-are-timeout-errors")
async def timeout_as_an_exception(f: Scene) -> None:
    with stalled(f.source), pytest.raises(TimeoutError) as raised:
        await f.pull(f.r[0], f.d, timeout=100)
    error = raised.value
    assert isinstance(error, LLMTimeoutError)
    assert (error.operation, error.retry_safe, error.destination_unsafe) == ("pull_cache", True, False)
    assert error.elapsed_ms is not None
    assert error.elapsed_ms >= 99
    await all_there(f)


@rule(NEW, differs="one-deadline-for-everything")
async def queueing_spends_the_timeout(f: Scene) -> None:
    with stalled(f.source):
        began = time.monotonic()
        pulls = [f.api.start(lambda i=i: f.pull(f.r[i], f.d, i, timeout=700)) for i in range(4)]
        errors = [await pull.outcome() for pull in pulls]
        took = time.monotonic() - began
    assert all(isinstance(error, LLMTimeoutError) for error in errors), errors
    assert took < 2.1, "one after another they would take 2.8 s"
    await all_there(f)


@rule(differs="late-answers-are-dropped")
async def late_answers(f: Scene) -> None:
    with stalled(f.source):
        for _ in range(3):
            assert isinstance(await failure(lambda: f.pull(f.r[0], f.d, timeout=50)), LLMTimeoutError)
    await f.pull(f.r[1], f.d)
    assert np.array_equal(f.content(f.d)[:, 0], f.image(f.s)[:, 1])


@rule(differs="links-survive-timeouts")
async def refusals_by_the_source(f: Scene) -> None:
    """Each is found out by the source, some of them in the original only once it has begun to send."""
    for wrong in ({"dst_layer_range": range(1)}, {"src_cache_offset": 500}, {"src_layer_range": range(5, 7)}):
        error = await failure(lambda wrong=wrong: f.pull(f.r[0], f.d, **wrong))  # type: ignore[misc]
        assert is_error(error, PI)
    assert is_error(await failure(lambda: f.pull(key(77), f.d)), KNE)
    await all_there(f)


@rule(differs="links-survive-timeouts")
async def extreme_values(f: Scene) -> None:
    """Whatever fits its type is answered by the source, or before; it is no reason to give the connection up."""
    last, most = range(2**32 - 1, 2**32), 2**63 - 1
    layers = [{"src_layer_range": last, "tensor_num_per_layer": number} for number in (1, 2, 4, 2**32 - 1)]
    sizes = [{"size": most}, {"src_cache_offset": most}, {"dst_cache_offset": most}, {"src_cache_offset": most - 512}]
    for wrong in (*layers, *sizes, {"dst_layer_range": last}, {"batch_index": 2**32 - 1}):
        error = await failure(lambda wrong=wrong: f.pull(f.r[0], f.d, **wrong))  # type: ignore[misc]
        assert is_error(error, PI), (wrong, error)
    keys = [key(2**64 - 2), key(0, model_id=2**64 - 1), key(INVALID_ID, prefix_id=2**64 - 2)]
    ids = [CacheKeyByIdAndIndex(SOURCE, number, 2**32 - 1) for number in (-(2**63), -1, 0, 1, most)]
    for unknown in (*keys, *ids):
        await lacks(f, unknown)
    await all_there(f)
    assert "links_lost" not in f.destination.counters


@rule(NEW, differs="link-timeouts-bound-silent-peers", transport="tcp", **NOTHING)
async def silent_listener(f: Scene) -> None:
    node = await f.node(LLMRole.DECODER, 2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        info = cluster_info(SOURCE, silent.getsockname())
        began = time.monotonic()
        answer = await f.api.do(node.link_clusters, [info], timeout=300)
        took = time.monotonic() - began
    assert answer == (LLMStatusCode.LLM_TIMEOUT, [LLMStatusCode.LLM_TIMEOUT])
    assert 0.29 < took < 10


@rule(differs="the-peer-must-be-the-one-asked-for", **UNLINKED)
async def link_to_another_cluster(f: Scene) -> None:
    failed = LLMStatusCode.LLM_LINK_FAILED
    info = cluster_info(9, f.source.listen_address)
    answer = await f.api.do(f.destination.link_clusters, [info], timeout=20_000)
    assert answer[1] == [failed]
    await f.link(f.destination, f.source)
    await all_there(f)


@rule(differs="equal-cluster-ids", **NOTHING)
async def nodes_of_one_id(f: Scene) -> None:
    f.source = await f.node(LLMRole.PROMPT, SOURCE, listen=True)
    f.destination = await f.node(LLMRole.DECODER, SOURCE)
    f.s, f.d = await f.publish(f.r), await f.allocate()
    assert is_error(await failure(lambda: f.pull(f.r[0], f.d)), PI)
    await f.link(f.destination, f.source)
    await all_there(f)


@rule(NEW, differs="links-of-hixl-serve-both-sides", remote_access=True, **NOTHING)
async def one_link_of_hixl_is_enough_and_the_other_side_may_link_too(f: Scene) -> None:
    hixl = {"llm.TransferBackend": "hixl"}
    f.source = await f.node(LLMRole.PROMPT, SOURCE, listen=True, **hixl)
    f.destination = await f.node(LLMRole.DECODER, DESTINATION, listen=True, **hixl)
    f.s, f.d = await f.publish(f.r), await f.allocate()
    await f.link(f.source, f.destination)
    await all_there(f)
    await f.link(f.destination, f.source)
    assert f.destination.counters["links_up"] == f.source.counters["links_up"] == 1
    info = cluster_info(DESTINATION, f.destination.listen_address)
    answer = await f.api.do(f.source.link_clusters, [info])
    assert answer == (LLMStatusCode.LLM_ALREADY_LINK, [LLMStatusCode.LLM_ALREADY_LINK])
    for node, other in ((f.source, DESTINATION), (f.destination, SOURCE)):
        assert await f.api.do(node.unlink_clusters, [cluster_info(other)]) == (SUCCESS, [SUCCESS])


@rule(NEW, differs="remote-caches-are-looked-up-afresh", remote_access=True, d=Layout(shape=(4, 100)))
async def caches_made_after_the_first_pull(f: Scene) -> None:
    """The entries of the two sides differ in size, too: the source's own counts for where an entry begins."""
    await f.pull(CacheKeyByIdAndIndex(SOURCE, f.s.cache_id, 2), f.d)
    assert np.array_equal(f.content(f.d)[:, 0], f.image(f.s)[:, 2, :200])
    later = await f.publish([])
    await f.pull(CacheKeyByIdAndIndex(SOURCE, later.cache_id, 3), f.d)
    assert np.array_equal(f.content(f.d)[:, 0], f.image(later)[:, 3, :200])
    await f.api.do(f.source.cache_manager.deallocate_cache, later)
    await lacks(f, CacheKeyByIdAndIndex(SOURCE, later.cache_id, 3))
    await lacks(f, CacheKeyByIdAndIndex(SOURCE, f.s.cache_id, 4))
    error = await failure(
        lambda: f.pull(
            CacheKeyByIdAndIndex(SOURCE, f.s.cache_id), f.d, src_layer_range=range(2, 3), dst_layer_range=range(1)
        )
    )
    assert is_error(error, PI), "layers are checked by the source"


@rule(NEW, differs="unlinking-is-bounded", options=(("kvpull.SettleTimeout", "200"),))
async def unlinking_under_a_pull(f: Scene) -> None:
    info = cluster_info(SOURCE, f.source.listen_address)
    with stalled(f.source):
        pull = f.api.start(lambda: f.pull(f.r[0], f.d))
        await f.api.until(lambda: f.destination.counters.get("pulls_started", 0) == 1)
        timeout = LLMStatusCode.LLM_TIMEOUT
        assert await f.api.do(f.destination.unlink_clusters, [info], timeout=100) == (timeout, [timeout])
        assert await f.api.do(f.destination.unlink_clusters, [info], force=True) == (SUCCESS, [SUCCESS])
        assert is_error(await pull.outcome(), LLMStatusCode.LLM_NOT_YET_LINK)
    assert not f.content(f.d).any()


# -- nodes and options -------------------------------------------------------------------------------------------------


@rule(differs="finalize-does-not-wait-for-calls")
async def finalize_under_a_pull(f: Scene) -> None:
    manager = f.of(f.destination)
    with stalled(f.source):
        pull = f.api.start(lambda: f.pull(f.r[0], f.d))
        await f.api.until(lambda: f.destination.counters.get("pulls_started", 0) == 1)
        await f.api.do(f.destination.finalize)
        assert is_error(await pull.outcome(), LLMStatusCode.LLM_ENGINE_FINALIZED)
    later = await failure(lambda: f.api.do(manager.pull_cache, f.r[0], f.d))
    assert is_error(later, LLMStatusCode.LLM_ENGINE_FINALIZED)
    await f.api.do(f.destination.init, f.options())
    await f.link(f.destination, f.source)
    f.d = await f.allocate()
    await all_there(f)


@rule(NEW, differs="any-number-of-nodes", **NOTHING)
async def many_nodes(f: Scene) -> None:
    nodes = [await f.node(LLMRole.MIX, number, listen=True) for number in range(1, 5)]
    for dialler in nodes:
        for listener in nodes:
            if dialler.cluster_id < listener.cluster_id:
                await f.link(dialler, listener)
    for f.source in nodes:
        cache = await f.publish([])
        for f.destination in nodes:
            if f.destination is not f.source:
                f.d = await f.allocate()
                await f.pull(CacheKeyByIdAndIndex(f.source.cluster_id, cache.cache_id, 1), f.d)
                assert np.array_equal(f.content(f.d)[:, 0], f.image(cache)[:, 1])


@rule(differs="both-managers-in-both-modes")
async def the_other_manager(f: Scene) -> None:
    other = f.destination.cache_manager if f.setup.manager == OLD else f.destination.kv_cache_manager
    await f.api.do(other.pull_cache, f.r[1], f.d)
    assert np.array_equal(f.content(f.d)[:, 0], f.image(f.s)[:, 1])


@rule(NEW, differs="options-say-what-is-set", **NOTHING)
async def options_that_were_cleared(f: Scene) -> None:
    config = f.api.package.LLMConfig()
    config.listen_ip_info, config.enable_cache_manager = "127.0.0.1:1", True
    first = config.generate_options()
    assert first["llm.listenIpInfo"] == "127.0.0.1:1"
    config.listen_ip_info, config.enable_cache_manager = "", None
    assert config.generate_options() == {"llm.MemoryUtilization": "0.95"}
    assert first["llm.EnableCacheManager"] == "1", "what was generated before is the caller's"
    config.ge_options["ge.mine"] = "x"
    assert config.generate_options()["ge.mine"] == "x"


@rule(NEW, differs="listening-beyond-this-machine", transport="tcp", **NOTHING)
async def listening_on_every_address(f: Scene) -> None:
    everywhere = {"llm.listenIpInfo": "0.0.0.0:0"}
    node = f.api.package.LLMDataDist(LLMRole.MIX, 1)
    error = await failure(lambda: f.api.do(node.init, {**f.options(), **everywhere}))
    assert is_error(error, PI)
    for way in ("KVPULL_LINK_SECRET", "TLS", "KVPULL_ALLOW_INSECURE_NETWORK"):
        assert way in str(error)
    for safeguard in ({"kvpull.LinkSecret": "hush"}, {"kvpull.AllowInsecureNetwork": "1"}):
        await f.node(LLMRole.MIX, 1, **everywhere, **safeguard)


@rule(NEW, differs="every-name-is-exported", **NOTHING)
async def star_import(f: Scene) -> None:
    names: dict[str, Any] = {}
    exec(f"from {f.api.package.__name__} import *", names)
    assert set(names) - {"__builtins__"} == set(f.api.package.__all__)
    assert names["LLMConfig"] is names["LlmConfig"]


# -- running them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
async def test_difference_awaited(case: RuleCase) -> None:
    await case.play(AWAITED)


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
def test_difference_blocking(case: RuleCase) -> None:
    BLOCKING.run(case.play(BLOCKING))
