"""`allowed_clusters`: caches that exist for some clusters only, and nodes that only some clusters may link with."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
)
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Failed, Session
from tests import duo, hostile
from tests.conformance.api import AWAITED, Api
from tests.integration.rig import begin, each_face, each_path
from tests.loop_nodes import event_log, eventually
from tests.transferring import Ready
from tests.wire import SAMPLES, identity

pytestmark = pytest.mark.smoke

FRIEND, STRANGER = 2, 3
BLOCKS = CacheDesc(4, [8, 1024], DataType.DT_UINT8)
PREFIX = CacheKey(duo.PROMPT, 2**64 - 1, 0, 44)
MISSING, INVALID = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_PARAM_INVALID
PAYLOAD = b"x" * 4096
NOT_HERE = 900_000
"""A number of which nothing is there."""


@dataclass
class Three:
    """A source, and two nodes that are linked with it: one that may see everything, and one that may not."""

    api: Api
    source: Any
    friend: Any
    stranger: Any
    kept: list[Any] = field(default_factory=list)

    async def make(self, allocate: Any, *args: Any, **options: Any) -> Any:
        self.kept.append(await self.api.do(allocate, *args, **options))
        return self.kept[-1]

    async def pair(self, manager: Any) -> tuple[Any, Any]:
        """A cache, and one of blocks."""
        return await self.make(manager.allocate_cache, duo.SMALL), await self.make(
            manager.allocate_blocks_cache, BLOCKS
        )


@contextlib.asynccontextmanager
async def three(api: Api, path: str, **properties: Any) -> AsyncIterator[Three]:
    made = [
        api.package.LLMDataDist(role, number)
        for role, number in ((LLMRole.PROMPT, duo.PROMPT), (LLMRole.DECODER, FRIEND), (LLMRole.DECODER, STRANGER))
    ]
    try:
        for node in made:
            options = {"transport": path, "enable_cache_manager": True, **properties}
            await api.do(node.init, duo.options(listen=node is made[0], **options))
        for node in made[1:]:
            info = duo.cluster(duo.PROMPT, made[0].listen_address)
            await api.do(node.link_clusters, [info], duo.TIMEOUT_MS, raise_on_error=True)
        yield Three(api, *made)
    finally:
        for node in reversed(made):
            await api.do(node.finalize)


async def error_of(t: Three, call: Any, *args: Any, **options: Any) -> tuple[LLMStatusCode, str, bool]:
    """How a call failed, without the numbers in which two failures may differ."""
    with pytest.raises(LLMException) as caught:
        await t.api.do(call, *args, **options)
    return LLMStatusCode(caught.value.status_code), plain(str(caught.value)), caught.value.retry_safe


def plain(message: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "N", message)


@each_path
@each_face
async def test_for_others_a_cache_does_not_exist(path: str, api: Api) -> None:
    async with three(api, path) as t:
        manager, only = t.source.cache_manager, {"allowed_clusters": [FRIEND]}
        cache = await t.make(manager.allocate_cache, duo.SMALL, [CacheKey(duo.PROMPT, 1), PREFIX], **only)
        blocks = await t.make(manager.allocate_blocks_cache, BLOCKS, BlocksCacheKey(duo.PROMPT, 7), **only)
        duo.fill(cache)
        duo.fill(blocks)
        for node in (t.stranger, t.friend):  # the friend at last: it uses a key up
            pulls = node.cache_manager
            into, paged = await t.pair(pulls)
            calls: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
                (pulls.pull_cache, (PREFIX, into), (CacheKey(duo.PROMPT, 2**64 - 1, 0, NOT_HERE), into)),
                (
                    pulls.pull_cache,
                    (CacheKeyByIdAndIndex(duo.PROMPT, cache.cache_id, 1), into),
                    (CacheKeyByIdAndIndex(duo.PROMPT, NOT_HERE, 1), into),
                ),
                (
                    pulls.pull_blocks,
                    (BlocksCacheKey(duo.PROMPT, 7), paged, [0], [1]),
                    (BlocksCacheKey(duo.PROMPT, NOT_HERE), paged, [0], [1]),
                ),
                (
                    pulls.pull_blocks,
                    (PREFIX, paged, [], [3]),
                    (CacheKey(duo.PROMPT, 2**64 - 1, 0, NOT_HERE), paged, [], [3]),
                ),
                (pulls.renew_key, (CacheKey(duo.PROMPT, 1), 1000), (CacheKey(duo.PROMPT, NOT_HERE), 1000)),
                (pulls.pull_cache, (CacheKey(duo.PROMPT, 1), into), (CacheKey(duo.PROMPT, NOT_HERE), into)),
            ]
            for call, asked, missing in calls:
                if node is t.friend:
                    await api.do(call, *asked)
                else:
                    told = await error_of(t, call, *asked)
                    assert told == await error_of(t, call, *missing)
                    assert told[0] == MISSING
                    assert "held: none at all" in told[1] or "held" not in told[1]
            if node is t.stranger:
                assert duo.untouched(into)
                assert duo.untouched(paged)
                told = await error_of(t, pulls.release_key, PREFIX)
                assert told == await error_of(t, pulls.release_key, CacheKey(duo.PROMPT, 2**64 - 1, 0, NOT_HERE))
        assert duo.holds(into, entry=0, source=0)
        assert duo.holds(paged, entry=1, source=0)


@each_path
async def test_a_pull_that_waits_hears_nothing_of_a_cache_for_others(path: str) -> None:
    async with three(AWAITED, path) as t:
        source, waits = t.source.cache_manager, {"wait_for_key": True}
        kinds = [CacheKey(duo.PROMPT, 1), CacheKeyByIdAndIndex(duo.PROMPT, 1, 2), BlocksCacheKey(duo.PROMPT, 7)]
        pulls: dict[int, list[asyncio.Task[Any]]] = {}
        for node in (t.friend, t.stranger):
            manager = node.cache_manager
            into, paged = await t.pair(manager)
            patience = duo.TIMEOUT_MS if node is t.friend else 1000
            pulls[node.cluster_id] = [
                begin(manager.pull_cache(kinds[1], into, timeout=patience, **waits)),
                begin(manager.pull_blocks(kinds[2], paged, [1], [0], timeout=patience, **waits)),
                begin(manager.pull_cache(kinds[0], into, 1, timeout=patience, **waits)),
            ]
        watches = duo.engine_of(t.source).registry._watches
        await eventually(lambda: sum(map(len, tuple(watches.values()))) == 6)
        only = {"allowed_clusters": {FRIEND}}
        await t.make(source.allocate_cache, duo.SMALL, [CacheKey(duo.PROMPT, 1)], **only)
        await t.make(source.allocate_blocks_cache, BLOCKS, BlocksCacheKey(duo.PROMPT, 7), **only)
        await asyncio.gather(*pulls[FRIEND])
        ends = await asyncio.gather(*pulls[STRANGER], return_exceptions=True)
        assert all(isinstance(end, TimeoutError) and "had not been published" in str(end) for end in ends), ends


@each_path
@each_face
async def test_nobody_else_pushes_into_it_by_key(path: str, api: Api) -> None:
    async with three(api, path, enable_remote_cache_accessible=True) as t:
        manager, only = t.source.cache_manager, {"allowed_clusters": [FRIEND]}
        cache = await t.make(manager.allocate_cache, duo.SMALL, **only)
        blocks = await t.make(manager.allocate_blocks_cache, BLOCKS, BlocksCacheKey(duo.PROMPT, 7), **only)
        for node in (t.stranger, t.friend):
            pushes = node.cache_manager
            own, paged = await t.pair(pushes)
            duo.fill(own)
            duo.fill(paged)
            by_id = [CacheKeyByIdAndIndex(duo.PROMPT, number, 1) for number in (cache.cache_id, NOT_HERE)]
            by_model = [BlocksCacheKey(duo.PROMPT, model) for model in (7, NOT_HERE)]
            if node is t.friend:
                await api.do(pushes.push_cache, by_id[0], own)
                await api.do(pushes.push_blocks, by_model[0], paged, [1], [2])
                await api.do(pushes.pull_cache, by_id[0], own, 3)
            else:
                for call, keys, *rest in (
                    (pushes.push_cache, by_id, own),
                    (pushes.push_blocks, by_model, paged, [1], [2]),
                    (pushes.pull_cache, by_id, own),
                ):
                    told = await error_of(t, call, keys[0], *rest)
                    assert told == await error_of(t, call, keys[1], *rest)
                    assert told[0] == MISSING
                assert duo.untouched(cache)
                assert duo.untouched(blocks)
                links = duo.engine_of(node).links.all()
                assert [link.standing.find(cache.cache_id) for link in links] == [None]
        assert duo.holds(cache, entry=1, source=0)
        assert duo.holds(blocks, entry=2, source=1)


@each_path
@each_face
async def test_nobody_else_writes_to_its_addresses(path: str, api: Api) -> None:
    """Memory that is registered twice, for one cluster each, is reached by both: the younger hides no older."""
    desc = CacheDesc(2, [1, 4096], DataType.DT_UINT8)
    async with three(api, path) as t:
        manager = t.source.cache_manager
        memory = np.zeros((3, 2, 4096), np.uint8)
        for rows, allowed in ((memory[0], {FRIEND}), (memory[1], {FRIEND}), (memory[1], {STRANGER}), (memory[2], ())):
            await t.make(
                manager.register_cache, desc, [row.ctypes.data for row in rows], remote_accessible=True,
                allowed_clusters=allowed,
            )  # fmt: skip

        async def write(node: Any, addresses: list[int], value: int) -> tuple[LLMStatusCode, str]:
            own = await t.make(node.cache_manager.allocate_cache, desc)
            for array in duo.arrays(own):
                array[:] = value
            config = TransferConfig(duo.PROMPT, addresses)
            task = node.cache_manager.transfer_cache_async(own, Ready(), [config])
            status = await api.do(task.synchronize)
            return status, plain(str(task.exceptions[0]))

        places = [[row.ctypes.data for row in rows] for rows in memory]
        gone = np.zeros((2, 4096), np.uint8)
        missing = await write(t.stranger, [row.ctypes.data for row in gone], 9)
        assert missing[0] == INVALID
        assert await write(t.stranger, places[0], 9) == missing
        assert await write(t.stranger, [places[1][0], places[0][1]], 9) == missing
        assert not memory.any()
        assert await write(t.friend, places[2], 9) == missing  # nobody's
        assert (await write(t.friend, places[0], 5))[0] is LLMStatusCode.LLM_SUCCESS
        assert (await write(t.friend, places[1], 6))[0] is LLMStatusCode.LLM_SUCCESS
        assert (memory[0] == 5).all()
        assert (memory[1] == 6).all()
        assert (await write(t.stranger, places[1], 7))[0] is LLMStatusCode.LLM_SUCCESS
        assert (memory[1] == 7).all()
        assert not memory[2].any()
        assert not gone.any()


async def test_over_shared_memory_others_get_no_descriptor_of_it() -> None:
    async with three(AWAITED, "shm") as t:
        source = t.source.cache_manager
        await t.make(source.allocate_cache, duo.BIG, [CacheKey(duo.PROMPT, 1)], allowed_clusters=[FRIEND])
        for node in (t.friend, t.stranger):
            into = await t.make(node.cache_manager.allocate_cache, duo.BIG)
            pull = node.cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), into, src_cache_offset=0)
            (end,) = await asyncio.gather(pull, return_exceptions=True)
            assert (end is None) == (node is t.friend)
            (link,) = duo.engine_of(node).links.all()
            assert bool(link.path._side._caches) == bool(link.path._side._files) == (node is t.friend)


def asked(kind: type[Any], number: int, **fields: Any) -> frames.Message:
    """What a peer asks, of small caches of 4 tensors with 1024 bytes in an entry."""
    common: dict[str, Any] = {"request_id": number}
    if kind is frames.Request:
        common |= {"tensors": 4, "size": 1024, "remaining_ms": 20_000, "entry": 0, "blocks": 0}
    if kind is frames.Offer:
        common |= {"tensors": 4, "per_tensor": 1024, "first_tensor": 0, "blocks": 0, "src_blocks": 0, "inline": True}
        common |= {"remaining_ms": 20_000, "entry": 0, "ticket": None, "src_tensor": 0, "block_nbytes": 0}
    return msgspec.structs.replace(SAMPLES[kind.__name__].message, **{**common, **fields})


def _rows(*addresses: list[int]) -> list[bytes]:
    return [np.array(each, "<i8").tobytes() + PAYLOAD for each in addresses]


def _named(cache_id: int, blocks_id: int) -> list[Any]:
    """Messages about something that is hidden, and what to change so that they are about something that is not there;
    and what follows each.
    """
    elsewhere, model = {"identity": NOT_HERE}, {"model_id": NOT_HERE}
    blocks = {"key": "blocks", "model_id": 7}
    filled = {**blocks, "blocks": 1, "block_nbytes": 1024}
    sliced = {"key": "cache", "identity": cache_id, "entry": 3, "blocks": 2, "size": 512}
    found = [(kind, {"key": "request", "identity": 5}, elsewhere, b"", b"") for kind in (frames.Request, frames.Lease)]
    for number in (cache_id, blocks_id):
        by_id = {"key": "cache", "identity": number}
        found += [(frames.Request, {**by_id, "remote_access": way}, elsewhere, b"", b"") for way in (False, True)]
        found.append((frames.Offer, by_id, elsewhere, PAYLOAD, PAYLOAD))
    return [
        *found,
        (frames.Request, sliced, elsewhere, b"", b""),
        (frames.Request, blocks, model, bytes(8), bytes(8)),
        (frames.Request, blocks, model, b"odd", b"odd"),
        (frames.Offer, filled, model, bytes(8) + PAYLOAD, bytes(8) + PAYLOAD),
    ]


async def _answers(source: Any, cluster_id: int, pairs: list[Any]) -> list[tuple[Any, Any]]:
    """What a peer with that id hears about each, first of what may be hidden."""
    peer = await hostile.raw_peer(source.listen_address, who=identity(cluster_id))
    answers: list[Any] = []
    try:
        for kind, there, other, *tails in pairs:
            for given, tail in zip((there, {**there, **other}), tails, strict=True):
                number = len(answers) + 1
                await peer.asks.send(frames.encode(asked(kind, number, **given), tail))
                while len(answers) < number:
                    said = hostile.messages(await peer.asks.receive())
                    answers += [one for one in said if isinstance(one, (frames.Refuse, frames.Result, frames.Grant))]
        return list(zip(answers[::2], answers[1::2], strict=True))
    finally:
        peer.close()


@pytest.mark.parametrize("remote", [False, True], ids=["", "remote access"])
async def test_a_hostile_peer_cannot_tell_what_is_hidden_from_what_is_not_there(remote: bool) -> None:
    properties: dict[str, Any] = {"enable_cache_manager": True, "enable_remote_cache_accessible": remote}
    async with hostile.serving(1, **properties) as source:
        manager, only = source.cache_manager, {"allowed_clusters": [FRIEND]}
        cache = await manager.allocate_cache(duo.SMALL, [CacheKey(1, 5)], **only)
        blocks = await manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1, 7), **only)
        hidden = [array.ctypes.data for array in duo.arrays(cache)]
        nowhere = [array.ctypes.data for array in np.zeros((4, 1024), np.uint8)]
        pairs = [
            *_named(cache.cache_id, blocks.cache_id),
            (frames.Offer, {"key": "address"}, {}, *_rows(hidden, nowhere)),
        ]
        for i, (one, two) in enumerate(await _answers(source, STRANGER, pairs)):
            assert not isinstance(one, frames.Grant), pairs[i]
            assert (type(one), one.status, plain(one.reason)) == (type(two), two.status, plain(two.reason)), pairs[i]
        assert duo.untouched(cache)
        assert duo.untouched(blocks)
        granted = [one for one, _ in await _answers(source, FRIEND, pairs) if not getattr(one, "status", 0)]
        assert len(granted) > len(pairs) // 2, "these messages would have been good ones"


async def test_wrong_lists_are_named() -> None:
    async with duo.node(LLMRole.PROMPT, duo.PROMPT) as node:
        for odd in (7, "12", b"12", [None], [1.0]):
            with pytest.raises(TypeError, match="allowed_clusters"):
                await node.cache_manager.allocate_cache(duo.SMALL, allowed_clusters=odd)  # type: ignore[arg-type]
        for wrong in ([-1], [2**64]):
            with pytest.raises(ValueError, match="allowed_clusters"):
                await node.cache_manager.allocate_blocks_cache(BLOCKS, allowed_clusters=wrong)
        made = await node.cache_manager.allocate_cache(duo.SMALL, allowed_clusters=iter([2, 2**64 - 1]))
        assert duo.engine_of(node).registry.entries()[0].allowed == {2, 2**64 - 1}
        await node.cache_manager.deallocate_cache(made)


# -- whole nodes -------------------------------------------------------------------------------------------------------


@each_path
async def test_only_allowed_clusters_link(path: str) -> None:
    options: dict[str, Any] = {"transfer_backend": path}
    with event_log() as log:
        async with (
            hostile.serving(1, allowed_clusters=[FRIEND, 7], **options) as source,
            hostile.pulling(FRIEND, **options) as friend,
            hostile.pulling(STRANGER, **options) as stranger,
        ):
            assert await hostile.link(stranger, source) == LLMStatusCode.LLM_LINK_FAILED
            assert await hostile.link(friend, source) == hostile.OK
            await hostile.honest_pull(friend, source, 9)
            assert [link.cluster_id for link in hostile.links_of(source)] == [FRIEND]
            reason = "cluster 3 is not among the allowed clusters"
            await log.first("link.rejected", text=reason, local_cluster_id=1)
            await log.first("link.failed", text=f"refused: {reason}", local_cluster_id=STRANGER)


async def test_whom_a_node_itself_links_with_is_its_own_choice() -> None:
    async with hostile.serving(1) as source, hostile.pulling(2, allowed_clusters=[9]) as puller:
        assert await hostile.link(puller, source) == hostile.OK
        await hostile.honest_pull(puller, source, 9)


async def test_who_does_not_know_the_secret_does_not_hear_of_the_list() -> None:
    async with hostile.serving(1, allowed_clusters="2", link_secret="a secret of 16 bytes") as source:
        for secret, says in ((b"another one, wrong", "secrets"), (b"a secret of 16 bytes", "not among the allowed")):
            raw = await hostile.Raw.connect(source.listen_address)
            event = await hostile.greet(raw, Session(identity(STRANGER, secret=secret), dialer=True, asked=1))
            assert isinstance(event, Failed)
            assert says in event.reason
            raw.close()
        assert hostile.links_of(source) == []
