"""The two ends of a serving engine's plugin that links by `link_clusters` when it has to, reduced to what they do with
`llm_datadist`: the client links, pulls, retries and links anew; the server forgets clients by id, sleeps and wakes up.

Classes are imported from the modules of the original where some plugins find them. It blocks, as such plugins do.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import llm_datadist as datadist  # type: ignore[import-not-found]
import torch
from llm_datadist import LLMStatusCode
from llm_datadist.v2.llm_types import BlocksCacheKey, Cache, CacheDesc  # type: ignore[import-not-found]

LINK_TIMEOUT = 20000
RETRYABLE = [
    LLMStatusCode.LLM_REPEAT_REQUEST,
    LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT,
    LLMStatusCode.LLM_PROCESSING_LINK,
    LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
    LLMStatusCode.LLM_TIMEOUT,
    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_LINK_BUSY,
]


class Engine:
    """`port` is what a server listens on; a client has none."""

    def __init__(self, port: int | None, cluster_id: int | None = None) -> None:
        self.cluster_id = uuid.uuid4().int & 0xFFFFFFFFFFFFFFFF if cluster_id is None else cluster_id
        self.serves = port is not None
        config = datadist.LLMConfig()
        config.device_id = 3
        config.sync_kv_timeout = 20000
        config.enable_remote_cache_accessible = True
        config.local_comm_res = ""
        if self.serves:
            config.listen_ip_info = f"127.0.0.1:{port}"
        role = datadist.LLMRole.PROMPT if self.serves else datadist.LLMRole.DECODER
        self.engine = datadist.LLMDataDist(role, self.cluster_id)
        self.options = config.generate_options()
        self.engine.init(self.options)
        self.lock = threading.Lock()
        self.caches: list[Cache] = []
        self.links: dict[int, float] = {}

    def register(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Tensors of any type, as bytes; those of one shape together. Only a server's caches have keys."""
        for tensors in groups:
            buffers = [tensor.view(torch.uint8).view(tensor.shape[0], -1) for tensor in tensors]
            desc = CacheDesc(
                num_tensors=len(buffers), shape=tuple(buffers[0].shape), data_type=datadist.DataType.DT_UINT8
            )
            key = BlocksCacheKey(self.engine.cluster_id, model_id=len(self.caches)) if self.serves else None
            addresses = [int(buffer.data_ptr()) for buffer in buffers]
            self.caches.append(self.engine.cache_manager.register_blocks_cache(desc, addresses, key))

    def sleep(self) -> None:
        self.forget(list(self.links))
        for cache in self.caches:
            self.engine.cache_manager.unregister_cache(cache.cache_id)
        self.caches.clear()
        self.engine.finalize()

    def wake_up(self) -> None:
        self.engine.init(self.options)

    def forget(self, clusters: Sequence[int]) -> None:
        """By id alone."""
        infos = []
        for cluster in clusters:
            info = datadist.LLMClusterInfo()
            info.remote_cluster_id = cluster
            infos.append(info)
            self.links.pop(cluster, None)
        if infos:
            self.engine.unlink_clusters(infos, timeout=LINK_TIMEOUT, force=True)


class Client(Engine):
    def __init__(self, cluster_id: int | None = None) -> None:
        super().__init__(None, cluster_id)
        self.attempts: list[str] = []

    def _info(self, cluster: int, port: int) -> Any:
        info = datadist.LLMClusterInfo()
        info.remote_cluster_id = cluster
        info.append_remote_ip_info("127.0.0.1", port)
        info.append_local_ip_info("127.0.0.1", 0)
        return info

    def _link(self, cluster: int, port: int) -> bool:
        if cluster not in self.links:
            status, _ = self.engine.link_clusters([self._info(cluster, port)], timeout=LINK_TIMEOUT)
            if status != LLMStatusCode.LLM_SUCCESS:
                self.attempts.append("no link")
                return False
        self.links[cluster] = time.time()
        return True

    def _unlink(self, cluster: int, port: int) -> None:
        self.links.pop(cluster, None)
        self.engine.unlink_clusters([self._info(cluster, port)], timeout=LINK_TIMEOUT, force=True)

    def _pull_once(self, cluster: int, model_id: int, remote: list[int], local: list[int]) -> str:
        try:
            self.engine.cache_manager.pull_blocks(
                BlocksCacheKey(cluster, model_id), self.caches[model_id], remote, local
            )
        except datadist.LLMException as error:
            return "retry" if error.status_code in RETRYABLE else "fail"
        return "ok"

    def pull(self, cluster: int, port: int, remote: list[int], local: list[int]) -> bool:
        return all(self._pull(cluster, port, model_id, remote, local) for model_id in range(len(self.caches)))

    def _pull(self, cluster: int, port: int, model_id: int, remote: list[int], local: list[int]) -> bool:
        for _ in range(20):
            with self.lock:
                if self._link(cluster, port):
                    outcome = self._pull_once(cluster, model_id, remote, local)
                    self.attempts.append(outcome)
                    if outcome == "ok":
                        return True
                self._unlink(cluster, port)
            time.sleep(0.3)
        return False

    def pull_from_a_loop(self, cluster: int, port: int, remote: list[int], local: list[int]) -> bool:
        """As plugins that are asynchronous themselves: each pull in a loop of its own, in a worker thread."""

        async def call() -> bool:
            return await asyncio.to_thread(self.pull, cluster, port, remote, local)

        return asyncio.run(call())
