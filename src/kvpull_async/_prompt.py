"""Waits that cost no turn of the loop: a future whose waiter goes on at once, and coroutines that run by hand as long
as they need no task. It must not know what is waited for.

A turn of the loop is a system call and more; a small pull is little else than its turns.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections.abc import Callable, Generator
from typing import Any, TypeVar

__all__ = ["Prompt", "by_hand"]

T = TypeVar("T")


class Prompt(asyncio.Future[T]):
    """`hand` runs the first one who waits before it returns; in all other ways a plain future."""

    _waiter: tuple[Callable[[asyncio.Future[T]], object], contextvars.Context | None] | None = None
    _shared = False

    @property
    def awaited(self) -> bool:
        """Whether `hand` would run whoever waits, and nobody else comes later."""
        return self._waiter is not None and not self._shared and asyncio.current_task(self.get_loop()) is None

    def hand(self, result: T) -> None:
        """`set_result`, and then the waiter. Inside another task the waiter's turn comes with the loop's next."""
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            super().set_result(result)
        elif asyncio.current_task(self.get_loop()) is not None:
            self._waiter = waiter
            self.set_result(result)
        else:
            super().set_result(result)
            callback, context = waiter
            (contextvars.copy_context() if context is None else context).run(callback, self)

    def add_done_callback(  # type: ignore[override]  # of any future: what is called gets this one
        self, callback: Callable[[asyncio.Future[T]], object], /, *, context: contextvars.Context | None = None
    ) -> None:
        if self._waiter is None and not self.done():
            self._waiter = (callback, context)
        else:
            self._shared = True
            super().add_done_callback(callback, context=context)

    def remove_done_callback(self, callback: Callable[[asyncio.Future[T]], object], /) -> int:  # type: ignore[override]
        if self._waiter is not None and self._waiter[0] == callback:
            self._waiter = None
            return 1 + super().remove_done_callback(callback)
        return super().remove_done_callback(callback)

    def set_result(self, result: T, /) -> None:
        self._give_way()
        super().set_result(result)

    def set_exception(self, exception: type | BaseException, /) -> None:
        self._give_way()
        super().set_exception(exception)

    def cancel(self, msg: Any = None) -> bool:
        self._give_way()
        return super().cancel(msg)

    def _give_way(self) -> None:
        """It ends as any future does: its waiter is told in the loop's next turn."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            super().add_done_callback(waiter[0], context=waiter[1])


@types.coroutine
def by_hand(until: Prompt[Any] | None = None) -> Generator[Prompt[Any] | None, None, None]:
    """For coroutines that are run without a task (see `CoreLoop.call`): go on when `until` is done, however it ended.
    With None go on in a task: nothing but this may be awaited before. Where there is a task already it is one turn of
    the loop.
    """
    loop = asyncio.get_running_loop() if until is None else until.get_loop()  # the former is a system call
    yield until if asyncio.current_task(loop) is None else None
