"""What the source has yet to acknowledge: kept in order, bounded, and waited for."""

from __future__ import annotations

import asyncio

from kvpull_async.protocol import frames
from kvpull_async.receipts import Receipts
from kvpull_async.status import LLMException


def done(number: int) -> frames.Done:
    return frames.Done(number.to_bytes(16, "big"), f"pull {number}")


def written(*numbers: int) -> Receipts:
    receipts = Receipts()
    for number in numbers:
        receipts.add(done(number))
    return receipts


def never() -> asyncio.Future[LLMException]:
    return asyncio.get_running_loop().create_future()


async def test_they_are_told_in_the_order_in_which_they_were_written() -> None:
    receipts = written(3, 1, 2)
    receipts.acknowledged(done(1).grant_id)
    receipts.acknowledged(done(9).grant_id)
    assert [receipt.pull_id for receipt in receipts] == ["pull 3", "pull 2"]
    assert len(receipts) == 2
    receipts.clear()
    assert not receipts


async def test_the_oldest_go_where_there_are_more_than_the_source_remembers() -> None:
    receipts = written(*range(5000))
    assert len(receipts) == 4096
    assert next(iter(receipts)).pull_id == "pull 904"


async def test_settled_waits_for_the_last_acknowledgement() -> None:
    receipts = written(1, 2)
    waiting = [asyncio.ensure_future(receipts.settled(never(), timeout=20)) for _ in range(2)]
    await asyncio.sleep(0)
    receipts.acknowledged(done(1).grant_id)
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    receipts.acknowledged(done(2).grant_id)
    assert await asyncio.wait_for(asyncio.gather(*waiting), 5) == [True, True]
    assert await receipts.settled(never(), timeout=0)


async def test_settled_ends_with_the_connection_or_the_time() -> None:
    receipts, lost = written(1), never()
    waiting = asyncio.ensure_future(receipts.settled(lost, timeout=20))
    await asyncio.sleep(0)
    lost.set_result(LLMException("lost"))
    assert not await asyncio.wait_for(waiting, 5)
    assert not await receipts.settled(never(), timeout=0.01)
    receipts.acknowledged(done(1).grant_id)  # nobody waits any more
