"""Publications: the epoch word lives with the cache, no epoch comes twice, the budget waits for the last reader."""

from __future__ import annotations

import errno
import gc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvpull_async.memory import publications, shared
from kvpull_async.memory.base import Region
from kvpull_async.memory.copying import load_word
from kvpull_async.memory.host import HostMemory
from kvpull_async.memory.publications import EPOCHS, Publication, Publications
from kvpull_async.memory.shared import SharedFile
from kvpull_async.values import Placement
from tests import memfds

HOST = Placement.HOST


def in_file(file: SharedFile, *offsets: int, nbytes: int = 64) -> tuple[Region, ...]:
    return tuple(Region(file.address + offset, nbytes, HOST, file) for offset in offsets)


def on_heap(count: int, nbytes: int = 64) -> tuple[Region, ...]:
    arrays = [np.zeros(nbytes, np.uint8) for _ in range(count)]
    return tuple(Region(array.ctypes.data, nbytes, HOST, array) for array in arrays)


def published(all_of: Publications, regions: tuple[Region, ...]) -> Publication:
    made = all_of.publish(regions)
    assert made is not None
    return made


def word(all_of: Publications, slot: int) -> int:
    return load_word(all_of.page.address + slot * 8)


def nothing() -> None: ...


def _release(made: Publication, holder: str, number: int) -> None:
    made.release(holder)


# -- the epoch ---------------------------------------------------------------------------------------------------------


def test_the_word_is_the_caches_while_it_lives_and_zero_afterwards() -> None:
    all_of, regions = Publications(), on_heap(2)
    made = published(all_of, regions)
    assert made.epoch > 0
    assert word(all_of, made.slot) == made.epoch
    all_of.withdraw(regions, nothing)
    assert word(all_of, made.slot) == 0


def test_the_word_is_gone_before_anyone_hears_of_it() -> None:
    all_of, regions = Publications(), on_heap(1)
    seen: list[object] = []
    made = published(all_of, regions)
    made.holders["reader"] = lambda number: seen.append((number, word(all_of, made.slot)))
    all_of.withdraw(regions, lambda: seen.append("over"))
    assert seen == [(made.number, 0)]


def test_a_cache_is_published_once() -> None:
    all_of, regions = Publications(), on_heap(2)
    assert published(all_of, regions) is published(all_of, regions)
    assert published(all_of, on_heap(2)) is not published(all_of, regions)


def test_no_epoch_or_number_is_used_twice_though_slots_are() -> None:
    all_of, epochs, numbers, slots = Publications(), set(), set(), set()
    for _ in range(300):
        regions = on_heap(1)
        made = published(all_of, regions)
        epochs.add(made.epoch)
        numbers.add(made.number)
        slots.add(made.slot)
        all_of.withdraw(regions, nothing)
    assert len(epochs) == len(numbers) == 300
    assert len(slots) == 1


def test_a_word_withdrawn_and_taken_by_the_next_cache_is_not_the_old_epoch() -> None:
    all_of, first, second = Publications(), on_heap(1), on_heap(1)
    old = published(all_of, first)
    all_of.withdraw(first, nothing)
    new = published(all_of, second)
    assert new.slot == old.slot
    assert word(all_of, old.slot) == new.epoch != old.epoch


def test_the_page_is_sealed_and_has_a_word_for_every_cache_that_may_be_published() -> None:
    page = Publications().page
    assert page.nbytes == EPOCHS * 8
    shared.check_sealed(page.descriptor, page.nbytes)


def test_more_caches_than_words_are_not_published_until_one_goes() -> None:
    all_of = Publications()
    held = [on_heap(1, 8) for _ in range(EPOCHS)]
    slots = {published(all_of, regions).slot for regions in held}
    assert slots == set(range(EPOCHS))
    late = on_heap(1)
    assert all_of.publish(late) is None
    assert all_of.publish(held[5]) is not None
    all_of.withdraw(held[0], nothing)
    assert published(all_of, late).slot in slots


