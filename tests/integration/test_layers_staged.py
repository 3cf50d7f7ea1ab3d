"""Layers that land in memory which is filled piece by piece, as a device's is: each is given once it is final there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvpull_async.memory.base import Allocation
from kvpull_async.testing.faults import GatedMemory
from kvpull_async.transport.shm.path import ShmPath
from kvpull_async.values import Placement
from tests import duo
from tests.integration.own_loop import within
from tests.layered import LAYERED, LAYERS, key, layer_holds

SOME = 2


class Staged(GatedMemory):
    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        made = super().allocate(tensors=tensors, tensor_nbytes=tensor_nbytes, placement=placement)
        return replace(made, regions=tuple(replace(region, device=0) for region in made.regions))


@pytest.mark.parametrize("path", ["inproc", "tcp", "shm"])
async def test_layers_are_given_while_others_have_yet_to_land(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        registry = duo.engine_of(pair.decoder).registry
        registry.backend = memory = Staged(registry.backend, after=2 * SOME)
        await pair.publish(LAYERED)
        cache = await pair.destination(LAYERED)
        memory.landing_gate.close()
        async with pair.decoder.kv_cache_manager.pull_layers(key(), cache) as layers:
            for layer in range(SOME):
                assert await within(layers.__anext__()) == layer
                assert layer_holds(cache, layer, source=0)
            following = asyncio.ensure_future(layers.__anext__())
            await memory.landing_gate.reached()
            await asyncio.sleep(0.02)
            assert not following.done()
            memory.landing_gate.open()
            assert await within(following) == SOME
            assert [layer async for layer in layers] == list(range(SOME + 1, LAYERS))
        assert all(layer_holds(cache, layer, source=0) for layer in range(LAYERS))


async def test_no_layer_is_given_before_the_source_has_said_that_it_held_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On machines where a read may see a withdrawn source's bytes as if it still had them."""
    monkeypatch.setattr(ShmPath, "unproven", lambda _path, _ticket: True)
    async with duo.duo(transport="shm") as pair:
        registry = duo.engine_of(pair.decoder).registry
        registry.backend = memory = Staged(registry.backend, after=2 * SOME)
        await pair.publish(LAYERED)
        cache = await pair.destination(LAYERED)
        memory.landing_gate.close()
        async with pair.decoder.kv_cache_manager.pull_layers(key(), cache) as layers:
            first = asyncio.ensure_future(layers.__anext__())
            await memory.landing_gate.reached()
            await asyncio.sleep(0.02)
            assert not first.done(), "it lies there, but may not be what the source had"
            memory.landing_gate.open()
            assert await within(first) == 0
            assert [layer async for layer in layers] == list(range(1, LAYERS))
        assert all(layer_holds(cache, layer, source=0) for layer in range(LAYERS))
