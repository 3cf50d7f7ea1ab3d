"""A serving engine's plugin on the older manager, reduced to what it does with `llm_datadist`: a cache per request and
layer tensors made of its addresses. The prefill side lets go of a cache as soon as it is filled.

It blocks, as such plugins do.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import llm_datadist  # type: ignore[import-not-found]
import torch

LAYERS = 3
SHAPE = (1, 2, 4, 8)  # keys and values of four tokens


def number_of(request: str) -> int:
    """An int64 from a request's name."""
    return int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big") >> 1


def tensors_at(shape: tuple[int, ...], addresses: list[int]) -> list[torch.Tensor]:
    count = torch.Size(shape).numel()
    return [
        torch.frombuffer((ctypes.c_uint8 * (2 * count)).from_address(address), dtype=torch.float16).view(shape)
        for address in addresses
    ]


class Connector:
    def __init__(self, role: str, cluster_id: int, listen: str = "") -> None:
        self.engine = llm_datadist.LLMDataDist(getattr(llm_datadist.LLMRole, role), cluster_id)
        options = {
            "llm.SyncKvCacheWaitTime": "20000",
            "ge.flowGraphMemMaxSize": f"{(9 * 1024 * 1024 * 1024):d}",
            "ge.exec.deviceId": "0",
        }
        if listen:
            options["llm.listenIpInfo"] = listen
        self.engine.init(options)
        self.transfer = self.engine.kv_cache_manager
        self.buffers: list[Any] = []

    def _create(self, keys: list[Any]) -> tuple[Any, list[torch.Tensor]]:
        desc = llm_datadist.CacheDesc(LAYERS, SHAPE, llm_datadist.DataType.DT_FLOAT16)
        buffer = self.transfer.allocate_cache(desc, keys)
        return buffer, tensors_at(SHAPE, buffer.per_device_tensor_addrs[0])

    def save(self, request: str, layers: list[torch.Tensor]) -> None:
        buffer, tensors = self._create([llm_datadist.CacheKey(self.engine.cluster_id, number_of(request), 1)])
        for tensor, layer in zip(tensors, layers, strict=True):
            tensor.copy_(layer.unsqueeze(0))
        self.transfer.deallocate_cache(buffer)

    def link(self, peers: list[tuple[int, int]]) -> list[str]:
        clusters = []
        for cluster_id, port in peers:
            cluster = llm_datadist.LLMClusterInfo()
            cluster.remote_cluster_id = cluster_id
            cluster.append_local_ip_info("127.0.0.1", 0)
            cluster.append_remote_ip_info("127.0.0.1", port)
            clusters.append(cluster)
        _, codes = self.engine.link_clusters(clusters, timeout=3000)
        return [code.name for code in codes]

    def load(self, request: str, cluster_id: int) -> list[torch.Tensor]:
        """The buffers of the round before are let go of first."""
        for buffer in self.buffers:
            self.transfer.deallocate_cache(buffer)
        self.buffers.clear()
        buffer, tensors = self._create([])
        self.buffers.append(buffer)
        self.transfer.pull_cache(llm_datadist.CacheKey(cluster_id, number_of(request), 1), buffer, 0)
        return [tensor.squeeze(0).clone() for tensor in tensors]
