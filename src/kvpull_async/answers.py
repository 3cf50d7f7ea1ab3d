"""What the requests of one lane wait for: each answer finds whoever asked. It must not send, or know caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvpull_async._prompt import Prompt
from kvpull_async._workers import resolve
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Message
from kvpull_async.status import (
    TIMEOUTS,
    LLMException,
    LLMStatusCode,
    LLMTimeoutError,
    fresh,
    status_of,
    worth_repeating,
)

__all__ = ["Answer", "Answers"]

Answer = tuple[frames.Grant, "bytes | memoryview"]
"""The payload may be a view of a buffer, and is then gone when whoever asked waits for something else."""


@dataclass
class _Watched:
    """A watch, and those who wait for what it names."""

    request_id: int
    futures: set[asyncio.Future[None]] = field(default_factory=set)


class Answers:
    """Used by one event loop. `peer` is for messages to people."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: str) -> None:
        self._loop = loop
        self._peer = peer
        self._asked: dict[int, Prompt[Answer]] = {}
        self._digests: dict[int, asyncio.Future[bytes]] = {}
        self._refusals: dict[int, asyncio.Future[LLMException]] = {}
        """Of requests that may be refused after they were granted."""
        self._results: dict[int, tuple[Callable[[], None] | None, Prompt[frames.Result]]] = {}
        self._watched: dict[object, _Watched] = {}
        self._names: dict[int, object] = {}
        """Of the watches, by request."""
        self._pongs: dict[int, asyncio.Future[None]] = {}
        self._checks: dict[bytes, asyncio.Future[bool]] = {}

    def of_request(self, request_id: int) -> Prompt[Answer]:
        """The future of its answer; LLMException when it is refused."""
        answer = self._asked[request_id] = Prompt(loop=self._loop)
        return answer

    def digest_of(self, request_id: int) -> asyncio.Future[bytes]:
        """The future of the sum that the source sends after its grant."""
        digest = self._digests[request_id] = self._loop.create_future()
        return digest

    def refusal_of(self, request_id: int) -> asyncio.Future[LLMException]:
        """The future of a refusal that comes after the grant. Whoever has it cancels it in the end."""
        refusal = self._refusals[request_id] = self._loop.create_future()
        refusal.add_done_callback(lambda _: self._refusals.pop(request_id, None))
        return refusal

    def of_result(self, request_id: int, accepted: Callable[[], None] | None = None) -> Prompt[frames.Result]:
        """The future of what came of an offer, whose bytes the peer may wait for with `accepted` before, or a lease."""
        result: Prompt[frames.Result] = Prompt(loop=self._loop)
        self._results[request_id] = (accepted, result)
        return result

    @contextmanager
    def of_ping(self, number: int) -> Iterator[asyncio.Future[None]]:
        """The future of its pong, for as long as this is entered."""
        pong = self._pongs[number] = self._loop.create_future()
        try:
            yield pong
        finally:
            self._pongs.pop(number, None)

    @contextmanager
    def of_check(self, grant_id: bytes) -> Iterator[asyncio.Future[bool]]:
        """The future of whether the grant is valid, for as long as this is entered."""
        check = self._checks[grant_id] = self._loop.create_future()
        try:
            yield check
        finally:
            self._checks.pop(grant_id, None)

    @property
    def watches(self) -> int:
        """How many names are watched."""
        return len(self._watched)

    def of_watch(self, name: object, begin: Callable[[], int]) -> asyncio.Future[None]:
        """The future of the appearance of what is named. Unless it is watched already `begin` asks for that, and says
        with which request.
        """
        watched = self._watched.get(name)
        if watched is None:
            watched = self._watched[name] = _Watched(begin())
            self._names[watched.request_id] = name
        appeared: asyncio.Future[None] = self._loop.create_future()
        watched.futures.add(appeared)
        return appeared

    def unwatch(self, name: object, appeared: asyncio.Future[None]) -> int | None:
        """That one waits no more. The request, if it was the last one and nothing has come of it."""
        watched = self._watched.get(name)
        if watched is None or appeared not in watched.futures:
            return None
        watched.futures.remove(appeared)
        if watched.futures:
            return None
        del self._watched[name], self._names[watched.request_id]
        return watched.request_id

    def forget(self, request_id: int) -> None:
        """Nobody waits for its answer any more."""
        self._asked.pop(request_id, None)
        self._digests.pop(request_id, None)
        self._results.pop(request_id, None)

    def deliver(self, message: Message, tail: bytes | memoryview) -> bool:
        """False for what is no answer."""
        if isinstance(message, (frames.Grant, frames.Refuse)):
            self._answered(message, tail)
        elif isinstance(message, frames.Digest):
            digest = self._digests.pop(message.request_id, None)
            if digest is not None and not digest.done():
                digest.set_result(message.digest)
        elif isinstance(message, (frames.Accept, frames.Result)):
            self._taken(message)
        elif isinstance(message, frames.Appeared):
            watched = self._watched.pop(self._names.pop(message.request_id, None), None)
            for appeared in () if watched is None else watched.futures:
                resolve(appeared)
        elif isinstance(message, frames.Pong):
            resolve(self._pongs.get(message.number))
        elif isinstance(message, frames.Checked):
            check = self._checks.get(message.grant_id)
            if check is not None and not check.done():
                check.set_result(message.valid)
        else:
            return False
        return True

    def _answered(self, message: frames.Grant | frames.Refuse, tail: bytes | memoryview) -> None:
        answer = self._asked.pop(message.request_id, None)
        if answer is None or answer.done():
            refusal = self._refusals.get(message.request_id)
            if isinstance(message, frames.Refuse) and refusal is not None and not refusal.done():
                refusal.set_result(self._refusal(message))
            return
        if isinstance(message, frames.Grant):
            answer.hand((message, tail if answer.awaited else bytes(tail)))
        else:
            self._digests.pop(message.request_id, None)
            answer.set_exception(self._refusal(message))
            answer.exception()  # who asked may be about to end for another reason

    def _taken(self, message: frames.Accept | frames.Result) -> None:
        accepted, result = self._results.get(message.request_id, (None, None))
        if result is None or result.done():
            return
        if isinstance(message, frames.Accept):
            if accepted is not None:
                accepted()
        else:
            del self._results[message.request_id]
            result.hand(message)

    def _refusal(self, message: frames.Refuse) -> LLMException:
        status = status_of(message.status)
        if status is LLMStatusCode.LLM_SUCCESS:  # a refusal is never a success
            status = LLMStatusCode.LLM_FAILED
        again = worth_repeating(status)
        kind = LLMTimeoutError if status in TIMEOUTS else LLMException
        return kind(message.reason, status_code=status, peer=self._peer, retry_safe=again)

    def fail(self, error: LLMException) -> None:
        """None of them will come: the connection is lost."""
        waiting: list[asyncio.Future[Any]] = [*self._asked.values(), *(result for _, result in self._results.values())]
        waiting += [*self._digests.values(), *self._pongs.values(), *self._checks.values()]
        waiting += [appeared for watch in self._watched.values() for appeared in watch.futures]
        for refusal in self._refusals.values():
            if not refusal.done():
                refusal.set_result(fresh(error))
        for table in (self._asked, self._digests, self._results, self._watched, self._names):
            table.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(fresh(error))
                future.exception()  # who asked may have been cancelled meanwhile

    def __repr__(self) -> str:
        return f"<Answers asked={len(self._asked)} results={len(self._results)} watched={len(self._watched)}>"
