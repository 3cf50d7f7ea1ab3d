"""The side channel's words: what is said is what is heard, and nothing else is heard at all."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpull_async.transport.shm import messages
from kvpull_async.transport.shm.messages import (
    DESCRIPTORS,
    PACKET,
    TENSORS,
    Drop,
    Dropped,
    Files,
    Hello,
    Layout,
    Message,
    Missed,
    Offer,
    Opened,
    Stream,
    decode,
    decode_offer,
    encode,
)

TOKEN, PROBE = bytes(range(16)), bytes(range(16, 32))
MOST = 2**63 - 1
LAYOUT = Layout(7, 8191, MOST, 4096, 2, 0, [1, 2], bytes(32))
ALL: list[Message] = [
    Hello(TOKEN, 2**64 - 1, PROBE, True),
    Opened(False),
    Files([1, 2], [4096, MOST]),
    LAYOUT,
    Missed(1),
    Drop(0),
    Dropped(MOST),
    Stream(1),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_every_message_comes_through(message: Message) -> None:
    assert decode(encode(message)) == message


def test_an_offer_comes_through_and_fits_a_greeting() -> None:
    offer = Offer("b" * 64, MOST, b"n" * 64)
    assert decode_offer(encode(offer)) == offer
    assert len(encode(offer)) <= 512


def test_the_largest_messages_fit_a_packet() -> None:
    assert len(encode(Files([MOST] * DESCRIPTORS, [MOST] * DESCRIPTORS))) <= PACKET
    part = Layout(MOST, 8191, MOST, MOST, 2**31 - 1, MOST, [2**31] * 1024, bytes(16 * TENSORS))
    assert len(encode(part)) <= PACKET


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_a_message_cut_anywhere_or_with_more_behind_it_is_refused(message: Message) -> None:
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(ConnectionError, match="malformed"):
            decode(data[:length])
    with pytest.raises(ConnectionError, match="malformed"):
        decode(data + b"\0")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for read in (decode, decode_offer):
        try:
            read(data)
        except ConnectionError:
            continue


@given(st.sampled_from(ALL), st.integers(0, 255), st.data())
def test_a_byte_changed_is_another_message_or_refused(message: Message, value: int, data: st.DataObject) -> None:
    changed = bytearray(encode(message))
    changed[data.draw(st.integers(0, len(changed) - 1))] = value
    try:
        decode(bytes(changed))
    except ConnectionError:
        return


def test_deep_nesting_is_refused_and_crashes_nothing() -> None:
    for read in (decode, decode_offer):
        with pytest.raises(ConnectionError, match="malformed"):
            read(b"\x91" * 90_000)


def changed(message: Message, position: int, value: object) -> bytes:
    fields = msgspec.msgpack.decode(encode(message))
    fields[position] = value
    return msgspec.msgpack.encode(fields)


HELLO, FILES = ALL[0], ALL[2]


@pytest.mark.parametrize(
    ("message", "position", "value"),
    [
        (HELLO, 0, 99),
        (HELLO, 0, 0),
        (HELLO, 1, TOKEN[:15]),
        (HELLO, 1, TOKEN + b"x"),
        (HELLO, 1, "0123456789abcdef"),
        (HELLO, 2, -1),
        (HELLO, 3, b""),
        (HELLO, 4, 1),
        (HELLO, 4, None),
        (FILES, 1, [1] * (DESCRIPTORS + 1)),
        (FILES, 1, [-1, 2]),
        (FILES, 2, [2**63]),
        (FILES, 2, [1.5, 2]),
        (LAYOUT, 1, -1),
        (LAYOUT, 2, 2**63),
        (LAYOUT, 3, 0),
        (LAYOUT, 3, 2**63),
        (LAYOUT, 4, 0),
        (LAYOUT, 4, -5),
        (LAYOUT, 4, 2**63),
        (LAYOUT, 5, 0),
        (LAYOUT, 5, 2**31),
        (LAYOUT, 6, -1),
        (LAYOUT, 7, [1] * (TENSORS + 1)),
        (LAYOUT, 8, b""),
        (LAYOUT, 8, bytes(15)),
        (LAYOUT, 8, bytes(16 * TENSORS + 1)),
        (Stream(0), 1, 2),
        (Stream(0), 1, -1),
        (Drop(1), 1, 2**63),
    ],
)
def test_fields_out_of_bounds_are_refused(message: Message, position: int, value: object) -> None:
    with pytest.raises(ConnectionError, match="malformed"):
        decode(changed(message, position, value))


@pytest.mark.parametrize("values", [["b" * 65, 0, b"n" * 16], ["b", -1, b"n" * 16], ["b", 0, b"short"], ["b", 0]])
def test_an_offer_out_of_bounds_is_refused(values: list[object]) -> None:
    with pytest.raises(ConnectionError, match="malformed"):
        decode_offer(msgspec.msgpack.encode(values))


def test_an_offer_and_a_message_are_not_mistaken_for_each_other() -> None:
    for message in ALL:
        with pytest.raises(ConnectionError):
            decode_offer(encode(message))
    with pytest.raises(ConnectionError):
        decode(encode(Offer("b", 0, b"n" * 16)))


def test_a_refusal_is_an_os_error_as_that_of_a_broken_connection() -> None:
    assert issubclass(ConnectionError, OSError)
    assert messages.PACKET > 16 * messages.TENSORS
