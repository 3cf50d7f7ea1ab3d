"""The faults themselves: they hold, cut, stall and refuse exactly as asked, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from kvpull_async.memory.base import PIECE_BYTES
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Log
from kvpull_async.testing.faults import (
    Faults,
    FaultyChannel,
    FaultyTransport,
    Gate,
    GatedMemory,
)
from kvpull_async.transport.arrivals import Arrivals
from kvpull_async.transport.base import ControlChannel
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.values import Placement


def at_the_gate(gate: Gate) -> threading.Thread:
    thread = threading.Thread(target=gate.pass_through, daemon=True)
    thread.start()
    return thread


# --- gates ---


async def test_a_gate_is_open_until_it_is_closed_and_then_holds_until_it_is_opened() -> None:
    gate = Gate()
    gate.pass_through()
    gate.close()
    threads = [at_the_gate(gate) for _ in range(3)]
    await gate.reached()
    threads[0].join(0.05)
    assert all(thread.is_alive() for thread in threads)
    gate.open()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


async def test_a_gate_may_hold_only_so_many() -> None:
    gate = Gate()
    gate.close(times=1)
    held = at_the_gate(gate)
    await gate.reached()
    gate.pass_through()
    assert held.is_alive()
    gate.open()
    held.join(10)
    gate.close(times=1)
    again = at_the_gate(gate)
    await gate.reached()
    gate.open()
    again.join(10)


async def test_waiting_at_and_for_a_gate_is_bounded() -> None:
    gate = Gate(limit=0.02)
    gate.close()
    with pytest.raises(asyncio.TimeoutError):
        await gate.reached(timeout=0.02)
    with pytest.raises(TimeoutError, match="the gate stayed closed"):
        gate.pass_through()
    await gate.reached()  # one came, and has gone


# --- gated memory ---


def test_gated_memory_stops_after_so_many_batches() -> None:
    for after in (0, 1, 2):
        memory = GatedMemory(HostMemory(), after=after)
        made = memory.allocate(tensors=1, tensor_nbytes=4 * PIECE_BYTES, placement=Placement.DEVICE)
        whole = np.array([(0, 0, 4 * PIECE_BYTES)], np.int64)
        for make, gate in ((memory.landing, memory.landing_gate), (memory.lending, memory.lending_gate)):
            gate._limit = 0.01
            gate.close()
            with closing(make(made.regions, whole)) as batches:
                for _ in range(after):
                    next(batches)
                with pytest.raises(TimeoutError):
                    next(batches)
            gate.open()
            assert len(list(make(made.regions, whole))) == 4
        memory.free(made)
        memory.close()


def test_closing_gated_memory_lets_everybody_go() -> None:
    memory = GatedMemory(HostMemory())
    memory.landing_gate.close()
    thread = at_the_gate(memory.landing_gate)
    memory.close()
    thread.join(10)
    assert not thread.is_alive()


# --- channels ---


class Pipe(ControlChannel):
    """Keeps what is sent, gives what is fed."""

    peer = "pipe"

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.sent: list[bytes] = []
        self.aborted = False

    @property
    def ready(self) -> bool:
        return not self.aborted

    async def send(self, data: bytes) -> None:
        self.post(data)

    def post(self, data: bytes) -> None:
        self.sent.append(data)

    def abort(self) -> None:
        self.aborted = True


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_what_is_known_of_the_peer_is_what_the_channel_below_knows() -> None:
    pipe = Pipe()
    pipe.unfit = "no TLS"
    pipe.speaks_for = lambda cluster_id: cluster_id == 3  # type: ignore[method-assign]
    channel = FaultyChannel(pipe, Faults())
    assert (channel.unfit, channel.speaks_for(3), channel.speaks_for(4)) == ("no TLS", True, False)


async def test_without_a_fault_everything_passes() -> None:
    pipe, faults = Pipe(), Faults()
    channel = FaultyChannel(pipe, faults)
    await channel.send(b"a")
    channel.post(b"b")
    pipe.arrivals.put(b"c")
    assert await channel.receive() == b"c"
    assert pipe.sent == [b"a", b"b"]
    channel.abort()
    assert pipe.aborted


async def test_a_stall_holds_both_directions_and_resume_delivers_in_order() -> None:
    pipe, faults = Pipe(), Faults()
    channel = FaultyChannel(pipe, faults)
    receiving = begin(channel.receive())
    await turns()
    faults.stall()
    pipe.arrivals.put(b"late")
    channel.post(b"1")
    channel.post(b"2")
    sending = begin(channel.send(b"3"))
    await turns()
    assert not receiving.done()
    assert not sending.done()
    assert pipe.sent == []
    faults.resume()
    channel.post(b"between")
    await asyncio.wait_for(sending, 10)
    assert await asyncio.wait_for(receiving, 10) == b"late"
    assert pipe.sent == [b"1", b"2", b"between", b"3"]


async def test_a_receive_cancelled_in_a_stall_loses_nothing() -> None:
    pipe, faults = Pipe(), Faults()
    channel = FaultyChannel(pipe, faults)
    faults.stall()
    pipe.arrivals.put(b"kept")
    receiving = begin(channel.receive())
    await turns()
    receiving.cancel()
    await asyncio.wait([receiving])
    faults.resume()
    assert await asyncio.wait_for(channel.receive(), 10) == b"kept"


async def test_cut_at_loses_that_frame_and_its_connection_only() -> None:
    pipes, faults = [Pipe(), Pipe()], Faults()
    channels = [FaultyChannel(pipe, faults) for pipe in pipes]
    faults.cut_at(3)
    await channels[0].send(b"1")
    channels[1].post(b"2")
    assert faults.frames_left == 1
    with pytest.raises(OSError, match="cut by the test"):
        await channels[0].send(b"3")
    assert faults.frames_left == 0
    channels[1].post(b"4")
    assert [pipe.sent for pipe in pipes] == [[b"1"], [b"2", b"4"]]
    assert [pipe.aborted for pipe in pipes] == [True, False]
    faults.cut_at(1)
    faults.cut_at(0)
    channels[1].post(b"5")
    assert not pipes[1].aborted


async def test_cut_breaks_all_that_are_open_from_any_thread() -> None:
    pipes, faults = [Pipe(), Pipe()], Faults()
    for pipe in pipes:
        FaultyChannel(pipe, faults)
    await asyncio.to_thread(faults.cut)
    await turns()
    assert all(pipe.aborted for pipe in pipes)


async def test_an_abort_ends_a_send_that_is_stalled() -> None:
    faults = Faults()
    channel = FaultyChannel(Pipe(), faults)
    faults.stall()
    sending = begin(channel.send(b"never"))
    await turns()
    channel.abort()
    with pytest.raises(OSError, match="cut"):
        await asyncio.wait_for(sending, 10)


async def test_the_faulty_transport_is_the_other_one_with_faulty_channels() -> None:
    transport = FaultyTransport(InprocTransport(Log()), Faults())
    accepted: asyncio.Queue[ControlChannel] = asyncio.Queue()
    listener = await transport.listen(("127.0.0.1", 0), accepted.put)
    assert transport.name == "inproc"
    assert transport.reaches(listener.address)
    near, far = await transport.dial(listener.address), await accepted.get()
    assert isinstance(near, FaultyChannel)
    assert isinstance(far, FaultyChannel)
    near.abort()
    far.abort()
    await listener.aclose()
    assert not transport.reaches(listener.address)
