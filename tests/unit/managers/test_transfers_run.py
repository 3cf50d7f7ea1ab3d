"""The run of a transfer, with a stand-in for the push of one layer: what is sent where and when, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMRole,
    LLMStatusCode,
    LLMTimeoutError,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvpull_async.managers import pushes
from kvpull_async.tasks import TransferTask
from tests.loop_nodes import event_log
from tests.transferring import BOUND, Held, Ready, Sends
from tests.unit.side import Side

OK, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED
PARAM_INVALID, FINALIZED = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_ENGINE_FINALIZED
LAYERS = 4
DESC = CacheDesc(2 * LAYERS, [3, 64], DataType.DT_UINT8)
SYNC_MS = 20_000


def address(layer: int, tensor: int = 0) -> int:
    """Made up; the stand-in looks at none."""
    return 4096 * (2 * layer + tensor + 1)


def config(cluster_id: int = 2, layers: range = range(LAYERS), **more: Any) -> TransferConfig:
    addresses = [address(layer, tensor) for layer in layers for tensor in (0, 1)]
    return TransferConfig(cluster_id, addresses, layers, **more)


class Run:
    """One side, and the transfers that it is asked for."""

    def __init__(self, sends: Sends, **properties: Any) -> None:
        self.sends = sends
        self.side = Side("cache", LLMRole.PROMPT, sync_kv_timeout=SYNC_MS, **properties)
        self.cache = self.side.allocate(DESC)
        self.ready = Ready()

    def begin(
        self, configs: list[Any], *blocks: Any, ready: Any = None, cache: Any = None, **options: Any
    ) -> TransferTask:
        arguments = [cache or self.cache, ready or self.ready, configs, *blocks, *[None] * (3 - len(blocks))]
        asked = self.side.manager.transfer_cache_async(*arguments, options=options, caller=None)
        return TransferTask(self.side.engine, asked)

    def __call__(self, configs: list[Any], *blocks: Any, **more: Any) -> list[LLMStatusCode | None]:
        return self.end(self.begin(configs, *blocks, **more)).results

    @staticmethod
    def end(task: TransferTask) -> TransferTask:
        over = threading.Event()
        task.when_over(over.set)
        assert over.wait(BOUND)
        return task

    def close(self) -> None:
        self.side.close()
        self.cache = None

    def counts(self) -> dict[str, int]:
        found = self.side.engine.snapshot()
        return {name[10:]: found[name] for name in found if name.startswith("transfers_")}


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sends]:
    made = Sends()
    monkeypatch.setattr(pushes, "send", made)
    yield made
    made.parcels.clear()  # they keep the memory of caches


@pytest.fixture
def run(sends: Sends) -> Iterator[Run]:
    made = Run(sends)
    yield made
    made.close()


@pytest.fixture
def remote(sends: Sends) -> Iterator[Run]:
    made = Run(sends, enable_cache_manager=True, enable_remote_cache_accessible=True)
    yield made
    made.close()


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_each_layer_is_asked_for_and_sent_in_order(run: Run) -> None:
    assert run([config()]) == [OK]
    assert run.ready.asked == [(layer, None) for layer in range(LAYERS)]
    for layer, parcel in enumerate(run.sends.parcels):
        assert parcel.source is run.cache._binding
        assert parcel.tensors == range(2 * layer, 2 * layer + 2)
        assert (parcel.aim.cluster_id, parcel.aim.kind) == (2, "address")
        assert parcel.aim.addresses == (address(layer, 0), address(layer, 1))
        assert (parcel.src_index, parcel.src_blocks, parcel.dst_blocks, parcel.block_nbytes) == (0, None, None, 0)
    assert run.counts() == {"started": 1, "finished": 1}


def test_a_layer_goes_to_every_config_that_wants_it_and_is_asked_for_once(run: Run) -> None:
    assert run([config(2, range(2)), config(3, range(1, 4), src_batch_index=2)]) == [OK, OK]
    assert run.ready.layers == [0, 1, 2, 3]
    assert sorted(run.sends.layers[1:3]) == [(2, 1), (3, 1)]
    assert (run.sends.layers[0], run.sends.layers[3:]) == ((2, 0), [(3, 2), (3, 3)])
    assert {parcel.src_index for parcel in run.sends.parcels if parcel.aim.cluster_id == 3} == {2}
    third = next(parcel for parcel in run.sends.parcels if parcel.tensors.start == 4)
    assert third.aim.addresses == (address(2, 0), address(2, 1)), "addresses are counted from the range's start"


def test_a_layer_that_nobody_wants_is_not_asked_for(run: Run) -> None:
    assert run([config(2, range(1)), config(2, range(3, 4))]) == [OK, OK]
    assert run.ready.layers == [0, 3]


def test_nothing_to_send_is_a_success(run: Run) -> None:
    task = run.end(run.begin([]))
    assert (task.results, task.overall, task.exceptions) == ([], OK, [])
    assert not run.ready.asked


def test_a_config_that_is_changed_after_the_call_changes_nothing(run: Run) -> None:
    held, changed = Held(), config()
    task = run.begin([changed], ready=held)
    changed.dst_cluster_id, changed.dst_addrs, changed.src_layer_range = 9, [1], range(7)
    held.let_go()
    assert run.end(task).results == [OK]
    assert run.sends.layers == [(2, layer) for layer in range(LAYERS)]


def test_into_blocks(run: Run) -> None:
    assert run([config(2, range(1), src_batch_index=1)], None, [5, 1], 48) == [OK]
    (parcel,) = run.sends.parcels
    assert parcel.dst_blocks is not None
    assert (parcel.src_index, parcel.src_blocks, parcel.dst_blocks.tolist(), parcel.block_nbytes) == (
        1,
        None,
        [5, 1],
        48,
    )


@pytest.mark.parametrize("size", [None, 0, 64])
def test_blocks_into_blocks(run: Run, size: int | None) -> None:
    assert run([config(2, range(1))], [2, 0], [5, 1], size, cache=run.side.blocks(DESC)) == [OK]
    (parcel,) = run.sends.parcels
    assert parcel.src_blocks is not None
    assert parcel.dst_blocks is not None
    assert (parcel.src_blocks.tolist(), parcel.dst_blocks.tolist(), parcel.block_nbytes) == ([2, 0], [5, 1], 64)


def test_of_a_blocks_cache_without_lists_the_first_block_goes_to_the_first(run: Run) -> None:
    assert run([config(2, range(1))], cache=run.side.blocks(DESC)) == [OK]
    (parcel,) = run.sends.parcels
    assert parcel.src_blocks is not None
    assert parcel.dst_blocks is not None
    assert (parcel.src_blocks.tolist(), parcel.dst_blocks.tolist(), parcel.block_nbytes) == ([0], [0], 64)


def test_by_key_the_destinations_layer_is_that_of_its_own_range(remote: Run) -> None:
    by_id = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 7, 1), range(1, 4), range(5, 8), 2)
    assert remote([by_id]) == [OK]
    aims = [parcel.aim for parcel in remote.sends.parcels]
    assert {(aim.cluster_id, aim.kind, aim.identity, aim.entry) for aim in aims} == {(2, "cache", 7, 1)}
    assert [aim.first_tensor for aim in aims] == [10, 12, 14]
    assert [parcel.tensors.start for parcel in remote.sends.parcels] == [2, 4, 6]
    assert {parcel.src_index for parcel in remote.sends.parcels} == {2}


def test_by_blocks_key(remote: Run) -> None:
    by_blocks = TransferWithCacheKeyConfig(BlocksCacheKey(2, 3), range(1), range(1, 2))
    assert remote([by_blocks], [0], [4], cache=remote.side.blocks(DESC)) == [OK]
    (parcel,) = remote.sends.parcels
    assert (parcel.aim.cluster_id, parcel.aim.kind, parcel.aim.model_id) == (2, "blocks", 3)
    assert (parcel.aim.first_tensor, parcel.block_nbytes) == (2, 64)


# -- at the same time, and in time -------------------------------------------------------------------------------------


def test_clusters_do_not_wait_for_each_other(run: Run) -> None:
    """Each send of a layer waits until the other cluster's has begun, too."""
    meeting: dict[int, set[int]] = {}

    async def meet(parcel: Any) -> None:
        there = meeting.setdefault(parcel.tensors.start, set())
        there.add(parcel.aim.cluster_id)
        while len(there) < 2:  # noqa: ASYNC110  (on purpose: it never ends where they wait for each other)
            await asyncio.sleep(0.001)

    run.sends.act = meet
    assert run([config(2), config(3)]) == [OK, OK]


