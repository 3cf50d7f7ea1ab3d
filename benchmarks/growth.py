"""How cost grows: with the tensors and the blocks of a pull, with links, and with pulls at the same time.

Short runs over shm and tcp, awaited, on memory of the library's. It must not compare with anybody.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from figures import print_table
from idle import cores, many_side, star_side
from kv_nodes import PULLER_CLUSTER, SOURCE_CLUSTER, AwaitingNode, BlockingNode, entry_key
from kvpull_async import BlocksCacheKey, LLMRole
from processes import Child, ChildFailed, Unavailable
from workloads import FULL, KIB, QUICK, BlocksPull, EntryPull, Shape, wrong_bytes

__all__ = ["grow", "tell_growth"]

BACKENDS: Final = ("shm", "tcp")
SEED: Final = 1
TENSORS: Final = (1, 2, 5, 10, 20, 40, 80)
BLOCKS: Final = (1, 4, 16, 64, 256)
"""Of each of 64 tensors."""
LINKS: Final = (1, 4, 16, 64)
AT_ONCE: Final = (1, 4, 16, 64, 256)
PAGED: Final = Shape(tensors=64, blocks=512, block_nbytes=32 * KIB)
MANY: Final = Shape(tensors=1, blocks=256 * 32, block_nbytes=4 * KIB)
"""For pulls at the same time: a destination of 64 KiB for each."""
Found = dict[str, dict[str, float]]


def _source(backend: str, shape: Shape) -> Mapping[str, Callable[..., Any]]:
    node = BlockingNode(
        LLMRole.PROMPT, SOURCE_CLUSTER, shape=shape, listen_ip_info="127.0.0.1:0", transfer_backend=backend
    )

    def open_(kind: str) -> tuple[str, int]:
        key = entry_key(SOURCE_CLUSTER)
        offered = node.blocks(None, BlocksCacheKey(SOURCE_CLUSTER)) if kind == "blocks" else node.entries(None, key)
        offered[1].fill(SEED)
        address: tuple[str, int] = tuple(node.datadist.listen_address)
        return address

    return {"open": open_, "close": node.close}


class _Growing:
    """A node that pulls more and more."""

    def __init__(self, backend: str, shape: Shape) -> None:
        self._shape = shape
        self._node = AwaitingNode(LLMRole.DECODER, PULLER_CLUSTER, shape=shape, transfer_backend=backend)

    def open(self, kind: str, address: tuple[str, int]) -> None:
        self._cache, self._arena = self._node.blocks(None) if kind == "blocks" else self._node.entries(None)
        self._arena.poison()
        self._node.link(SOURCE_CLUSTER, tuple(address))  # type: ignore[arg-type]

    def tensors(self, count: int) -> float:
        """Median seconds of a pull of half of each of `count` tensors."""
        return self._median(EntryPull(range(count), range(count), self._shape.entry_nbytes))

    def blocks(self, count: int) -> float:
        """Median seconds of a pull of `count` scattered blocks of each tensor."""
        rng = np.random.default_rng(count)
        src, dst = (2 * rng.permutation(self._shape.blocks // 2)[:count] for _ in range(2))
        pull = BlocksPull(self._shape.tensors, tuple(src.tolist()), tuple(dst.tolist()), self._shape.block_nbytes)
        return self._median(pull)

    def _median(self, pull: EntryPull | BlocksPull) -> float:
        call = self._node.call(pull, self._cache, cluster_id=SOURCE_CLUSTER)
        seconds: float = statistics.median(self._node.repeat([call], 6, budget=0.5))
        self._check(pull, call)
        return seconds

    def _check(self, pull: EntryPull | BlocksPull, call: Callable[[], Any]) -> None:
        self._arena.poison()
        self._node.do(call())
        wrong = wrong_bytes(self._arena, [pull], shape=self._shape, seed=SEED)
        if wrong:
            raise RuntimeError(f"{wrong} wrong bytes after {pull}")

    def at_once(self, count: int) -> float:
        """Median seconds per pull of 64 KiB while `count` run at the same time, each into a place of its own."""
        nbytes = 64 * KIB
        manager, key = self._node.manager, entry_key(SOURCE_CLUSTER)
        places = [place % (self._shape.entry_nbytes // nbytes) * nbytes for place in range(count)]

        async def together() -> float:
            began = time.perf_counter()
            pulls = [manager.pull_cache(key, self._cache, 0, nbytes, dst_cache_offset=at) for at in places]
            await asyncio.gather(*pulls)
            return (time.perf_counter() - began) / count

        rounds = max(2, min(50, 400 // count))
        seconds: float = statistics.median(self._node.do(together()) for _ in range(rounds))
        return seconds


def _puller(backend: str, shape: Shape) -> Mapping[str, Callable[..., Any]]:
    growing = _Growing(backend, shape)
    names = ("open", "tensors", "blocks", "at_once")
    return {**{name: getattr(growing, name) for name in names}, "close": growing._node.close}


def grow(*, quick: bool) -> dict[str, Any]:
    """Seconds by table, backend and size; and what could not run, or failed."""
    shape = QUICK if quick else FULL
    found: dict[str, Any] = {"missing": {}, "failed": {}, "entry": shape.entry_nbytes, "block": shape.block_nbytes}
    for backend in BACKENDS:
        try:
            for table, sizes in _grown(backend, quick=quick).items():
                found.setdefault(table, {})[backend] = sizes
        except Unavailable as why:
            found["missing"][backend] = str(why)
        except ChildFailed as failure:
            print(failure, file=sys.stderr)
            found["failed"][f"growth over {backend}"] = str(failure).strip().splitlines()[-1]
    return found


def _grown(backend: str, *, quick: bool) -> Found:
    whole, paged, many = (QUICK, QUICK, QUICK) if quick else (FULL, PAGED, MANY)
    tensors, blocks = ((1, 8), (1, 8)) if quick else (TENSORS, BLOCKS)
    links, at_once = ((1, 2), (1,)) if quick else (LINKS, AT_ONCE)
    segments = {str(paged.tensors * count): count for count in blocks}
    scattered = _series(backend, paged, "blocks", list(segments.values()))
    return {
        "tensors": _series(backend, whole, "tensors", tensors),
        "blocks": dict(zip(segments, scattered.values(), strict=True)),
        "at once": _series(backend, many, "at_once", at_once),
        **_linked(backend, links, quick=quick),
    }


def _series(backend: str, shape: Shape, what: str, sizes: Sequence[int]) -> dict[str, float]:
    kind = "blocks" if what == "blocks" else "entries"
    with Child(_source, backend, shape) as source, Child(_puller, backend, shape) as puller:
        puller.ask("open", kind, source.ask("open", kind))
        puller.ask(what, sizes[0])
        return {str(size): puller.ask(what, size) for size in sizes}


def _linked(backend: str, counts: Sequence[int], *, quick: bool) -> Found:
    """Seconds per link made, per pull over each in turn, and cores used by both sides while idle."""
    made, pulled, idle = {}, {}, {}
    for count in counts:
        with Child(many_side, backend, count) as many, Child(star_side, backend) as star:
            told = many.ask("open")
            made[str(count)] = star.ask("link", told)
            ids = [cluster_id for cluster_id, _ in told]
            star.ask("pull", ids, 2)
            pulled[str(count)] = statistics.median(star.ask("pull", ids, max(4, 200 // count)))
            idle[str(count)] = cores(many, star, seconds=0.1 if quick else 1.0)
    return {"links": made, "links pull": pulled, "links idle": idle}


def tell_growth(found: Mapping[str, Any]) -> None:
    def cells(nbytes: int, size: int, seconds: float) -> list[str]:
        return [f"{1e3 * seconds:.2f}", f"{size * nbytes / seconds / 1e9:.2f}"]

    entry, block = found["entry"], found["block"]
    _tell(found, "tensors", f"tensors x {entry // KIB} KiB", partial(cells, entry))
    _tell(found, "blocks", f"scattered blocks of {block // KIB} KiB", partial(cells, block))
    _tell(found, "at once", "pulls at once, of 64 KiB", lambda _, s: [f"{1e6 * s:.0f}"], ("us a pull",))
    _tell(found, "links", "links made", lambda _, s: [f"{1e3 * s:.2f}"], ("ms a link",))
    _tell(found, "links pull", "links, pulls in turn", lambda _, s: [f"{1e6 * s:.0f}"], ("us a pull",))
    _tell(found, "links idle", "links, idle", lambda _, cores: [f"{cores:.3f}"], ("cores",))
    for backend, why in found["missing"].items():
        print(f"growth over {backend}: not available: {why}")


def _tell(
    found: Mapping[str, Any],
    table: str,
    title: str,
    cells: Callable[[int, float], list[str]],
    heads: Sequence[str] = ("ms", "GB/s"),
) -> None:
    """One table: a line for each size, the columns of each backend beside one another."""
    by_backend = found.get(table)
    if not by_backend:
        return
    sizes = list(next(iter(by_backend.values())))
    rows = [[size, *(cell for each in by_backend.values() for cell in cells(int(size), each[size]))] for size in sizes]
    print_table(f"Growth: {title}", ["", *(f"{backend} {head}" for backend in by_backend for head in heads)], rows)
