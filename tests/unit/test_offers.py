"""What a peer asks for, checked against this node's own descriptor, whatever the peer claims."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpull_async import offers, plan
from kvpull_async.protocol import frames
from kvpull_async.registry import Entry, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import INVALID_ID, BlocksCacheKey, CacheDesc, CacheKey, DataType, Placement
from tests.loop_nodes import PlainMemory
from tests.wire import SAMPLES

INVALID, UNKNOWN = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
ENTRIES, STRIDE, TENSORS = 3, 16, 4
DESC = CacheDesc(TENSORS, [ENTRIES, STRIDE], DataType.DT_INT8)
NO_TABLE = b""


class Source:
    """A node with one cache of each kind: keyed, by prefix, registered, of blocks."""

    def __init__(self) -> None:
        self.registry = Registry(PlainMemory())
        self.keyed = self.add([CacheKey(1, 7), CacheKey(1, 8)])
        self.prefixed = self.add([CacheKey(1, INVALID_ID, 0, 9)])
        self.private = self.add([CacheKey(1, 10)], remote_accessible=False)
        self.registered = self.add([CacheKey(1, 11)], owned=False)
        self.blocks = self.add([], blocks=True)
        self.registry.bind_blocks(self.blocks, BlocksCacheKey(1, 5))

    def add(
        self, keys: list[CacheKey], *, owned: bool = True, blocks: bool = False, remote_accessible: bool = True
    ) -> Entry:
        allocation = self.registry.backend.allocate(
            tensors=TENSORS, tensor_nbytes=ENTRIES * STRIDE, placement=Placement.HOST
        )
        entry = self.registry.add(
            DESC,
            allocation.regions,
            blocks=blocks,
            allocation=allocation if owned else None,
            remote_accessible=remote_accessible,
        )
        self.registry.bind(entry, keys)
        for number, view in enumerate(entry.views()):
            view[:] = bytes((number * 50 + i) % 256 for i in range(len(view)))
        return entry

    def find(self, table: bytes = NO_TABLE, **fields: Any) -> offers.Offer:
        return offers.find(self.registry, asked(**fields), table, peer=2)

    def read(self, offer: offers.Offer) -> bytes:
        """The bytes that the offer would send."""
        lending = self.registry.backend.lending(offer.entry.regions, offer.plan())
        return b"".join(bytes(view) for batch in lending for view in batch)


def asked(**fields: Any) -> frames.Request:
    base = {"key": "request", "identity": 7, "tensors": TENSORS, "size": STRIDE}
    request: frames.Request = msgspec.structs.replace(SAMPLES["Request"].message, **{**base, **fields})
    return request


def table(*blocks: int) -> bytes:
    return frames.encode_table(np.array(blocks, dtype=np.int64))


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


def content(tensors: range, entry: int, *, offset: int = 0, size: int = STRIDE) -> bytes:
    """What stands in these bytes of these tensors' batch entry."""
    start = entry * STRIDE + offset
    return b"".join(bytes((t * 50 + i) % 256 for i in range(start, start + size)) for t in tensors)


