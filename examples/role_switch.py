"""Two nodes that trade places: the prefill node becomes the decode node and back, as load demands, without a restart.

Its job: ``switch_role`` on both sides, with what must come before it (no link) and what goes with it (a prefill node
listens, a decode node does not). Caches live on through a switch. It must not need anything but kvpull and numpy.

    python examples/role_switch.py
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvpull_sync import (
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

NODES = (1, 2)
ROUNDS = 3
DESC = CacheDesc(num_tensors=4, shape=[1, 64, 128], data_type=DataType.DT_FLOAT)
LISTEN = "127.0.0.1:0"
SECONDS = 120.0
LINK_TIMEOUT_MS = 30_000


class Node:
    """One of the two; they run the same program and start in opposite roles."""

    def __init__(self, cluster_id: int, role: LLMRole, pipe: Connection) -> None:
        config = LLMConfig()
        config.device_backend = "host"  # numpy reads and writes the caches: not in the memory of an NPU
        config.enable_cache_manager = True
        config.sync_kv_timeout = 30_000
        if role is LLMRole.PROMPT:
            config.listen_ip_info = LISTEN
        self.datadist = LLMDataDist(role, cluster_id)
        self.datadist.init(config.generate_options())
        self.role = role
        self.peer = NODES[0] if cluster_id == NODES[1] else NODES[1]
        self.pipe = pipe
        self.cache: Cache | None = None  # of the request that this node has worked on last

    def run(self) -> bool:
        """All rounds, a switch between each two; True when every number is right."""
        right = True
        for number in range(ROUNDS):
            if number:
                self.switch()
            right = (self.serve(number) if self.role is LLMRole.PROMPT else self.fetch(number)) and right
        if self.cache is not None:
            self.datadist.cache_manager.deallocate_cache(self.cache)
        self.datadist.finalize()
        return right

    def serve(self, number: int) -> bool:
        """A turn as prefill node: offers its cache, and waits until it has been pulled."""
        manager, key = self.datadist.cache_manager, CacheKey(self.datadist.cluster_id, number)
        if self.cache is None:
            self.cache = manager.allocate_cache(DESC, [key])
            for index, tensor in enumerate(self.tensors()):
                tensor[...] = known_values(index)
        else:
            manager.publish_cache(self.cache, [key])  # what it has pulled as decode node
        for tensor in self.tensors():
            tensor[...] += 1  # the work of this turn
        self.pipe.send(self.datadist.listen_address)
        return bool(self.heard() == "pulled and unlinked")

    def fetch(self, number: int) -> bool:
        """A turn as decode node: links, tries to switch too early, pulls, unlinks."""
        manager, cluster = self.datadist.cache_manager, LLMClusterInfo()
        cluster.remote_cluster_id = self.peer
        cluster.append_remote_ip_info(*self.heard())
        self.datadist.link_clusters([cluster], LINK_TIMEOUT_MS, raise_on_error=True)
        right = self.refuses_to_switch()
        if self.cache is not None:
            manager.deallocate_cache(self.cache)
        self.cache = manager.allocate_cache(DESC)
        manager.pull_cache(CacheKey(self.peer, number), self.cache)
        expected = [known_values(index) + number + 1 for index in range(DESC.num_tensors)]
        right = all(map(np.array_equal, self.tensors(), expected)) and right
        self.datadist.unlink_clusters([cluster], LINK_TIMEOUT_MS, raise_on_error=True)
        verdict = "right" if right else "WRONG"
        print(f"round {number}: from node {self.peer} to node {self.datadist.cluster_id}, {verdict}", flush=True)
        self.pipe.send("pulled and unlinked")
        return right

    def refuses_to_switch(self) -> bool:
        """While a link exists, roles stay as they are."""
        try:
            self.datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": LISTEN})
        except LLMException as error:
            return bool(error.status_code == LLMStatusCode.LLM_EXIST_LINK)
        return False

    def switch(self) -> None:
        """To the other role. A prefill node is given an address to listen on; without one, a node stops listening."""
        if self.role is LLMRole.PROMPT:
            self.role = LLMRole.DECODER
            self.datadist.switch_role(self.role)
        else:
            self.role = LLMRole.PROMPT
            self.datadist.switch_role(self.role, {"llm.listenIpInfo": LISTEN})

    def tensors(self) -> list[Any]:
        """Views of the cache's memory."""
        assert self.cache is not None
        manager = self.datadist.cache_manager
        return [manager.get_cache_tensors(self.cache, index)[0].numpy() for index in range(DESC.num_tensors)]

    def heard(self) -> Any:
        """The other node's next message."""
        if not self.pipe.poll(SECONDS):
            raise RuntimeError("the other process says nothing")
        return self.pipe.recv()


def known_values(index: int) -> Any:
    """Where the numbers begin; each turn as prefill node adds one."""
    size = DESC.shape[1] * DESC.shape[2]
    return np.arange(index * size, (index + 1) * size, dtype=np.float32).reshape(DESC.shape)


def other_process(pipe: Connection) -> None:
    """The node that begins as prefill node; its exit code says whether all was right."""
    sys.exit(not Node(NODES[0], LLMRole.PROMPT, pipe).run())


def main() -> int:
    """Starts the first node; the second one is this process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=other_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # only then is the other process's end also the end of the pipe
    right = Node(NODES[1], LLMRole.DECODER, ours).run()
    process.join(SECONDS)
    if right and process.exitcode == 0:
        print(f"OK: the cache went there and back in {ROUNDS} rounds, and every number is right")
        return 0
    print(f"FAILED: see above (the other process ended with exit code {process.exitcode})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
