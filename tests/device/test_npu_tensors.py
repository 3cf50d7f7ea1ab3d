"""Tensors of torch_npu given as they are (`tensors=`). What stands for one here says of itself what such a tensor says,
and has its bytes in the emulated device's memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, CacheDesc, DataType, LLMException, LLMStatusCode, Placement
from tests import npu
from tests.duo import DECODER, PROMPT, duo

BLOCKS, ROW = 8, 64
DESC = CacheDesc(1, [BLOCKS, ROW], DataType.DT_FLOAT16)


class NpuTensor:
    """(BLOCKS, ROW) numbers of two bytes on an NPU."""

    dtype = "torch.float16"

    def __init__(self, index: int = 0, kind: str = "npu") -> None:
        self.device = SimpleNamespace(type=kind, index=index)
        self.bytes = npu.room(BLOCKS, ROW * 2)

    def data_ptr(self) -> int:
        return npu.address(self.bytes)

    def is_contiguous(self) -> bool:
        return True

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return BLOCKS * ROW

    def detach(self) -> NpuTensor:
        return self


# What a tensor is known by is looked up in its class.
NpuTensor.device = None  # type: ignore[assignment]


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
async def test_they_are_pulled_from_and_into(transport: str) -> None:
    theirs, ours = NpuTensor(), NpuTensor()
    theirs.bytes[:] = np.arange(BLOCKS * ROW * 2, dtype=np.uint16).astype(np.uint8).reshape(BLOCKS, -1)
    async with duo(transport=transport, enable_cache_manager=True) as pair:
        source, puller = pair.prompt.cache_manager, pair.decoder.cache_manager
        given = await source.register_blocks_cache(DESC, None, BlocksCacheKey(PROMPT, 0), tensors=[theirs])
        taken = await puller.register_blocks_cache(DESC, None, BlocksCacheKey(DECODER, 0), tensors=[ours])
        assert taken.tensor_addrs == [ours.data_ptr()]
        await puller.pull_blocks(BlocksCacheKey(PROMPT, 0), taken, [1, 7], [0, 3])
        assert (ours.bytes[0] == theirs.bytes[1]).all()
        assert (ours.bytes[3] == theirs.bytes[7]).all()
        assert not ours.bytes[[1, 2, 4, 5, 6, 7]].any()
        await puller.unregister_cache(taken.cache_id)
        await source.unregister_cache(given.cache_id)


@pytest.mark.parametrize(
    ("tensor", "placement", "said"),
    [
        (lambda: NpuTensor(1), Placement.DEVICE, r"tensors\[0\] is in the memory of NPU 1, .* NPU 0"),
        (
            lambda: NpuTensor(0),
            Placement.HOST,
            r"is in the memory of NPU 0, .*Placement.HOST.* host memory",
        ),
        (lambda: NpuTensor(0, "cpu"), Placement.DEVICE, r"tensors\[0\] is in host memory, .* NPU 0"),
        (lambda: np.zeros((BLOCKS, ROW), np.float16), Placement.DEVICE, r"tensors\[0\] is in host memory, .* NPU 0"),
        (lambda: NpuTensor(0, "cuda"), Placement.DEVICE, "only memory of the CPU or of an NPU"),
    ],
)
async def test_p10_one_that_is_elsewhere_is_refused_when_it_is_registered(
    tensor: Any, placement: Placement, said: str
) -> None:
    desc = CacheDesc(1, [BLOCKS, ROW], DataType.DT_FLOAT16, placement)
    async with duo(enable_cache_manager=True) as pair:
        with pytest.raises(LLMException, match=said) as caught:
            await pair.decoder.cache_manager.register_blocks_cache(desc, None, tensors=[tensor()])
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


async def test_p10_without_an_npu_there_is_none_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = NpuTensor()
    monkeypatch.setenv("KVPULL_DEVICE_BACKEND", "host")
    async with duo(enable_cache_manager=True) as pair:
        with pytest.raises(LLMException, match=r"tensors\[0\] is in the memory of NPU 0, .* host memory here"):
            await pair.decoder.cache_manager.register_blocks_cache(DESC, None, tensors=[tensor])