def test_configs_of_one_cluster_are_sent_in_turn(run: Run) -> None:
    busy: list[int] = []

    async def alone(parcel: Any) -> None:
        assert not busy
        busy.append(parcel.src_index)
        await asyncio.sleep(0.001)
        busy.clear()

    run.sends.act = alone
    assert run([config(2), config(2, src_batch_index=1)]) == [OK, OK]
    assert [parcel.src_index for parcel in run.sends.parcels] == [0, 1] * LAYERS


def test_each_layer_has_its_own_time(run: Run) -> None:
    run.sends.act = lambda _: asyncio.sleep(0.05)
    assert run([config(), config()]) == [OK, OK]
    assert len(run.sends.remaining) == 2 * LAYERS
    assert all(SYNC_MS / 1000 - 0.05 < remaining <= SYNC_MS / 1000 for remaining in run.sends.remaining)


def test_the_calls_own_timeout_and_trace(run: Run) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    run.end(run.begin([config()], timeout=7_000, traceparent=trace))
    assert all(6.9 < remaining <= 7 for remaining in run.sends.remaining)
    assert set(run.sends.traces) == {trace}


def test_the_next_layer_is_asked_for_when_this_one_has_gone(run: Run) -> None:
    story: list[str] = []
    ready = Ready(lambda layer: not story.append(f"ask {layer}"))
    run.sends.act = lambda parcel: story.append(f"send {parcel.tensors.start // 2}")
    assert run([config(2, range(2))], ready=ready) == [OK]
    assert story == ["ask 0", "send 0", "ask 1", "send 1"]


