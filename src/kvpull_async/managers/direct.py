"""Small pulls out of a cache that the peer lets this side read without asking: done at once, on the caller's thread.

Crossing to the core and back takes longer than such a copy. What is the least unusual (a wrong argument, a busy link, a
traced call) is left to the ordinary way, which has an answer to everything. It must not wait or raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvpull_async.held import Entry
from kvpull_async.link import Link
from kvpull_async.managers.node import Node
from kvpull_async.standing import Offered
from kvpull_async.status import LLMException
from kvpull_async.sums import NONE
from kvpull_async.values import Cache, CacheKeyByIdAndIndex

__all__ = ["pull_now"]

_MOST_BYTES: Final = 256 * 1024
"""Copied in some 20 us; more than this is worth a thread of its own."""
_MOST_TENSORS: Final = 256
_LONGEST: Final = 2**31
"""ms; a deadline in that time cannot pass here."""


def pull_now(node: Node, key: Any, cache: Any, batch_index: Any, size: Any, options: Mapping[str, Any]) -> int:
    """The bytes pulled, or 0 when nothing was done."""
    if not node.live:  # in a forked child, where even a lock may never be given back
        return 0
    if type(key) is not CacheKeyByIdAndIndex or type(cache) is not Cache or node.log.debugging:
        return 0
    if node.underway.get(key.cluster_id):
        return 0
    entry, link = node.registry.local(cache.cache_id), node.find_link(key.cluster_id)
    if entry is None or link is None or cache._binding is not entry or entry.blocks or not entry.remote_accessible:
        return 0
    if not entry.writable or not entry.direct or node.settings.verify != NONE:
        return 0
    offered = link.standing.find(key.cache_id)
    if offered is None:
        return 0
    where = _where(key, entry, batch_index, size, options, offered=offered)
    if where is None:
        return 0
    return _copy(node, key, entry, link, offered, *where)


def _where(
    key: CacheKeyByIdAndIndex,
    entry: Entry,
    batch_index: Any,
    size: Any,
    options: Mapping[str, Any],
    *,
    offered: Offered,
) -> tuple[range, int, range, int, int] | None:
    """Source tensors and start, destination tensors and start, bytes per tensor; None for what needs a closer look."""
    held = entry.desc.num_tensors
    src = dst = range(held)
    if options:
        ranges = _tensors(options, held)
        if ranges is None:
            return None
        src, dst = ranges[0] or range(offered.memory.tensors), ranges[1] or dst
    elif held != offered.memory.tensors:
        return None
    stride = entry.entry_nbytes
    if type(batch_index) is not int or type(size) is not int or not 0 <= batch_index < entry.desc.entries:
        return None
    nbytes = stride if size == -1 else size
    theirs = key.batch_index * offered.entry_nbytes
    if not 0 < nbytes <= min(stride, offered.entry_nbytes) or theirs + nbytes > offered.memory.tensor_nbytes:
        return None
    if len(src) != len(dst) or dst.stop > held or src.stop > offered.memory.tensors:
        return None
    if len(dst) > _MOST_TENSORS or len(dst) * nbytes > _MOST_BYTES:
        return None
    return src, theirs, dst, batch_index * stride, nbytes


def _tensors(options: Mapping[str, Any], held: int) -> tuple[range | None, range | None] | None:
    """The tensors of both layer ranges, None for all; None as a whole when there is more to it."""
    per_layer, found = options.get("tensor_num_per_layer", 2), 0
    ranges: list[range | None] = []
    if type(per_layer) is not int or per_layer < 1 or held % per_layer:
        return None
    for name in ("src_layer_range", "dst_layer_range"):
        layers = options.get(name)
        found += name in options
        if layers is None:
            ranges.append(None)
        elif type(layers) is not range or layers.step != 1 or not 0 <= layers.start < layers.stop:
            return None
        else:
            ranges.append(range(layers.start * per_layer, layers.stop * per_layer))
    timeout = options.get("timeout", 1)
    if type(timeout) not in (int, float) or not 0 < timeout < _LONGEST:
        return None
    if found + ("tensor_num_per_layer" in options) + ("timeout" in options) != len(options):
        return None
    return ranges[0], ranges[1]


def _copy(
    node: Node, key: CacheKeyByIdAndIndex, entry: Entry, link: Link, offered: Offered,
    src: range, theirs: int, dst: range, ours: int, nbytes: int,
) -> int:  # fmt: skip
    token = object()
    try:
        if not (link.claim(token) and entry.claim(token)):
            return 0
        if link.standing.find(key.cache_id) is not offered:
            return 0  # the link has been made anew meanwhile, maybe to another process
        if entry.moved(dst) is not None:
            return 0
        destinations = [entry.regions[tensor].address + ours for tensor in dst]
        if not offered.memory.read(src.start, theirs, destinations, nbytes):
            return 0  # taken away meanwhile: the source says what became of it
    except (OSError, ValueError, LLMException):
        return 0  # whatever it is, the ordinary way says it with all that belongs to it
    finally:
        try:
            entry.unclaim(token, node.loop)
            link.unclaim(token, node.loop)
        except BaseException:  # Ctrl-C in this very moment: neither may stay claimed
            entry.unclaim(token, node.loop)
            link.unclaim(token, node.loop)
            raise
    total = nbytes * len(dst)
    link.standing.note(key.cache_id, total)
    node.counters.add_elsewhere({"pulls_started": 1, "pulls_finished": 1, "bytes_pulled": total})
    return total
