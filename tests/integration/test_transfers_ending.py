"""How `transfer_cache_async` between real nodes ends when it does not end well."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvpull_async import LLMStatusCode, TransferConfig
from tests import duo, npu
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration.pushing import RECEIVER, WAYS, desc, ends
from tests.integration.transfers import BY_ADDRESS, OK, addresses, check, sent, transfer
from tests.transferring import BOUND, Ready

each_way = pytest.mark.parametrize("way", WAYS)
each_face = pytest.mark.parametrize("api", [AWAITED, BLOCKING], ids=lambda api: api.name)


@each_way
def test_only_what_lies_in_a_cache_of_the_receiver_is_an_address(way: str) -> None:
    async def body() -> None:
        async with ends(AWAITED, way, **BY_ADDRESS) as e:
            source, destination = await e.source(desc(96)), await e.destination(desc(96))
            stranger = np.zeros(4096, np.uint8)
            good = addresses(destination)
            size = source.arrays[0].shape[1]
            behind = npu.address(destination.arrays[3][2]) + 1
            for wrong in (0, 1, stranger.ctypes.data, good[3] - 1, behind, 2**64 - 1):
                statuses = await sent(e, source, [TransferConfig(RECEIVER, [*good[:3], wrong])])
                assert statuses not in ([OK], [None])
                check(destination, (0, 0, source.arrays[0][0][:size]), (1, 0, source.arrays[1][0]))
            assert not stranger.any()
            assert await sent(e, source, [TransferConfig(RECEIVER, good)]) == [OK], "the link is as good as before"

    AWAITED.run(body())


@each_way
@each_face
def test_without_a_link_the_status_says_so(way: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e:
            source = await e.source(desc(96))
            task = transfer(e, source, [TransferConfig(99, [16, 32, 48, 64])])
            assert await e.api.do(task.synchronize) is LLMStatusCode.LLM_NOT_YET_LINK
            (error,) = task.exceptions
            assert (error.peer, error.operation) == (99, "transfer_cache_async")

    api.run(body())


@each_way
@each_face
def test_a_peer_that_does_not_answer_costs_its_time_and_no_more(way: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e:
            source, destination = await e.source(desc(96)), await e.destination(desc(96))
            config = TransferConfig(RECEIVER, addresses(destination))
            with duo.frozen(e.receiver):
                began = time.monotonic()
                task = transfer(e, source, [config], timeout=200)
                assert await api.do(task.synchronize) is LLMStatusCode.LLM_TIMEOUT
                assert time.monotonic() - began < BOUND / 2
            assert await sent(e, source, [config]) == [OK]
            check(destination, *((tensor, 0, source.arrays[tensor][0]) for tensor in range(4)))

    api.run(body())


@each_way
@each_face
def test_finalize_ends_what_is_being_sent(way: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way, close_timeout=1500, **BY_ADDRESS) as e:
            source, destination = await e.source(desc(96)), await e.destination(desc(96))
            ready = Ready()
            with duo.frozen(e.receiver):
                task = transfer(e, source, [TransferConfig(RECEIVER, addresses(destination))], ready=ready)
                await api.until(lambda: ready.layers == [0])
                began = time.monotonic()
                await api.do(e.pusher.finalize)
                assert time.monotonic() - began < BOUND / 2
                assert await api.do(task.synchronize) is LLMStatusCode.LLM_ENGINE_FINALIZED
            assert await api.do(task.get_results) == [LLMStatusCode.LLM_ENGINE_FINALIZED]

    api.run(body())


@each_face
def test_finalize_of_the_receiver_is_a_status(api: Api) -> None:
    async def body() -> None:
        async with ends(api, "tcp", **BY_ADDRESS) as e:
            source, destination = await e.source(desc(96)), await e.destination(desc(96))
            gone = threading.Event()
            ready = Ready(lambda layer: layer == 0 or gone.wait(BOUND))
            task = transfer(e, source, [TransferConfig(RECEIVER, addresses(destination))], ready=ready, timeout=1000)
            await api.until(lambda: ready.layers == [0, 1])
            await api.do(e.receiver.finalize)
            gone.set()
            assert await api.do(task.synchronize) not in (OK, None)
            assert task.exceptions[0] is not None

    api.run(body())
