"""What the codes of AscendCL mean: a name, a status for the caller, and what a code says of the work and the device.

It raises and never logs, waits or repeats; which call is worth repeating is for the callers of `check` to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kvpull_async.memory._acl import Acl
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError

__all__ = [
    "CODES",
    "CONTEXT_NULL",
    "FEATURE_NOT_SUPPORT",
    "REPEAT_INITIALIZE",
    "STILL_RUNNING",
    "UNSUPPORTED",
    "AclError",
    "AclTimeoutError",
    "Meaning",
    "check",
    "drop_message",
    "failure",
    "meaning",
    "suspect",
]


class Meaning(NamedTuple):
    """A code's name, without ACL_ERROR and RT, and the status that a caller of ours sees."""

    name: str
    status: LLMStatusCode


_FAILED = LLMStatusCode.LLM_FAILED
_PARAM = LLMStatusCode.LLM_PARAM_INVALID
_TIMEOUT = LLMStatusCode.LLM_TIMEOUT
_MEMORY = LLMStatusCode.LLM_OUT_OF_MEMORY
_ABSENT = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
_BROKEN_MEMORY = LLMStatusCode.LLM_DEVICE_MEM_ERROR
_REMOTE = LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR

# Answers that are expected at some places and are no failure there.
REPEAT_INITIALIZE: Final = 100002
CONTEXT_NULL: Final = 107002
FEATURE_NOT_SUPPORT: Final = 207000

# Where a code tells of a mistake, the status says whose: LLM_PARAM_INVALID if addresses and devices, which the caller
# gave, may be at fault; handles and the order of calls are ours alone.
CODES: Final[Mapping[int, Meaning]] = {
    100000: Meaning("INVALID_PARAM", _PARAM),
    100001: Meaning("UNINITIALIZE", _FAILED),
    REPEAT_INITIALIZE: Meaning("REPEAT_INITIALIZE", _FAILED),
    100003: Meaning("INVALID_FILE", _FAILED),
    100037: Meaning("REPEAT_FINALIZE", _FAILED),
    100039: Meaning("COMPILING_STUB_MODE", _ABSENT),
    107000: Meaning("PARAM_INVALID", _PARAM),
    107001: Meaning("INVALID_DEVICEID", _PARAM),
    CONTEXT_NULL: Meaning("CONTEXT_NULL", _FAILED),
    107003: Meaning("STREAM_CONTEXT", _FAILED),
    107008: Meaning("ADDR_UNALIGNED", _PARAM),
    107016: Meaning("INVALID_MEMORY_TYPE", _PARAM),
    107017: Meaning("INVALID_HANDLE", _FAILED),
    107018: Meaning("INVALID_MALLOC_TYPE", _FAILED),
    107019: Meaning("WAIT_TIMEOUT", _TIMEOUT),
    107020: Meaning("TASK_TIMEOUT", _TIMEOUT),
    107022: Meaning("DEVICE_TASK_ABORT", _FAILED),
    107023: Meaning("STREAM_ABORT", _FAILED),
    107030: Meaning("CAPTURE_MODE_NOT_SUPPORT", _FAILED),
    107041: Meaning("CAPTURE_MODE_BLOCK_ASYNC", _FAILED),
    200000: Meaning("BAD_ALLOC", _MEMORY),
    200001: Meaning("API_NOT_SUPPORT", _ABSENT),
    200002: Meaning("INVALID_DEVICE", _PARAM),
    200003: Meaning("MEMORY_ADDRESS_UNALIGNED", _PARAM),
    200004: Meaning("RESOURCE_NOT_MATCH", _FAILED),
    200005: Meaning("INVALID_RESOURCE_HANDLE", _FAILED),
    200006: Meaning("FEATURE_UNSUPPORTED", _ABSENT),
    FEATURE_NOT_SUPPORT: Meaning("FEATURE_NOT_SUPPORT", _ABSENT),
    207001: Meaning("MEMORY_ALLOCATION", _MEMORY),
    207002: Meaning("MEMORY_FREE", _FAILED),
    207004: Meaning("NO_DEVICE", _FAILED),
    207005: Meaning("RESOURCE_ALLOC_FAIL", _FAILED),
    207006: Meaning("NO_PERMISSION", _FAILED),
    207007: Meaning("NO_EVENT_RESOURCE", _FAILED),
    207008: Meaning("NO_STREAM_RESOURCE", _FAILED),
    207018: Meaning("DEVICE_OOM", _MEMORY),
    207020: Meaning("TIMEOUT", _TIMEOUT),
    300000: Meaning("STORAGE_OVER_LIMIT", _FAILED),
    500000: Meaning("INTERNAL_ERROR", _FAILED),
    500001: Meaning("FAILURE", _FAILED),
    500003: Meaning("RT_FAILURE", _FAILED),
    500004: Meaning("DRV_FAILURE", _FAILED),
    507000: Meaning("INTERNAL_ERROR", _FAILED),
    507001: Meaning("TS_ERROR", _FAILED),
    507010: Meaning("LOST_HEARTBEAT", _FAILED),
    507012: Meaning("REPORT_TIMEOUT", _FAILED),
    507013: Meaning("SYS_DMA", _FAILED),
    507022: Meaning("IPC_ERROR", _FAILED),
    507033: Meaning("DEV_SETUP_ERROR", _FAILED),
    507046: Meaning("STREAM_SYNC_TIMEOUT", _TIMEOUT),
    507047: Meaning("EVENT_SYNC_TIMEOUT", _TIMEOUT),
    507052: Meaning("COPY_DATA", _FAILED),
    507053: Meaning("DEVICE_MEM_ERROR", _BROKEN_MEMORY),
    507054: Meaning("HBM_MULTI_BIT_ECC_ERROR", _BROKEN_MEMORY),
    507055: Meaning("SUSPECT_DEVICE_MEM_ERROR", _BROKEN_MEMORY),
    507056: Meaning("LINK_ERROR", _REMOTE),
    507057: Meaning("SUSPECT_REMOTE_ERROR", _REMOTE),
    507899: Meaning("DRV_INTERNAL_ERROR", _FAILED),
    507901: Meaning("SOCKET_CLOSE", _FAILED),
    507910: Meaning("HOST_MEMORY_ALREADY_REGISTERED", _FAILED),
    507911: Meaning("HOST_MEMORY_NOT_REGISTERED", _FAILED),
}

