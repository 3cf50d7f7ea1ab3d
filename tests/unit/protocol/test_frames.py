"""Messages to bytes and back: the layout on the wire, every limit, and what damaged or hostile bytes come to."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import HEADER, MESSAGES, Decoder, Frame, FrameError
from tests.wire import SAMPLES, framed, mutate, sample

BIG = 1 << 30
KINDS = sorted(SAMPLES)
WITH_TAIL = ("Grant", "Offer", "Request")


def decoded(data: bytes, *, limit: int = BIG) -> list[Frame]:
    decoder = Decoder(limit)
    decoder.feed(data)
    return taken(decoder)


def taken(decoder: Decoder) -> list[Frame]:
    found = []
    while (frame := decoder.next_frame()) is not None:
        found.append(frame)
    return found


def header(length: int, kind: int, body: int) -> bytes:
    return HEADER.pack(length, kind, body)


def _values(info: Any) -> st.SearchStrategy[Any]:
    """Any value that the type of a message's field allows."""
    if isinstance(info, msgspec.inspect.IntType):
        return st.integers(-(2**63) if info.ge is None else info.ge, 2**64 - 1 if info.le is None else info.le)
    if isinstance(info, msgspec.inspect.BytesType):
        return st.binary(min_size=info.min_length or 0, max_size=info.max_length)
    if isinstance(info, msgspec.inspect.StrType):
        return st.text(st.characters(codec="utf-8"), max_size=min(info.max_length or 0, 80))
    if isinstance(info, msgspec.inspect.ListType):
        return st.lists(_values(info.item_type), max_size=info.max_length)
    if isinstance(info, msgspec.inspect.TupleType):
        return st.tuples(*map(_values, info.item_types))
    if isinstance(info, msgspec.inspect.UnionType):
        return st.one_of(*map(_values, info.types))
    if isinstance(info, msgspec.inspect.NoneType):
        return st.none()
    assert isinstance(info, msgspec.inspect.BoolType)
    return st.booleans()


def _frames(message: type[Any]) -> st.SearchStrategy[Frame]:
    info = msgspec.inspect.type_info(message)
    assert isinstance(info, msgspec.inspect.StructType)
    tails = st.binary(max_size=200) if message.__name__ in WITH_TAIL else st.just(b"")
    made = st.builds(message, **{item.name: _values(item.type) for item in info.fields})
    return st.builds(framed, made, tails)


any_frame = st.sampled_from(sorted(MESSAGES.values(), key=lambda message: message.kind)).flatmap(_frames)


# --- the layout ---


def test_every_kind_of_message_has_a_sample_and_a_number_of_its_own() -> None:
    assert {message.__name__ for message in MESSAGES.values()} == set(SAMPLES)
    assert sorted(message.kind for message in MESSAGES.values()) == list(range(1, len(SAMPLES) + 1))


def test_the_layout_on_the_wire() -> None:
    """Length, kind and body length in little endian, MessagePack, the tail: peers of any release read this."""
    assert frames.encode(frames.Ping(5)) == bytes.fromhex("02000000 06 02000000 9105")
    grant = frames.encode(frames.Grant(1, b"g" * 16, 2, 3, True, False), b"tail")
    length, kind, body = HEADER.unpack_from(grant)
    assert (length, kind) == (body + 4, 9)
    assert grant[HEADER.size + body :] == b"tail"
    fields = msgspec.msgpack.decode(grant[HEADER.size : HEADER.size + body])
    assert fields[:6] == [1, b"g" * 16, 2, 3, True, False]


@given(any_frame)
def test_what_is_encoded_is_decoded(frame: Frame) -> None:
    assert decoded(frames.encode(frame.message, frame.tail)) == [frame]


