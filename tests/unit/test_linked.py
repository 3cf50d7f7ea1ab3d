"""Users of links, what is answered for targets, and targets asked for at once."""

from __future__ import annotations

import asyncio

from kvpull_async._deadline import Deadline
from kvpull_async.link import Link
from kvpull_async.linkage import LinkState
from kvpull_async.linked import ORDINARY, Answers, Changes, Target, Users, each
from kvpull_async.observe import Counters, Log
from kvpull_async.status import LLMStatusCode
from tests.loop_nodes import LoopNode, event_log, loop_nodes


async def test_users_of_a_link_come_and_go() -> None:
    node = LoopNode(1)
    async with loop_nodes(node, listen=False):
        link, users = Link(node.context, 2, None), Users()
        assert users.link(7, 2) is None
        users.add(link, ORDINARY, 7)
        assert users.of(link, None) == {ORDINARY, 7}
        assert (users.link(7, 2), users.link(7, 3), users.link(8, 2)) == (link, None, None)
        assert users.drop(link, 7)
        assert not users.drop(link, ORDINARY)
        assert not users.drop(link, 9)
        users.add(link, 7)
        users.forget(link)
        users.forget(link)
        assert users.of(link) == set()
        assert repr(users) == "<Users links=0>"


async def test_of_two_links_to_a_cluster_the_one_that_works_is_a_users() -> None:
    node = LoopNode(1)
    async with loop_nodes(node, listen=False):
        dead, alive, users = Link(node.context, 2, None), Link(node.context, 2, None), Users()
        alive.state = LinkState.READY
        for link in (dead, alive, dead):
            users.add(link, 7)
        assert users.link(7, 2) is alive


def test_each_answer_has_its_event_its_count_and_its_reason() -> None:
    counters, status = Counters(), LLMStatusCode.LLM_ALREADY_LINK
    answers, target = Answers(Log(local_cluster_id=1), counters), Target(3, ("127.0.0.1", 9))
    with event_log() as events:
        for number, answer in enumerate((answers.failed, answers.already, answers.stayed)):
            assert answer(target, f"reason {number}", status) is status
            assert answers.reasons == {3: f"reason {number}"}
    assert [event["event"] for event in events.events] == ["link.failed", "link.already", "link.unlink_failed"]
    assert events.warnings == [events.events[0], events.events[2]]
    common = {"local_cluster_id": 1, "cluster_id": 3, "peer": "127.0.0.1:9", "status": "LLM_ALREADY_LINK"}
    assert all(common.items() <= event.items() for event in events.events)
    assert counters.snapshot() == {"links_failed": 1, "unlinks_failed": 1}


async def test_everybody_who_waits_for_a_change_is_woken_or_waits_no_longer_than_the_deadline() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.next(Deadline.after_ms(20_000))) for _ in range(2)]
    await asyncio.sleep(0)
    assert repr(changes) == "<Changes waiting=2>"
    changes.tell()
    changes.tell()
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    await changes.next(Deadline.after_ms(1))
    assert repr(changes) == "<Changes waiting=0>"


async def test_all_are_asked_at_once_and_answer_in_order() -> None:
    asked: list[int] = []
    everybody = asyncio.Event()

    async def one(target: Target) -> LLMStatusCode:
        asked.append(target.cluster_id)
        if len(asked) == 3:
            everybody.set()
        await everybody.wait()
        return LLMStatusCode.LLM_SUCCESS if target.address else LLMStatusCode.LLM_PARAM_INVALID

    targets = [Target(3, None), Target(1, ("127.0.0.1", 9)), Target(2, None)]
    codes = await asyncio.wait_for(each(targets, one), 20)
    assert [code is LLMStatusCode.LLM_SUCCESS for code in codes] == [False, True, False]
    assert [str(target) for target in targets[:2]] == ["no address", "127.0.0.1:9"]


def test_a_target_is_told_with_its_address_if_it_has_one() -> None:
    assert Target(3, ("127.0.0.1", 9)).described == "cluster 3 at 127.0.0.1:9"
    assert Target(3, None).described == "cluster 3"