# Releases differ in their codes, so one that the table lacks is known by its first digit. None of these statuses
# blames the caller: a mistake nobody foresaw is ours.
_CLASSES: Final[Mapping[int, str]] = {
    1: "unknown, a mistake in the call",
    2: "unknown, resources or support are lacking",
    3: "unknown, full or empty",
    5: "unknown, inside the hardware or its software",
}

# What this device or release cannot do, and never will.
UNSUPPORTED: Final[frozenset[int]] = frozenset({200001, 200006, FEATURE_NOT_SUPPORT})

# The work may still be running: nobody has seen its end, so its buffers must neither be freed nor used again. After a
# code that leaves the device suspect the same care is due.
STILL_RUNNING: Final[frozenset[int]] = frozenset({107019, 107020, 207020, 507010, 507012, 507046, 507047, 507901})

_NOT_THE_DEVICE = {507046, 507047}
_NO_DEVICE = 207004
_MESSAGE_LENGTH = 500


def meaning(code: int) -> Meaning:
    """What a code other than 0 means; never fails, whatever the code."""
    known = CODES.get(code)
    return known or Meaning(_CLASSES.get(code // 100_000, "unknown"), _FAILED)


def suspect(code: int) -> bool:
    """Whether the device itself may be lost, and not only this piece of work."""
    return (code // 100_000 == 5 and code not in _NOT_THE_DEVICE) or code == _NO_DEVICE


class AclError(LLMException):
    """A function of the runtime answered ``code``. Repeating is correct where memory was short or time ran out."""

    def __init__(self, *args: object, function: str = "", code: int = 0, **fields: Any) -> None:
        status = meaning(code).status
        fields.setdefault("status_code", status)
        fields.setdefault("retry_safe", status in (_MEMORY, _TIMEOUT))
        super().__init__(*args, **fields)
        self.function = function
        self.code = code


class AclTimeoutError(AclError, LLMTimeoutError):
    """The same for the codes of a wait that took too long; also a ``TimeoutError``."""


def failure(function: str, code: int, message: str = "") -> AclError:
    """The exception for a code other than 0 that *function* answered; *message* is the runtime's own, newest first."""
    known = meaning(code)
    text = f"{function} answered {code} ({known.name})"
    if message := " ".join(message.split())[:_MESSAGE_LENGTH]:
        text = f"{text}: {message}"
    kind = AclTimeoutError if known.status is _TIMEOUT else AclError
    return kind(text, function=function, code=code)


def drop_message(acl: Acl) -> None:
    """After a code that was no failure, on the thread that got it: or the next error would carry this one's message."""
    if acl.aclGetRecentErrMsg is not None:
        acl.aclGetRecentErrMsg()


def check(acl: Acl, function: str, code: int) -> None:
    """Raise for every code but 0, with the runtime's own message.

    On the thread that made the call: the runtime keeps its message for that thread, and forgets it when asked.

    Raises:
        AclError: The code is not 0; AclTimeoutError if it says that time ran out.
    """
    if code:
        message = acl.aclGetRecentErrMsg() if acl.aclGetRecentErrMsg is not None else None
        raise failure(function, code, (message or b"").decode(errors="replace"))
