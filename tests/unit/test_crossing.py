"""The two ways across to an engine's core: results, errors and what errors are told on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvpull_async import LLMException, LLMRole, LLMStatusCode
from kvpull_async.config import Settings
from kvpull_async.crossing import Told, awaited, blocked
from kvpull_async.engine import Engine, close_bounded
from kvpull_async.managers.manager import Operation


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(Settings(LLMRole.DECODER, 7), dropped=None)
    yield made
    close_bounded(made)


async def where() -> str:
    return threading.current_thread().name


async def failing() -> None:
    raise LLMException("no", status_code=LLMStatusCode.LLM_NOT_YET_LINK)


async def test_both_run_on_the_core_and_bring_back_the_result(engine: Engine) -> None:
    assert await awaited(engine, Operation("where", where)) == "kvpull-core-7"
    assert blocked(engine, Operation("where", where)) == "kvpull-core-7"


async def test_an_error_learns_which_call_it_ended_and_how_long_that_took(engine: Engine) -> None:
    with pytest.raises(LLMException, match="no") as awaiting:
        await awaited(engine, Operation("try", failing))
    with pytest.raises(LLMException, match="no") as blocking:
        blocked(engine, Operation("try", failing))
    for caught in (awaiting, blocking):
        assert caught.value.operation == "try"
        assert caught.value.elapsed_ms is not None


def test_an_operation_is_underway_until_its_caller_has_heard(engine: Engine) -> None:
    underway: set[object] = set()
    operation: Operation[Any] = Operation("where", where, underway=underway)
    call = engine.call(operation)
    with Told(operation, call):
        assert len(underway) == 1
        call.wait()
        assert len(underway) == 1
    assert not underway
