"""Tells a peer when what it waits for has been published here. It must not grant anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvpull_async.lane import Lane
from kvpull_async.protocol import frames
from kvpull_async.registry import Registry

__all__ = ["Watching"]


class Watching:
    """The watches of one lane, of that cluster. The session bounds their number."""

    def __init__(self, lane: Lane, registry: Registry, peer: int) -> None:
        self._lane = lane
        self._peer = peer
        self._registry = registry
        self._watches: dict[int, Callable[[], None]] = {}

    def begin(self, watch: frames.Watch) -> None:
        number = watch.identity if watch.key != "blocks" else 0
        name = (watch.key, number, watch.entry if watch.key == "cache" else watch.model_id)
        appeared = partial(self._appeared, watch.request_id)
        self._watches[watch.request_id] = _nothing
        forget = self._registry.watch(name, appeared, peer=self._peer)
        if watch.request_id in self._watches:  # it is not here yet
            self._watches[watch.request_id] = forget

    def end(self, request_id: int) -> None:
        self._watches.pop(request_id, _nothing)()

    def abort(self) -> None:
        for request_id in list(self._watches):
            self.end(request_id)

    def _appeared(self, request_id: int) -> None:
        self.end(request_id)
        self._lane.session.end_request(request_id)
        self._lane.post(frames.Appeared(request_id))


def _nothing() -> None:
    """There is nothing to forget."""
