"""What the requests of one lane wait for: each answer finds whoever asked. It must not send, or know caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvpull_async._prompt import Prompt
from kvpull_async._workers import resolve
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Message
from kvpull_async.status import LLMException, LLMStatusCode, fresh, status_of

__all__ = ["Answer", "Answers", "Watched"]

Answer = tuple[frames.Grant, "bytes | memoryview"]
"""The payload may be a view of a buffer, and is then gone when whoever asked waits for something else."""
_FOR_EVER = (LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
"""With these the same request would be refused again."""


@dataclass
class Watched:
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
        self._offered: dict[int, tuple[Callable[[], None], Prompt[frames.Result]]] = {}
        self.watched: dict[object, Watched] = {}
        self.names: dict[int, object] = {}
        """Of the watches, by request."""
        self.pongs: dict[int, asyncio.Future[None]] = {}
        self.checks: dict[bytes, asyncio.Future[bool]] = {}

    def of_request(self, request_id: int) -> Prompt[Answer]:
        """The future of its answer; LLMException when it is refused."""
        answer = self._asked[request_id] = Prompt(loop=self._loop)
        return answer

    def digest_of(self, request_id: int) -> asyncio.Future[bytes]:
        """The future of the sum that the source sends after its grant."""
        digest = self._digests[request_id] = self._loop.create_future()
        return digest

    def of_offer(self, request_id: int, accepted: Callable[[], None]) -> Prompt[frames.Result]:
        result: Prompt[frames.Result] = Prompt(loop=self._loop)
        self._offered[request_id] = (accepted, result)
        return result

    def forget(self, request_id: int) -> None:
        """Nobody waits for its answer any more."""
        self._asked.pop(request_id, None)
        self._digests.pop(request_id, None)
        self._offered.pop(request_id, None)

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
            watched = self.watched.pop(self.names.pop(message.request_id, None), None)
            for appeared in () if watched is None else watched.futures:
                resolve(appeared)
        elif isinstance(message, frames.Pong):
            resolve(self.pongs.get(message.number))
        elif isinstance(message, frames.Checked):
            check = self.checks.get(message.grant_id)
            if check is not None and not check.done():
                check.set_result(message.valid)
        else:
            return False
        return True

    def _answered(self, message: frames.Grant | frames.Refuse, tail: bytes | memoryview) -> None:
        answer = self._asked.pop(message.request_id, None)
        if answer is None or answer.done():
            return
        if isinstance(message, frames.Grant):
            answer.hand((message, tail if answer.awaited else bytes(tail)))
        else:
            self._digests.pop(message.request_id, None)
            answer.set_exception(self._refusal(message))

    def _taken(self, message: frames.Accept | frames.Result) -> None:
        accepted, result = self._offered.get(message.request_id, (None, None))
        if result is None or accepted is None or result.done():
            return
        if isinstance(message, frames.Accept):
            accepted()
        else:
            del self._offered[message.request_id]
            result.hand(message)

    def _refusal(self, message: frames.Refuse) -> LLMException:
        status = status_of(message.status)
        if status is LLMStatusCode.LLM_SUCCESS:  # a refusal is never a success
            status = LLMStatusCode.LLM_FAILED
        return LLMException(message.reason, status_code=status, peer=self._peer, retry_safe=status not in _FOR_EVER)

    def fail(self, error: LLMException) -> None:
        """None of them will come: the connection is lost."""
        waiting: list[asyncio.Future[Any]] = [*self._asked.values(), *(result for _, result in self._offered.values())]
        waiting += [*self._digests.values(), *self.pongs.values(), *self.checks.values()]
        waiting += [appeared for watch in self.watched.values() for appeared in watch.futures]
        for table in (self._asked, self._digests, self._offered, self.watched, self.names):
            table.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(fresh(error))
                future.exception()  # who asked may have been cancelled meanwhile

    def __repr__(self) -> str:
        return f"<Answers asked={len(self._asked)} offered={len(self._offered)} watched={len(self.watched)}>"
