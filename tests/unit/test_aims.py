"""Where an offer's bytes land: compared with a plain model, for offers that fit and for such that were spoilt."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpull_async import aims
from kvpull_async.memory.base import copy_batches, lend_bytes
from kvpull_async.memory.host import HostMemory
from kvpull_async.protocol import frames
from kvpull_async.registry import Entry, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import BlocksCacheKey, CacheDesc, DataType, Placement
from tests.loop_nodes import PlainMemory
from tests.strategies import thorough
from tests.wire import SAMPLES

PARAM_INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
GAP = 16
"""Bytes between two tensors, which nothing may touch."""


@dataclass(frozen=True)
class Shape:
    tensors: int
    entries: int
    stride: int
    blocks: bool
    accessible: bool = True


class World:
    """Caches side by side in one piece of memory, and a model of that memory."""

    def __init__(self, shapes: list[Shape], seed: int) -> None:
        self.registry = Registry(PlainMemory())
        size = sum(shape.tensors * (shape.entries * shape.stride + GAP) for shape in shapes) + GAP
        self.memory = np.frombuffer(random.Random(seed).randbytes(size), np.uint8).copy()
        self.base = self.memory.ctypes.data
        self.caches: list[tuple[Shape, Entry, list[int]]] = []
        """With the place of each tensor in the memory."""
        at = GAP
        for model, shape in enumerate(shapes):
            nbytes = shape.entries * shape.stride
            places = [at + tensor * (nbytes + GAP) for tensor in range(shape.tensors)]
            at = places[-1] + nbytes + GAP
            regions = self.registry.backend.adopt(
                [self.base + place for place in places],
                tensor_nbytes=nbytes,
                placement=Placement.HOST,
                owners=[self.memory] * shape.tensors,
            )
            desc = CacheDesc(shape.tensors, [shape.entries, shape.stride], DataType.DT_UINT8)
            entry = self.registry.add(desc, regions, blocks=shape.blocks, remote_accessible=shape.accessible)
            if shape.blocks:
                self.registry.bind_blocks(entry, BlocksCacheKey(1, model))
            self.caches.append((shape, entry, places))

    def by_id(self, cache_id: int) -> tuple[Shape, Entry, list[int]] | None:
        return next((cache for cache in self.caches if cache[1].cache_id == cache_id), None)

    def holding(self, address: int, nbytes: int, *, block: int) -> int | None:
        """The place of those bytes in the memory, if one tensor of an accessible cache has them all, in blocks of that
        size if they are to be blocks (else 0) of a blocks cache.
        """
        place = address - self.base
        for shape, _, places in self.caches:
            for begin in places:
                if shape.accessible and begin <= place and place + nbytes <= begin + shape.entries * shape.stride:
                    paged = block and shape.blocks
                    return None if paged and (place != begin or block != shape.stride) else place
        return None


@dataclass(frozen=True)
class Case:
    """An offer, inline, whose tail is made of these numbers and bytes."""

    fields: dict[str, Any]
    addresses: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    payload: bytes = b""

    @property
    def offer(self) -> frames.Offer:
        base: dict[str, Any] = {
            "identity": 0, "model_id": 0, "entry": 0, "first_tensor": 0, "blocks": len(self.blocks), "block_nbytes": 0,
            "src_tensor": 0, "start": 0, "src_blocks": 0, "inline": True, "begun": False, "ticket": None,
        }  # fmt: skip
        offer = msgspec.structs.replace(SAMPLES["Offer"].message, **{**base, **self.fields})
        assert isinstance(offer, frames.Offer)
        return offer

    @property
    def tail(self) -> bytes:
        return frames.encode_table(np.array([*self.addresses, *self.blocks], np.int64)) + self.payload


def model(world: World, case: Case) -> list[int] | None:
    """For each byte of the payload its place in the memory; None for an offer that has to be refused."""
    offer = case.offer
    count, per_tensor, block = offer.tensors, offer.per_tensor, offer.block_nbytes
    numbers = (len(case.tail) - len(case.payload)) // 8
    wanted = offer.blocks + (count if offer.key == "address" else 0)
    if numbers != wanted or not count or not per_tensor or len(case.payload) != count * per_tensor:
        return None
    if any(number < 0 for number in case.blocks):
        return None
    if offer.blocks and not (offer.blocks - 1) * block < per_tensor <= offer.blocks * block:
        return None
    starts = by_address(world, case, offer) if offer.key == "address" else by_key(world, case, offer)
    if starts is None:
        return None
    inside = [at % block + case.blocks[at // block] * block if offer.blocks else at for at in range(per_tensor)]
    return [start + at for start in starts for at in inside]


def by_address(world: World, case: Case, offer: frames.Offer) -> list[int] | None:
    reach = (max(case.blocks) + 1) * offer.block_nbytes if offer.blocks else offer.per_tensor
    block = offer.block_nbytes if offer.blocks else 0
    starts = [world.holding(address, reach, block=block) for address in case.addresses]
    if any(abs(one - other) < reach for i, one in enumerate(case.addresses) for other in case.addresses[:i]):
        return None
    return None if None in starts else [start for start in starts if start is not None]


def by_key(world: World, case: Case, offer: frames.Offer) -> list[int] | None:
    found = world.by_id(offer.identity if offer.key == "cache" else offer.model_id + 1)
    if found is None or offer.key not in ("cache", "blocks") or (offer.key == "blocks" and not found[0].blocks):
        return None
    shape, _, places = found
    last = offer.first_tensor + offer.tensors
    if not shape.accessible or shape.blocks != bool(offer.blocks) or last > shape.tensors:
        return None
    starts = places[offer.first_tensor : last]
    if offer.blocks:
        fits = offer.block_nbytes == shape.stride and max(case.blocks) < shape.entries
        return starts if fits else None
    if offer.entry >= shape.entries or offer.per_tensor > shape.stride:
        return None
    return [start + offer.entry * shape.stride for start in starts]


# --- drawing ---

shapes = st.lists(
    st.builds(
        Shape,
        tensors=st.integers(1, 4),
        entries=st.integers(1, 5),
        stride=st.integers(1, 12),
        blocks=st.booleans(),
        accessible=st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def fitting(draw: st.DrawFn, world: World) -> Case:
    """An offer that must be taken, if its cache is accessible."""
    shape, entry, places = draw(st.sampled_from(world.caches))
    first = draw(st.integers(0, shape.tensors - 1))
    count = draw(st.integers(1, shape.tensors - first))
    fields: dict[str, Any] = {"first_tensor": first, "tensors": count}
    blocks: list[int] = []
    addresses: list[int] = []
    if shape.blocks:
        blocks = draw(st.lists(st.integers(0, shape.entries - 1), min_size=1, max_size=5, unique=draw(st.booleans())))
        last = draw(st.integers(1, shape.stride))
        fields |= {"key": "blocks", "model_id": entry.blocks_model, "block_nbytes": shape.stride}
        fields["per_tensor"] = (len(blocks) - 1) * shape.stride + last
        if draw(st.booleans()):
            fields |= {"key": "cache", "identity": entry.cache_id}
    else:
        fields |= {"key": "cache", "identity": entry.cache_id, "entry": draw(st.integers(0, shape.entries - 1))}
        fields["per_tensor"] = draw(st.integers(1, shape.stride))
    if draw(st.booleans()):
        at = 0 if shape.blocks else draw(st.integers(0, shape.entries * shape.stride - fields["per_tensor"]))
        addresses = [world.base + place + at for place in draw(st.permutations(places))[:count]]
        fields |= {"key": "address"}
    payload = random.Random(draw(st.integers(0, 2**16))).randbytes(count * fields["per_tensor"])
    return Case(fields, addresses, blocks, payload)


@st.composite
def spoilt(draw: st.DrawFn, world: World) -> Case:
    """One with a number or two changed, to others at the edges."""
    case = draw(fitting(world))
    for _ in range(draw(st.integers(1, 2))):
        lists = [name for name in ("addresses", "blocks") if getattr(case, name)]
        name = draw(st.sampled_from([*case.fields, "payload", "longer", *lists]))
        if name in lists:
            numbers = list(getattr(case, name))
            where = draw(st.integers(0, len(numbers) - 1))
            edges = [numbers[0], numbers[where] - 1, numbers[where] + 1, -1, 0, 2**63 - 1, -(2**63)]
            numbers[where] = draw(st.sampled_from([*edges, world.base, world.base + GAP]))
            case = replace(case, **{name: draw(st.sampled_from([numbers, numbers[:-1], [*numbers, numbers[0]]]))})
        elif name == "longer":
            per_tensor = case.offer.per_tensor + draw(
                st.sampled_from([1, 2, *(cache[0].stride for cache in world.caches)])
            )
            case = replace(case, fields={**case.fields, "per_tensor": per_tensor})
            case = replace(case, payload=bytes(min(case.offer.tensors * per_tensor, 10_000)))
        elif name == "payload":
            case = replace(case, payload=draw(st.sampled_from([case.payload[:-1], case.payload + b"x", b""])))
        elif name == "key":
            key = draw(st.sampled_from(["cache", "blocks", "address", "request", ""]))
            case = replace(case, fields={**case.fields, "key": key})
        else:
            value = case.fields[name]
            edges = [0, 1, 2**31, 2**32 - 1] + ([value + 1, max(0, value - 1)] if isinstance(value, int) else [])
            case = replace(case, fields={**case.fields, name: draw(st.sampled_from(edges))})
            if draw(st.integers(0, 3)) and name in ("tensors", "per_tensor"):
                count = case.offer.tensors * case.offer.per_tensor
                case = replace(case, payload=bytes(min(count, 10_000)))
    if case.offer.key not in ("cache", "blocks", "address", "request", ""):
        return replace(case, fields={**case.fields, "key": "cache"})
    return case


def land(world: World, case: Case) -> aims.Place:
    place = aims.find(world.registry, case.offer, case.tail, peer=2, by_key=True)
    landing = world.registry.backend.landing(place.regions, place.rows())
    for _ in copy_batches(lend_bytes(bytes(place.payload)), landing):
        pass
    return place


def check(world: World, case: Case) -> None:
    before = world.memory.copy()
    places = model(world, case)
    if places is None:
        with pytest.raises(LLMException) as caught:
            aims.find(world.registry, case.offer, case.tail, peer=2, by_key=True)
        assert caught.value.status_code in (PARAM_INVALID, NOT_EXIST)
        assert np.array_equal(world.memory, before)
        return
    found = land(world, case)
    for place, byte in zip(places, case.payload, strict=True):
        before[place] = byte
    assert np.array_equal(world.memory, before)
    assert found.nbytes == len(case.payload)
    assert found.most_rows >= len(found.rows())


@thorough
@given(shapes, st.data())
def test_what_fits_lands_where_it_was_to_and_nowhere_else(given_shapes: list[Shape], data: st.DataObject) -> None:
    world = World(given_shapes, 1)
    case = data.draw(fitting(world))
    cache = world.by_id(case.fields.get("identity", 0))
    if cache is not None and cache[0].accessible and case.fields["key"] == "cache":
        assert model(world, case) is not None
    check(world, case)


@thorough
@given(shapes, st.data())
def test_what_was_spoilt_lands_inside_what_it_names_or_is_refused(
    given_shapes: list[Shape], data: st.DataObject
) -> None:
    world = World(given_shapes, 2)
    check(world, data.draw(spoilt(world)))


# --- by example ---


def test_an_entry_of_which_only_a_part_comes_keeps_the_rest() -> None:
    world = World([Shape(2, 3, 8, blocks=False)], 3)
    before = world.memory.copy()
    land(world, Case({"key": "cache", "identity": 1, "entry": 1, "tensors": 2, "per_tensor": 5}, payload=b"abcdeABCDE"))
    changed = np.flatnonzero(world.memory != before)
    _, _, places = world.caches[0]
    assert set(changed) <= {place + 8 + i for place in places for i in range(5)}
    assert world.memory[places[1] + 8 : places[1] + 13].tobytes() == b"ABCDE"


def test_the_rows_of_the_sender_are_as_many_bytes_as_land() -> None:
    world = World([Shape(2, 4, 8, blocks=True)], 4)
    fields = {"key": "blocks", "model_id": 0, "tensors": 2, "per_tensor": 16, "block_nbytes": 8}
    fields |= {"inline": False, "src_blocks": 2, "src_tensor": 3}
    case = Case(fields, blocks=[3, 1, 7, 9])  # two for this side, two for the sender's
    offer = msgspec.structs.replace(case.offer, blocks=2)
    place = aims.find(world.registry, offer, case.tail, peer=2, by_key=True)
    assert place.source().tolist() == [[3, 56, 8], [3, 72, 8], [4, 56, 8], [4, 72, 8]]
    assert place.rows().tolist() == [[0, 24, 8], [0, 8, 8], [1, 24, 8], [1, 8, 8]]


def test_caches_whose_handles_were_dropped_are_not_found() -> None:
    world = World([Shape(1, 1, 8, blocks=False)], 5)
    world.caches[0][1].dropped()
    with pytest.raises(LLMException, match="cache 1 is not here") as caught:
        land(world, Case({"key": "cache", "identity": 1, "tensors": 1, "per_tensor": 8}, payload=bytes(8)))
    assert caught.value.status_code == NOT_EXIST


@pytest.mark.parametrize(("key", "named"), [("cache", True), ("blocks", True), ("address", False)])
def test_keys_are_for_peers_that_may_name_caches(key: str, named: bool) -> None:
    world = World([Shape(1, 2, 8, blocks=key == "blocks")], 6)
    blocks = [1] if key == "blocks" else []
    addresses = [world.caches[0][1].regions[0].address] if key == "address" else []
    fields = {"key": key, "identity": 1, "tensors": 1, "per_tensor": 8, "block_nbytes": 8}
    case = Case(fields, addresses, blocks, bytes(8))
    if named:
        with pytest.raises(LLMException, match="remote cache access is off here") as caught:
            aims.find(world.registry, case.offer, case.tail, peer=2, by_key=False)
        assert caught.value.status_code == PARAM_INVALID
    else:
        assert aims.find(world.registry, case.offer, case.tail, peer=2, by_key=False).nbytes == 8


@pytest.mark.parametrize(
    ("block", "at", "text"),
    [(32, 0, "blocks have 64 bytes, the sender's 32"), (128, 0, "64 bytes"), (64, 64, "inside a tensor of a blocks")],
)
def test_addresses_of_a_blocks_cache_take_its_own_blocks_only(block: int, at: int, text: str) -> None:
    """Blocks of another size would be other blocks than those that are named."""
    world = World([Shape(1, 8, 64, blocks=True)], 7)
    address = world.caches[0][1].regions[0].address + at
    fields = {"key": "address", "tensors": 1, "per_tensor": block, "block_nbytes": block}
    case = Case(fields, [address], [1], bytes(block))
    before = world.memory.copy()
    with pytest.raises(LLMException, match=text) as caught:
        aims.find(world.registry, case.offer, case.tail, peer=2, by_key=False)
    assert caught.value.status_code == PARAM_INVALID
    assert (world.memory == before).all()


def test_many_more_pieces_than_bytes_of_tables_are_refused_before_they_are_made() -> None:
    """Hundreds of addresses times as many blocks as one likes would be a table of many gigabytes."""
    world = World([Shape(1, 2, 4096, blocks=False)], 7)
    base = world.caches[0][1].regions[0].address
    addresses, blocks = [base + 2 * i for i in range(200)], [0, 0] * 50_000
    fields = {"key": "address", "tensors": 200, "per_tensor": 100_000, "block_nbytes": 1, "inline": False}
    case = Case(fields, addresses, blocks)
    place = aims.find(world.registry, case.offer, case.tail, peer=2, by_key=True)
    with pytest.raises(LLMException, match="pieces") as caught:
        place.rows()
    assert caught.value.status_code == PARAM_INVALID


def test_p6_an_offer_brings_few_bytes_along() -> None:
    world = World([Shape(1, 1, 2**20 + 1, blocks=False)], 9)
    fields = {"key": "cache", "identity": 1, "tensors": 1}
    assert land(world, Case({**fields, "per_tensor": 2**20}, payload=bytes(2**20))).nbytes == 2**20
    with pytest.raises(LLMException, match="1048577 bytes came with the offer, at most 1048576") as caught:
        land(world, Case({**fields, "per_tensor": 2**20 + 1}, payload=bytes(2**20 + 1)))
    assert caught.value.status_code == PARAM_INVALID


def test_p6_an_offer_names_few_addresses() -> None:
    """Of one that names more nothing is looked up."""
    world = World([Shape(1, 2, 4096, blocks=False)], 8)
    base = world.caches[0][1].regions[0].address
    cases = [
        Case({"key": "address", "tensors": count, "per_tensor": 1}, [base + i for i in range(count)], [], bytes(count))
        for count in (256, 257)
    ]
    assert land(world, cases[0]).nbytes == 256
    with pytest.raises(LLMException, match="257 addresses in one offer, at most 256") as caught:
        land(world, cases[1])
    assert caught.value.status_code == PARAM_INVALID


@pytest.mark.parametrize("key", ["cache", "address"])
def test_nothing_is_written_to_memory_that_may_only_be_read(key: str) -> None:
    registry = Registry(HostMemory())
    address = np.frombuffer(constant := mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ), np.uint8).ctypes.data
    regions = registry.backend.adopt([address], tensor_nbytes=64, placement=Placement.HOST)
    entry = registry.add(CacheDesc(1, [1, 64], DataType.DT_UINT8), regions, blocks=False)
    entry.reach()  # it was served before
    fields = {"key": key, "identity": entry.cache_id, "tensors": 1, "per_tensor": 64}
    case = Case(fields, [address] if key == "address" else [], payload=bytes(64))
    with pytest.raises(LLMException, match="read-only") as caught:
        aims.find(registry, case.offer, case.tail, peer=2, by_key=True)
    assert constant[:64] == bytes(64)
    assert caught.value.status_code == PARAM_INVALID