GOOD: list[tuple[dict[str, Any], bytes, str, bytes]] = [
    ({}, NO_TABLE, "keyed", content(range(4), 0)),
    ({"identity": 8}, NO_TABLE, "keyed", content(range(4), 1)),
    ({"first_tensor": 0}, NO_TABLE, "keyed", content(range(4), 0)),
    ({"first_tensor": 2, "tensors": 2}, NO_TABLE, "keyed", content(range(2, 4), 0)),
    ({"offset": 3, "size": 5}, NO_TABLE, "keyed", content(range(4), 0, offset=3, size=5)),
    ({"offset": 15, "size": 1}, NO_TABLE, "keyed", content(range(4), 0, offset=15, size=1)),
    ({"key": "prefix", "identity": 9}, NO_TABLE, "prefixed", content(range(4), 0)),
    ({"key": "cache", "identity": 1, "entry": 2}, NO_TABLE, "keyed", content(range(4), 2)),
    ({"key": "cache", "identity": 2}, NO_TABLE, "prefixed", content(range(4), 0)),
    ({"identity": 11, "remote_access": True}, NO_TABLE, "registered", content(range(4), 0)),
    ({"identity": 10}, NO_TABLE, "private", content(range(4), 0)),
    (
        {"key": "blocks", "identity": 0, "model_id": 5, "tensors": 4},
        table(2, 0),
        "blocks",
        b"".join(content(range(t, t + 1), b) for t in range(4) for b in (2, 0)),
    ),
    ({"blocks": 2, "size": 8}, NO_TABLE, "keyed", content(range(4), 0)),
    ({"blocks": 1, "size": 16}, NO_TABLE, "keyed", content(range(4), 0)),
    ({"identity": 8, "blocks": 2, "size": 8}, NO_TABLE, "keyed", content(range(4), 1)),
    ({"blocks": 3, "size": 7}, NO_TABLE, "keyed", content(range(4), 0)),  # 7 + 7 + 2: the last block is short
    ({"blocks": 2, "size": 6}, NO_TABLE, "keyed", content(range(4), 0, size=12)),
]


@pytest.mark.parametrize(("fields", "tail", "name", "expected"), GOOD, ids=[str(row[0]) for row in GOOD])
def test_what_is_offered_is_what_was_asked_for(
    source: Source, fields: dict[str, Any], tail: bytes, name: str, expected: bytes
) -> None:
    offer = source.find(tail, **fields)
    assert offer.entry is getattr(source, name)
    assert source.read(offer) == expected
    assert offer.nbytes == len(expected)
    assert offer.rows == len(offer.plan())


@pytest.mark.parametrize(("fields", "tail", "name"), [row[:3] for row in GOOD], ids=[str(row[0]) for row in GOOD])
def test_where_an_offer_starts_is_all_that_a_reader_needs_unless_it_named_blocks(
    source: Source, fields: dict[str, Any], tail: bytes, name: str
) -> None:
    """The puller finds the rows by itself, from what it asked for and the start that the grant tells."""
    offer = source.find(tail, **fields)
    if name == "blocks":
        rows = plan.block_segments(offer.tensors, frames.decode_table(tail), block_nbytes=STRIDE)
        assert offer.start == 0
    else:
        rows = plan.run_segments(offer.tensors, start=offer.start, size=offer.per_tensor)
    assert rows.tolist() == offer.plan().tolist()


