"""Links between whole nodes: both sides at once, shared ids, oneself, and ending them against any resistance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvpull_async import LLMException, LLMRole
from kvpull_async.linkage import LinkState
from kvpull_async.status import LLMStatusCode
from tests.hostile import (
    DESC,
    OK,
    content,
    honest_pull,
    info,
    info_of,
    link,
    links_of,
    node,
    publish,
    pulling,
    serving,
    unlink,
)
from tests.loop_nodes import eventually

ALREADY = LLMStatusCode.LLM_ALREADY_LINK
both_transports = pytest.mark.parametrize("transport", ["tcp", "inproc", "shm"])
both_modes = pytest.mark.parametrize("newer", [False, True], ids=["older mode", "newer mode"])


def peer(cluster_id: int, transport: str = "tcp", **properties: Any) -> Any:
    """A node that listens and may dial too."""
    return node(cluster_id, LLMRole.DECODER, listen="127.0.0.1:0", transfer_backend=transport, **properties)


def ready(*nodes: Any) -> list[int]:
    return [sum(one.state is LinkState.READY for one in links_of(made)) for made in nodes]


def settled_to(counts: list[int], *nodes: Any) -> Callable[[], bool]:
    return lambda: ready(*nodes) == counts == [len(links_of(made)) for made in nodes]


# --- both at once ---


@both_transports
async def test_two_nodes_that_link_to_each_other_at_once_end_with_one_link(transport: str) -> None:
    rng = random.Random("at once")
    async with peer(1, transport) as one, peer(2, transport) as two:
        for round_ in range(30):
            first, second = (one, two) if round_ % 2 else (two, one)

            async def after(delay: float, dialling: Any, dialled: Any) -> Any:
                await asyncio.sleep(delay)
                return await link(dialling, dialled)

            codes = await asyncio.gather(
                link(first, second), after(rng.choice((0, 0, 0.0005, 0.001, 0.002)), second, first)
            )
            assert set(codes) <= {OK, ALREADY}, (round_, codes)
            assert OK in codes
            await eventually(settled_to([1, 1], one, two), f"one link each in round {round_}: {ready(one, two)}")
            await one.check_link_status(2)
            await two.check_link_status(1)
            await honest_pull(one, two, round_)
            await honest_pull(two, one, round_ + 50)
            assert await unlink(rng.choice((one, two)), 2 if links_of(one)[0].address else 1) in (
                OK,
                LLMStatusCode.LLM_NOT_YET_LINK,
            )
            for made, other in ((one, 2), (two, 1)):
                if links_of(made):
                    await unlink(made, other)
            await eventually(settled_to([0, 0], one, two))


async def test_many_nodes_that_all_link_to_each_other_at_once_end_with_one_link_per_pair() -> None:
    async with peer(1) as a, peer(2) as b, peer(3) as c, peer(4) as d:
        nodes = [a, b, c, d]
        codes = await asyncio.gather(*(link(one, *(other for other in nodes if other is not one)) for one in nodes))
        assert {code for row in codes for code in row} <= {OK, ALREADY}
        await eventually(settled_to([3, 3, 3, 3], *nodes))


# --- shared ids ---


async def test_two_peers_of_one_id_may_both_link_and_are_both_served() -> None:
    async with serving() as source, pulling(7) as one, pulling(7) as two:
        assert [await link(one, source), await link(two, source)] == [OK, OK]
        for fill in range(3):
            await honest_pull(one, source, fill)
            await honest_pull(two, source, fill + 10)
        assert ready(source) == [2]
        assert await unlink(one, 1) == OK
        await eventually(lambda: ready(source) == [1])
        await honest_pull(two, source, 30)


async def test_a_second_peer_of_a_linked_id_cannot_be_dialled() -> None:
    async with serving(1) as one, serving(1) as other, pulling(2) as puller:
        assert await link(puller, one) == OK
        assert await link(puller, other) == ALREADY
        assert await unlink(puller, 1) == OK
        assert await link(puller, other) == OK
        await honest_pull(puller, other, 8)


async def test_a_peer_of_the_own_id_is_pulled_from_through_its_link() -> None:
    async with serving(5) as source, pulling(5) as puller:
        key, cache = await publish(source, 3)
        into = await puller.kv_cache_manager.allocate_cache(DESC)
        with pytest.raises(LLMException, match="is this node itself") as caught:
            await puller.kv_cache_manager.pull_cache(key, into)
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        assert await link(puller, source) == OK
        await puller.kv_cache_manager.pull_cache(key, into)
        assert content(puller, into) == {3}
        await puller.kv_cache_manager.deallocate_cache(into)
        await source.kv_cache_manager.deallocate_cache(cache)


@both_transports
async def test_a_node_may_link_to_itself_and_pull(transport: str) -> None:
    async with peer(5, transport) as one:
        assert await link(one, one) == OK
        await honest_pull(one, one, 6)
        assert await link(one, one) == ALREADY
        await one.check_link_status(5)
        assert await unlink(one, 5) == OK
        await eventually(lambda: links_of(one) == [])
        assert await link(one, one) == OK
        await honest_pull(one, one, 7)


# --- ending ---


@both_transports
@both_modes
@pytest.mark.parametrize("force", [False, True], ids=["politely", "by force"])
async def test_relinking_after_an_unlink_works_each_time(transport: str, newer: bool, force: bool) -> None:
    options = {"transfer_backend": transport, "enable_cache_manager": newer}
    async with serving(**options) as source, pulling(**options) as puller:
        for fill in range(4):
            assert await link(puller, source) == OK
            await honest_pull(puller, source, fill)
            assert await unlink(puller, 1, force=force) == OK
            with pytest.raises(LLMException) as caught:
                await honest_pull(puller, source, fill)
            assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK


@both_modes
async def test_a_forced_unlink_of_an_unknown_peer_is_harmless(newer: bool) -> None:
    async with pulling(enable_cache_manager=newer) as puller:
        for force in (True, True, False):
            overall, codes = await puller.unlink_clusters([info(77)], 3000, force)
            assert overall == OK
            assert codes == [OK if newer else LLMStatusCode.LLM_NOT_YET_LINK]


@both_modes
@pytest.mark.parametrize("side", ["puller", "source"])
async def test_a_forced_unlink_of_a_dead_peer_succeeds_and_the_restarted_one_can_be_linked(
    newer: bool, side: str
) -> None:
    polite = LLMStatusCode.LLM_UNLINK_FAILED if newer else LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
    async with peer(2, enable_cache_manager=newer) as puller:
        async with peer(1, enable_cache_manager=newer) as source:
            address = source.listen_address
            assert await link(*((puller, source) if side == "puller" else (source, puller))) == OK
        await eventually(lambda: ready(puller) == [0])
        if side == "puller":  # this side dialled, so the link is down and looks for its peer
            assert await unlink(puller, 1, timeout=2000) == polite
            assert len(links_of(puller)) == 1
            assert await unlink(puller, 1, force=True) == OK
        else:  # the side that dialled said goodbye in its `finalize`
            await eventually(lambda: links_of(puller) == [])
            assert await unlink(puller, 1, force=True) == (OK if newer else LLMStatusCode.LLM_NOT_YET_LINK)
        assert links_of(puller) == []
        assert address is not None
        async with node(
            1, LLMRole.PROMPT, listen=f"{address[0]}:{address[1]}", transfer_backend="tcp", enable_cache_manager=newer
        ) as restarted:
            assert await link(puller, restarted) == OK
            await honest_pull(puller, restarted, 5)


async def test_a_source_may_force_its_peer_out_by_id_alone_and_stays_rid_of_it() -> None:
    async with serving() as source, pulling() as puller:
        assert await link(puller, source) == OK
        assert await unlink(source, 2, force=True) == OK
        await eventually(settled_to([0, 0], source, puller))
        await asyncio.sleep(0.1)  # longer than the first attempts to reconnect would take
        assert ready(source, puller) == [0, 0]
        with pytest.raises(LLMException) as caught:
            await puller.check_link_status(1)
        assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK
        assert await link(puller, source) == OK
        await honest_pull(puller, source, 5)


async def test_finalize_while_the_other_side_dials_is_a_code() -> None:
    async with pulling() as puller:
        for _ in range(5):
            async with serving() as source:
                linking = asyncio.create_task(link(puller, info_of(source), timeout=5000))
                await asyncio.sleep(0)
                await source.finalize()
            code = await linking
            assert code in (OK, LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_ENGINE_FINALIZED)
            await unlink(puller, 1, force=True)
            assert links_of(puller) == []


async def test_a_key_of_an_unlinked_peer_is_still_there_after_relinking() -> None:
    async with serving() as source, pulling() as puller:
        key, cache = await publish(source, 4)
        into = await puller.kv_cache_manager.allocate_cache(DESC)
        for _ in range(2):
            assert await link(puller, source) == OK
            await puller.kv_cache_manager.pull_cache(key, into, size=8, src_cache_offset=0)
            assert await unlink(puller, 1) == OK
        await puller.kv_cache_manager.deallocate_cache(into)
        await source.kv_cache_manager.deallocate_cache(cache)


@both_modes
async def test_a_cluster_that_moved_is_linked_at_its_new_address(newer: bool) -> None:
    async with pulling(enable_cache_manager=newer) as puller:
        async with serving(enable_cache_manager=newer) as source:
            assert await link(puller, source) == OK
        await eventually(lambda: ready(puller) == [0])
        async with serving(enable_cache_manager=newer) as moved:
            assert await link(puller, moved) == OK
            await honest_pull(puller, moved, 5)


async def test_p10_a_lost_link_is_not_called_linked_already() -> None:
    async with pulling() as puller:
        async with serving() as source:
            assert await link(puller, source) == OK
            address = source.listen_address
        await eventually(lambda: ready(puller) == [0])
        again = info(1, address)
        overall, codes = await puller.link_clusters([again], 1500)
        assert codes == [LLMStatusCode.LLM_LINK_FAILED]
        assert overall == LLMStatusCode.LLM_LINK_FAILED
        with pytest.raises(LLMException, match=r"its connection is lost: .*(refused|Connect call failed)") as caught:
            await puller.link_clusters([again], 1500, raise_on_error=True)
        assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert caught.value.peer == 1
