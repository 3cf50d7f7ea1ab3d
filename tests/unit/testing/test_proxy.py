"""The fault proxy: whom its faults befall, which connections it takes, that a seed replays, and that it ends."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvpull_async.testing.proxy import Fault, FaultKind, Schedule, Way
from tests.unit.testing.proxying import PATIENCE, Line, Rig, exactly, rest, silent

CONTROL, PAYLOAD = b"KVPULL\x01C", b"KVPULL\x01P"


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_connections_of_a_link_are_told_apart_and_counted(rig: Rig) -> None:
    for first in (CONTROL, PAYLOAD, b"GET / HTTP/1.0\r\n", b"KVPULL\x01S", b"KVPULL\x01T"):
        line = rig.line()
        for byte in first:
            line.client.sendall(bytes([byte]))
        exactly(line.server, len(first))
        line.server.sendall(b"abc")
        exactly(line.client, 3)
    assert [one.kind for one in rig.proxy.passing()] == ["control", "payload", "", "control", "payload"]
    control = rig.proxy.passing("control")[0]
    assert (control.there, control.back, control.open) == (8, 3, True)
    assert rig.proxy.accepted == 5


def test_a_fault_by_hand_counts_from_then_on_and_befalls_whom_it_names(rig: Rig) -> None:
    lines = {"control": rig.line(), "payload": rig.line()}
    for first, line in zip((CONTROL, PAYLOAD), lines.values(), strict=True):
        line.client.sendall(first)
        exactly(line.server, 8)
    rig.proxy.inflict(Fault(FaultKind.CUT, Way.THERE, 3), kind="payload")
    for line in lines.values():
        line.client.sendall(b"abcdef")
    assert rest(lines["payload"].server) == (b"abc", "reset")
    assert exactly(lines["control"].server, 6) == b"abcdef"
    assert any("payload: cut there after 11 bytes" in line for line in rig.proxy.story)


# --- new connections ---


def test_a_connection_is_over_when_the_call_that_cut_it_returns(rig: Rig) -> None:
    """Else what is asked next may find it open, and breaks on it."""
    for _ in range(50):
        line = rig.line()
        line.client.sendall(b"x")
        assert exactly(line.server, 1) == b"x"
        rig.proxy.cut()
        for sock in (line.client, line.server):
            sock.setblocking(False)
            with pytest.raises(ConnectionResetError):
                sock.recv(1)


def test_connections_are_refused_until_they_are_accepted_again(rig: Rig) -> None:
    before = rig.line()
    rig.proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        rig.dial()
    before.client.sendall(b"x")
    assert exactly(before.server, 1) == b"x"
    rig.proxy.accept()
    rig.line()


def test_a_mute_proxy_accepts_and_says_nothing(rig: Rig) -> None:
    rig.proxy.mute = True
    client = rig.dial()
    client.sendall(CONTROL)
    assert silent(client)
    rig.proxy.mute = False
    rig.line()


def test_healed_it_does_no_more_harm(rig: Rig) -> None:
    line = rig.line()
    rig.proxy.inflict(Fault(FaultKind.CUT, at=3), Fault(FaultKind.CORRUPT, Way.BACK, 1, 1), Fault(FaultKind.STALL))
    rig.proxy.plans, rig.proxy.mute = Schedule(1, share=1.0), True
    rig.proxy.refuse()
    rig.proxy.heal()
    for one in (line, rig.line()):
        for way in Way:
            writer, reader = one.end(way)
            writer.sendall(bytes(1000))
            assert exactly(reader, 1000) == bytes(1000)


# --- replay and end ---


def test_the_same_seed_harms_the_same_connections_at_the_same_bytes() -> None:
    def run() -> list[str]:
        made = Rig(Schedule(11, share=0.8, span=300, longest=1))
        try:
            for _ in range(12):
                line = made.line()
                for writer in (line.client, line.server):
                    with contextlib.suppress(OSError):
                        writer.sendall(bytes(300))
                        writer.shutdown(socket.SHUT_WR)
                for reader in (line.server, line.client):
                    reader.settimeout(1.0)
                    rest(reader)
            return sorted(line for line in made.proxy.story if " after " in line and "from" not in line)
        finally:
            made.close()

    first = run()
    assert len(first) > 4
    assert run() == first


@pytest.mark.parametrize("state", ["idle", "stalled", "mute", "refusing", "slow"])
def test_nothing_is_left_after_the_end_whatever_goes_on(rig: Rig, state: str) -> None:
    """(The leak guard looks for threads and sockets.)"""
    rig.proxy.mute = state == "mute"
    line = rig.line() if state != "mute" else Line(rig.dial(), socket.socket())
    if state == "stalled":
        rig.proxy.stall()
    if state == "refusing":
        rig.proxy.refuse()
    if state == "slow":
        rig.proxy.inflict(Fault(FaultKind.THROTTLE, value=1))
    line.client.sendall(bytes(1000))
    rig.proxy.close()
    assert rest(line.client)[1] == "reset"
    rig.proxy.close()
    line.server.close()


def test_as_a_program_it_says_where_it_listens_and_what_happens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-m", "kvpull_async.testing.proxy", "--target", f"127.0.0.1:{port}", "--seed", "3"]
        more = ["--kinds", "half-close", "cut", "--share", "1", "--span", "1"]
        with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            host, _, port_text = process.stdout.readline().strip().rpartition(":")
            with socket.create_connection((host, int(port_text)), PATIENCE) as client:
                client.settimeout(PATIENCE)
                assert "connection 0 from" in process.stdout.readline()
                said = process.stdout.readline()
                assert "cut" in said or "half close" in said
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait(PATIENCE) == 0