def test_without_a_descriptor_the_page_is_an_error_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of, regions = Publications(), on_heap(1)
    with monkeypatch.context() as old:
        old.setattr(shared, "_sealed", lambda _: False)
        with pytest.raises(OSError, match="descriptor") as caught:
            all_of.publish(regions)
        assert caught.value.errno == errno.EMFILE
    assert word(all_of, published(all_of, regions).slot) > 0


def test_the_page_takes_a_descriptor_though_caches_must_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with very many caches can share those that have one all the same."""
    all_of = Publications()
    with monkeypatch.context() as few:
        few.setattr(shared, "_descriptors", 2**40)
        assert SharedFile(4096).descriptor == -1
        assert all_of.page.descriptor >= 0
    all_of.close()


def test_a_cache_of_more_tensors_than_a_side_channel_takes_at_once_is_not_published() -> None:
    all_of, file = Publications(), SharedFile(8)
    assert all_of.publish((Region(file.address, 8, HOST),) * 8193) is None
    assert all_of.publish((Region(file.address, 8, HOST),) * 8192) is not None
    all_of.close()


# -- where the bytes are -----------------------------------------------------------------------------------------------


def test_places_are_file_and_offset() -> None:
    one, other = SharedFile(4096), SharedFile(4096)
    regions = (*in_file(one, 0, 128), *in_file(other, 4032), *in_file(one, 64))
    made = published(Publications(), regions)
    assert made.files == (one, other)
    assert made.places.tolist() == [[0, 0], [0, 128], [1, 4032], [0, 64]]
    assert made.tensor_nbytes == 64


def test_an_address_inside_a_file_is_recognised_without_its_owner() -> None:
    file = SharedFile(4096)
    made = published(Publications(), (Region(file.address + 7, 64, HOST),))
    assert made.files == (file,)
    assert made.places.tolist() == [[0, 7]]


def test_what_is_published_stays_though_its_owner_has_dropped_it() -> None:
    file = SharedFile(4096)
    all_of, regions = Publications(), (Region(file.address, 64, HOST),)
    made, before = published(all_of, regions), memfds.mappings()
    del file
    gc.collect()
    assert memfds.mappings() == before
    all_of.withdraw(regions, nothing)
    del made
    gc.collect()
    assert memfds.mappings() == before - 1


def test_one_tensor_outside_makes_all_of_them_addresses() -> None:
    file = SharedFile(4096)
    regions = (*in_file(file, 0), *on_heap(1), *in_file(file, 64))
    made = published(Publications(), regions)
    assert made.files == ()
    assert made.places.tolist() == [[-1, region.address] for region in regions]


def test_a_tensor_that_reaches_past_its_file_is_in_no_file() -> None:
    file = SharedFile(4096)
    assert published(Publications(), in_file(file, 4033)).files == ()
    assert published(Publications(), in_file(file, 4032)).files == (file,)


def test_an_address_above_the_half_comes_through_as_it_is() -> None:
    made = published(Publications(), (Region(2**64 - 4096, 64, HOST),))
    assert made.places[:, 1].view(np.uint64).tolist() == [2**64 - 4096]


def test_a_file_without_a_descriptor_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of = Publications()
    page = all_of.page
    monkeypatch.setattr(shared, "_descriptors", 2**40)
    file = SharedFile(4096)
    assert file.descriptor == -1
    assert published(all_of, in_file(file, 0)).places.tolist() == [[-1, file.address]]
    assert page is all_of.page


def test_a_cache_in_very_many_files_counts_as_one_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publications, "_FILES", 3)
    files = [SharedFile(4096) for _ in range(4)]
    regions = tuple(region for file in files for region in in_file(file, 0, 64))
    assert published(Publications(), regions[:6]).files == tuple(files[:3])
    assert published(Publications(), regions).files == ()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_memory_is_over_once_the_last_holder_lets_go() -> None:
    all_of, regions = Publications(), on_heap(1)
    said: list[object] = []
    made = published(all_of, regions)
    for holder in ("one", "two"):
        made.holders[holder] = said.append
    all_of.withdraw(regions, lambda: said.append("over"))
    assert said == [made.number] * 2
    made.release("one")
    made.release("one")
    made.release("a stranger")
    assert "over" not in said
    made.release("two")
    made.release("two")
    assert said == [made.number, made.number, "over"]


def test_it_is_over_at_once_without_holders_and_where_nothing_was_published() -> None:
    all_of, regions = Publications(), on_heap(1)
    said: list[object] = []
    all_of.withdraw(regions, lambda: said.append("never published"))
    published(all_of, regions)
    all_of.withdraw(regions, lambda: said.append("nobody holds it"))
    all_of.withdraw(regions, lambda: said.append("withdrawn already"))
    assert said == ["never published", "nobody holds it", "withdrawn already"]


def test_a_holder_that_lets_go_while_it_is_told_ends_it_once() -> None:
    all_of, regions = Publications(), on_heap(1)
    said: list[object] = []
    made = published(all_of, regions)
    for holder in ("one", "two"):
        made.holders[holder] = partial(_release, made, holder)
    all_of.withdraw(regions, lambda: said.append("over"))
    assert said == ["over"]


def test_releasing_what_still_lives_ends_nothing() -> None:
    all_of, regions = Publications(), on_heap(1)
    made = published(all_of, regions)
    made.holders["one"] = lambda _: None
    made.release("one")
    assert word(all_of, made.slot) == made.epoch


def test_a_budget_counts_memory_until_every_reader_has_dropped_it() -> None:
    memory = HostMemory({HOST: 8192})
    allocation = memory.allocate(tensors=1, tensor_nbytes=8192, placement=HOST)
    made = published(memory.publications, allocation.regions)
    made.holders["reader"] = lambda _: None
    memory.free(allocation)
    assert f"HOST={8192}" in repr(memory)
    made.release("reader")
    assert "HOST=0" in repr(memory)


def test_memory_of_the_caller_that_is_disowned_is_withdrawn_too() -> None:
    memory, array = HostMemory(), np.zeros(64, np.uint8)
    regions = memory.adopt([array.ctypes.data], tensor_nbytes=64, placement=HOST)
    made = published(memory.publications, regions)
    memory.disown(regions)
    assert word(memory.publications, made.slot) == 0


def test_close_withdraws_everything_and_may_come_twice() -> None:
    all_of = Publications()
    told: list[int] = []
    many = [on_heap(1) for _ in range(5)]
    made = [published(all_of, regions) for regions in many]
    for one in made:
        one.holders["reader"] = told.append
    all_of.close()
    all_of.close()
    assert sorted(told) == [one.number for one in made]
    assert [word(all_of, one.slot) for one in made] == [0] * 5


def test_a_cache_freed_after_the_close_is_over_at_once() -> None:
    memory = HostMemory({HOST: 4096})
    allocation = memory.allocate(tensors=1, tensor_nbytes=4096, placement=HOST)
    made = published(memory.publications, allocation.regions)
    made.holders["reader"] = lambda _: None
    memory.close()
    memory.free(allocation)
    assert "HOST=0" in repr(memory)


def test_nothing_is_left_of_publications_that_are_dropped() -> None:
    before = memfds.descriptors(), memfds.mappings()
    all_of, file = Publications(), SharedFile(4096)
    published(all_of, in_file(file, 0))
    del all_of, file
    gc.collect()
    assert (memfds.descriptors(), memfds.mappings()) == before


def test_memory_of_a_device_is_not_published() -> None:
    all_of = Publications()
    regions = tuple(replace(region, device=0) for region in on_heap(2))
    assert all_of.publish(regions) is None
    over: list[bool] = []
    all_of.withdraw(regions, lambda: over.append(True))
    assert over == [True]
