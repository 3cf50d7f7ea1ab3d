"""The checks of the binding, the device and contexts, and the order of all that needs no second process.

Runs in a process that may hang or die of it. It must not print, nor know who listens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from kvpull_async.memory._acl import OPTIONAL, REQUIRED, Acl, load
from kvpull_async.memory.npu.codes import CONTEXT_NULL, meaning
from kvpull_async.self_test.copies import check_copies, check_ends
from kvpull_async.self_test.lines import Steps, Stop, Wrong
from kvpull_async.self_test.raw import Raw
from kvpull_async.self_test.speed import check_speed

__all__ = ["check_device"]

T = TypeVar("T")
BINDING, OPENING, CONTEXTS = 1, 2, 3
_GIB = 1024**3


def check_device(steps: Steps, *, number: int, nbytes: int, patience: float) -> None:
    """All of it for device `number`: `nbytes` for each buffer of the bandwidth's, `patience` seconds for one copy.

    Raises Stop where nothing of the device can be used.
    """
    raw = Raw(_loaded(steps), number)
    _open(steps, raw)
    steps.run(CONTEXTS, "this thread", lambda: _own_context(raw), needed=True)
    steps.run(CONTEXTS, "a second thread", lambda: elsewhere(lambda: _bare(raw)))
    steps.run(CONTEXTS, "a second thread that binds the device", lambda: _second_context(raw))
    milliseconds = int(patience * 1000)
    for section in (check_copies, check_ends):
        try:
            section(steps, raw, milliseconds)
        except Stop:
            continue
    check_speed(steps, raw, nbytes=nbytes, milliseconds=milliseconds)


def elsewhere(call: Callable[[], T]) -> T:
    """The same in a new thread, which has no context of its own."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  (raised where it was asked for)
            failed.append(error)

    thread = threading.Thread(target=run, name="self-test")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _loaded(steps: Steps) -> Acl:
    found: list[Acl] = []

    def library() -> str:
        found.append(load(os.environ))
        return found[0].path

    def functions() -> str:
        acl = found[0]
        lacking = f"without {', '.join(acl.missing)}" if acl.missing else "none is missing"
        return f"{len(REQUIRED)} required and {len(OPTIONAL) - len(acl.missing)} optional functions; {lacking}"

    steps.run(BINDING, "library", library, needed=True)
    steps.run(BINDING, "functions", functions)
    return found[0]


def _open(steps: Steps, raw: Raw) -> None:
    def initialise() -> str:
        return "aclInit answers 0" if raw.initialise() else "aclInit answers 100002: it had been done before"

    def devices() -> str:
        count = raw.count()
        if not 0 <= raw.number < count:
            raise Wrong(f"there is no device {raw.number}: AscendCL sees {count}")
        return f"{count}, of which device {raw.number} is tested"

    def device() -> str:
        raw.bind()
        memory = raw.memory()
        room = f"{memory[0] / _GIB:.1f} of {memory[1] / _GIB:.1f} GiB free" if memory else "memory unknown"
        return f"{raw.soc() or 'unknown chip'}, interface {raw.version() or 'unknown'}, {room}"

    steps.run(OPENING, "initialisation", initialise, needed=True)
    steps.run(OPENING, "devices", devices, needed=True)
    steps.run(OPENING, f"device {raw.number}", device, needed=True)


def _own_context(raw: Raw) -> str:
    code, context = raw.context()
    if code != 0 or not context:
        raise Wrong(f"has none after aclrtSetDevice: aclrtGetCurrentContext answers {code}")
    return "has a context after aclrtSetDevice"


def _bare(raw: Raw) -> str:
    code, context = raw.context()
    refused = raw.try_malloc(64)
    if context:
        return "has a context of its own accord; maybe a default device is configured"
    if refused == 0:
        raise Wrong("may allocate without a context")
    named = f"{refused} ({meaning(refused).name})"
    if refused != CONTEXT_NULL:
        raise Wrong(f"is refused with {named} instead of {CONTEXT_NULL}")
    return f"has none (aclrtGetCurrentContext answers {code}), and is refused with {named}"


def _second_context(raw: Raw) -> str:
    def bound() -> tuple[int, int | None]:
        raw.bind()
        return raw.context()

    mine, theirs = raw.context(), elsewhere(bound)
    if theirs != mine:
        raise Wrong(f"gets another context: {theirs} instead of {mine} (code and handle)")
    return "gets the same context"
