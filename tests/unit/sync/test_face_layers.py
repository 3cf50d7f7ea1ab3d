"""Layers as they land, blocking: an iterator, its `close`, and its block."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from kvpull_async.testing.faults import Gate
from kvpull_sync import LLMDataDist, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError
from tests import duo
from tests.canaries import intact, set_canary
from tests.inject import gated_memories
from tests.layered import FLAT, LAYERED, LAYERS, key, layer_holds

BOUND = 30.0
SOME = 2
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


class Pair:
    """Two blocking nodes, linked; the gate stops a pull of the published cache when SOME layers have landed."""

    def __init__(self, gate: Callable[[], Gate], desc: Any, transport: str) -> None:
        self.prompt = LLMDataDist(LLMRole.PROMPT, duo.PROMPT)
        self.decoder = LLMDataDist(LLMRole.DECODER, duo.DECODER)
        properties: Any = {"transport": transport, "settle_timeout": 20_000}
        self.prompt.init(duo.options(listen=True, **properties))
        self.decoder.init(duo.options(**properties))
        assert self.decoder.link_clusters([duo.cluster(duo.PROMPT, self.prompt.listen_address)]) == (duo.OK, [duo.OK])
        self.gate = gate()
        self.manager = self.decoder.kv_cache_manager
        self.source = self.prompt.kv_cache_manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(self.source)
        self.cache, self.other = self.manager.allocate_cache(desc), self.manager.allocate_cache(desc)

    def check_next(self) -> None:
        """After a pull that was stopped: the next one is right, the key was kept, and nothing was written."""
        set_canary(self.cache)
        assert not self.cache.quarantined
        self.gate.open()
        self.manager.pull_cache(key(), self.other, 1)
        assert duo.holds(self.other, entry=1, source=0)
        assert intact(self.cache)

    def reached(self) -> None:
        until(lambda: self.gate.held > 0)

    def close(self) -> None:
        self.gate.open()
        self.decoder.finalize()
        self.prompt.finalize()
        del self.source, self.cache, self.other


@pytest.fixture(params=["tcp", "inproc"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    memories = gated_memories(monkeypatch, after=2 * SOME)

    def gate() -> Gate:
        memories[1].direct = True  # the pieces are the memory itself
        return memories[0].lending_gate

    made = Pair(gate, LAYERED, request.param)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def later(*steps: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    return thread


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["kv", "cache"])
def test_layers_come_in_order_and_each_is_whole_when_it_is_given(pair: Pair, kind: str) -> None:
    manager: Any = pair.manager if kind == "kv" else pair.decoder.cache_manager
    with manager.pull_layers(key(1), pair.cache, 2) as layers:
        seen = [(layer, layer_holds(pair.cache, layer, entry=2, source=1)) for layer in layers]
    assert seen == [(layer, True) for layer in range(LAYERS)]
    assert pair.decoder.counters["pulls_finished"] == 1
    with pytest.raises(LLMException) as caught:
        pair.manager.pull_cache(key(1), pair.cache)
    assert caught.value.status_code is NOT_EXIST


def test_a_plain_iterator_starts_with_its_first_layer(pair: Pair) -> None:
    layers = pair.manager.pull_layers(key(), pair.cache)
    assert pair.decoder.counters.get("pulls_started") is None
    assert iter(layers) is layers
    assert list(layers) == list(range(LAYERS))
    assert next(layers, None) is None
    layers.close()
    with pytest.raises(RuntimeError, match="pull_layers again"), layers:
        pass


def test_one_that_is_closed_before_it_began_never_begins(pair: Pair) -> None:
    with contextlib.closing(pair.manager.pull_layers(key(), pair.cache)) as layers:
        pass
    assert list(layers) == []
    assert pair.decoder.counters.get("pulls_started") is None


def test_layers_are_given_while_others_have_yet_to_land(pair: Pair) -> None:
    pair.gate.close()
    with pair.manager.pull_layers(key(), pair.cache) as layers:
        assert [next(layers) for _ in range(SOME)] == list(range(SOME))
        pair.reached()
        assert not duo.arrays(pair.cache)[-1].any()
        helper = later(lambda: time.sleep(0.05), pair.gate.open)
        assert list(layers) == list(range(SOME, LAYERS))
        helper.join()


def test_a_consumer_that_never_iterates_gets_the_whole_cache(pair: Pair) -> None:
    with pair.manager.pull_layers(key(), pair.cache):
        until(lambda: pair.decoder.counters.get("pulls_finished") == 1)
    assert duo.holds(pair.cache, entry=0, source=0)


@pytest.mark.parametrize("how", ["close", "block", "raise"])
def test_p1_leaving_early_cancels_and_settles(pair: Pair, how: str) -> None:
    pair.gate.close()
    helper = later(pair.reached, lambda: time.sleep(0.05), pair.gate.open)
    layers = pair.manager.pull_layers(key(), pair.cache)
    if how == "close":
        assert next(layers) == 0
        pair.reached()
        layers.close()
    else:
        with contextlib.suppress(ZeroDivisionError), layers:
            assert next(layers) == 0
            pair.reached()
            if how == "raise":
                raise ZeroDivisionError
    helper.join()
    assert next(layers, None) is None
    assert pair.decoder.counters["pulls_cancelled"] == 1
    layers.close()  # harmless
    pair.check_next()


class Interrupt(Exception):
    """What a signal handler of the application raises."""


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def test_p1_an_interrupt_while_it_waits_settles_before_it_is_raised(pair: Pair) -> None:
    pair.gate.close()
    layers = pair.manager.pull_layers(key(), pair.cache)  # no block: the iterator itself has to
    helper = later(pair.reached, lambda: time.sleep(0.05), interrupt, lambda: time.sleep(0.05), pair.gate.open)
    with interrupting(), pytest.raises(Interrupt):
        list(layers)
    helper.join()
    assert pair.decoder.counters["pulls_cancelled"] == 1
    pair.check_next()


def test_an_iterator_that_is_dropped_warns_and_cancels(pair: Pair) -> None:
    pair.gate.close()
    layers = pair.manager.pull_layers(key(), pair.cache)
    assert next(layers) == 0
    pair.reached()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del layers
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning]
    assert "close" in str(caught[0].message)
    pair.gate.open()
    until(lambda: pair.decoder.counters.get("pulls_cancelled") == 1)
    pair.check_next()


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)  # whose receiver stops while the sender is held
def test_the_deadline_passes_in_the_middle(pair: Pair) -> None:
    pair.gate.close()
    with pair.manager.pull_layers(key(), pair.cache, timeout=1000) as layers:
        with pytest.raises(LLMTimeoutError) as caught:
            list(layers)
        assert next(layers, None) is None  # once
    assert caught.value.operation == "pull_layers"
    assert not caught.value.destination_unsafe
    pair.check_next()


def test_a_refused_pull_raises_out_of_the_iteration() -> None:
    pair = Pair(Gate, FLAT, "tcp")
    with pair.manager.pull_layers(key(9), pair.cache) as layers, pytest.raises(LLMException) as caught:
        next(layers)
    assert caught.value.status_code is NOT_EXIST
    with pytest.raises(TypeError, match="pull_layers"):
        pair.manager.pull_layers(key(), pair.cache, 0, -1, layers=1)
    pair.close()


def test_several_threads_each_take_their_own_layers() -> None:
    pair, found = Pair(Gate, FLAT, "tcp"), []

    def work(entry: int) -> None:
        with pair.manager.pull_layers(key(entry), pair.cache, entry) as layers:
            found.extend([layer_holds(pair.cache, layer, entry=entry, source=entry) for layer in layers])

    threads = [threading.Thread(target=work, args=(entry,)) for entry in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert found == [True] * 4 * LAYERS
    pair.close()
