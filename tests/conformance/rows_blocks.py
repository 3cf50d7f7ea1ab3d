"""Section 7.6: blocks, pushes, asynchronous transfers.

A refused call has changed nothing, and the same link then does the right thing.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from kvpull_async import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
)
from tests.conformance.api import PATIENCE_S
from tests.conformance.row import PI, Error, Row, all_there, failure, is_error, succeeds
from tests.conformance.scene import BOTH, DESTINATION, NEW, OLD, SOURCE, Scene

REMOTE = {"remote_access": True}
SUCCESS = LLMStatusCode.LLM_SUCCESS

# -- blocks ------------------------------------------------------------------------------------------------------------


def refuses_blocks(expected: Error, *arguments: Any, contiguous: bool = False) -> Callable[[Scene], Awaitable[None]]:
    """`pull_blocks` from `BlocksCacheKey(1)`, into blocks or into the contiguous `d`."""

    async def call(f: Scene) -> None:
        target = f.d if contiguous else await f.allocate_blocks()
        error = await failure(lambda: f.pull_blocks(BlocksCacheKey(SOURCE), target, *arguments))
        assert is_error(error, expected), f"{expected!s} expected, got {error!r}"
        assert not f.content(target).any(), "a refused pull wrote to the destination"
        await all_there(f)

    return call


BLOCKS = [
    Row(122, BOTH, refuses_blocks(PI, [], [0]), succeeds()),
    Row(128, BOTH, refuses_blocks(PI, [0], [0], contiguous=True), succeeds()),
    Row(129, BOTH, refuses_blocks(TypeError, None, [0]), succeeds()),
]

# -- pushes ------------------------------------------------------------------------------------------------------------


def to_d(f: Scene) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(DESTINATION, f.d.cache_id)


async def refuses_push(f: Scene, expected: Error, key: object, **options: Any) -> None:
    push = f.source.cache_manager.push_cache
    error = await failure(lambda: f.api.do(push, key, f.s, **options))
    assert is_error(error, expected), f"{expected!s} expected, got {error!r}"
    assert not f.content(f.d).any(), "a refused push wrote to the destination"


def refuses_one_push(expected: Error, key: Callable[[Scene], object] = to_d, **options: Any) -> Any:
    """With remote access: the push is refused, and the next one on the link is whole."""

    async def call(f: Scene) -> None:
        await refuses_push(f, expected, key(f), **options)
        await f.api.do(f.source.cache_manager.push_cache, to_d(f), f.s)
        wanted = np.zeros_like(f.content(f.d))
        wanted[:, 0] = f.image(f.s)[:, 0]
        assert np.array_equal(f.content(f.d), wanted), "the next push delivered something else"

    return call


async def refuses_pushes_without_remote_access(f: Scene) -> None:
    await refuses_push(f, PI, to_d(f))
    await all_there(f)


PUSHES = [
    Row(130, NEW, refuses_pushes_without_remote_access, succeeds()),
    Row(131, NEW, refuses_one_push(TypeError, lambda _: None), succeeds(), setup=REMOTE),
    Row(132, NEW, refuses_one_push(PI, size=4), succeeds(), setup=REMOTE),
    Row(133, NEW, refuses_one_push(PI, src_layer_range=range(0)), succeeds(), setup=REMOTE),
]

# -- asynchronous transfers --------------------------------------------------------------------------------------------


class Synchronizer(LayerSynchronizer):
    """Answers what `answer` says of the layer."""

    def __init__(self, answer: Callable[[int], bool]) -> None:
        self.answer = answer

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self.answer(layer_index)


def addresses(cache: Any) -> list[int]:
    """Where the tensors of a cache of either manager are."""
    found: list[Any] = getattr(cache, "tensor_addrs", None) or cache.per_device_tensor_addrs
    return list(found[0]) if isinstance(found[0], list) else list(found)


def begins(f: Scene, answer: Callable[[int], bool], dst_addrs: list[int]) -> Any:
    """A task that sends entry 0 of `s`. Beginning it waits in neither face."""
    configs = [TransferConfig(DESTINATION, dst_addrs)]
    return f.of(f.source).transfer_cache_async(f.s, Synchronizer(answer), configs)


async def transfers_all(f: Scene) -> None:
    """Entry 0 of `s` arrives in entry 0 of `d`, whole."""
    task = begins(f, lambda _: True, addresses(f.d))
    assert await f.api.do(task.synchronize) == SUCCESS
    check_arrived(f)


def check_arrived(f: Scene) -> None:
    wanted = np.zeros_like(f.content(f.d))
    wanted[:, 0] = f.image(f.s)[:, 0]
    assert np.array_equal(f.content(f.d), wanted), "the destination holds other bytes"


async def has_too_few_addresses(f: Scene) -> None:
    async def too_few() -> Any:
        return begins(f, lambda _: True, addresses(f.d)[:3])

    error = await failure(too_few)
    assert is_error(error, PI), repr(error)
    assert not f.content(f.d).any()
    await transfers_all(f)


async def is_told_no(f: Scene) -> None:
    task = begins(f, lambda _: False, addresses(f.d))
    assert await f.api.do(task.synchronize) == PI
    assert await f.api.do(task.get_results) == [PI]
    assert not f.content(f.d).any(), "a layer was sent that was not ready"
    await transfers_all(f)


async def has_a_broken_synchronizer(f: Scene) -> None:
    """The original reports success, and None for the config."""

    def broken(layer: int) -> bool:
        if layer == 1:
            raise ZeroDivisionError
        return True

    task = begins(f, broken, addresses(f.d))
    status = await f.api.do(task.synchronize)
    assert isinstance(status, LLMStatusCode)
    assert status != SUCCESS
    assert await f.api.do(task.get_results) == [status]
    assert not f.content(f.d)[2:].any(), "the second layer was sent"
    await transfers_all(f)


async def runs_out_of_time(f: Scene) -> None:
    """Waiting ends and the transfer goes on."""
    ready = threading.Event()
    expected = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT if f.setup.manager == OLD else LLMStatusCode.LLM_TIMEOUT
    task = begins(f, lambda _: ready.wait(PATIENCE_S), addresses(f.d))
    try:
        assert await f.api.do(task.synchronize, timeout_in_millis=1) == expected
        assert await f.api.do(task.get_results, 1) == [expected]
        assert not f.content(f.d).any()
    finally:
        ready.set()
    assert await f.api.do(task.synchronize) == SUCCESS
    assert await f.api.do(task.get_results) == [SUCCESS]
    check_arrived(f)


TRANSFERS = [
    Row(136, BOTH, has_too_few_addresses, succeeds()),
    Row(137, BOTH, is_told_no, succeeds()),
    Row(138, BOTH, has_a_broken_synchronizer, succeeds(), differs="failed-transfers-say-so"),
    Row(139, BOTH, runs_out_of_time, succeeds()),
]

ROWS = [*BLOCKS, *PUSHES, *TRANSFERS]
