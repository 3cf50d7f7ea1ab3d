"""Layers as they land, blocking: what `pull_layers` of the blocking managers returns.

It must not contain more than the waiting.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from types import TracebackType
from typing import Final

from kvpull_async.entry import LayerPull

__all__ = ["LandingLayers"]

_SIGNALS: Final = 0.2
"""Seconds after which a signal is noticed at the latest by a thread that blocks."""


class LandingLayers:
    """An iterator over the numbers of the layers (int), in order, each when it has landed. Also a context manager.

    Entering the block starts the pull and its deadline, else the first `next`. The pull goes on whether or not anybody
    iterates. The bytes of a layer that was given are final. The iteration ends when the pull has; a pull that fails
    raises out of it, once. `close`, or leaving the block, before all layers were taken cancels the pull and returns
    once nothing writes any more; later it waits for the end and raises what went wrong. For one thread at a time.
    """

    def __init__(self, pull: LayerPull) -> None:
        self._pull = pull
        self._bell = _Bell()

    def __enter__(self) -> LandingLayers:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        if self._pull.begun or self._pull.over:
            raise RuntimeError("this pull has begun already; call pull_layers again for another one")
        try:
            self._begin()
        except BaseException:  # an interrupt: the block is not entered, and nobody will leave it
            self._stop()
            raise
        return self

    def __iter__(self) -> LandingLayers:
        return self

    def __next__(self) -> int:
        pull = self._pull
        try:
            if not pull.begun and not pull.over:
                self._begin()
            while not pull.over:
                layer = pull.take()
                if layer is not None:
                    return layer
                if not pull.over:
                    self._bell.wait(_SIGNALS)
        except BaseException:  # an interrupt; a failure of the pull leaves nothing to stop
            self._stop()
            raise
        raise StopIteration

    def close(self) -> None:
        """Give up the layers that were not taken; harmless when there are none, or when it is closed already."""
        pull = self._pull
        if not pull.begun:
            pull.over = True
        elif not pull.over and (pull.all_taken or pull.failed):
            self._finish()
        else:
            self._stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stop()

    def __del__(self) -> None:
        if self._pull.begun and not self._pull.over:
            self._pull.drop()
            warnings.warn(
                f"{self!r} was dropped while it ran: use `with`, or `close` it",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _begin(self) -> None:
        self._pull.begin(self._bell.ring, self._bell.ring)

    def _finish(self) -> None:
        try:
            self._until_ended(math.inf)
        except BaseException:
            self._stop()
            raise
        self._pull.take()

    def _stop(self) -> None:
        pull = self._pull
        if pull.begun and not pull.over:
            pull.cancel()
            try:
                self._until_ended(pull.patience)
            finally:
                pull.leave()

    def _until_ended(self, bound: float) -> None:
        give_up = time.monotonic() + bound
        while not self._pull.ended and time.monotonic() < give_up:
            self._bell.wait(_SIGNALS)

    def __repr__(self) -> str:
        return f"<LandingLayers {self._pull!r}>"


class _Bell:
    """Rung by any thread, heard by one, which signals may interrupt. Rings that nobody heard are one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> bool:
        with contextlib.suppress(RuntimeError):  # rung already
            self._lock.release()
        return True

    def wait(self, timeout: float) -> None:
        """At most `timeout` seconds; it may return without a ring."""
        self._lock.acquire(timeout=timeout)
