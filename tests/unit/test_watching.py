"""Watches of a peer: what it waits for is told once, as soon as it is here, and not after it has lost interest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvpull_async.protocol import frames
from kvpull_async.values import INVALID_ID, BlocksCacheKey, CacheKey
from tests.loop_nodes import eventually
from tests.serving import PEER, Scene
from tests.unit.test_receiving import allocated
from tests.wire import SAMPLES


def watch(scene: Scene, number: int, **fields: Any) -> None:
    base = {"request_id": number, "key": "request", "identity": 9, "model_id": 0, "entry": 0}
    scene.serving.receive(msgspec.structs.replace(SAMPLES["Watch"].message, **{**base, **fields}), b"")


def appeared(scene: Scene) -> list[int]:
    return [said.request_id for said in scene.of(frames.Appeared)]


def publish(scene: Scene, *keys: CacheKey) -> None:
    scene.registry.bind(allocated(scene, [2, 8]), keys)


def prefix(number: int) -> CacheKey:
    return CacheKey(cluster_id=1, req_id=INVALID_ID, prefix_id=number)


async def test_what_is_here_already_is_told_at_once() -> None:
    scene = Scene()
    watch(scene, 1, identity=7)
    watch(scene, 2, identity=8)
    assert appeared(scene) == [1, 2]
    assert scene.lane.ended == [1, 2]


async def test_what_is_published_later_is_told_then_to_all_who_wait_and_once() -> None:
    scene = Scene()
    for number in (1, 2, 3):
        watch(scene, number)
    watch(scene, 4, identity=10)
    assert scene.lane.said == []
    publish(scene, CacheKey(1, 9))
    assert sorted(appeared(scene)) == [1, 2, 3]
    scene.registry.remove_key(CacheKey(1, 9))
    publish(scene, CacheKey(1, 9), CacheKey(1, 10))
    assert sorted(appeared(scene)) == [1, 2, 3, 4]
    assert sorted(scene.lane.ended) == [1, 2, 3, 4]


async def test_a_key_that_is_gone_is_waited_for_until_it_is_bound_again() -> None:
    scene = Scene()
    scene.registry.remove_key(CacheKey(1, 7))
    watch(scene, 1, identity=7)
    assert appeared(scene) == []
    scene.registry.bind(scene.entry, [CacheKey(1, 7)])
    assert appeared(scene) == [1]


async def test_a_key_that_was_pulled_is_waited_for_anew() -> None:
    scene = Scene(inline_limit=2**20)
    watch(scene, 1, identity=7)
    scene.ask(2)
    grant = await scene.granted()
    scene.serving.receive(frames.Done(grant.grant_id, "p"), b"")
    watch(scene, 3, identity=7)
    assert appeared(scene) == [1]
    scene.registry.bind(scene.entry, [CacheKey(1, 7)])
    assert appeared(scene) == [1, 3]


async def test_each_kind_of_name_is_watched() -> None:
    scene = Scene()
    watch(scene, 1, key="prefix", identity=9)
    watch(scene, 2, key="blocks", identity=12345, model_id=4)
    watch(scene, 3, key="cache", identity=2)
    watch(scene, 4, key="request", identity=9, model_id=6)
    blocks = allocated(scene, [4, 8])
    assert appeared(scene) == [3]  # the second cache of this node has the id 2
    scene.registry.bind_blocks(blocks, BlocksCacheKey(1, 4))
    assert appeared(scene) == [3, 2]
    publish(scene, prefix(9))
    assert appeared(scene) == [3, 2, 1]
    publish(scene, CacheKey(1, 9, 6))
    assert appeared(scene) == [3, 2, 1, 4]


async def test_who_has_given_up_is_not_told() -> None:
    scene = Scene()
    for number in (1, 2):
        watch(scene, number)
    scene.serving.receive(frames.Cancel(1), b"")
    scene.serving.receive(frames.Cancel(1), b"")
    publish(scene, CacheKey(1, 9))
    assert appeared(scene) == [2]


async def test_a_watch_that_has_ended_may_be_given_up() -> None:
    scene = Scene()
    watch(scene, 1, identity=7)
    scene.serving.receive(frames.Cancel(1), b"")
    assert appeared(scene) == [1]
    watch(scene, 2)
    assert appeared(scene) == [1]


async def test_p8_the_end_of_the_lane_ends_its_watches() -> None:
    scene = Scene()
    for number in (1, 2, 3):
        watch(scene, number)
    scene.serving.abort()
    assert scene.registry._watches == {}
    publish(scene, CacheKey(1, 9))
    assert appeared(scene) == []


@pytest.mark.parametrize("key", ["", "nonsense", "address"])
async def test_a_name_of_no_known_kind_never_appears_and_harms_nobody(key: str) -> None:
    scene = Scene()
    watch(scene, 1, key=key)
    watch(scene, 2, key="cache", identity=-5)
    publish(scene, CacheKey(1, 9))
    assert appeared(scene) == []
    scene.serving.receive(frames.Cancel(1), b"")
    assert scene.lane.aborted == []


async def test_a_watch_is_in_nobodys_way() -> None:
    scene = Scene()
    watch(scene, 1)
    scene.ask(2)
    await scene.heard(frames.Grant)
    scene.path.transfers[0].finish()
    await eventually(lambda: not scene.entry.busy)
    assert appeared(scene) == []


async def test_a_peer_is_not_told_of_what_is_for_others() -> None:
    scene = Scene()
    scene.entry.allowed = frozenset({PEER + 1})
    watch(scene, 1, identity=7)
    watch(scene, 2, key="cache", identity=scene.entry.cache_id)
    assert appeared(scene) == []
    scene.registry.remove_key(CacheKey(1, 7))
    publish(scene, CacheKey(1, 7))
    assert appeared(scene) == [1]
