"""What tests of `transfer_cache_async` share: synchronizers, and a stand-in for the push of one layer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from kvpull_async import LayerSynchronizer
from kvpull_async._deadline import Deadline
from kvpull_async.managers.pushes import Parcel

BOUND = 30.0
"""Seconds that a test waits for what must come; reached only when it fails."""


class Ready(LayerSynchronizer):
    """Every layer is ready at once; `asked` are the arguments of the calls, `threads` where they were made."""

    def __init__(self, answer: Callable[[int], Any] = lambda _: True) -> None:
        self.asked: list[tuple[int, int | None]] = []
        self.threads: list[threading.Thread] = []
        self._answer = answer

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append((layer_index, timeout_in_millis))
        self.threads.append(threading.current_thread())
        answer: bool = self._answer(layer_index)
        return answer

    @property
    def layers(self) -> list[int]:
        return [layer for layer, _ in self.asked]


class ReadyLater(LayerSynchronizer):
    """A coroutine function, which answers with what `answer` returns."""

    def __init__(self, answer: Callable[[int], Any] = lambda _: True) -> None:
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.layers: list[int] = []
        self._answer = answer

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.loops.append(asyncio.get_running_loop())
        self.layers.append(layer_index)
        await asyncio.sleep(0)
        answer: bool = self._answer(layer_index)
        return answer


class Held(LayerSynchronizer):
    """Blocks until it is let go; `entered` says that it has been called."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._go = threading.Event()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.entered.set()
        return self._go.wait(BOUND)

    def let_go(self) -> None:
        self._go.set()


class Sends:
    """Stands in for `pushes.send`: notes what is sent, on the core, and does for each parcel what `act` says."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []
        self.remaining: list[float] = []
        self.traces: list[str] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        """The id of each push, and what it is a part of."""
        self.act: Callable[[Parcel], Any] = lambda _: None

    async def __call__(
        self, node: Any, dialect: Any, parcel: Parcel, *, pull_id: str, operation: str, deadline: Deadline,
        part_of: dict[str, Any], traceparent: str = "",
    ) -> None:  # fmt: skip
        assert operation == "transfer_cache_async"
        self.parcels.append(parcel)
        self.remaining.append(deadline.remaining)
        self.traces.append(traceparent)
        self.told.append((pull_id, part_of))
        acted = self.act(parcel)
        if asyncio.iscoroutine(acted):
            await acted

    @property
    def layers(self) -> list[tuple[int, int]]:
        """(cluster, source layer) of each, in order."""
        return [(parcel.aim.cluster_id, parcel.tensors.start // 2) for parcel in self.parcels]
