"""What a session tells its owner: values, compared as such."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from kvpull_async.protocol import events, frames
from kvpull_async.status import LLMStatusCode
from tests.wire import at, deliver


def test_events_are_values() -> None:
    failed = events.Failed("because", LLMStatusCode.LLM_LINK_FAILED)
    assert failed == events.Failed("because", LLMStatusCode.LLM_LINK_FAILED, by_peer=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        failed.reason = "another"  # type: ignore[misc]


def test_a_session_tells_nothing_but_events() -> None:
    kinds = typing.get_args(events.Event)
    assert {kind.__name__ for kind in kinds} == set(events.__all__) - {"Event"}
    (told,) = deliver(at("acceptor", "serves"), frames.Done(bytes(16), "p"))
    assert isinstance(told, kinds)