@given(st.lists(any_frame, max_size=4), st.data())
def test_frames_arrive_whole_however_the_stream_is_cut(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(frames.encode(frame.message, frame.tail) for frame in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    decoder, received = Decoder(BIG), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        received += taken(decoder)
    assert received == sent
    assert decoder.buffered == 0


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_tables_come_back(values: list[int]) -> None:
    table = frames.decode_table(frames.encode_table(np.array(values, dtype=np.int64)))
    assert table.tolist() == values
    assert table.dtype == np.int64


def test_a_table_may_come_from_a_strided_array() -> None:
    assert frames.decode_table(frames.encode_table(np.arange(10, dtype=np.int64)[::3])).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("length", [1, 7, 9])
def test_a_table_with_a_partial_value_is_refused(length: int) -> None:
    with pytest.raises(FrameError, match=f"{length} bytes is not made of 8-byte values"):
        frames.decode_table(bytes(length))


# --- limits ---


def test_a_frame_above_the_limit_is_refused_by_its_header_alone() -> None:
    limit = frames.GREETING_LIMIT
    assert decoded(header(limit, 6, limit), limit=limit) == []  # waits for the rest
    for length in (limit + 1, 0x7FFFFFFF, 0xFFFFFFFF):
        with pytest.raises(FrameError, match=f"{length} bytes exceeds the limit of {limit}; perhaps the peer does not"):
            decoded(header(length, 6, length), limit=limit)


def test_a_raised_limit_holds_for_the_next_frame() -> None:
    frame = sample("Ping")
    decoder = Decoder(limit=0)
    decoder.feed(frame + frame)
    with pytest.raises(FrameError):
        decoder.next_frame()
    decoder.limit = BIG
    assert taken(decoder) == [SAMPLES["Ping"]] * 2


@pytest.mark.parametrize("kind", [0, max(MESSAGES) + 1, 0x2F, 255])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(FrameError, match=f"frame kind {kind} is unknown"):
        decoded(header(2, kind, 2))


@pytest.mark.parametrize(("length", "body"), [(10, 11), (0, 1), (frames.BODY_LIMIT + 1, frames.BODY_LIMIT + 1)])
def test_a_body_beyond_its_frame_or_its_limit_is_refused(length: int, body: int) -> None:
    with pytest.raises(FrameError, match=f"a body of {body} bytes in a frame of {length} "):
        decoded(header(length, 8, body))


@pytest.mark.parametrize("name", [name for name in KINDS if name not in WITH_TAIL])
def test_only_requests_grants_and_offers_carry_a_tail(name: str) -> None:
    with pytest.raises(FrameError, match=f"a {name} frame carries no tail, 3 bytes came"):
        decoded(frames.encode(SAMPLES[name].message, b"abc"))


def test_nothing_is_encoded_that_a_peer_would_refuse_for_its_size() -> None:
    grant = SAMPLES["Grant"].message
    (at_most,) = decoded(frames.encode(grant, bytes(frames.TAIL_LIMIT)))
    assert len(at_most.tail) == frames.TAIL_LIMIT
    with pytest.raises(FrameError, match=r"a Grant frame .* exceeds the limits"):
        frames.encode(grant, bytes(frames.TAIL_LIMIT + 1))
    with pytest.raises(FrameError, match=r"a Refuse frame .* exceeds the limits"):
        frames.encode(frames.Refuse(1, 2, "x" * frames.BODY_LIMIT))


BAD_FIELDS = [
    ("Hello", "incarnation", b"short"),
    ("Hello", "incarnation", b"l" * 17),
    ("Hello", "nonce", b"n" * 31),
    ("Hello", "token", b"t" * 33),
    ("Hello", "lane", 2),
    ("Hello", "lane", -1),
    ("Hello", "cluster_id", -1),
    ("Hello", "cluster_id", "5"),
    ("Hello", "asked", -1),
    ("Hello", "authenticates", 1),
    ("Hello", "version", None),
    ("Hello", "magic", "m" * 65),
    ("Hello", "paths", ["x"] * 33),
    ("Hello", "paths", ["x" * 65]),
    ("Hello", "paths", [b"tcp"]),
    ("Welcome", "offers", [("tcp", b"")] * 5),
    ("Welcome", "offers", [("x" * 65, b"")]),
    ("Welcome", "offers", [("tcp", bytes(513))]),
    ("Welcome", "offers", [("tcp", "text")]),
    ("Welcome", "offers", [("tcp",)]),
    ("Welcome", "offers", [("tcp", b"", b"")]),
    ("Prove", "proof", b"p" * 33),
    ("Reject", "reason", "r" * 1025),
    ("Reject", "status", 1.5),
    ("Request", "remaining_ms", 2**31),
    ("Request", "remaining_ms", -1),
    ("Request", "size", -1),
    ("Request", "size", 2**63),
    ("Request", "offset", -8),
    ("Request", "entry", -1),
    ("Request", "first_tensor", -2),
    ("Request", "first_tensor", 2**32),
    ("Request", "request_id", -1),
    ("Request", "traceparent", "t" * 65),
    ("Grant", "grant_id", b""),
    ("Grant", "per_tensor", -1),
    ("Grant", "inline", None),
    ("Grant", "ticket", b"t" * 4097),
    ("Grant", "ticket", "text"),
    ("Grant", "start", -1),
    ("Grant", "start", 2**63),
    ("Offer", "grant_id", bytes(15)),
    ("Offer", "remaining_ms", 2**31),
    ("Offer", "tensors", -1),
    ("Offer", "tensors", 2**63),
    ("Offer", "per_tensor", -1),
    ("Offer", "blocks", -1),
    ("Offer", "src_blocks", -1),
    ("Offer", "block_nbytes", -32),
    ("Offer", "first_tensor", -1),
    ("Offer", "first_tensor", 2**32),
    ("Offer", "src_tensor", -1),
    ("Offer", "start", 2**63),
    ("Offer", "key", "k" * 65),
    ("Offer", "inline", 1),
    ("Offer", "ticket", b"t" * 4097),
    ("Result", "reason", "r" * 1025),
    ("Result", "unsafe", None),
    ("Watch", "entry", -1),
    ("Watch", "request_id", -1),
    ("Accept", "request_id", "1"),
    ("Appeared", "request_id", -1),
    ("Done", "pull_id", "p" * 65),
    ("Check", "grant_id", bytes(15)),
    ("Read", "pulls", -1),
    ("Read", "nbytes", 2**63),
    ("Read", "pull_ids", ["p"] * 65),
    ("Read", "pull_ids", ["p" * 65]),
    ("Checked", "grant_id", bytes(17)),
    ("Checked", "valid", 1),
    ("Checked", "valid", None),
]


@pytest.mark.parametrize(("name", "field", "value"), BAD_FIELDS)
def test_a_field_outside_its_bounds_is_refused(name: str, field: str, value: object) -> None:
    data = frames.encode(msgspec.structs.replace(SAMPLES[name].message, **{field: value}), SAMPLES[name].tail)
    with pytest.raises(FrameError, match=f"a malformed {name} frame"):
        decoded(data)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("Bye", "ByeAck")])