BAD: list[tuple[str, dict[str, Any], bytes, LLMStatusCode, str]] = [
    ("unknown key", {"identity": 99}, NO_TABLE, UNKNOWN, "req_id 99 of model 0 is not here"),
    ("another model", {"model_id": 3}, NO_TABLE, UNKNOWN, "req_id 7 of model 3 is not here"),
    ("prefix of a request", {"key": "prefix"}, NO_TABLE, UNKNOWN, "prefix_id 7 of model 0 is not here"),
    ("negative key", {"identity": -(2**63)}, NO_TABLE, UNKNOWN, "is not here"),
    ("unknown cache", {"key": "cache", "identity": 99}, NO_TABLE, UNKNOWN, "no cache 99 with batch entry 0"),
    ("outside the batch", {"key": "cache", "identity": 1, "entry": 3}, NO_TABLE, UNKNOWN, "no cache 1 with"),
    ("far outside", {"key": "cache", "identity": 1, "entry": 2**63 - 1}, NO_TABLE, UNKNOWN, "no cache 1 with"),
    ("unknown kind of key", {"key": "address"}, NO_TABLE, INVALID, "keys of kind 'address' are unknown"),
    ("not remote accessible", {"identity": 10, "remote_access": True}, NO_TABLE, INVALID, "is not remote accessible"),
    ("more tensors", {"tensors": 5}, NO_TABLE, INVALID, "5 tensors asked for, the source cache has 4"),
    ("fewer tensors", {"tensors": 3}, NO_TABLE, INVALID, "3 tensors asked for, the source cache has 4"),
    ("no tensors", {"first_tensor": 0, "tensors": 0}, NO_TABLE, INVALID, "the source cache has 4"),
    ("tensors beyond", {"first_tensor": 2, "tensors": 3}, NO_TABLE, INVALID, "tensors 2..4 asked for"),
    ("tensors far beyond", {"first_tensor": 2**32 - 1, "tensors": 2**63 - 1}, NO_TABLE, INVALID, "source cache has 4"),
    ("size 0", {"size": 0}, NO_TABLE, INVALID, "a batch entry of the source has 16"),
    ("size beyond", {"size": 17}, NO_TABLE, INVALID, "bytes 0..17 asked for, a batch entry of the source has 16"),
    ("offset beyond", {"offset": 16, "size": 1}, NO_TABLE, INVALID, "bytes 16..17 asked for"),
    ("both huge", {"offset": 2**63 - 1, "size": 2**63 - 1}, NO_TABLE, INVALID, "a batch entry of the source has 16"),
    ("blocks of size 0", {"blocks": 2, "size": 0}, NO_TABLE, INVALID, "2 blocks of 0 bytes asked for"),
    ("too many blocks", {"blocks": 3, "size": 8}, NO_TABLE, INVALID, "3 blocks of 8 bytes asked for"),
    ("blocks too large", {"blocks": 1, "size": 17}, NO_TABLE, INVALID, "larger than the source's batch entry of 16"),
    ("huge blocks", {"blocks": 2**63 - 1, "size": 2**63 - 1}, NO_TABLE, INVALID, "asked for"),
    ("id of a blocks cache", {"key": "cache", "identity": 5}, NO_TABLE, INVALID, "cache 5 is a blocks cache"),
]  # fmt: skip
BAD += [
    (name, {"key": "blocks", "model_id": 5, **fields}, tail, status, text)
    for name, fields, tail, status, text in (
        ("no blocks cache", {"model_id": 6}, table(0), UNKNOWN, "no blocks cache of model 6 here"),
        ("another block size", {"size": 8}, table(0), INVALID, "blocks here have 16 bytes, the destination's 8"),
        ("no table", {}, NO_TABLE, INVALID, "source blocks must be in 0..2"),
        ("half a table", {}, table(0)[:-1], INVALID, "7 bytes is not made of 8-byte values"),
        ("a block beyond", {}, table(0, 3), INVALID, "source blocks must be in 0..2"),
        ("a negative block", {}, table(-1), INVALID, "source blocks must be in 0..2"),
        ("a huge block", {}, table(2**63 - 1), INVALID, "source blocks must be in 0..2"),
        ("too many tensors", {"tensors": 5}, table(0), INVALID, "5 tensors asked for"),
    )
]


