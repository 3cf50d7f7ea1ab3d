"""What links share: which route reaches a peer, how a lane is made, and how a failed connection reads."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.linkage import LinkState, Route, broken, connect_error, first, lost_with, reconnect_error, text
from kvpull_async.protocol import frames
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.transport.inproc import InprocTransport
from tests.loop_nodes import LaneScene, LoopNode, ScriptedChannel, loop_nodes

HERE = ("127.0.0.1", 9)


async def test_the_first_route_that_reaches_the_peer_is_taken() -> None:
    node, listening = LoopNode(1), LoopNode(2, transport="inproc")
    inproc = InprocTransport(node.log)
    context = dataclasses.replace(node.context, routes=(Route(inproc, (inproc,)), node.route))
    async with loop_nodes(listening):
        address = listening.target.address
        assert address is not None
        assert context.route_to(address).transport is inproc
        assert context.route_to(HERE) is node.route


async def test_a_peer_out_of_reach_is_a_failed_link_that_names_what_was_tried() -> None:
    context = LoopNode(1, transport="inproc").context
    with pytest.raises(LLMException, match=r"127\.0\.0\.1:9 is out of reach of inproc") as caught:
        context.route_to(HERE)
    assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED


async def test_a_lane_greets_as_this_engine_and_names_the_kinds_of_path_it_is_given() -> None:
    node = LoopNode(7, incarnation=b"i" * 16, secret=b"s", heartbeat_interval_ms=50, heartbeat_timeout_ms=2000)
    channel = ScriptedChannel()
    lane = node.context.new_lane(channel, dialer=True, paths=("shm", "tcp"), asked=9, lane=1, token=b"t" * 16)
    lane.session.start()
    channel.post(lane.session.take_output())
    (hello,) = channel.take()
    assert isinstance(hello, frames.Hello)
    assert (hello.cluster_id, hello.asked, hello.incarnation) == (7, 9, b"i" * 16)
    assert (hello.lane, hello.token, hello.authenticates, hello.paths) == (1, b"t" * 16, True, ["shm", "tcp"])
    assert (lane._heartbeat, lane._silence) == (0.05, 2.0)


def test_a_refusal_keeps_its_status() -> None:
    error = LLMException("no", status_code=LLMStatusCode.LLM_ALREADY_LINK)
    assert connect_error(error, "here") is error


def test_a_deadline_that_passed_is_a_timeout() -> None:
    error = connect_error(asyncio.TimeoutError(), "10.0.0.1:7")
    assert isinstance(error, LLMTimeoutError)
    assert (str(error), error.retry_safe) == ("10.0.0.1:7 did not answer in time", True)


@pytest.mark.parametrize("cause", [ConnectionResetError(errno.ECONNRESET, "reset"), OSError("no route")])
def test_a_broken_connection_is_a_failed_link_that_keeps_its_cause(cause: OSError) -> None:
    error = connect_error(cause, "10.0.0.1:7")
    assert error.status_code == LLMStatusCode.LLM_LINK_FAILED
    assert str(error) == f"10.0.0.1:7: {cause}"
    assert error.__cause__ is cause
    assert error.retry_safe


def test_what_the_loop_leaves_out_of_a_failed_connection_is_in_the_systems_words() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.1', 7)")
    assert str(connect_error(refused, "10.0.0.1:7")) == "10.0.0.1:7: Connection refused"


def test_a_peer_that_is_silent_while_it_is_dialled_again_is_away_and_nobodys_deadline_has_passed() -> None:
    error = reconnect_error(asyncio.TimeoutError(), "10.0.0.1:7")
    assert not isinstance(error, TimeoutError)
    assert (str(error), error.retry_safe) == ("10.0.0.1:7 did not answer in time", True)
    assert error.status_code == LLMStatusCode.LLM_LINK_FAILED


def test_what_was_not_asked_of_a_lost_peer_may_be_asked_again_whatever_keeps_it_away() -> None:
    refusal = LLMException("no", status_code=LLMStatusCode.LLM_ALREADY_LINK)
    assert reconnect_error(refusal, "10.0.0.1:7") is refusal
    assert refusal.retry_safe


def test_addresses_for_people() -> None:
    assert text(("10.0.0.1", 7)) == "10.0.0.1:7"
    assert text(None) == "a peer that dialled this side"


async def test_first_waits_for_either_or_for_the_time() -> None:
    loop = asyncio.get_running_loop()
    one: asyncio.Future[None] = loop.create_future()
    other: asyncio.Future[LLMException] = loop.create_future()
    await first(one, other, timeout=0.01)
    assert not one.done()
    loop.call_soon(other.set_result, LLMException("lost"))
    await first(one, other)
    assert not one.done()
    one.set_result(None)
    await first(one, loop.create_future())


def test_the_states_of_a_link_are_the_documented_ones() -> None:
    assert [state.value for state in LinkState] == ["new", "connecting", "ready", "poisoned", "closed"]


def test_p10_a_destination_that_cannot_be_written_is_no_trouble_of_the_links() -> None:
    error = broken(OSError(errno.EFAULT, "Bad address"), None, "10.0.0.1:1")
    assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert not error.retry_safe
    assert "is the address it was registered with right?" in str(error)
    other = broken(ConnectionResetError("gone"), None, "10.0.0.1:1")
    assert other.status_code == LLMStatusCode.LLM_LINK_FAILED
    assert other.retry_safe


def test_p10_a_source_that_cannot_be_read_is_no_trouble_of_the_links() -> None:
    error = broken(OSError(errno.EFAULT, "Bad address"), None, "10.0.0.1:1", push=True)
    assert (error.status_code, error.retry_safe) == (LLMStatusCode.LLM_PARAM_INVALID, False)
    assert str(error).startswith("the source's memory cannot be read")


@pytest.mark.parametrize(("push", "way"), [(False, "from"), (True, "to")])
def test_a_transfer_that_breaks_is_told_with_its_direction(push: bool, way: str) -> None:
    error = broken(ConnectionResetError("gone"), None, "10.0.0.1:1", push=push)
    assert str(error) == f"the transfer {way} 10.0.0.1:1 broke: gone"


async def test_whether_a_whole_connection_is_lost_shows_within_the_deadline() -> None:
    scene = await LaneScene().greet()
    assert not await lost_with(scene.lane, Deadline.after_ms(10))
    asyncio.get_running_loop().call_later(0.01, scene.lane.abort, "reset")
    assert await lost_with(scene.lane, Deadline.after_ms(20_000))
    assert await lost_with(scene.lane, Deadline.after_ms(0))
    await asyncio.gather(*scene.lane.tasks, return_exceptions=True)
