"""How many bytes of one placement may be allocated, and how many are. It must not know what they are."""

from __future__ import annotations

import threading

from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement

__all__ = ["Budget"]


class Budget:
    """`limit` bytes of memory of a placement, None for as many as there are. Used from any thread."""

    def __init__(self, placement: Placement, limit: int | None) -> None:
        self.used: int = 0
        self._placement = placement
        self._limit = limit
        self._lock = threading.Lock()  # protects used

    def reserve(self, nbytes: int) -> None:
        """LLM_OUT_OF_MEMORY when so many are not left."""
        with self._lock:
            if self._limit is not None and self.used + nbytes > self._limit:
                raise LLMException(
                    f"{self._placement.name} memory: {nbytes} bytes asked for, {self._limit - self.used} of "
                    f"{self._limit} are free",
                    status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
                )
            self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes

    def __repr__(self) -> str:
        return f"<Budget {self._placement.name} used={self.used} of {self._limit}>"