def test_a_message_with_too_few_fields_is_refused(name: str) -> None:
    kind = SAMPLES[name].message.kind
    with pytest.raises(FrameError, match=f"a malformed {name} frame"):
        decoded(header(1, kind, 1) + b"\x90")


# --- bytes that mean harm ---

GREEDY = {
    "a list of four billion names": b"\x9b\xa6kvpull\x01\x05\x02\xc4\x10" + bytes(16) + b"\xc4\x20" + bytes(32)
    + b"\x00\xc4\x00\xc3" + b"\xdd\xff\xff\xff\xff",
    "a message of four billion fields": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 40,
    "a string of four gigabytes": b"\x9b\xdb\xff\xff\xff\xff",
    "bytes of four gigabytes": b"\x9b\xa6kvpull\x01\x05\x02\xc6\xff\xff\xff\xff",
    "four billion map entries": b"\x9b\xa6kvpull\x01\x05\x02\xdf\xff\xff\xff\xff",
    "an extension of four gigabytes": b"\x9b\xc9\xff\xff\xff\xff\x01",
    "nesting without an end": b"\x9b\xa6kvpull\x01\x05\x02" + b"\x91" * 4000,
    "nesting in a field too many": b"\xdc\x00\x20" + sample("Hello")[HEADER.size + 1 :] + b"\x91" * 3000,
}  # fmt: skip


@pytest.mark.parametrize("body", GREEDY.values(), ids=GREEDY.keys())
def test_a_length_inside_a_body_allocates_nothing(body: bytes) -> None:
    decoder = Decoder()
    decoder.feed(header(len(body), 1, len(body)) + body)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="a malformed Hello frame"):
            decoder.next_frame()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 1024


