"""Pushes between processes of which one is killed, stopped, or takes its memory back in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from kvpull_async import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import LLMRole
from tests import duo
from tests.conformance.api import AWAITED
from tests.inject import gated_copies
from tests.integration.content import SPOILT
from tests.integration.own_loop import outcome, within
from tests.integration.processes import Child, Footprint, child
from tests.integration.pushing import PUSHER, RECEIVER, Ends, Stock, desc, laid, options_for
from tests.loop_nodes import eventually

WAYS = ("tcp", "mapped", "read", "streamed")
SENT = ("tcp", "streamed")
READ = ("mapped", "read")
NBYTES = 8 * 1024 * 1024
"""Of an entry of one tensor: a push of it is copied in several pieces."""
SEED = 5
each_way = pytest.mark.parametrize("way", WAYS)


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


class Here:
    """The node of this process, and the other one's child."""

    def __init__(self, node: Any, there: Child, way: str) -> None:
        self.node, self.there, self.way = node, there, way
        self.ends = Ends(AWAITED, way, node, node)

    async def stock(self) -> Stock:
        made = await self.ends.stock(self.node, desc(NBYTES, tensors=2, entries=2))
        made.set_canary()
        return made

    async def their_stock(self, seed: int | None = None) -> int:
        said = await self.there.ask(
            "hold_stock", "stock", nbytes=NBYTES, by_address=self.way in ("read", "streamed"), seed=seed
        )
        return int(said["cache_id"])

    async def link(self) -> None:
        info = duo.cluster(RECEIVER if self.node.cluster_id == PUSHER else PUSHER, self.there.address)
        await self.node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)

    async def push(self, source: Stock, to: int, entry: int = 0, **options: Any) -> None:
        there = Stock(_Known(to), [])
        receiver: Any = _Named(RECEIVER)
        await Ends(AWAITED, self.way, self.node, receiver).push(there, source, 1, entry=entry, **options)

    async def see(self, cache_id: int, entry: int = 0) -> dict[str, Any]:
        return await self.there.ask("look", "seen", cache_id=cache_id, seed=SEED, entry=entry)


class _Known:
    """A cache of the other process."""

    def __init__(self, cache_id: int) -> None:
        self.cache_id = cache_id


class _Named:
    """The other process's node."""

    def __init__(self, cluster_id: int) -> None:
        self.cluster_id = cluster_id


@contextlib.asynccontextmanager
async def pushing_here(way: str, *, theirs: Any = None, **more: Any) -> AsyncIterator[tuple[Here, Stock, int]]:
    """The receiver is the child: its cache's id, and a filled source here."""
    options = options_for(way, **more)
    async with (
        child("MIX", RECEIVER, program="pushing", listen=True, **{**options, **(theirs or {})}) as there,
        duo.node(LLMRole.MIX, PUSHER, **options) as node,
    ):
        here = Here(node, there, way)
        source = await here.stock()
        source.fill(SEED)
        to = await here.their_stock()
        await here.link()
        yield here, source, to


@contextlib.asynccontextmanager
async def pushing_there(way: str, **more: Any) -> AsyncIterator[tuple[Here, Stock, int]]:
    """The pusher is the child: its source's id, and a destination here."""
    options = options_for(way, **more)
    async with (
        child("MIX", PUSHER, program="pushing", listen=True, **options) as there,
        duo.node(LLMRole.MIX, RECEIVER, **options) as node,
    ):
        here = Here(node, there, way)
        destination, of = await here.stock(), await here.their_stock(SEED)
        await here.link()
        yield here, destination, of


async def ask_push(here: Here, to: Stock, of: int, *, entry: int = 0, timeout: float = duo.TIMEOUT_MS) -> None:
    where = {"cluster": RECEIVER, "cache_id": to.cache.cache_id, "of": of, "entry": entry, "timeout": timeout}
    await here.there.ask("push", "pushing", **where)


def free(here: Here, destination: Stock) -> bool:
    entry = duo.engine_of(here.node).registry.local(destination.cache.cache_id)
    return entry is not None and not entry.busy


