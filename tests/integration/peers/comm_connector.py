"""The worker of a serving engine's plugin that links by rank table, reduced to what it does with `llm_datadist`.

Each worker answers for its whereabouts on a socket of its own. A decode worker that has a request asks the prefill
worker there; upon that both call `link`, each in the thread that heard of the other. It blocks, as such plugins do.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llm_datadist  # type: ignore[import-not-found]
import torch
from llm_datadist import BlocksCacheKey, CacheDesc, LLMConfig, LLMDataDist, LLMException, LLMRole

TYPES = {
    torch.float16: llm_datadist.DataType.DT_FLOAT16,
    torch.bfloat16: llm_datadist.DataType.DT_BF16,
    torch.float32: llm_datadist.DataType.DT_FLOAT,
    torch.int8: llm_datadist.DataType.DT_INT8,
    torch.int32: llm_datadist.DataType.DT_INT32,
}
Place = dict[str, Any]


class Worker:
    """`place` is its entry of the operator's table: server, device, address, cluster."""

    def __init__(self, role: str, place: Place) -> None:
        self.role = {"producer": LLMRole.PROMPT, "consumer": LLMRole.DECODER}[role]
        self.place = place
        self.linked: dict[int, int] = {}
        self.finished: set[str] = set()
        self.complaints: list[str] = []
        self.lock = threading.Lock()
        self.executor = ThreadPoolExecutor(1)
        self.datadist = LLMDataDist(self.role, int(place["cluster_id"]))
        config = LLMConfig()
        config.device_id = int(place["device_id"])
        config.sync_kv_timeout = 20000
        config.enable_switch_role = True
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.mem_pool_cfg = '{"memory_size": 18737418240, "page_shift": 16}'
        self.datadist.init(config.generate_options())
        self.cache_manager = self.datadist.cache_manager

    # -- memory -----------------------------------------------------------------------------------------------------

    def register(self, layers: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> int:
        """Keys and values of one shape are one cache. Where they differ, each kind is a cache, by model id."""
        first, second = next(iter(layers.values()))
        if first.shape == second.shape:
            groups = [[tensor for layer in layers.values() for tensor in layer]]
        else:
            groups = [[layer[kind] for layer in layers.values()] for kind in (0, 1)]
        self.caches = []
        for model_id, tensors in enumerate(groups):
            desc = CacheDesc(len(tensors), [*tensors[0].shape], TYPES[tensors[0].dtype])
            key = BlocksCacheKey(cluster_id=int(self.place["cluster_id"]), model_id=model_id)
            addresses = [tensor.data_ptr() for tensor in tensors]
            self.caches.append(self.cache_manager.register_blocks_cache(desc, addresses, key))
        return self._listen()

    # -- meeting ----------------------------------------------------------------------------------------------------

    def _listen(self) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._answer, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def _answer(self, listener: socket.socket) -> None:
        while True:
            channel, _ = listener.accept()
            with channel, channel.makefile("rw") as lines:
                said = json.loads(lines.readline())
                lines.write(json.dumps(self.place) + "\n")
                lines.flush()
                if "finished" in said:
                    with self.lock:
                        self.finished.add(said["finished"])
                else:
                    self.add_remote(said)

    def _tell(self, port: int, said: dict[str, Any]) -> Place:
        with socket.create_connection(("127.0.0.1", port), 20) as channel, channel.makefile("rw") as lines:
            lines.write(json.dumps(said) + "\n")
            lines.flush()
            place: Place = json.loads(lines.readline())
            return place

    def add_remote(self, remote: Place) -> int:
        cluster = int(remote["cluster_id"])
        if cluster in self.linked:
            return cluster
        here = self.role == LLMRole.PROMPT
        one, other = (self.place, remote) if here else (remote, self.place)
        name = f"pd_comm_{one['device_ip']}_{other['device_ip']}"
        ranks = {int(one["cluster_id"]): 0, int(other["cluster_id"]): 1}
        comm_id = self.datadist.link(name, ranks, json.dumps(rank_table(one, other)))
        give_up = time.monotonic() + 30
        while True:
            status = self.datadist.query_register_mem_status(comm_id=comm_id)
            if status == llm_datadist.RegisterMemStatus.OK:
                break
            if status == llm_datadist.RegisterMemStatus.FAILED or time.monotonic() > give_up:
                raise RuntimeError(f"linking failed, comm id {comm_id}")
            time.sleep(0.5)
        self.linked[cluster] = comm_id
        return cluster

    def remove_remote(self, cluster: int) -> None:
        try:
            self.datadist.unlink(self.linked.pop(cluster))
        except LLMException as error:
            self.complaints.append(str(error))

    # -- requests ---------------------------------------------------------------------------------------------------

    def load(self, request: str, port: int, remote: Sequence[int], local: Sequence[int]) -> Any:
        return self.executor.submit(self._read, request, port, list(remote), list(local))

    def _read(self, request: str, port: int, remote: list[int], local: list[int]) -> None:
        cluster = self.add_remote(self._tell(port, self.place))
        remote = remote[-len(local) :]
        try:
            for model_id, cache in enumerate(self.caches):
                key = BlocksCacheKey(cluster_id=cluster, model_id=model_id)
                self.cache_manager.pull_blocks(key, cache, remote, local)
        except (TypeError, ValueError) as error:
            raise RuntimeError("unexpected parameter") from error
        except LLMException as error:
            raise RuntimeError(f"pull failed with {error.status_code}") from error
        self._tell(port, {"finished": request})
        with self.lock:
            self.finished.add(request)


def rank_table(one: Place, other: Place) -> dict[str, Any]:
    """Of version 1.2 where devices belong to a super pod."""
    pods = "super_pod_id" in one
    devices = [
        {name: place[name] for name in ("device_id", "device_ip", "super_device_id") if name in place}
        | {"rank_id": str(rank)}
        for rank, place in enumerate((one, other))
    ]
    together = one["server_id"] == other["server_id"]
    table: dict[str, Any] = {"version": "1.2" if pods else "1.0", "status": "completed"}
    table["server_count"] = "1" if together else "2"
    if together:
        table["server_list"] = [{"device": devices, "server_id": one["server_id"]}]
    else:
        table["server_list"] = [
            {"device": [device], "server_id": place["server_id"]}
            for device, place in zip(devices, (one, other), strict=True)
        ]
    if pods:
        servers = dict.fromkeys([one["server_id"], other["server_id"]])
        table["super_pod_list"] = [
            {"super_pod_id": one["super_pod_id"], "server_list": [{"server_id": server} for server in servers]}
        ]
    return table
