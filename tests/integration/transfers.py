"""What tests of `transfer_cache_async` between real nodes share, beside what those of pushes do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpull_async import LLMStatusCode
from tests import npu
from tests.integration.pushing import Ends, Stock, laid
from tests.transferring import Ready

OK, PI = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID
BY_ADDRESS = {"enable_remote_cache_accessible": False}


def addresses(stock: Stock, layers: range = range(2), *, entry: int = 0) -> list[int]:
    """Of that entry, of both tensors of each layer."""
    return [npu.address(stock.arrays[2 * layer + tensor][entry]) for layer in layers for tensor in (0, 1)]


def check(destination: Stock, *pieces: tuple[int, int, Any]) -> None:
    assert np.array_equal(destination.image, laid(destination, pieces))
    destination.set_canary()


def transfer(e: Ends, source: Stock, configs: Sequence[Any], *blocks: Any, ready: Any = None, **options: Any) -> Any:
    """The task of a transfer by the newer manager."""
    manager = e.pusher.cache_manager
    return manager.transfer_cache_async(source.cache, ready or Ready(), configs, *blocks, **options)


async def sent(e: Ends, source: Stock, configs: Sequence[Any], *blocks: Any, **options: Any) -> list[Any]:
    """The statuses of a transfer, once it is over."""
    task = transfer(e, source, configs, *blocks, **options)
    results: list[Any] = await e.api.do(task.get_results)
    overall = await e.api.do(task.synchronize)
    assert overall == next((status for status in results if status not in (OK, None)), OK)
    return results
