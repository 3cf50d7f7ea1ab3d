"""The check of a pull into tensors of torch_npu, in a process of its own, where torch_npu is initialised first.

That is how applications use the library. Without torch_npu there is nothing to check. It must not know AscendCL.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import Any, Final

from kvpull_async import CacheDesc, DataType, LLMRole, Placement
from kvpull_async.self_test.copies import compare
from kvpull_async.self_test.lines import Absent, Steps
from kvpull_async.self_test.pulls import ENTRY, KEY, PULLS, TENSORS, Address, a_node, linked, pattern

__all__ = ["check_tensors"]

_HERE: Final = 3


def check_tensors(steps: Steps, *, device: int, source: Address, patience: float) -> None:
    """Their bytes as torch_npu sees them: copied on the device first, by a stream of its own."""

    def check() -> str:
        if importlib.util.find_spec("torch_npu") is None:
            raise Absent("torch_npu is not installed")
        return _pulled(device, source, limit=int(patience * 1000))

    steps.run(PULLS, "into tensors of torch_npu", check)


def _pulled(device: int, source: Address, *, limit: int) -> str:
    torch: Any = importlib.import_module("torch")
    importlib.import_module("torch_npu")
    torch.npu.set_device(device)
    tensors = [torch.zeros(ENTRY, dtype=torch.uint8, device=f"npu:{device}") for _ in range(TENSORS)]
    torch.npu.synchronize()
    asyncio.run(_pull([tensor.data_ptr() for tensor in tensors], device, source, limit=limit))
    for number, tensor in enumerate(tensors):
        compare(tensor.clone().cpu().numpy(), pattern(number, 0, (ENTRY,)), f"tensor {number}")
    return "pull_cache to their data_ptr(); torch_npu sees every byte right"


async def _pull(addresses: list[int], device: int, source: Address, *, limit: int) -> None:
    desc = CacheDesc(TENSORS, [1, ENTRY], DataType.DT_UINT8, placement=Placement.DEVICE)
    async with a_node(LLMRole.DECODER, _HERE, device, limit=limit) as node, linked(node, source, limit=limit):
        cache = await node.cache_manager.register_cache(desc, addresses)
        await node.cache_manager.pull_cache(KEY, cache, 0, src_cache_offset=0, dst_cache_offset=0)
        await node.cache_manager.unregister_cache(cache.cache_id)
