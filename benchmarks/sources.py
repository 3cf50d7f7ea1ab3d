"""The prefill process that the benchmarks of lag, deadlines and fairness pull from. It must not measure pulls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kv_nodes import KvSource
from kvpull_async.serve import Serving
from lag import LagMeter
from workloads import Shape, build

__all__ = ["prefill_side"]


def prefill_side(
    shape: Shape, cluster_id: int, seed: int, transport: str = "tcp", allocated: bool = False
) -> Mapping[str, Callable[..., Any]]:
    """The answers of the source process: "open", "mute", "start_lag" and "stop_lag" of its core's loop, "close"."""
    source = KvSource(cluster_id=cluster_id, allocated=allocated, transfer_backend=transport)
    works = list(build(shape, seed=seed).values())
    meters: list[LagMeter] = []

    def start_lag() -> None:
        assert source.node is not None
        meters.append(LagMeter(source.node.core_loop))

    return {
        "open": lambda: source.open(shape, works, seed=seed),
        "mute": _mute,
        "start_lag": start_lag,
        "stop_lag": lambda: meters.pop().stop(),
        "close": source.close,
    }


def _mute() -> None:
    """From now on this process greets, answers heartbeats, and never serves a request that comes."""

    def serve_nothing(*_: object) -> bool:
        """The requests stay where they are."""
        return False

    for name in ("_next", "_answered"):  # there is no option for being broken
        setattr(Serving, name, serve_nothing)