# -- failures ----------------------------------------------------------------------------------------------------------


def when(layer: int, error: BaseException, *, cluster_id: int = 2) -> Callable[[Any], None]:
    def act(parcel: Any) -> None:
        if (parcel.aim.cluster_id, parcel.tensors.start) == (cluster_id, 2 * layer):
            raise error

    return act


def test_a_refusing_synchronizer_ends_the_transfer(run: Run) -> None:
    task = run.end(
        run.begin([config(), config(3, range(1)), config(4, range(2, 3))], ready=Ready(lambda layer: layer < 1))
    )
    assert task.results == [PARAM_INVALID, OK, None]
    assert task.overall is PARAM_INVALID
    assert sorted(run.sends.layers) == [(2, 0), (3, 0)]
    assert "refused layer 1" in str(task.exceptions[0])
    assert task.exceptions[1:] == [None, None]
    assert run.counts() == {"started": 1, "failed": 1}


NAMED = LLMException("no link", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
LATE = LLMTimeoutError("late")
ERRORS = [
    (NAMED, LLMStatusCode.LLM_NOT_YET_LINK),
    (LATE, LLMStatusCode.LLM_TIMEOUT),
    (LLMException("it does not say"), FAILED),
    (LLMException("odd", status_code=7), FAILED),
    (ValueError("odd"), FAILED),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_what_a_synchronizer_raises_is_a_status_and_never_a_success(
    run: Run, error: BaseException, expected: LLMStatusCode
) -> None:
    def raise_it(layer: int) -> bool:
        raise error

    task = run.end(run.begin([config(), config(3, range(1, 2))], ready=Ready(raise_it)))
    assert (task.results, task.overall) == ([expected, None], expected)
    assert task.exceptions == [error, None]
    assert not run.sends.parcels


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_what_a_push_raises_is_that_configs_status(run: Run, error: BaseException, expected: LLMStatusCode) -> None:
    run.sends.act = when(1, error)
    task = run.end(run.begin([config(2), config(3, range(2)), config(3), config(4, range(3, 4))]))
    assert task.results == [expected, OK, None, None], "the others have had that layer, and then it stopped"
    assert task.exceptions == [error, None, None, None]
    assert run.ready.layers == [0, 1]
    assert task.overall is expected


def test_two_configs_of_one_cluster_have_a_status_each(run: Run) -> None:
    def act(parcel: Any) -> None:
        if parcel.src_index == 1:
            raise NAMED

    run.sends.act = act
    last = range(LAYERS - 1, LAYERS)
    results = run([config(2, last), config(2, last, src_batch_index=1), config(2, last)])
    assert results == [OK, LLMStatusCode.LLM_NOT_YET_LINK, OK]


def test_a_cache_that_is_gone_is_a_status(run: Run) -> None:
    held = Held()
    task = run.begin([config()], ready=held)
    assert held.entered.wait(BOUND)
    run.side.run(run.side.manager.deallocate(run.cache, blocks=False))
    held.let_go()
    assert run.end(task).results == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST]


def test_blocks_and_entries_are_told_apart(run: Run) -> None:
    assert run([config()], [0], [0]) == [PARAM_INVALID]
    assert run([config()], [0], [0], 63, cache=run.side.blocks(DESC)) == [PARAM_INVALID]
    assert not run.sends.parcels


# -- the end of the node -----------------------------------------------------------------------------------------------


def test_finalize_ends_a_transfer_that_sends(sends: Sends) -> None:
    run, sending = Run(sends), threading.Event()

    async def forever(parcel: Any) -> None:
        sending.set()
        await asyncio.sleep(BOUND)

    sends.act = forever
    task = run.begin([config(2), config(3, range(1, 2)), config(4, range(1))])
    assert sending.wait(BOUND)
    run.close()
    assert run.end(task).results == [FINALIZED] * 3
    assert run.counts() == {"started": 1, "failed": 1}
    assert all(isinstance(error, LLMException) for error in task.exceptions)
    assert task.overall is FINALIZED


def test_finalize_does_not_wait_for_a_synchronizer_and_says_so(sends: Sends) -> None:
    run, held = Run(sends), Held()
    with event_log() as log:
        task = run.begin([config()], ready=held)
        assert held.entered.wait(BOUND)
        run.close()
        assert run.end(task).results == [FINALIZED]
        (stuck,) = log.named("transfer.synchronizer_stuck")
        assert stuck["layer"] == 0
    held.let_go()  # the leak guard sees that its thread ends now


def test_a_node_that_has_ended_takes_no_transfer(sends: Sends) -> None:
    run = Run(sends)
    cache = run.cache
    run.close()
    with pytest.raises(LLMException) as caught:
        run.begin([config()], cache=cache)
    assert caught.value.status_code is FINALIZED


# -- events ------------------------------------------------------------------------------------------------------------


def test_the_story_of_a_transfer(sends: Sends) -> None:
    run, sends.act = Run(sends), when(1, NAMED, cluster_id=3)
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    with event_log() as log:
        run([config(), config(3)], traceparent=trace)
        run([config()])
        run.close()  # its log is written, too
        (first, second) = log.named("transfer.started")
        (failed,) = log.named("transfer.failed")
        (finished,) = log.named("transfer.finished")
    assert (first["cache_id"], first["configs"]) == (1, 2)
    assert first["transfer_id"] == failed["transfer_id"]
    assert second["transfer_id"] == finished["transfer_id"] != first["transfer_id"]
    told = {name: failed[name] for name in ("cluster_id", "config", "layer", "status", "error", "reason")}
    assert told == {
        "cluster_id": 3, "config": 1, "layer": 1, "status": "LLM_NOT_YET_LINK", "error": "LLMException",
        "reason": "no link",
    }  # fmt: skip
    part_of = {"transfer_id": first["transfer_id"], "config": 1, "layer": 1}
    assert [of for pull_id, of in sends.told if pull_id == failed["pull_id"]] == [part_of]
    assert (first["traceparent"], failed["traceparent"]) == (trace, trace)
    assert "traceparent" not in second.keys() | finished.keys()
