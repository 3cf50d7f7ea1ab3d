"""Status codes and exceptions of the public API, and the table from native numbers to them.

Every other module may import this one; it imports nothing of the package and never logs, waits or retries.
"""

from __future__ import annotations

import copy
from enum import IntEnum
from typing import Any

__all__ = [
    "TIMEOUTS",
    "LLMException",
    "LLMStatusCode",
    "LLMTimeoutError",
    "NamedIntEnum",
    "Status",
    "fresh",
    "status_of",
    "worth_repeating",
]

_BASE = 0x5010B000


class NamedIntEnum(IntEnum):
    """An IntEnum whose text is ``Class.NAME`` on every Python version (3.11 turned it into the number)."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return int.__format__(self, spec) if spec else str(self)


class LLMStatusCode(NamedIntEnum):
    """Outcome of a call. LLM-DataDist documentation: the numbers are those of the original."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 2
    LLM_REPEAT_REQUEST = _BASE + 3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 4
    LLM_PARAM_INVALID = _BASE + 5
    LLM_ENGINE_FINALIZED = _BASE + 6
    LLM_NOT_YET_LINK = _BASE + 7
    LLM_ALREADY_LINK = _BASE + 8
    LLM_LINK_FAILED = _BASE + 9
    LLM_UNLINK_FAILED = _BASE + 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 12
    LLM_PROCESSING_LINK = _BASE + 13
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 14
    LLM_PREFIX_ALREADY_EXIST = _BASE + 15
    LLM_PREFIX_NOT_EXIST = _BASE + 16
    LLM_SEQ_LENOVERLIMIT = _BASE + 17
    LLM_NO_FREE_BLOCK = _BASE + 18
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 19
    LLM_EXIST_LINK = _BASE + 24
    LLM_FEATURE_NOT_ENABLED = _BASE + 25
    LLM_TIMEOUT = _BASE + 26
    LLM_LINK_BUSY = _BASE + 27
    LLM_OUT_OF_MEMORY = _BASE + 28
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1


_BY_NUMBER = {int(code): code for code in LLMStatusCode if code is not LLMStatusCode.LLM_UNKNOWN_ERROR}


def status_of(number: int) -> LLMStatusCode:
    """The status for a number from a native engine or a peer.

    LLM-DataDist documentation: a number without a member (its internal ones, 20 to 23, included) is LLM_FAILED, and
    LLM_UNKNOWN_ERROR is never produced.
    """
    return _BY_NUMBER.get(number, LLMStatusCode.LLM_FAILED)


TIMEOUTS = (LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
"""What a peer refuses with is an LLMTimeoutError here, too."""
_FOR_EVER = (LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


def worth_repeating(status: LLMStatusCode) -> bool:
    """Whether a peer that refused with it might not refuse the same words again."""
    return status not in _FOR_EVER


class LLMException(RuntimeError):
    """A failure at run time.

    ``status_code`` says what failed and takes any value, as in the original: callers build these with odd codes.
    Attributes of our own: ``peer`` (the remote cluster id or address), ``operation`` (the call that failed),
    ``elapsed_ms``, ``retry_safe`` (repeating the call is correct: nothing was consumed) and ``destination_unsafe``
    (something may still write to the destination: wait for ``manager.settled(cache)`` before using or freeing it).
    """

    def __init__(
        self,
        *args: object,
        status_code: Any = LLMStatusCode.LLM_SUCCESS,
        peer: int | str | None = None,
        operation: str | None = None,
        elapsed_ms: float | None = None,
        retry_safe: bool = False,
        destination_unsafe: bool = False,
    ) -> None:
        super().__init__(*args)
        self._status_code = status_code
        self.peer = peer
        self.operation = operation
        self.elapsed_ms = elapsed_ms
        self.retry_safe = retry_safe
        self.destination_unsafe = destination_unsafe

    @property
    def status_code(self) -> Any:
        """An LLMStatusCode, or whatever the raiser gave."""
        return self._status_code

    def __str__(self) -> str:
        # Without this a subclass that is also an OSError prints its arguments as errno and strerror.
        return BaseException.__str__(self)


class LLMTimeoutError(LLMException, TimeoutError):
    """The deadline passed. Also a ``TimeoutError``; the link stays usable, so the call may be repeated.

    Its status is LLM_WAIT_PROCESS_TIMEOUT from the older manager and LLM_TIMEOUT from the newer one.
    """

    def __init__(self, *args: object, status_code: Any = LLMStatusCode.LLM_TIMEOUT, **fields: Any) -> None:
        super().__init__(*args, status_code=status_code, **fields)


def fresh(error: LLMException) -> LLMException:
    """A new instance equal to *error*: class, arguments, fields, notes and cause.

    An exception that ends several waiting calls must be one object per waiter: a shared one mixes their tracebacks.
    """
    twin = copy.copy(error)
    if "__notes__" in vars(twin):
        vars(twin)["__notes__"] = list(vars(twin)["__notes__"])
    twin.__cause__ = error.__cause__
    twin.__suppress_context__ = error.__suppress_context__
    return twin


class Status:
    """A status as an object, as some callers of the original keep it."""

    __slots__ = ("_status_code",)

    def __init__(self, status: LLMStatusCode) -> None:
        self._status_code = status

    def is_ok(self) -> bool:
        """Whether the status is LLM_SUCCESS."""
        return self._status_code == LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        """The status given at construction."""
        return self._status_code

    def __repr__(self) -> str:
        return f"Status({self._status_code!s})"
