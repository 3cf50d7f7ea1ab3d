"""Which layers of a running pull have landed: told in bytes by whatever thread moves them, taken by one consumer.

It must not know how bytes move, or how the consumer waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Landed"]

_NEVER: Final = 2**63


class Landed:
    """Made before the pull, `expect` is called on the core before its first byte, `bytes_landed` while bytes come.

    A consumer that finds nothing is told by `signal` once there is something.
    """

    def __init__(self) -> None:
        self.signal: Callable[[], object] = bool
        """Called, from any thread, when something has landed after `take` had found nothing. It must not wait."""
        self._lock = threading.RLock()  # protects _complete and _waiting; a signal handler may take layers, too
        self._layers = range(0)
        self._layer_nbytes = _NEVER
        self._known = False
        self._complete = 0
        self._taken = 0
        self._waiting = False

    def expect(self, layers: range, layer_nbytes: int) -> None:
        """The numbers of the layers in stream order, and the bytes of each."""
        self._layers, self._layer_nbytes, self._known = layers, layer_nbytes, True

    def bytes_landed(self, total: int) -> None:
        """So many bytes have landed so far. From one thread at a time, whichever it is."""
        complete = total // self._layer_nbytes
        with self._lock:
            if complete <= self._complete:
                return
            self._complete = complete
            waiting, self._waiting = self._waiting, False
        if waiting:
            self.signal()

    def all_landed(self) -> None:
        """The pull has ended well: whatever was told before, it is all there."""
        self.bytes_landed(len(self._layers) * self._layer_nbytes)

    def take(self) -> int | None:
        """The next layer, if it has landed."""
        with self._lock:
            if self._taken == self._complete:
                self._waiting = True
                return None
        self._taken += 1
        return self._layers[self._taken - 1]

    @property
    def all_taken(self) -> bool:
        return self._known and self._taken == len(self._layers)

    def __repr__(self) -> str:
        return f"<Landed {self._complete} of {len(self._layers)} layers, {self._taken} taken>"
