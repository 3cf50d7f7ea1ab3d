"""Many links of one node, each to another one, and what they cost while nothing is asked for.

The other nodes share one process. It must not measure pulls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from kv_nodes import PULLER_CLUSTER, AwaitingNode, BlockingNode, entry_key
from kvpull_async import LLMRole
from processes import Child
from workloads import Arena, EntryPull, Shape

__all__ = ["IDLE_LINKS", "LINK_SHAPE", "cores", "idle_links", "many_side", "star_side"]

IDLE_LINKS: Final = 16
LINK_SHAPE: Final = Shape(tensors=4, blocks=32, block_nbytes=4096)
"""What each of many nodes holds: enough for one pull of 64 KiB."""
PULL: Final = EntryPull(range(1), range(1), LINK_SHAPE.entry_nbytes)


def many_side(backend: str, count: int) -> Mapping[str, Callable[..., Any]]:
    """The answers of a process with `count` source nodes: "open" tells their cluster ids and addresses."""
    nodes: list[BlockingNode] = []

    def open_() -> list[Any]:
        for cluster_id in range(1, count + 1):
            node = BlockingNode(
                LLMRole.PROMPT, cluster_id, shape=LINK_SHAPE, listen_ip_info="127.0.0.1:0", transfer_backend=backend
            )
            nodes.append(node)
            arena: Arena = node.entries(None, entry_key(cluster_id))[1]
            arena.fill(cluster_id)
        return [(i + 1, tuple(node.datadist.listen_address)) for i, node in enumerate(nodes)]

    def close() -> None:
        for node in nodes:
            node.close()

    return {"open": open_, "close": close}


def star_side(backend: str) -> Mapping[str, Callable[..., Any]]:
    """The answers of a process with one node that links to all: "open", "link" (s per link), "pull" (s of each)."""
    node = AwaitingNode(LLMRole.DECODER, PULLER_CLUSTER, shape=LINK_SHAPE, transfer_backend=backend)
    cache, _ = node.entries(None)

    def link(told: list[Any]) -> float:
        began = time.perf_counter()
        for cluster_id, address in told:
            node.link(cluster_id, tuple(address))
        return (time.perf_counter() - began) / len(told)

    def pull(ids: list[int], rounds: int) -> list[float]:
        calls = [node.call(PULL, cache, cluster_id=cluster_id) for cluster_id in ids]
        whole = node.repeat(calls, rounds, budget=1.0)
        return [seconds / len(calls) for seconds in whole]

    return {"link": link, "pull": pull, "close": node.close}


def idle_links(backend: str, *, seconds: float) -> float:
    """Cores that both processes use with `IDLE_LINKS` links open, after one pull over each."""
    with Child(many_side, backend, IDLE_LINKS) as many, Child(star_side, backend) as star:
        told = many.ask("open")
        star.ask("link", told)
        star.ask("pull", [cluster_id for cluster_id, _ in told], 1)
        return cores(many, star, seconds=seconds)


def cores(*sides: Child, seconds: float) -> float:
    """What these processes use while nobody asks them for anything."""
    time.sleep(seconds / 10)
    before = sum(side.ask("cpu") for side in sides)
    time.sleep(seconds)
    return float(sum(side.ask("cpu") for side in sides) - before) / seconds
