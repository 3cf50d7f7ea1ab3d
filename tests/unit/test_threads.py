"""How one thread wakes another: the bell of a loop, and the end that a thread waits for."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from kvpull_async._threads import Bell, Ended


async def test_a_bell_is_heard_on_the_loop_whoever_rings() -> None:
    heard: asyncio.Queue[int] = asyncio.Queue()
    bell = Bell(asyncio.get_running_loop(), lambda: heard.put_nowait(threading.get_ident()))
    bell.listen()
    assert await asyncio.to_thread(bell.ring)
    assert await asyncio.wait_for(heard.get(), 20) == threading.get_ident()
    assert bell.ring()
    assert bell.ring()
    await asyncio.wait_for(heard.get(), 20)
    await asyncio.sleep(0.02)
    assert heard.empty(), "two rings in a row were heard as two"
    bell.close()


async def test_a_closed_bell_says_that_nobody_hears_it() -> None:
    rung: list[None] = []
    bell = Bell(asyncio.get_running_loop(), lambda: rung.append(None))
    bell.listen()
    descriptor = bell._fd
    bell.close()
    bell.close()
    assert not bell.ring()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    await asyncio.sleep(0.01)
    assert rung == []


async def test_a_signal_handler_may_ring_while_its_thread_rings() -> None:
    bell = Bell(asyncio.get_running_loop(), bool)
    with bell._lock:  # where a handler may come in between
        assert bell.ring()
    bell.close()


async def test_a_forked_child_gives_up_its_copy_even_while_a_thread_of_the_parent_rings() -> None:
    bell = Bell(asyncio.get_running_loop(), bool)
    with bell._lock:
        bell.close_after_fork()
        bell.close_after_fork()
    assert not bell.ring()


def test_a_thread_waits_until_it_has_ended_and_no_longer() -> None:
    ended = Ended()
    threading.Timer(0.02, ended.set).start()
    began = time.monotonic()
    ended.wait(20.0)
    assert time.monotonic() - began < 10
    ended.wait(20.0)  # nor once it has
    assert time.monotonic() - began < 10


def test_the_wait_for_an_end_is_bounded() -> None:
    began = time.monotonic()
    Ended().wait(0.03)
    assert 0.02 < time.monotonic() - began < 10


def test_an_end_may_be_set_twice() -> None:
    ended = Ended()
    assert ended.set()
    assert ended.set()
    ended.wait(20.0)
