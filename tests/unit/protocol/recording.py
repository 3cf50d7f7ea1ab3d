"""A session as it goes over the wire, written down; `python -m tests.unit.protocol.recording FILE` records one.

A recording stays for the versions that come: they must read it, or refuse its greeting with both versions named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Decoder, Message
from kvpull_async.protocol.session import Asked, Identity, Ready, Session
from tests.wire import SAMPLES, framed

FOLDER = Path(__file__).parents[2] / "data"
SECRET = b"the secret of the recording"
TOKEN = b"t" * 16
DIALER = Identity(5, b"d" * 16, ("tcp", "shm"), SECRET)
ACCEPTOR = Identity(2, b"a" * 16, ("tcp",), SECRET)
ASKED = ("Request", "Request", "Watch", "Offer", "Lease")
SAID = ("Check", "Read", "Done", "Ping", "Cancel", "Bye")
ANSWERED = ("Grant", "Refuse", "Appeared", "Accept", "Result", "Digest", "Checked", "DoneAck", "Pong", "ByeAck")


def entropy(side: str) -> Callable[[int], bytes]:
    return lambda n: (side.encode() * n)[:n]


def session(side: str) -> Session:
    if side == "dialer":
        return Session(DIALER, dialer=True, asked=ACCEPTOR.cluster_id, entropy=entropy(side))
    return Session(ACCEPTOR, dialer=False, entropy=entropy(side))


def spoken(data: bytes) -> list[dict[str, Any]]:
    """What frames say, as plain values."""
    decoder, said = Decoder(1 << 30), []
    decoder.feed(data)
    while (frame := decoder.next_frame()) is not None:
        fields = msgspec.to_builtins(
            dict(zip(frame.message.__struct_fields__, msgspec.structs.astuple(frame.message), strict=True))
        )
        said.append({"kind": type(frame.message).__name__, "fields": fields, "tail": bytes(frame.tail).hex()})
    return said


def record() -> dict[str, Any]:
    """One greeting, and every kind of message once or more."""
    dialer, acceptor = session("dialer"), session("acceptor")
    steps: list[tuple[str, bytes]] = []

    def deliver(side: str) -> None:
        from_, to = (dialer, acceptor) if side == "dialer" else (acceptor, dialer)
        data = from_.take_output()
        steps.append((side, data))
        to.receive(data)

    dialer.start()
    for side in ("dialer", "acceptor", "dialer"):
        deliver(side)
    assert isinstance(acceptor.next_event(), Asked)
    acceptor.welcome(token=TOKEN, offers=[("tcp", b"")])
    deliver("acceptor")
    assert isinstance(dialer.next_event(), Ready)
    for name in (*ASKED, *SAID):
        message, tail = SAMPLES[name].message, SAMPLES[name].tail
        if name in ASKED:
            number = dialer.new_request(type(message))  # type: ignore[arg-type]
            message = msgspec.structs.replace(message, request_id=number)  # type: ignore[arg-type]
        dialer.send(message, tail)
    deliver("dialer")
    of = {"Grant": 1, "Digest": 1, "Refuse": 2, "Appeared": 3, "Accept": 4, "Result": 4}
    for name in ANSWERED:
        message, tail = SAMPLES[name].message, SAMPLES[name].tail
        if name in of:
            message = msgspec.structs.replace(message, request_id=of[name])  # type: ignore[arg-type]
        acceptor.send(message, tail)
    deliver("acceptor")
    written = [{"from": side, "bytes": data.hex(), "says": spoken(data)} for side, data in steps]
    return {"version": frames.VERSION, "steps": written}


def encoded(said: dict[str, Any]) -> bytes:
    """The frame that says so, as this version writes it."""
    kind: type[Message] = getattr(frames, said["kind"])
    message = msgspec.convert([*said["fields"].values()], kind)
    return frames.encode(message, framed(message, bytes.fromhex(said["tail"])).tail)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
