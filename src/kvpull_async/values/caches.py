"""The caller's handles on local caches. They hold names and addresses; the memory and its life belong to the registry.

A handle never frees, waits or locks. What it knows of its memory it asks through its binding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from kvpull_async.values._check import UINT64_MAX, instance, integers, require
from kvpull_async.values.desc import CacheDesc
from kvpull_async.values.enums import Placement

Addresses = TypeVar("Addresses", bound="list[Any]")


class CacheBinding(Protocol):
    """What a handle may ask of the memory behind it."""

    @property
    def quarantined(self) -> bool:
        """Whether a transfer that could not be stopped may still write to the cache."""

    def views(self) -> Sequence[memoryview]:
        """The bytes of each tensor, writable, without a copy."""

    def abandon(self) -> None:
        """The caller of a running pull stops waiting for it to settle. From any thread."""

    def dropped(self) -> None:
        """The handle was garbage-collected while bound. Runs inside ``__del__``: must not block, lock or raise."""


class _Handle(Generic[Addresses]):
    """Id, layout, addresses and binding, common to both kinds of handle."""

    _binding: CacheBinding | None = None

    def __init__(self, cache_id: int, cache_desc: CacheDesc, addrs: Addresses, manager: object) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._addrs = addrs
        self._manager = manager

    @property
    def cache_id(self) -> int:
        """Id of the cache on this node, counted from 1; -1 for one that no manager made."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """Layout of the cache."""
        return self._cache_desc

    @property
    def quarantined(self) -> bool:
        """Whether a transfer that could not be stopped may still write here.

        While it is true do not use or free the memory: ``manager.settled(cache)`` waits for the end.
        """
        return self._binding is not None and self._binding.quarantined

    def _release(self) -> None:
        """Forget addresses and memory; the manager calls this once the cache is gone."""
        self._addrs = type(self._addrs)()
        self._binding = None

    def __repr__(self) -> str:
        state = " quarantined" if self.quarantined else "" if self._addrs else " released"
        return f"<{type(self).__name__} {self._cache_id} {self._cache_desc}{state}>"


class Cache(_Handle["list[int]"]):
    """A cache of the newer manager (``cache_manager``). Made by its methods, or by ``create_cpu_cache``."""

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        cache_manager: object,
        is_registered: bool,
        is_blocks_cache: bool,
    ) -> None:
        super().__init__(cache_id, cache_desc, list(tensor_addrs), cache_manager)
        self._is_registered = is_registered
        self._is_blocks_cache = is_blocks_cache

    @property
    def tensor_addrs(self) -> list[int]:
        """Address of each tensor, as a new list; empty after the cache was deallocated."""
        return list(self._addrs)

    @property
    def is_blocks_cache(self) -> bool:
        """Whether the first dimension counts blocks and not batch entries."""
        return self._is_blocks_cache

    @property
    def is_registered(self) -> bool:
        """Whether the memory is the caller's (``register_*``) and not the manager's."""
        return self._is_registered

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """A handle on host memory of the caller, for ``swap_blocks``: one address per tensor, cache id -1, blocks.

        Errors: TypeError (``addrs`` must be a list of int), ValueError (uint64), LLMException(LLM_PARAM_INVALID) when
        the descriptor is not placed on HOST or the count is not ``num_tensors``.
        """
        desc = instance("cache_desc", cache_desc, CacheDesc)
        require(desc.placement == Placement.HOST, f"cache_desc must be placed on HOST, got {desc.placement}")
        return cls(-1, desc, _addresses("addrs", addrs, count=desc.num_tensors), None, False, True)


class KvCache(_Handle["list[list[int]]"]):
    """A cache of the older manager (``kv_cache_manager``). Made by its methods, or by ``create_cpu_cache``."""

    def __init__(
        self, cache_id: int, cache_desc: CacheDesc, per_device_tensor_addrs: list[list[int]], kv_cache_manager: object
    ) -> None:
        addrs = [list(device) for device in per_device_tensor_addrs]
        super().__init__(cache_id, cache_desc, addrs, kv_cache_manager)

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """For each device the address of each tensor, as new lists; empty after the cache was deallocated."""
        return [list(device) for device in self._addrs]

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """A handle on host memory of the caller, for ``swap_blocks``: a list of addresses, or one such list per device.

        Errors: TypeError (also for a mixture of both forms), ValueError (uint64), LLMException(LLM_PARAM_INVALID) for
        an empty list. Differs from the original: each list must have ``num_tensors`` addresses.
        """
        desc = instance("cache_desc", cache_desc, CacheDesc)
        items: list[Any] = instance("addrs", addrs, list)
        require(bool(items), "addrs must not be empty")
        devices = items if isinstance(items[0], list) else [items]
        checked = [_addresses(f"addrs[{i}]", device, count=desc.num_tensors) for i, device in enumerate(devices)]
        return cls(-1, desc, checked, None)

    def __del__(self) -> None:
        if self._binding is not None:
            self._binding.dropped()


def _addresses(name: str, addrs: object, *, count: int) -> list[int]:
    checked = integers(name, addrs, low=0, high=UINT64_MAX, kinds=(list,))
    require(len(checked) == count, f"{name} must have one address for each of the {count} tensors, got {len(checked)}")
    return checked
