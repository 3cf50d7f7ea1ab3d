"""What a conformance row is, and what can be expected of its call.

A row's call is a function of the scene. An expectation runs it and judges; the ones here also look at what the original
leaves unsaid: a refused call has changed nothing, and the link serves the next pull.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvpull_async import CacheKey, CacheKeyByIdAndIndex, LLMException, LLMStatusCode
from tests.conformance.api import Api
from tests.conformance.scene import BOTH, NEW, OLD, SOURCE, Scene, Setup, scene

Call = Callable[[Scene], Awaitable[Any]]
Error = type[Exception] | LLMStatusCode
Expectation = Callable[[Scene, Sequence[Call]], Awaitable[None]]

PI = LLMStatusCode.LLM_PARAM_INVALID
KNE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NYL = LLMStatusCode.LLM_NOT_YET_LINK


@dataclass(frozen=True)
class Row:
    """`calls` share one expectation. `differs` names the entry of docs/coming-from-llm_datadist.md that explains why
    the expectation is not the original's. `setup` are fields of `Setup`; `transports` is empty where none is involved.
    """

    number: int
    manager: str
    calls: Call | tuple[Call, ...]
    expect: Expectation
    differs: str | None = None
    setup: dict[str, Any] = field(default_factory=dict)
    transports: tuple[str, ...] = ("inproc", "tcp", "shm")

    @property
    def managers(self) -> tuple[str, ...]:
        return (OLD, NEW) if self.manager == BOTH else (self.manager,)


@dataclass(frozen=True)
class Case:
    """A row, for one manager and one transport."""

    row: Row
    setup: Setup

    def __str__(self) -> str:
        transport = f"-{self.setup.transport}" if self.row.transports else ""
        return f"row{self.row.number:03}-{self.setup.manager}{transport}"


def cases(rows: Sequence[Row]) -> list[Case]:
    return [
        Case(row, Setup(manager=manager, transport=transport, **row.setup))
        for row in rows
        for manager in row.managers
        for transport in row.transports or ("auto",)
    ]


async def play(api: Api, case: Case) -> None:
    calls = case.row.calls if isinstance(case.row.calls, tuple) else (case.row.calls,)
    async with scene(api, case.setup) as made:
        await case.row.expect(made, calls)


# -- failures ----------------------------------------------------------------------------------------------------------


async def failure(call: Callable[[], Awaitable[Any]]) -> Exception:
    """The exception of a call that must raise one."""
    try:
        returned = await call()
    except Exception as error:  # noqa: BLE001  (the test judges it)
        return _without_frames(error)
    raise AssertionError(f"nothing was raised, and {returned!r} returned")


def _without_frames(error: Exception) -> Exception:
    """Its frames would keep the caches alive until the garbage collector comes, and the leak guard would call it."""
    chain: list[BaseException | None] = [error]
    for link in chain:
        if link is not None and link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
            chain += [link.__cause__, link.__context__]
    return error


def is_error(error: Exception, expected: Error) -> bool:
    """A status means an LLMException of that status; a class means exactly that class."""
    if isinstance(expected, LLMStatusCode):
        return isinstance(error, LLMException) and error.status_code == expected
    return type(error) is expected


def raises(expected: Error, *, old: Error | None = None) -> Expectation:
    """Each call raises it; `old` is what the older manager raises, where that differs."""

    async def judge(f: Scene, calls: Sequence[Call]) -> None:
        wanted = old if old is not None and f.setup.manager == OLD else expected
        for call in calls:
            error = await failure(lambda call=call: call(f))  # type: ignore[misc]
            assert is_error(error, wanted), f"{wanted!s} expected, got {error!r} {getattr(error, 'status_code', '')}"

    return judge


def refused(expected: Error, *, old: Error | None = None, usable: bool = True) -> Expectation:
    """A pull into `d` is refused: nothing is written, no key consumed, and the next pull on the link is right."""
    judge_error = raises(expected, old=old)

    async def judge(f: Scene, calls: Sequence[Call]) -> None:
        await judge_error(f, calls)
        if f.d.cache_desc.num_tensors and not _released(f.d):
            assert not f.content(f.d).any(), "a refused pull wrote to the destination"
        if usable:
            await all_there(f)

    return judge


def _released(cache: Any) -> bool:
    return cache._binding is None


async def all_there(f: Scene) -> None:
    """Every key of `s` still leads to its entry, whole, over the same link."""
    spare = await f.allocate(f.setup.s)
    for number, key in enumerate(f.r):
        by_id = CacheKeyByIdAndIndex(SOURCE, f.s.cache_id, number)
        await f.pull(by_id if f.setup.remote_access else key, spare, number)
    assert np.array_equal(f.content(spare), f.image(f.s)), "the next pulls delivered something else"


# -- successes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """Bytes that are to go from `s` (or `source(f)`) to `d`. `tensors` are pairs (from, to); None is all of them."""

    tensors: tuple[tuple[int, int], ...] | None = None
    src_entry: int = 0
    dst_entry: int = 0
    src_at: int = 0
    dst_at: int = 0
    size: int = 512
    source: Callable[[Scene], Any] = lambda f: f.s

    def apply(self, f: Scene, image: Any) -> None:
        held = f.image(self.source(f))
        pairs = self.tensors if self.tensors is not None else tuple((i, i) for i in range(len(image)))
        for src, dst in pairs:
            moved = held[src, self.src_entry, self.src_at : self.src_at + self.size]
            image[dst, self.dst_entry, self.dst_at : self.dst_at + self.size] = moved


def delivers(*moves: Move, then: Sequence[Call] = ()) -> Expectation:
    """Each call returns None, and afterwards `d` holds these bytes and no others; then the checks in `then` hold."""

    async def judge(f: Scene, calls: Sequence[Call]) -> None:
        for call in calls:
            assert await call(f) is None
        expected = np.zeros_like(f.content(f.d))
        for move in moves:
            move.apply(f, expected)
        assert np.array_equal(f.content(f.d), expected), "the destination holds other bytes"
        for check in then:
            await check(f)

    return judge


def succeeds(*, then: Sequence[Call] = ()) -> Expectation:
    """Each call returns None; then the checks in `then` hold."""

    async def judge(f: Scene, calls: Sequence[Call]) -> None:
        for call in calls:
            assert await call(f) is None
        for check in then:
            await check(f)

    return judge


def returns(expected: object) -> Expectation:
    """Each call returns a value equal to this one."""

    async def judge(f: Scene, calls: Sequence[Call]) -> None:
        for call in calls:
            returned = await call(f)
            assert returned == expected, returned

    return judge


# -- keys --------------------------------------------------------------------------------------------------------------


def kept(*numbers: int) -> Call:
    """These keys are still there."""

    async def check(f: Scene) -> None:
        for number in numbers:
            await keeps(f, f.r[number])

    return check


def gone(*numbers: int) -> Call:
    """These keys are not there any more."""

    async def check(f: Scene) -> None:
        for number in numbers:
            await lacks(f, f.r[number])

    return check


async def delivered(f: Scene, key_: Any, cache: Any, entry: int = 0) -> None:
    """A pull by this key gives that entry, whole."""
    await f.pull(key_, f.d)
    assert np.array_equal(f.content(f.d)[:, 0], f.image(cache)[:, entry]), "the key leads to other bytes"


async def keeps(f: Scene, key_: Any) -> None:
    """The source still has the key. Looking does not consume it: a pull with an offset never does."""
    await f.pull(key_, f.d, size=1, src_cache_offset=0)


async def lacks(f: Scene, key: Any) -> None:
    """The source has no such key. Asked over the same link, after what went there before."""
    error = await failure(lambda: f.pull(key, f.d, size=1))
    assert is_error(error, KNE), f"the key should be gone, got {error!r}"


def plain(**kwargs: Any) -> Call:
    """Pull `r[0]` into `d`, whose entry 0 it is by default, with these arguments."""
    return lambda f: f.pull(f.r[0], f.d, **kwargs)


def several(**kwargs: Sequence[Any]) -> tuple[Call, ...]:
    """One plain pull for each value of the one argument given."""
    ((name, values),) = kwargs.items()
    return tuple(plain(**{name: value}) for value in values)


def for_manager(row: Row, *, old_differs: str | None = None, new_differs: str | None = None) -> list[Row]:
    """A row of both managers of which one differs from the original and the other does not."""
    return [replace(row, manager=OLD, differs=old_differs), replace(row, manager=NEW, differs=new_differs)]


def key(req_id: int, **more: int) -> CacheKey:
    return CacheKey(1, req_id, **more)


def by_id(cache: Any, index: int = 0) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(SOURCE, cache.cache_id, index)
