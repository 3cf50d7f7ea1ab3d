"""Which memory an engine gets, and how it is opened and closed without holding anybody's loop or borrowing a thread.

What knows Ascend is imported only where it is looked for. It must not know what becomes of the memory it chose.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers, stand_in_here
from kvpull_async.memory.base import MemoryBackend
from kvpull_async.memory.host import HostMemory
from kvpull_async.memory.publications import Publications
from kvpull_async.observe import Log
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import Placement

if TYPE_CHECKING:
    from kvpull_async.memory._acl import AclMissing

__all__ = ["ACL", "HOST", "Budgets", "Chosen", "Unopened", "choose", "choose_apart", "closing"]

Budgets = Mapping[Placement, "int | None"]
"""Bytes by placement; None: no limit."""

HOST: Final = "host"
ACL: Final = "acl"
_LOOK: Final = 0.0005
_ENDING: Final = 1.0
"""Seconds that a thread has to end which has nothing left to do."""
_PATIENCE: Final = 120.0
"""Seconds after which a device that does not open is given up: the driver of a sick one may never answer."""
_HOMES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_SIGNS: Final = (("/dev", "davinci*"), ("/usr/local", "Ascend"))
"""Folder and pattern of what is there where an NPU is."""
_ASK: Final = "has set_env.sh of CANN been run before Python started?"


@dataclass(frozen=True)
class Chosen:
    """A memory and why it was taken. It belongs to whoever got it, who has to close it."""

    memory: MemoryBackend
    publications: Publications
    backend: str
    reason: str
    device: Mapping[str, object] = field(default_factory=dict)
    """What is known of the NPU: device_id, library, soc, version, missing. Nothing of host memory."""
    lost: bool = False
    """An NPU seems to be meant to be there, and host memory serves in its place."""

    def attend(self, log: Log) -> None:
        """Let operators see the choice and what goes wrong with it, and replace workers that a device holds up."""
        failed = partial(_tell_failed, log)
        self.memory.watch(failed=failed, held=_Hanging(log, self.device.get("device_id")).held)
        if self.lost:
            log.warning("memory.chosen", backend=self.backend, reason=self.reason)
        elif not self.device:
            log.info("memory.chosen", backend=self.backend, reason=self.reason)
        else:
            known = self.device.get
            log.info(
                "memory.chosen", backend=self.backend, reason=self.reason, device_id=known("device_id"),
                library=known("library"), soc=known("soc"), version=known("version"), missing=known("missing"),
            )  # fmt: skip


def choose(backend: str, *, budgets: Budgets, device_ids: Sequence[int], environ: Mapping[str, str]) -> Chosen:
    """The memory for `device_backend` "auto", "host" or "acl". May block for seconds: never call it on a loop.

    "acl" raises where "auto" takes host memory: LLM_FEATURE_NOT_ENABLED without CANN, with what was tried, or for
    several devices; what the device's own error means if it cannot be opened.
    """
    if backend == HOST:
        return _host(budgets, "device_backend is host")
    try:
        return _acl(budgets, device_ids, environ)
    except _Declined as declined:
        if backend == ACL:
            raise declined.error from declined.why
        return _host(budgets, declined.reason, lost=declined.lost)


async def choose_apart(
    backend: str,
    *,
    budgets: Budgets,
    device_ids: Sequence[int],
    environ: Mapping[str, str],
    patience: float = _PATIENCE,
) -> Chosen:
    """As `choose`, in a thread that lives as long as the choice. After `patience` seconds "auto" takes host memory, and
    "acl" raises LLMTimeoutError. Memory that comes too late, or that nobody waits for any more, is closed there.
    """
    if backend == HOST:
        return choose(backend, budgets=budgets, device_ids=device_ids, environ=environ)
    thread = Workers(1, name="kvpull-choosing")
    try:
        running = thread.submit(choose, backend, budgets=budgets, device_ids=device_ids, environ=environ)
    except RuntimeError as error:
        text = f"the engine cannot start: {error}"
        raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED) from error
    answer = asyncio.wrap_future(running)
    taken = False
    try:
        await asyncio.wait([answer], timeout=patience)
        taken = answer.done()
    finally:
        if not taken:
            _give_up(answer, running, thread)
        thread.close(0)
    if taken:
        ending = Deadline.after_ms(_ENDING * 1000)
        while thread.close(0) and not ending.expired:  # noqa: ASYNC110  (a thread that ends sets no event)
            await asyncio.sleep(_LOOK)
        return answer.result()
    reason = f"the NPU could not be opened within {patience:g} s"
    if backend == ACL:
        raise LLMTimeoutError(f"device_backend acl: {reason}", retry_safe=True)
    return _host(budgets, reason, lost=True)


def closing(memory: MemoryBackend, *, failed: Callable[[str], object]) -> Callable[[float], bool]:
    """Begin to close a memory. The result waits at most so many seconds, and says whether that has ended; `failed` is
    told, in some thread, what it raised. Host memory is closed on the spot; a device may take its time.
    """
    close = partial(_closed, memory, failed)
    if not (isinstance(memory, HostMemory) or type(memory) is Unopened):
        thread = Workers(1, name="kvpull-closing")
        try:
            thread.submit(close)
        except RuntimeError:  # no thread is left: better here than not at all
            thread.close(0)
        else:
            return lambda timeout: not thread.close(timeout)
    close()
    return lambda _: True


def _not_yet(*_: object, **__: object) -> NoReturn:
    raise LLMException("`init` of this node has not ended yet", status_code=LLMStatusCode.LLM_FAILED)


class Unopened(MemoryBackend):
    """The memory of an engine whose `init` has not ended: there is none."""

    name = "unopened"
    direct = True
    allocate: Any = _not_yet
    free: Any = _not_yet
    adopt: Any = _not_yet
    views: Any = _not_yet
    landing: Any = _not_yet
    lending: Any = _not_yet


# -- inside ------------------------------------------------------------------------------------------------------------


class _Declined(Exception):
    """Device memory cannot be had: `error` is for who insists, `reason` for the log of who does not."""

    def __init__(
        self, error: LLMException, reason: str = "", *, lost: bool = True, why: BaseException | None = None
    ) -> None:
        super().__init__(reason)
        self.error = error
        self.reason = reason or str(error)
        self.lost = lost
        self.why = why


def _acl(budgets: Budgets, device_ids: Sequence[int], environ: Mapping[str, str]) -> Chosen:
    from kvpull_async.memory import _acl as binding  # noqa: PLC0415  (whoever needs no NPU pays for none)

    try:
        acl = binding.load(environ)
    except binding.AclMissing as missing:
        lost, asked = _meant(missing, environ), f"{missing}; {_ASK}"
        short = asked if lost else "no Ascend runtime library was found"
        raise _Declined(_refused(asked), short, lost=lost, why=missing) from missing
    if len(device_ids) != 1:
        several = f"a node has the memory of one device, device_id names {len(device_ids)}"
        raise _Declined(_refused(several), several)
    from kvpull_async.memory import ascend  # noqa: PLC0415

    try:
        memory = ascend.open_memory(acl, device_id=device_ids[0], budgets=budgets)
        try:
            device = memory.describe()
        except BaseException:
            memory.close()
            raise
    except LLMException as error:
        raise _Declined(error) from error
    except (OSError, RuntimeError) as error:  # no thread, or no descriptor
        told = LLMException(f"the NPU cannot be opened: {error}", status_code=LLMStatusCode.LLM_FAILED)
        raise _Declined(told, why=error) from error
    return Chosen(memory, memory.publications, ACL, f"device {device_ids[0]} could be opened", device)


def _refused(text: str) -> LLMException:
    return LLMException(f"device_backend acl: {text}", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


def _meant(missing: AclMissing, environ: Mapping[str, str]) -> bool:
    """Whether there is a sign that CANN should be there: its environment, a file that could not be used, or an NPU."""
    unusable = any("/" in attempt or attempt.count(".so") > 1 for attempt in missing.attempts)
    if unusable or any(environ.get(home) for home in _HOMES):
        return True
    return any(any(Path(folder).glob(pattern)) for folder, pattern in _SIGNS)


def _host(budgets: Budgets, reason: str, *, lost: bool = False) -> Chosen:
    memory = HostMemory(budgets)
    return Chosen(memory, memory.publications, HOST, reason, lost=lost)


def _give_up(answer: asyncio.Future[Chosen], running: Future[Chosen], thread: Workers) -> None:
    """Nobody takes the memory: the thread that opens it closes it, too."""
    if not answer.cancel() and not answer.cancelled():
        answer.exception()  # was looked at
    thread.submit(_close_late, running)


def _close_late(running: Future[Chosen]) -> None:
    if not running.cancelled() and running.exception() is None:
        running.result().memory.close()


class _Hanging:
    """Others take the places of threads that hang with a device; that any do is told when the first begins."""

    def __init__(self, log: Log, device_id: object) -> None:
        self._log = log
        self._device_id = device_id
        self._lock = threading.Lock()  # protects _threads
        self._threads = 0

    def held(self, begins: bool) -> None:
        with self._lock:
            self._threads += 1 if begins else -1
            first = begins and self._threads == 1
        stand_in_here(begins=begins)
        if first:
            self._log.warning("memory.hangs", device_id=self._device_id)


def _tell_failed(log: Log, error: BaseException) -> None:
    log.error("memory.failed", reason=str(error) or repr(error))


def _closed(memory: MemoryBackend, failed: Callable[[str], object]) -> None:
    try:
        memory.close()
    except Exception as error:  # noqa: BLE001  (the end goes on, whatever a device says)
        failed(f"the memory could not be closed: {error!r}")
