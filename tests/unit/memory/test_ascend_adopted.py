"""Memory of a caller's own: the device is asked whose it is before a byte moves, once, and not by who may not wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvpull_async.memory.base import Region
from kvpull_async.status import LLMException, LLMStatusCode
from tests.unit.memory.ascend_side import (
    DEVICE,
    HOST,
    MIB,
    Side,
    pairs,
    side,
    whole,
)
from tests.unit.memory.emulated import BOUND, pattern

WAYS: dict[str, Callable[[Side, tuple[Region, ...]], object]] = {
    "landing": lambda here, regions: here.write(regions, whole(64), pattern(64)),
    "lending": lambda here, regions: here.read(regions, whole(64)),
    "copying from": lambda here, regions: list(
        here.memory.copying(regions, here.cache().regions, pairs((0, 0, 0, 0, 64)))
    ),
    "copying to": lambda here, regions: list(
        here.memory.copying(here.cache().regions, regions, pairs((0, 0, 0, 0, 64)))
    ),
    "copying to the host": lambda here, regions: list(
        here.memory.copying(regions, here.cache(placement=HOST).regions, pairs((0, 0, 0, 0, 64)))
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_addresses_of_the_host_are_refused_as_device_memory_before_a_byte_moves(way: str) -> None:
    with side() as here:
        data = np.zeros(MIB, np.uint8)
        regions = here.memory.adopt([data.ctypes.data], tensor_nbytes=MIB, placement=DEVICE)
        for _ in range(2):
            with pytest.raises(LLMException, match=r"tensor 0 .* no device's.*Placement\.HOST") as caught:
                WAYS[way](here, regions)
            assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        assert here.emulator.count("aclrtMemcpyAsync") == here.emulator.count("aclrtMemcpy") == 0
        here.memory.disown(regions)


def test_addresses_of_the_host_are_looked_at_by_the_hosts_memory() -> None:
    with side() as here:
        data = np.zeros(MIB, np.uint8)
        regions = here.memory.adopt([data.ctypes.data], tensor_nbytes=MIB, placement=HOST)
        here.memory.reach(regions, writing=True)
        here.memory.disown(regions)
        nowhere = here.memory.adopt([4096], tensor_nbytes=MIB, placement=HOST)
        with pytest.raises(LLMException, match="no memory at the address"):
            here.memory.reach(nowhere, writing=True)


@pytest.mark.parametrize("way", WAYS)
def test_adopted_memory_is_asked_about_once_and_again_after_it_was_given_up(way: str) -> None:
    with side() as here:
        address = here.memory.device.malloc(MIB)
        for turn in (1, 2):
            regions = here.memory.adopt([address], tensor_nbytes=MIB, placement=DEVICE)
            for _ in range(3):
                WAYS[way](here, regions)
            assert here.emulator.count("aclrtPointerGetAttributes") == 2 * turn
            here.memory.disown(regions)
        here.memory.device.free(address).result(BOUND)


def test_whoever_only_registers_is_not_held_up_by_the_device() -> None:
    with side() as here:
        regions = here.memory.adopt([4096], tensor_nbytes=MIB, placement=DEVICE)
        before = here.emulator.counts()
        here.memory.reach(regions, writing=True)
        assert here.emulator.counts() == before


def test_memory_that_another_node_registered_is_asked_about_each_time_and_never_remembered() -> None:
    """In one process a node copies from the memory of another, which nobody tells it when that is given up."""
    with side() as here:
        address = here.memory.device.malloc(MIB)
        others = (Region(address, MIB, DEVICE, None, 0),)
        for turn in (1, 2, 3):
            here.read(others, whole(64))
            assert here.emulator.count("aclrtPointerGetAttributes") == 2 * turn
        assert not here.memory._checked
        here.memory.device.free(address).result(BOUND)


def test_memory_registered_twice_is_known_until_it_is_given_up_twice() -> None:
    with side() as here:
        address = here.memory.device.malloc(MIB)
        one, two = (here.memory.adopt([address], tensor_nbytes=MIB, placement=DEVICE) for _ in range(2))
        here.memory.disown(one)
        for _ in range(3):
            here.read(two, whole(64))
        assert here.emulator.count("aclrtPointerGetAttributes") == 2
        here.memory.disown(two)
        assert not here.memory._checked
        assert not here.memory._adopted
        here.memory.device.free(address).result(BOUND)


@pytest.mark.parametrize("way", WAYS)
def test_only_the_tensors_that_are_used_are_asked_about(way: str) -> None:
    with side() as here:
        address = here.memory.device.malloc(MIB)
        regions = here.memory.adopt([address, *(4096,) * 50], tensor_nbytes=MIB, placement=DEVICE)
        WAYS[way](here, regions)
        assert here.emulator.count("aclrtPointerGetAttributes") == 2
        here.memory.disown(regions)
        here.memory.device.free(address).result(BOUND)
