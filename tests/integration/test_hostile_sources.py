"""A source that answers with lies: the pull fails with a reason, its destination and the node are unharmed, and the
link serves the next honest pull.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from kvpull_async import CacheKey, KvCache, LLMDataDist, LLMException, LLMTimeoutError
from kvpull_async.protocol import frames
from kvpull_async.status import LLMStatusCode
from tests.hostile import (
    DESC,
    OK,
    STRIDE,
    TENSORS,
    HostileSource,
    content,
    honest_pull,
    info,
    link,
    links_of,
    payload_head,
    pulling,
    serving,
    unlink,
)
from tests.loop_nodes import event_log, eventually
from tests.wire import SAMPLES, mutate, sample

FAILED = LLMStatusCode.LLM_LINK_FAILED
KEY = CacheKey(1, 7)
GRANT_ID = b"g" * 16
NBYTES = TENSORS * STRIDE
UNTOUCHED = 0x55


def grant(request: frames.Request, **fields: object) -> frames.Grant:
    whole = frames.Grant(request.request_id, GRANT_ID, TENSORS, STRIDE, inline=True, wants_done=True)
    changed: frames.Grant = msgspec.structs.replace(whole, **fields)
    return changed


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[HostileSource, LLMDataDist, KvCache]]:
    """A puller linked to a hostile source, and a destination full of one value."""
    async with HostileSource().listening() as source, pulling() as puller:
        assert await link(puller, info(1, source.address)) == OK
        into = await puller.kv_cache_manager.allocate_cache(DESC)
        for tensor in range(TENSORS):
            puller.kv_cache_manager.get_cache_tensors(into, tensor)[0].numpy().view(np.uint8)[:] = UNTOUCHED
        yield source, puller, into
        await puller.kv_cache_manager.deallocate_cache(into)


async def good(source: HostileSource, puller: LLMDataDist, into: KvCache) -> None:
    """The same source, now telling the truth."""
    source.answer = lambda request: [(grant(request), b"\x21" * NBYTES)]
    await puller.kv_cache_manager.pull_cache(KEY, into)
    assert content(puller, into) == {0x21}


LIES = {
    "fewer bytes than granted": lambda request: [(grant(request), bytes(NBYTES - 1))],
    "more bytes than granted": lambda request: [(grant(request), bytes(NBYTES + 1))],
    "no bytes": lambda request: [(grant(request), b"")],
    "more tensors": lambda request: [(grant(request, tensors=TENSORS + 1), bytes(NBYTES + STRIDE))],
    "fewer tensors": lambda request: [(grant(request, tensors=TENSORS - 1), bytes(NBYTES - STRIDE))],
    "longer tensors": lambda request: [(grant(request, per_tensor=STRIDE + 1), bytes(NBYTES + TENSORS))],
    "shorter tensors": lambda request: [(grant(request, per_tensor=STRIDE - 1), bytes(NBYTES - TENSORS))],
    "absurd tensors": lambda request: [(grant(request, tensors=2**63 - 1, per_tensor=2**63 - 1), b"")],
    "a refusal of status 0": lambda request: [(frames.Refuse(request.request_id, 0, "fine"), b"")],
    "a refusal of no known status": lambda request: [(frames.Refuse(request.request_id, 12345, "odd"), b"")],
    "an answer to another request": lambda request: [(grant(request, request_id=request.request_id + 1), b"")],
    "a request of its own": lambda _: [(SAMPLES["Request"].message, b"")],
    "a goodbye": lambda _: [(frames.Bye(), b"")],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_p7_a_lie_fails_the_pull_and_writes_nothing(lie: object) -> None:
    async with linked() as (source, puller, into):
        source.answer = lie  # type: ignore[assignment]
        with pytest.raises(LLMException) as caught:
            await puller.kv_cache_manager.pull_cache(KEY, into)
        assert caught.value.status_code in (FAILED, LLMStatusCode.LLM_FAILED), str(caught.value)
        assert not caught.value.destination_unsafe
        assert not isinstance(caught.value, LLMTimeoutError)
        assert content(puller, into) == {UNTOUCHED}
        await good(source, puller, into)


PAYLOADS = {
    "of another grant": payload_head(b"x" * 16, NBYTES) + bytes(NBYTES),
    "of another length": payload_head(GRANT_ID, NBYTES + 1) + bytes(NBYTES + 1),
    "of garbage": random.Random("payload").randbytes(NBYTES),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
async def test_p7_a_payload_that_is_not_the_granted_one_never_lands(payload: bytes) -> None:
    async with linked() as (source, puller, into):
        source.payload = payload
        source.answer = lambda request: [(grant(request, inline=False), b"")]
        with pytest.raises(LLMException):  # there is no payload connection, since a small pull expects none
            await puller.kv_cache_manager.pull_cache(KEY, into)
        assert content(puller, into) == {UNTOUCHED}
        await good(source, puller, into)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
async def test_p7_a_large_pull_takes_no_foreign_payload_either(payload: bytes) -> None:
    async with HostileSource().listening() as source, pulling(inline_limit=0) as puller:
        assert await link(puller, info(1, source.address)) == OK
        into = await puller.kv_cache_manager.allocate_cache(DESC)
        source.payload = payload
        source.answer = lambda request: [(grant(request, inline=False), b"")]
        with pytest.raises(LLMException, match="carries another transfer"):
            await puller.kv_cache_manager.pull_cache(KEY, into)
        assert content(puller, into) == {0}
        source.payload = payload_head(GRANT_ID, NBYTES) + b"\x21" * NBYTES
        await puller.kv_cache_manager.pull_cache(KEY, into)
        assert content(puller, into) == {0x21}
        await puller.kv_cache_manager.deallocate_cache(into)


@pytest.mark.parametrize("stage", ["no answer", "no payload", "half a payload"])
async def test_p3_a_source_that_stops_talking_is_a_timeout_and_is_told_to_forget_it(stage: str) -> None:
    async with HostileSource().listening() as source, pulling(inline_limit=0) as puller:
        assert await link(puller, info(1, source.address)) == OK
        into = await puller.kv_cache_manager.allocate_cache(DESC)
        if stage != "no answer":
            source.answer = lambda request: [(grant(request, inline=False), b"")]
        if stage == "half a payload":
            source.payload = payload_head(GRANT_ID, NBYTES) + b"\x21" * STRIDE
        with pytest.raises(LLMTimeoutError) as caught:
            await puller.kv_cache_manager.pull_cache(KEY, into, timeout=100)
        assert caught.value.retry_safe
        assert not into.quarantined
        await eventually(lambda: source.cancelled == [1])
        source.answer = lambda request: [(grant(request, inline=False), b"")]
        source.payload = payload_head(GRANT_ID, NBYTES) + b"\x42" * NBYTES
        await puller.kv_cache_manager.pull_cache(KEY, into)
        assert content(puller, into) == {0x42}
        await puller.kv_cache_manager.deallocate_cache(into)


async def test_a8_mutated_answers_fail_the_pull_and_the_node_goes_on() -> None:
    """Each is one pull: it fails, or a mutation that spares the numbers delivers bytes; nothing else."""
    rng = random.Random("answers")
    kinds = ("Grant", "Refuse", "DoneAck", "Pong", "Request", "Hello")
    async with serving(3) as honest:
        with event_log() as events:
            async with linked() as (source, puller, into):
                assert await link(puller, honest) == OK
                for round_ in range(40):
                    source.answer = lambda _: mutate(sample(rng.choice(kinds)), rng)
                    with contextlib.suppress(LLMException):
                        await puller.kv_cache_manager.pull_cache(KEY, into, timeout=30)
                    assert not into.quarantined
                    if round_ % 20 == 19:
                        await honest_pull(puller, honest, round_)
                # Half a frame may stand before its next answer, so the link is made anew.
                await unlink(puller, 1, force=True)
                assert await link(puller, info(1, source.address)) == OK
                await good(source, puller, into)
            assert events.named("link.bug") == events.named("engine.bug") == []


STRANGERS = {
    "an HTTP server": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "an SSH server": b"SSH-2.0-OpenSSH_9.6\r\n" * 3,
    "a frame above the limit": frames.HEADER.pack(frames.GREETING_LIMIT + 1, 2, 100),
    "a message out of turn": sample("Welcome"),
    "garbage": random.Random("garbage").randbytes(500),
}


@pytest.mark.parametrize("first_words", STRANGERS.values(), ids=STRANGERS.keys())
async def test_dialling_something_else_is_a_failed_link_that_says_so(first_words: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first_words)
        await reader.read(100)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    with event_log() as events:
        async with pulling() as puller, serving(3) as honest:
            assert await link(puller, info(1, server.sockets[0].getsockname())) == FAILED
            failed = await events.first("link.failed", cluster_id=1)
            assert failed["reason"]
            assert links_of(puller) == []
            assert await link(puller, honest) == OK
            await honest_pull(puller, honest, 9)
    server.close()


async def test_a_refusal_of_status_0_is_not_a_link() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode(frames.Reject(0, "welcome, in a way")))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with pulling() as puller:
        assert await link(puller, info(1, server.sockets[0].getsockname())) == FAILED
        assert links_of(puller) == []
    server.close()


async def test_an_acceptor_of_another_version_is_named() -> None:
    async def newer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode(frames.Challenge(9, b"i" * 16, b"n" * 32, False)))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(newer, "127.0.0.1", 0)
    words = (
        f"the dialling side speaks protocol {frames.VERSION}, the accepting side 9; run releases that share one on both"
    )
    with event_log() as events:
        async with pulling() as puller:
            assert await link(puller, info(1, server.sockets[0].getsockname())) == FAILED
            await events.first("link.failed", text=words)
    server.close()


async def test_a_source_that_never_says_goodbye_back_can_be_forced_out() -> None:
    async with linked() as (source, puller, _):
        source.answer = lambda _: []
        source._handle = lambda *_: None  # type: ignore[method-assign]
        assert await unlink(puller, 1, timeout=100) == LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert len(links_of(puller)) == 1
        assert await unlink(puller, 1, force=True) == OK
        assert links_of(puller) == []
