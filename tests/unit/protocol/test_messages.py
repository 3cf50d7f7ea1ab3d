"""The messages themselves: each has a number that it keeps, is a value, and holds nothing that a peer must not see."""

from __future__ import annotations

import msgspec
import pytest

from kvpull_async.protocol import frames, messages
from kvpull_async.protocol.messages import MESSAGES
from tests.wire import SAMPLES

NUMBERS = {
    "Hello": 1, "Challenge": 2, "Prove": 3, "Welcome": 4, "Reject": 5, "Ping": 6, "Pong": 7, "Request": 8, "Grant": 9,
    "Refuse": 10, "Cancel": 11, "Done": 12, "DoneAck": 13, "Bye": 14, "ByeAck": 15, "Check": 16, "Checked": 17,
    "Read": 18, "Offer": 19, "Accept": 20, "Result": 21, "Watch": 22, "Appeared": 23,
    "Digest": 24, "Lease": 25,
}  # fmt: skip
"""As they are on the wire: a number that changes needs another version of the protocol."""


def test_every_message_keeps_its_number() -> None:
    assert {kind: message.__name__ for kind, message in MESSAGES.items()} == {n: name for name, n in NUMBERS.items()}
    assert (frames.VERSION, frames.OLDEST) == (4, 4)


def test_all_of_them_can_be_had_from_frames_too() -> None:
    for message in MESSAGES.values():
        assert getattr(frames, message.__name__) is message
        assert message.__name__ in messages.__all__


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_message_is_a_value(name: str) -> None:
    message = SAMPLES[name].message
    assert message == msgspec.structs.replace(message)
    for field in message.__struct_fields__[:1]:
        with pytest.raises(AttributeError):
            setattr(message, field, 0)


def test_an_older_grant_without_the_last_fields_is_read_with_their_defaults() -> None:
    grant = messages.Grant(1, bytes(16), 2, 64, inline=True, wants_done=False)
    short = msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(grant))[:6])
    assert msgspec.msgpack.decode(short, type=messages.Grant) == grant
    assert (grant.ticket, grant.start, grant.entry_nbytes) == (None, 0, 0)


def test_an_offer_without_a_ticket_says_so_by_leaving_it_out() -> None:
    offer = SAMPLES["Offer"].message
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(offer))[:-2]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=messages.Offer) == msgspec.structs.replace(
        offer, ticket=None
    )
