"""The arguments of transfers: construction and assignment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpull_async.status import LLMException
from kvpull_async.values import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

KEY = CacheKeyByIdAndIndex(5, 1)


def test_mem_info() -> None:
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, np.uint64(2**64 - 1), 8)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_DEVICE, 2**64 - 1, 8)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((0, 1, 1), TypeError),
        ((None, 1, 1), TypeError),
        ((Memtype.MEM_TYPE_HOST, -1, 1), ValueError),
        ((Memtype.MEM_TYPE_HOST, 1, None), TypeError),
    ],
)
def test_mem_info_refusals(args: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        MemInfo(*args)


def test_a_synchronizer_must_say_how() -> None:
    class Silent(LayerSynchronizer):
        pass

    class Ready(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return layer_index == 0

    with pytest.raises(TypeError):
        Silent()  # type: ignore[abstract]
    assert Ready().synchronize_layer(0, None)


async def test_a_synchronizer_may_be_a_coroutine_function() -> None:
    class Later(LayerSynchronizer):
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return layer_index == 0

    assert await Later().synchronize_layer(0, None)


def test_transfer_config() -> None:
    addrs = [1, 2]
    config = TransferConfig(7, addrs)
    addrs.clear()
    assert (config.dst_cluster_id, config.dst_addrs, config.src_batch_index) == (7, [1, 2], 0)
    assert (config.src_layer_range, config.dst_layer_range) == (None, None)
    config.src_layer_range = config.dst_layer_range = range(1)
    config.dst_addrs = (3, 4)  # type: ignore[assignment]
    assert (config.src_layer_range, config.dst_layer_range, config.dst_addrs) == (range(1), range(1), [3, 4])


BAD = [
    ("dst_cluster_id", None, TypeError),
    ("dst_cluster_id", -1, ValueError),
    ("dst_addrs", None, TypeError),
    ("dst_addrs", [None], TypeError),
    ("dst_addrs", [2**64], ValueError),
    ("src_layer_range", [0], TypeError),
    ("src_layer_range", range(0, 4, 2), LLMException),
    ("src_batch_index", True, TypeError),
    ("src_batch_index", 2**32, ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD)
def test_transfer_config_checks_construction_and_assignment(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        TransferConfig(**{"dst_cluster_id": 1, "dst_addrs": [1], name: value})
    with pytest.raises(error, match=name):
        setattr(TransferConfig(1, [1]), name, value)


def test_transfer_by_key() -> None:
    config = TransferWithCacheKeyConfig(KEY, range(2), range(2, 4), 3)
    assert (config.cache_key, config.src_batch_index, config.dst_cluster_id) == (KEY, 3, 5)
    assert (config.src_layer_range, config.dst_layer_range) == (range(2), range(2, 4))
    config.cache_key = BlocksCacheKey(6)
    assert config.dst_cluster_id == 6
    with pytest.raises(LLMException, match="src_batch_index"):
        config.check()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((CacheKey(1, 2), range(1), range(1)), TypeError),
        ((None, range(1), range(1)), TypeError),
        ((KEY,), TypeError),
        ((KEY, range(1)), TypeError),
        ((KEY, range(1), range(2)), LLMException),
        ((KEY, range(-1, 1), range(2)), LLMException),
        ((KEY, range(1), range(1), -1), ValueError),
        ((BlocksCacheKey(1), range(1), range(1), 1), LLMException),
    ],
)
def test_transfer_by_key_refusals(args: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        TransferWithCacheKeyConfig(*args)
