"""One `pull_layers` from its begin to its end, without the waiting, in which the two faces differ.

The pull runs on the core like any other; here its layers and its end are looked at and told to the caller, each once.
It must not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvpull_async.core import Call
from kvpull_async.crossing import Told
from kvpull_async.engine import Engine
from kvpull_async.managers.manager import LayersAsked

__all__ = ["LayerPull"]


class LayerPull:
    """Used by one consumer: `begin`, then `take` until `over`, and `leave` where it goes before that."""

    def __init__(self, engine: Engine, asked: LayersAsked) -> None:
        self.over: bool = False
        """Whether the consumer has been told the end, or has left."""
        self._engine = engine
        self._begin = asked.begin
        self._landed = asked.landed
        self._call: Call[None] | None = None
        self._told = contextlib.ExitStack()
        self._cancelled = False
        self._forget: Callable[[], object] = bool

    def begin(
        self,
        landed: Callable[[], object],
        ended: Callable[[], bool],
        *,
        caller: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Start the pull, once. `landed` is called when a layer has landed that `take` had not found, `ended` when the
        pull has ended; from any thread, and they must not wait. `caller` as for `Call.start`.
        """
        if caller is None:
            self._engine.core.check_thread()
        operation = self._begin()
        self._landed.signal = landed
        self._call = call = self._engine.call(operation)
        told = Told(operation, call)
        self._told.enter_context(told)
        self._forget = told.forget
        call.start(ended, caller=caller)

    @property
    def begun(self) -> bool:
        return self._call is not None

    @property
    def ended(self) -> bool:
        """Whether the pull has ended, and so nothing of it writes any more, unless its destination is quarantined."""
        return self._begun_call.ended

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error that the consumer has yet to hear of."""
        return self._begun_call.ended and not self._begun_call.succeeded

    @property
    def patience(self) -> float:
        """Seconds after a cancellation in which it ends, unless the core is stuck."""
        return self._begun_call.patience

    @property
    def all_taken(self) -> bool:
        return self._landed.all_taken

    @property
    def _begun_call(self) -> Call[None]:
        assert self._call is not None
        return self._call

    def take(self) -> int | None:
        """The next layer that has landed. None where there is none, because it has yet to come or all is `over`.

        A pull that has failed raises its error, once, also when layers have landed that were not taken.
        """
        call = self._begun_call
        ended = call.ended  # before looking for a layer: the last one lands before the end
        if not ended or call.succeeded:
            layer = self._landed.take()
            if layer is not None or not ended:
                return layer
        self.over = True
        with self._told:
            call.taken()
        return None

    def cancel(self) -> None:
        """Ask the pull to stop. Never waits."""
        if not self.ended:
            self._cancelled = True
            self._begun_call.cancel()

    def leave(self) -> None:
        """The consumer goes, when the pull has ended or the patience with it has: the log alone hears how."""
        if self.over:
            return
        self.over = True
        call = self._begun_call
        late = call.succeeded and self._cancelled
        error = asyncio.CancelledError() if late or not call.ended else call.error
        self._told.__exit__(None if error is None else type(error), error, None)

    def drop(self) -> None:
        """From a finalizer: cancel, in whatever thread and process that runs."""
        with contextlib.suppress(RuntimeError):
            self._engine.core.check_process()
            self._forget()
            self.cancel()

    def __repr__(self) -> str:
        return f"<LayerPull {self._landed!r}{' over' if self.over else ''}>"
