"""The names by which a cache is found on a cluster.

They compare by identity, as in the original; look-ups use the fields. Whether a key may be used for a given call is
not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

from kvpull_async.values._check import INVALID_ID, int64, require, uint32, uint64


def _arguments(kind: str, fields: tuple[str, ...], args: tuple[int, ...], kwargs: Mapping[str, int]) -> dict[str, int]:
    """Match *args* and *kwargs* to *fields*; ``prompt_cluster_id`` is the other name of ``cluster_id``.

    LLM-DataDist documentation: a positional value wins over a named one, and ``cluster_id`` over the other name; too
    many values or an unknown name are LLM_PARAM_INVALID.
    """
    count = len(args) + len(kwargs)
    require(count <= len(fields), f"{kind} takes at most {len(fields)} values, got {count}")
    unknown = sorted(set(kwargs) - {*fields, "prompt_cluster_id"})
    require(not unknown, f"{kind} has no argument named {', '.join(unknown)}; its arguments are {', '.join(fields)}")
    named = {name: value for name, value in kwargs.items() if name in fields}
    if "prompt_cluster_id" in kwargs:
        named.setdefault("cluster_id", kwargs["prompt_cluster_id"])
    return {**named, **dict(zip(fields, args, strict=False))}


def _complete(kind: str, given: Mapping[str, int], defaults: Mapping[str, int | None]) -> dict[str, int]:
    """*given* over *defaults*, each a uint64; a default of None marks a value that must be given."""
    missing = [name for name, default in defaults.items() if default is None and name not in given]
    require(not missing, f"{kind} needs {' and '.join(missing)}")
    return {name: uint64(name, given.get(name, default)) for name, default in defaults.items()}


@dataclass(frozen=True, eq=False, init=False)
class CacheKey:
    """``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64-1)``: a batch entry of a cache, by request or prefix.

    ``prompt_cluster_id`` may stand for ``cluster_id``. Exactly one of ``req_id`` and ``prefix_id`` should differ from
    2**64-1; a pull checks that. All are uint64. Errors: TypeError, ValueError, LLMException(LLM_PARAM_INVALID) for a
    missing, surplus or unknown argument.
    """

    cluster_id: int
    req_id: int
    model_id: int
    prefix_id: int

    @overload
    def __init__(self, cluster_id: int, req_id: int, model_id: int = 0, prefix_id: int = INVALID_ID) -> None: ...
    @overload
    def __init__(
        self, *, prompt_cluster_id: int, req_id: int, model_id: int = 0, prefix_id: int = INVALID_ID
    ) -> None: ...
    def __init__(self, *args: int, **kwargs: int) -> None:
        defaults = {"cluster_id": None, "req_id": None, "model_id": 0, "prefix_id": INVALID_ID}
        vars(self).update(_complete("CacheKey", _arguments("CacheKey", tuple(defaults), args, kwargs), defaults))

    @property
    def prompt_cluster_id(self) -> int:
        """The older name of ``cluster_id``."""
        return self.cluster_id

    @property
    def is_prefix(self) -> bool:
        """Whether the key names a prefix; it does as soon as ``prefix_id`` is set, with or without ``req_id``."""
        return self.prefix_id != INVALID_ID

    @property
    def is_padding(self) -> bool:
        """Whether the key names nothing: at allocation it leaves its batch entry without a key."""
        return self.req_id == INVALID_ID and not self.is_prefix


@dataclass(frozen=True, eq=False, init=False)
class BlocksCacheKey:
    """``BlocksCacheKey(cluster_id, model_id=0)``: the cache of blocks that a cluster offers for a model.

    ``prompt_cluster_id`` may stand for ``cluster_id``. Errors as for CacheKey. Differs from the original: both values
    are checked (uint64) here.
    """

    cluster_id: int
    model_id: int

    @overload
    def __init__(self, cluster_id: int, model_id: int = 0) -> None: ...
    @overload
    def __init__(self, *, prompt_cluster_id: int, model_id: int = 0) -> None: ...
    def __init__(self, *args: int, **kwargs: int) -> None:
        defaults = {"cluster_id": None, "model_id": 0}
        given = _arguments("BlocksCacheKey", tuple(defaults), args, kwargs)
        vars(self).update(_complete("BlocksCacheKey", given, defaults))

    @property
    def prompt_cluster_id(self) -> int:
        """The older name of ``cluster_id``."""
        return self.cluster_id


@dataclass(frozen=True, eq=False)
class CacheKeyByIdAndIndex:
    """A batch entry by the id of its cache on that cluster: uint64, int64, uint32. Errors: TypeError, ValueError."""

    cluster_id: int
    cache_id: int
    batch_index: int = 0

    def __post_init__(self) -> None:
        vars(self).update(
            cluster_id=uint64("cluster_id", self.cluster_id),
            cache_id=int64("cache_id", self.cache_id),
            batch_index=uint32("batch_index", self.batch_index),
        )
