"""What the source says of the sum of what it has granted, and what it holds until then. See also test_serve.py."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xxhash

from kvpull_async import LLMStatusCode, sums
from kvpull_async.memory.base import MemoryBackend
from kvpull_async.protocol import frames
from kvpull_async.testing.faults import GatedMemory
from tests.loop_nodes import eventually
from tests.serving import STRIDE, TENSORS, FakeTransfer, Scene

EXPECTED = xxhash.xxh3_64(bytes(range(STRIDE)) * TENSORS).digest()


@pytest.fixture(params=["inline", "one-sided", "streamed"])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """Each way in which bytes leave."""
    made = Scene(one_sided=request.param == "one-sided", inline_limit=4096 if request.param == "inline" else 0)
    yield made
    made.serving.abort()
    made.workers.close(5.0)


async def streamed(scene: Scene) -> None:
    """Let the bytes leave, where the source sends them."""
    await scene.granted()
    for transfer in scene.path.transfers:
        if not transfer.done.done():
            transfer.finish()


async def digest(scene: Scene) -> frames.Digest:
    found: list[Any] = await scene.heard(frames.Digest)
    assert len(found) == 1
    return found[0]  # type: ignore[no-any-return]


async def test_the_sum_comes_beside_the_grant(scene: Scene) -> None:
    scene.ask(7, inline_limit=4096, verify="xxh3")
    await streamed(scene)
    assert await digest(scene) == frames.Digest(7, EXPECTED)


async def test_nothing_is_summed_that_nobody_asked_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise AssertionError("something was summed")

    monkeypatch.setattr(sums, "begin", none)
    scene.ask(7, inline_limit=4096)
    await streamed(scene)
    await eventually(lambda: scene.counters.snapshot().get("serves") == 1)
    assert not scene.of(frames.Digest)


@pytest.mark.parametrize(
    ("name", "status"),
    [("xxh3", LLMStatusCode.LLM_FEATURE_NOT_ENABLED), ("sha1", LLMStatusCode.LLM_PARAM_INVALID)],
)
async def test_p10_a_sum_that_cannot_be_made_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str, status: LLMStatusCode
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    scene.ask(7, inline_limit=4096, verify=name)
    (refusal,) = await scene.heard(frames.Refuse)
    assert refusal.status == status
    assert not scene.of(frames.Grant)
    assert not scene.entry.busy


class Held:
    """A sum that is held in its middle, in the worker."""

    def __init__(self, scene: Scene) -> None:
        inner: MemoryBackend = scene.registry.backend
        self.gated = GatedMemory(inner, after=0)
        scene.registry.backend = self.gated
        self.gate = self.gated.lending_gate


async def begin_held() -> tuple[Scene, Held]:
    scene = Scene(one_sided=True)
    held = Held(scene)
    scene.path.serve = lambda *_: _served(scene)  # type: ignore[method-assign]
    held.gate.close()
    scene.ask(7, verify="crc32")
    await held.gate.reached()
    return scene, held


def _served(scene: Scene) -> Any:
    transfer = FakeTransfer(finished=True)
    scene.path.transfers.append(transfer)
    return transfer


async def end(scene: Scene, held: Held) -> None:
    held.gate.open()
    await eventually(lambda: not scene.entry.busy, "the end of the sum")
    scene.serving.abort()
    scene.workers.close(5.0)


async def test_p1_the_memory_is_held_while_it_is_summed() -> None:
    scene, held = await begin_held()
    scene.path.transfers[0].settled.set_result(None)
    grant = await scene.granted()
    scene.serving.receive(frames.Done(grant.grant_id, "a-pull"), b"")  # as no honest puller does: it waits for the sum
    assert scene.entry.busy
    await end(scene, held)
    assert (await digest(scene)).digest


@pytest.mark.parametrize("how", ["cancelled", "released"])
async def test_a_sum_that_ends_early_is_told_as_none(how: str) -> None:
    scene, held = await begin_held()
    if how == "cancelled":
        scene.serving.receive(frames.Cancel(7), b"")
    else:
        scene.entry.cut_pins()
    assert await digest(scene) == frames.Digest(7, b"")
    assert scene.entry.busy  # a thread is still reading
    for transfer in scene.path.transfers:
        if not transfer.settled.done():
            transfer.settled.set_result(None)
    await end(scene, held)


async def test_one_request_is_summed_after_the_other() -> None:
    """So that a peer which only asks cannot keep all workers busy."""
    scene, held = await begin_held()
    scene.ask(8, identity=8, verify="crc32")
    assert len(scene.of(frames.Grant)) == 1
    held.gate.open()
    assert [found.request_id for found in await scene.heard(frames.Digest, 2)] == [7, 8]
    for transfer in scene.path.transfers:
        if not transfer.settled.done():
            transfer.settled.set_result(None)
    scene.serving.abort()
    await end(scene, held)