async def check_bytes(here: Here, destination: Stock, of: int, entry: int) -> None:
    """The next push of the child is right."""
    destination.set_canary()
    await ask_push(here, destination, of, entry=entry)
    await here.there.hear("pushed")
    source = Stock(None, [array.copy() for array in destination.arrays])
    source.fill(SEED)
    wanted = laid(destination, [(tensor, entry, source.arrays[tensor][1]) for tensor in range(2)])
    assert (destination.image == wanted).all()


async def timed(waiting: Awaitable[Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return await waiting, time.monotonic() - began


# -- the receiver ------------------------------------------------------------------------------------------------------


@each_way
async def test_p1_p3_p4_a_receiver_that_is_stopped_for_a_while(way: str) -> None:
    """The deadline ends each push; the receiver takes none of them when it goes on; the link is the same one."""
    async with pushing_here(way) as (here, source, to):
        await within(here.push(source, to))
        await here.there.ask("set_canary", "canary", cache_id=to)
        here.there.stop()
        for number in range(3):
            error, seconds = await timed(outcome(begin(here.push(source, to, timeout=150))))
            assert isinstance(error, LLMTimeoutError), error
            assert error.status_code is LLMStatusCode.LLM_TIMEOUT
            if not number:  # the later ones may wait for a new connection, and then it has not been told of them
                assert error.destination_unsafe, "nobody can know what it will still do"
            assert error.peer
            assert seconds < 3
        here.there.go_on()
        await within(here.push(source, to, 1))  # the receiver has read what came before it
        seen = await here.see(to, 1)
        assert seen["right"]
        assert not seen["quarantined"]
        assert not (await here.see(to, 0))["right"], "it took a push that had timed out"
        await here.there.ask("set_canary", "canary", cache_id=to)
        other = await here.their_stock()
        await within(here.push(source, other))
        assert (await here.see(other))["right"]
        assert (await here.see(to))["untouched"]
        assert here.node.counters["links_up"] == 1


@pytest.mark.parametrize("way", SENT)
async def test_p1_p3_p4_a_receiver_stopped_in_the_middle(way: str) -> None:
    async with pushing_here(way) as (here, source, to):
        await here.there.ask("hold", "holding", where="landing")
        push = begin(here.push(source, to, timeout=1500))
        await here.there.hear("held")
        here.there.tell("let_go")
        here.there.stop()
        error, seconds = await timed(outcome(push))
        if error is not None:  # it may have taken it all before it stopped
            assert isinstance(error, LLMTimeoutError), error
            assert error.destination_unsafe
        assert seconds < 5
        here.there.go_on()
        await here.there.hear("let_go")
        other = await here.their_stock()
        await within(here.push(source, other))
        await here.there.ask("set_canary", "canary", cache_id=to)
        await within(here.push(source, other, 1))
        assert (await here.see(other, 1))["right"]
        assert (await here.see(to))["untouched"]


@each_way
async def test_p7_p8_a_receiver_killed_in_the_middle(way: str) -> None:
    async with pushing_here(way) as (here, source, to):
        before = Footprint(here.node)
        if way in SENT:
            await here.there.ask("hold", "holding", where="landing")
        pushes = [begin(here.push(source, to, entry)) for entry in (0, 1, 0)]
        if way in SENT:
            await here.there.hear("held")
        here.there.kill()
        for number, push in enumerate(pushes):
            error = await outcome(push)
            if error is not None or way in SENT:  # where it reads by itself it may have been quick
                assert isinstance(error, LLMException), (number, error)
                assert error.status_code is LLMStatusCode.LLM_LINK_FAILED, error
                assert error.retry_safe != error.destination_unsafe
        error = await outcome(begin(here.push(source, to, timeout=5000)))
        assert isinstance(error, LLMException)
        assert error.status_code is LLMStatusCode.LLM_LINK_FAILED
        assert not error.destination_unsafe, "it was never told of this one"
        assert error.retry_safe
        await within(here.node.cache_manager.unregister_cache(source.cache.cache_id))
        await here.node.unlink_clusters([duo.cluster(RECEIVER, here.there.address)], 10_000, True)
        # The link was there when the footprint was taken.
        await eventually(lambda: before._now()["sockets"] <= before._before["sockets"])


@pytest.mark.parametrize("way", SENT)
async def test_p7_a_receiver_takes_its_memory_back_in_the_middle(way: str) -> None:
    async with pushing_here(way, settle_timeout=200) as (here, source, to):
        gate = duo.gate(here.node).lending_gate
        gate.close(times=1)
        push = begin(here.push(source, to))
        await gate.reached()
        here.there.tell("spoil", cache_id=to)
        await here.there.hear("spoiled")  # the bytes were held here, so nothing was writing there
        gate.open()
        error = await outcome(push)
        assert isinstance(error, LLMException), error
        assert error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert not error.destination_unsafe
        other = await here.their_stock()
        await within(here.push(source, other))
        assert (await here.see(other))["right"]


# -- the pusher --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def held_push(
    monkeypatch: pytest.MonkeyPatch, way: str, *, timeout: float = duo.TIMEOUT_MS, **more: Any
) -> AsyncIterator[tuple[Here, Stock, int, Any]]:
    """The child pushes to this process, and its bytes stop in the middle; what lets them go on here, if it is here."""
    gate = gated_copies(monkeypatch)
    async with pushing_there(way, **more) as (here, destination, of):
        if way in READ:
            gate.close(times=1)
        else:
            await here.there.ask("hold", "holding", where="lending")
        await ask_push(here, destination, of, timeout=timeout)
        await (gate.reached() if way in READ else here.there.hear("held"))
        try:
            yield here, destination, of, gate
        finally:
            gate.open()


@each_way
async def test_p1_p7_p8_a_pusher_killed_in_the_middle(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    async with held_push(monkeypatch, way) as (here, destination, _, gate):
        here.there.kill()
        gate.open()
        await eventually(lambda: free(here, destination))
        assert not destination.cache.quarantined
        destination.set_canary()
        await eventually(lambda: bool(here.node.counters.get("links_lost")))
        await here.node.unlink_clusters([duo.cluster(PUSHER, here.there.address)], 10_000, True)
        await within(here.node.cache_manager.unregister_cache(destination.cache.cache_id))
        assert destination.untouched


@each_way
async def test_p1_p3_p4_a_pusher_stopped_in_the_middle(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The receiver gives its memory back at the deadline that the pusher told it, not when the pusher goes on."""
    async with held_push(monkeypatch, way, timeout=1500) as (here, destination, of, gate):
        if way in SENT:
            here.there.tell("let_go")
        here.there.stop()
        gate.open()
        await eventually(lambda: free(here, destination))
        assert not destination.cache.quarantined
        destination.set_canary()
        here.there.go_on()
        heard = [(await here.there.hear("let_go", "pushed", "failed"))["event"] for _ in range(1 + (way in SENT))]
        assert {"pushed", "failed"} & set(heard)
        assert destination.untouched
        await check_bytes(here, destination, of, 1)
        assert here.node.counters["links_up"] == 1


@each_way
async def test_p2_p7_a_pusher_takes_its_memory_back_in_the_middle(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Whatever is written there afterwards is never taken for what was pushed."""
    async with held_push(monkeypatch, way, settle_timeout=300) as (here, destination, of, gate):
        here.there.tell("spoil", cache_id=of)
        said = [await here.there.hear("spoiled", "kept", "failed") for _ in range(2)]
        failed = [message for message in said if message["event"] == "failed"]
        assert [message["status"] for message in failed] == ["LLM_KV_CACHE_NOT_EXIST"], said
        assert failed[0]["unsafe"] == (way in READ)  # where this process may still be copying
        if way in SENT:  # a thread there still reads it, and that is what it says
            assert {"event": "kept", "status": "LLM_TIMEOUT"} in said
            await here.there.ask("let_go", "let_go")
        gate.open()
        await eventually(lambda: free(here, destination))
        for array in destination.arrays:
            assert not (array[0] == SPOILT).all(), "memory that was taken back arrived as if it had been pushed"
