"""Keys kept for longer or given up on a peer's word: what may be, what is refused, and that each is answered once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvpull_async import leasing
from kvpull_async.protocol import frames
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import INVALID_ID, CacheDesc, CacheKey, DataType, Placement
from tests.loop_nodes import event_log, eventually
from tests.serving import PEER, Scene
from tests.wire import SAMPLES

SUCCESS, MISSING, INVALID = (
    LLMStatusCode.LLM_SUCCESS,
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    LLMStatusCode.LLM_PARAM_INVALID,
)
SEVEN = ("request", 7, 0)


def ask(scene: Scene, number: int, lease_ms: int, **fields: Any) -> frames.Result:
    """The answer, which comes at once."""
    base = {"request_id": number, "key": "request", "identity": 7, "model_id": 0, "entry": 0, "lease_ms": lease_ms}
    scene.serving.receive(msgspec.structs.replace(SAMPLES["Lease"].message, **{**base, **fields}), b"")
    (result,) = [said for said in scene.of(frames.Result) if said.request_id == number]
    assert scene.lane.ended.count(number) == 1
    assert not result.unsafe
    assert isinstance(result, frames.Result)
    return result


def registered(scene: Scene, key: CacheKey, *, lease: float | None = None) -> None:
    desc = CacheDesc(1, [1, 8], DataType.DT_INT8)
    regions = scene.registry.backend.adopt([4096], tensor_nbytes=8, placement=Placement.HOST)
    scene.registry.bind(scene.registry.add(desc, regions, blocks=False), [key], lease=lease)


async def test_a_peer_gives_a_key_up_once() -> None:
    with event_log() as log:
        scene = Scene()
        assert ask(scene, 1, 0).status == SUCCESS
        assert not scene.held
        again = ask(scene, 2, 0)
        assert again.status == MISSING
        assert "req_id 7 of model 0 is not here: released" in again.reason
        assert scene.counters.snapshot()["keys_released"] == 1
    assert len(log.named("serve.key_released", key="request:7:0", pull_id="pull-9")) == 1
    assert len(log.named("serve.key_refused", status="LLM_KV_CACHE_NOT_EXIST")) == 1


async def test_a_peer_puts_an_end_off_and_never_brings_it_forward() -> None:
    scene = Scene()
    binding = scene.registry.find_key(SEVEN)
    assert binding is not None
    assert ask(scene, 1, 1).status == SUCCESS
    assert binding.ends is None, "it had no end, and gets none"
    scene.registry.lease(binding, 100)
    before = binding.ends
    assert ask(scene, 2, 1).status == SUCCESS
    assert binding.ends == before
    assert ask(scene, 3, 200_000).status == SUCCESS
    assert binding.ends is not None
    assert before is not None
    assert 99 < binding.ends - before < 101
    assert scene.counters.snapshot()["keys_renewed"] == 3
    scene.registry.close()


async def test_the_node_itself_says_when_a_key_ends() -> None:
    scene = Scene()
    binding = scene.registry.find_key(SEVEN)
    assert binding is not None
    for seconds in (100.0, 50.0):
        leasing.renew(scene.registry, SEVEN, seconds)
        now = asyncio.get_running_loop().time()
        assert binding.ends is not None
        assert now < binding.ends <= now + seconds
    leasing.give_up(scene.registry, SEVEN)
    for call in (lambda: leasing.renew(scene.registry, SEVEN, 1), lambda: leasing.give_up(scene.registry, SEVEN)):
        with pytest.raises(LLMException, match="released") as caught:
            call()
        assert caught.value.status_code == MISSING


async def test_a_prefix_is_given_up_as_well() -> None:
    scene = Scene()
    registered(scene, CacheKey(1, INVALID_ID, 2, 9), lease=100)
    assert ask(scene, 1, 0, key="prefix", identity=9, model_id=2).status == SUCCESS
    assert ask(scene, 2, 0, key="prefix", identity=9, model_id=2).status == MISSING


async def test_a_key_of_a_registered_cache_stays_unless_it_has_a_lease() -> None:
    scene = Scene()
    registered(scene, CacheKey(1, 20))
    registered(scene, CacheKey(1, 21), lease=100)
    stays = ask(scene, 1, 0, identity=20)
    assert stays.status == INVALID
    assert "registered cache" in stays.reason
    assert ask(scene, 2, 0, identity=21).status == SUCCESS
    assert scene.registry.find_key(("request", 20, 0)) is not None


@pytest.mark.parametrize("kind", ["cache", "blocks", "address", "", "Request"])
async def test_other_names_have_no_lease(kind: str) -> None:
    scene = Scene()
    for number, lease in enumerate((0, 1000), 1):
        answer = ask(scene, number, lease, key=kind, identity=scene.entry.cache_id)
        assert (answer.status, "have no lease" in answer.reason) == (INVALID, True)
    assert scene.held


async def test_what_a_peer_may_not_see_it_cannot_give_up() -> None:
    scene = Scene()
    scene.entry.allowed = frozenset({PEER + 1})
    hidden, missing = ask(scene, 1, 0), ask(scene, 2, 0, identity=99)
    assert hidden.status == missing.status == MISSING
    assert hidden.reason == missing.reason.replace("99", "7")
    assert ask(scene, 3, 1000).reason == hidden.reason
    scene.entry.allowed = frozenset({PEER})
    assert ask(scene, 4, 0).status == SUCCESS


async def test_a_key_that_ends_while_its_request_waits_is_refused_with_the_reason() -> None:
    scene = Scene()
    binding = scene.registry.find_key(SEVEN)
    assert binding is not None
    scene.path.stuck = True
    scene.ask(1, identity=8)
    scene.ask(2)  # waits for the first
    scene.registry.lease(binding, 0.01)
    await asyncio.sleep(0.05)
    assert not scene.held
    scene.serving.receive(frames.Cancel(1), b"")
    (refusal,) = await scene.heard(frames.Refuse)
    assert refusal.request_id == 2
    assert refusal.status == MISSING
    assert "expired" in refusal.reason


async def test_what_was_granted_before_the_end_stays_pinned() -> None:
    scene = Scene(one_sided=True)
    binding = scene.registry.find_key(SEVEN)
    assert binding is not None
    scene.ask(1)
    grant = await scene.granted()
    scene.registry.lease(binding, 0.01)
    await eventually(lambda: not scene.held)
    assert scene.entry.busy
    scene.serving.receive(frames.Done(grant.grant_id, "p"), b"")
    scene.path.transfers[0].settled.set_result(None)
    await eventually(lambda: not scene.entry.busy)
    assert "keys_consumed" not in scene.counters.snapshot()