def test_an_endless_frame_is_kept_up_to_its_limit_only() -> None:
    """Fed for ever, a parser holds at most one frame of the limit and what came with the last piece."""
    piece, limit = 1000, frames.GREETING_LIMIT
    decoder = Decoder(limit)
    decoder.feed(header(limit, 8, 300))
    for _ in range(100):
        decoder.feed(b"\x01" * piece)
        try:
            frame = decoder.next_frame()
        except FrameError:
            break
        assert frame is None
        assert decoder.buffered <= HEADER.size + limit + piece
    else:
        pytest.fail("the parser never made up its mind")


@pytest.mark.parametrize("name", KINDS)
def test_a8_a_truncated_frame_asks_for_more_at_every_byte(name: str) -> None:
    data = sample(name)
    for length in range(len(data)):
        decoder = Decoder(BIG)
        decoder.feed(data[:length])
        assert decoder.next_frame() is None
        assert decoder.buffered == length
        decoder.feed(data[length:])
        assert taken(decoder) == [SAMPLES[name]]


@pytest.mark.parametrize("name", KINDS)
def test_a8_mutated_frames_are_refused_or_read_and_nothing_else(name: str) -> None:
    data, rng = sample(name), random.Random(name)
    outcomes = {"refused": 0, "read": 0, "waiting": 0}
    for _ in range(10_000):
        damaged = mutate(data, rng)
        decoder = Decoder(frames.BODY_LIMIT)
        decoder.feed(damaged)
        try:
            outcomes["read" if taken(decoder) else "waiting"] += 1
        except FrameError:
            outcomes["refused"] += 1
        assert decoder.buffered <= len(damaged)
    assert all(outcomes.values()), outcomes  # the mutations reach every branch


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_any_bytes_are_frames_or_a_frame_error(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        decoded(data, limit=frames.GREETING_LIMIT)


@given(st.sampled_from(sorted(MESSAGES)), st.binary(max_size=300))
@settings(max_examples=300)
def test_any_body_is_a_message_or_a_frame_error(kind: int, body: bytes) -> None:
    with contextlib.suppress(FrameError):
        (frame,) = decoded(header(len(body), kind, len(body)) + body)
        assert decoded(frames.encode(frame.message)) == [frame]


# --- frames that come alone ---


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_bytes_that_are_one_frame_need_not_be_fed(name: str) -> None:
    frame = SAMPLES[name]
    data = frames.encode(frame.message, frame.tail)
    decoder = Decoder(BIG)
    assert decoder.whole(memoryview(data)) == frame
    assert decoder.buffered == 0
    for other in (data[:-1], data + b"\0", data + data, b"", data[:4]):
        assert decoder.whole(other) is None
    decoder.feed(data[:5])
    assert decoder.whole(data) is None, "those bytes belong to another frame"


def test_a_frame_that_comes_alone_is_checked_as_any_other() -> None:
    with pytest.raises(FrameError, match="exceeds the limit"):
        Decoder(limit=0).whole(frames.encode(frames.Ping(5)))
    with pytest.raises(FrameError, match="unknown"):
        Decoder(BIG).whole(HEADER.pack(1, 200, 1) + b"x")
    with pytest.raises(FrameError, match="malformed"):
        Decoder(BIG).whole(HEADER.pack(1, frames.Ping.kind, 1) + b"x")


def test_a_tail_may_come_in_pieces_and_stays_in_the_bytes_that_were_given() -> None:
    (grant,) = (frame.message for frame in SAMPLES.values() if isinstance(frame.message, frames.Grant))
    data = frames.encode(grant, b"ab", memoryview(b"cd"), b"")
    assert data == frames.encode(grant, b"abcd")
    buffer = bytearray(data)
    frame = Decoder(BIG).whole(memoryview(buffer))
    assert frame is not None
    buffer[-1:] = b"!"
    assert bytes(frame.tail) == b"abc!"
    decoder = Decoder(BIG)
    decoder.feed(memoryview(buffer)[:-1])
    decoder.keep()
    buffer[:] = bytes(len(buffer))
    decoder.feed(b"e")
    whole = decoder.next_frame()
    assert whole is not None
    assert bytes(whole.tail) == b"abce"
