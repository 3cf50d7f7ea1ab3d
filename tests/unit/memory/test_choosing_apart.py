"""Memory is chosen and closed in threads that live no longer, and none is left open that nobody took."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from kvpull_async.memory import choosing
from kvpull_async.memory.choosing import ACL, HOST, Chosen, Unopened, choose_apart, closing
from kvpull_async.memory.host import HostMemory
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import Placement
from tests.acl_libraries import Library
from tests.loop_nodes import eventually
from tests.unit.memory.choices import BUDGETS, SICK, device, sick_library


async def apart(backend: str, environ: Mapping[str, str], **more: Any) -> Chosen:
    return await choose_apart(backend, budgets=BUDGETS, device_ids=(0,), environ=environ, **more)


@pytest.fixture
def sick(library: Library) -> dict[str, str]:
    return sick_library(library)


# -- apart from the loop -----------------------------------------------------------------------------------------------


async def test_p6_a_library_that_takes_its_time_does_not_hold_the_loop(library: Library) -> None:
    choosing = asyncio.ensure_future(apart("auto", sick_library(library, takes_ms=300)))
    longest, last = 0.0, time.monotonic()
    while not choosing.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    made = await choosing
    assert str(SICK) in made.reason
    assert longest < 0.25
    made.memory.close()


async def test_no_thread_of_the_caller_is_borrowed_and_none_is_left(
    sick: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = device(monkeypatch)
    made = await apart(ACL, sick)
    assert memory.threads == ["kvpull-choosing-0"]
    await eventually(lambda: not any(thread.name == "kvpull-choosing-0" for thread in threading.enumerate()))
    made.memory.close()


async def test_host_memory_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    made = await apart(HOST, {})
    made.memory.close()


async def test_what_is_opened_for_nobody_is_closed(sick: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    memory = device(monkeypatch, gate=gate)
    waiting = asyncio.ensure_future(apart(ACL, sick))
    await eventually(lambda: bool(memory.threads))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting  # at once, although the device does not answer
    assert memory.closed == 0
    gate.set()
    await eventually(lambda: memory.closed == 1)
    assert memory.threads == ["kvpull-choosing-0"] * 2


async def test_what_was_opened_in_the_very_moment_of_a_cancellation_is_closed(
    sick: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    memory = device(monkeypatch, gate=gate)
    waiting = asyncio.ensure_future(apart(ACL, sick))
    await eventually(lambda: bool(memory.threads))
    gate.set()
    time.sleep(0.1)  # noqa: ASYNC251  (it is there, and this loop has not heard of it)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await eventually(lambda: memory.closed == 1)


async def test_a_device_that_never_answers_is_given_up(sick: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    memory = device(monkeypatch, gate=gate)
    with pytest.raises(LLMTimeoutError, match=r"within 0\.05 s") as caught:
        await apart(ACL, sick, patience=0.05)
    assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    made = await apart("auto", sick, patience=0.05)
    assert (made.backend, made.lost) == (HOST, True)
    assert "within 0.05 s" in made.reason
    gate.set()
    await eventually(lambda: memory.closed == 2)
    made.memory.close()


async def test_errors_come_through(sick: dict[str, str]) -> None:
    with pytest.raises(LLMException, match=str(SICK)):
        await apart(ACL, sick)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_host_memory_is_closed_on_the_spot() -> None:
    memory = HostMemory()
    allocation = memory.allocate(tensors=1, tensor_nbytes=64, placement=Placement.HOST)
    made = memory.publications.publish(allocation.regions)
    assert closing(memory, failed=pytest.fail)(0)
    assert made is not None
    assert memory.publications.publish(allocation.regions) is not made


class Slow(Unopened):
    def __init__(self, *, fails: bool = False) -> None:
        self.go_on = threading.Event()
        self._fails = fails

    def close(self) -> None:
        assert self.go_on.wait(20)
        if self._fails:
            raise LLMException("507899", status_code=LLMStatusCode.LLM_FAILED)


def test_a_device_may_take_its_time_to_close() -> None:
    memory = Slow()
    closed = closing(memory, failed=pytest.fail)
    assert not closed(0)
    assert not closed(0.05)
    memory.go_on.set()
    assert closed(20)
    assert closed(0)


def test_an_error_of_the_end_is_told() -> None:
    told: list[str] = []
    memory = Slow(fails=True)
    closed = closing(memory, failed=told.append)
    memory.go_on.set()
    assert closed(20)
    assert ["507899" in text for text in told] == [True]


def test_without_a_thread_it_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: object) -> None:
        raise RuntimeError("can't start new thread")

    told: list[str] = []
    memory = Slow(fails=True)
    memory.go_on.set()
    monkeypatch.setattr(threading.Thread, "start", none)
    assert closing(memory, failed=told.append)(0)
    assert len(told) == 1


def test_what_was_never_opened_is_closed_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "Workers", pytest.fail)
    assert closing(Unopened(), failed=pytest.fail)(0)
