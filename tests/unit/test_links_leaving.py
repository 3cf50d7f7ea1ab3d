"""What others do while a link is on its way out: link it again, wait, or cancel its end."""

from __future__ import annotations

import asyncio

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.link import Link
from kvpull_async.linkage import LinkState
from kvpull_async.status import LLMException, LLMStatusCode
from tests.loop_nodes import CODES, LoopNode, eventually, loop_nodes

OK = LLMStatusCode.LLM_SUCCESS


def link_of(node: LoopNode, cluster_id: int) -> Link:
    link = node.links.find(cluster_id)
    assert link is not None
    return link


async def test_who_links_while_the_link_is_being_unlinked_gets_a_new_one() -> None:
    """Not the answer that it is there already, of one that goes."""
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        for turns in range(0, 20, 2):
            await one.link(two)
            old = link_of(one, 2)
            unlinking = asyncio.create_task(one.unlink(2))
            await eventually(lambda old=old: old.leaving)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert await one.link(two) == [OK]
            assert await unlinking == OK
            assert link_of(one, 2) is not old
            await link_of(one, 2).check(Deadline.after_ms(15_000))


@pytest.mark.parametrize("stays", [True, False])
async def test_who_links_while_an_unlink_waits_for_a_pull_waits_as_well(stays: bool) -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        link = link_of(one, 2)
        await link._fifo.acquire()
        unlinking = asyncio.create_task(one.unlink(2))
        await eventually(lambda: link.leaving)
        assert await one.link(two, timeout_ms=30) == [CODES.timeout]
        assert "being unlinked" in one.links.reasons[2]
        linking = asyncio.create_task(one.link(two))
        await asyncio.sleep(0.02)
        assert not linking.done()
        if stays:
            unlinking.cancel()
        link._fifo.release()
        assert await asyncio.wait_for(linking, 10) == [LLMStatusCode.LLM_ALREADY_LINK if stays else OK]
        assert (link_of(one, 2) is link) is stays
        await asyncio.gather(unlinking, return_exceptions=True)


async def test_who_waits_for_a_lost_link_that_is_then_unlinked_gets_a_new_one() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        target, link = two.target, link_of(one, 2)
        await two.stop_listening()
        for lane in link._lanes.values():
            lane.channel.abort()
        await eventually(lambda: link.state is not LinkState.READY)
        linking = asyncio.create_task(one.link(target))
        await asyncio.sleep(0.02)
        assert not linking.done()
        link.refuse(LLMException("about to be unlinked"))
        await two.listen(target.address or ("", 0))
        one.links.end(link, "unlinked")
        assert await linking == [OK]
        await link_of(one, 2).check(Deadline.after_ms(15_000))


async def test_who_waits_for_an_unlink_to_end_hears_of_the_end_of_all() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        link = link_of(one, 2)
        link.refuse(LLMException("about to be unlinked"))
        linking = asyncio.create_task(one.link(two))
        await asyncio.sleep(0.02)
        one.links.refuse()
        assert await asyncio.wait_for(linking, 10) == [LLMStatusCode.LLM_ENGINE_FINALIZED]


async def test_a_close_that_is_cancelled_ends_the_link_and_is_cancelled_then() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        for turns in range(6):
            await one.link(two)
            link = link_of(one, 2)
            one.links.forget(link)
            lane = next(iter(link._lanes.values()))
            lingering = asyncio.ensure_future(asyncio.sleep(0.05))
            lane._tasks.add(lingering)
            closing = asyncio.create_task(link.close(LLMException("enough"), Deadline.after_ms(15_000)))
            for _ in range(1 + turns):
                await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert lingering.done()
            assert link.state is LinkState.CLOSED
