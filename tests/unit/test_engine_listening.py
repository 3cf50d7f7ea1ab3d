"""The engine listens where its options say, and what it has opened is closed in the end."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from kvpull_async import LLMDataDist, LLMException, LLMRole, LLMStatusCode
from kvpull_async import engine as engine_module
from kvpull_async.config import Settings
from kvpull_async.crossing import awaited
from kvpull_async.engine import Engine, end_awaited, live_engines
from kvpull_async.listening import listen
from kvpull_async.managers.manager import Operation
from kvpull_async.transport.base import Listener
from tests.duo import DECODER, PROMPT, node, options
from tests.loop_nodes import eventually

BOUND = 20.0


async def opened_engine() -> Engine:
    engine = Engine(Settings(LLMRole.DECODER, 7), dropped=None)
    await awaited(engine, Operation("init", engine.open))
    return engine


async def test_any_free_port_is_found_and_told() -> None:
    async with node(LLMRole.PROMPT, PROMPT, listen=True) as prompt:
        address = prompt.listen_address
        assert address is not None
        assert address[0] == "127.0.0.1"
        assert address[1] > 0
        with socket.create_connection(address, timeout=BOUND):
            pass  # somebody listens there


async def test_without_an_address_nobody_listens() -> None:
    async with node(LLMRole.DECODER, DECODER) as decoder:
        assert decoder.listen_address is None


@pytest.mark.parametrize("transport", ["auto", "tcp", "inproc"])
async def test_an_address_that_is_taken_fails_init_and_leaves_nothing(transport: str) -> None:
    async with node(LLMRole.PROMPT, PROMPT, listen=True, transport=transport) as first:
        assert first.listen_address is not None
        second = LLMDataDist(LLMRole.PROMPT, 3)
        wanted = options(transport=transport, listen_ip_info="{}:{}".format(*first.listen_address))
        with pytest.raises(LLMException, match="cannot listen on") as caught:
            await second.init(wanted)
        assert caught.value.status_code == LLMStatusCode.LLM_FAILED
        assert len(live_engines()) == 1
    await second.init(wanted)  # the address is free now, and `init` may be repeated
    await second.finalize()


async def test_a_listener_that_is_opened_while_the_engine_ends_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, opened, go_on = await opened_engine(), threading.Event(), threading.Event()
    addresses: list[tuple[str, int]] = []

    async def slow(*arguments: Any) -> list[Listener]:
        listeners = await listen(*arguments)
        addresses.append(listeners[-1].address)
        opened.set()
        await eventually(go_on.is_set)
        return listeners

    monkeypatch.setattr(engine_module, "listen", slow)
    listening = asyncio.create_task(awaited(engine, Operation("listen", lambda: engine.listen(("127.0.0.1", 0)))))
    await eventually(opened.is_set)
    await awaited(engine, Operation("close", engine.close))
    go_on.set()
    with pytest.raises(LLMException, match="finalized") as caught:
        await listening
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert engine.listen_address is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0], timeout=BOUND)
    await end_awaited(engine)


async def test_listeners_that_were_closed_meanwhile_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, opened, go_on = await opened_engine(), threading.Event(), threading.Event()
    try:
        await awaited(engine, Operation("listen", lambda: engine.listen(("127.0.0.1", 0))))
        old = engine.listen_address

        async def slow(*arguments: Any) -> list[Listener]:
            opened.set()
            await eventually(go_on.is_set)
            return await listen(*arguments)

        monkeypatch.setattr(engine_module, "listen", slow)
        listening = asyncio.create_task(awaited(engine, Operation("listen", lambda: engine.listen(("127.0.0.1", 0)))))
        await eventually(opened.is_set)
        await awaited(engine, Operation("stop", engine.stop_listening))
        go_on.set()
        await listening
        assert {listener.address for listener in engine._listeners} == {engine.listen_address} != {old}
    finally:
        await awaited(engine, Operation("close", engine.close))
        await end_awaited(engine)