@pytest.mark.parametrize(("fields", "tail", "status", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_p7_what_does_not_fit_this_nodes_own_descriptor_is_refused(
    source: Source, fields: dict[str, Any], tail: bytes, status: LLMStatusCode, text: str
) -> None:
    with pytest.raises(LLMException) as caught:
        source.find(tail, **fields)
    assert caught.value.status_code == status
    assert text in str(caught.value)


def test_an_unknown_key_names_its_nearest_neighbours(source: Source) -> None:
    with pytest.raises(LLMException, match=r"\(held: req_id 8 of model 0, req_id 10 of model 0, req_id 7 of model 0\)"):
        source.find(identity=9)
    with pytest.raises(LLMException, match=r"\(held: none at all\)"):
        offers.find(Registry(PlainMemory()), asked(), NO_TABLE, peer=2)


def test_a_dropped_handle_is_released_before_the_key_is_looked_up() -> None:
    source = Source()
    source.blocks.dropped()
    with pytest.raises(LLMException, match="no blocks cache of model 5 here"):
        source.find(table(0), key="blocks", model_id=5)


def test_a_released_cache_is_offered_as_long_as_a_key_of_it_is_left() -> None:
    source = Source()
    source.registry.release(source.keyed)
    assert source.find().entry is source.keyed
    assert source.find(key="cache", identity=1, entry=2).entry is source.keyed
    for number in (7, 8):
        source.registry.remove_key(CacheKey(1, number))
    for fields in ({}, {"key": "cache", "identity": 1}):
        with pytest.raises(LLMException) as caught:
            source.find(**fields)
        assert caught.value.status_code == UNKNOWN


CONSUMING = [
    ("a request", {}, NO_TABLE, range(4)),
    ("some tensors of it", {"first_tensor": 1, "tensors": 2}, NO_TABLE, range(1, 3)),
    ("by id, the entry of a key", {"key": "cache", "identity": 1, "entry": 1}, NO_TABLE, range(4)),
    ("cut into blocks", {"blocks": 2, "size": 8}, NO_TABLE, range(4)),
    ("an offset pull", {"offset_pull": True}, NO_TABLE, None),
    ("with remote access", {"remote_access": True}, NO_TABLE, None),
    ("a prefix", {"key": "prefix", "identity": 9}, NO_TABLE, None),
    ("by id, the entry of a prefix", {"key": "cache", "identity": 2}, NO_TABLE, None),
    ("by id, an entry without a key", {"key": "cache", "identity": 1, "entry": 2}, NO_TABLE, None),
    ("of a registered cache", {"identity": 11}, NO_TABLE, None),
    ("blocks", {"key": "blocks", "model_id": 5}, table(0), None),
]


@pytest.mark.parametrize(("fields", "tail", "tensors"), [row[1:] for row in CONSUMING], ids=[r[0] for r in CONSUMING])
def test_which_pulls_consume_the_key(
    source: Source, fields: dict[str, Any], tail: bytes, tensors: range | None
) -> None:
    offer = source.find(tail, **fields)
    issued = offers.consumes(asked(**fields), offer)
    assert (issued.tensors if issued else None) == tensors
    if issued:
        assert offer.binding is not None
        assert issued.generation == offer.binding.generation


@given(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from(["request", "prefix", "cache", "blocks", "x"]),
            "identity": st.integers(-2, 12) | st.integers(-(2**63), 2**64 - 1),
            "model_id": st.sampled_from([0, 5, 2**64 - 1]),
            "entry": st.integers(0, 4) | st.just(2**63 - 1),
            "first_tensor": st.integers(-1, 5) | st.just(2**32 - 1),
            "tensors": st.integers(0, 6) | st.just(2**63 - 1),
            "size": st.integers(0, 20) | st.just(2**63 - 1),
            "offset": st.integers(0, 20) | st.just(2**63 - 1),
            "blocks": st.integers(0, 6) | st.just(2**63 - 1),
            "remote_access": st.booleans(),
        }
    ),
    st.binary(max_size=20) | st.lists(st.integers(-1, 4), max_size=4).map(lambda blocks: table(*blocks)),
)
@settings(max_examples=400)
def test_p7_whatever_is_asked_only_bytes_of_the_cache_are_offered_or_it_is_refused(
    source: Source, fields: dict[str, Any], tail: bytes
) -> None:
    try:
        offer = source.find(tail, **fields)
    except LLMException as error:
        status = error.status_code
        assert status in (INVALID, UNKNOWN)
        return
    rows = offer.plan()
    assert rows[:, 2].sum() == offer.nbytes
    assert rows[:, 2].min() > 0
    assert rows[:, 0].min() >= 0
    assert rows[:, 0].max() < TENSORS
    assert rows[:, 1].min() >= 0
    assert (rows[:, 1] + rows[:, 2]).max() <= ENTRIES * STRIDE
