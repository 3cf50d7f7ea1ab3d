"""Programs that are told to end while calls are under way, and processes that processes start: in time, and with the
status that they chose.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvpull_async import LLMException, LLMStatusCode
from kvpull_async.testing.proxy import Fault, FaultKind, Way
from tests import duo
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration.peers.shutting import REMOTE, TERMINATED
from tests.integration.rig import nodes
from tests.integration.running import Running, running
from tests.integration.test_blocking import source
from tests.integration.test_exit import check_the_peer_goes_on

CLOSE_MS, SETTLE_MS = 1500, 500
IN_TIME = (CLOSE_MS + SETTLE_MS) / 1000 + 10
"""Seconds in which a program has ended, on a slow machine too; its calls have 30 s and more."""
FACES, CALLS = ("awaited", "blocking"), ("pull", "many", "push", "transfer", "link")
STATUS = {signal.SIGTERM: TERMINATED, signal.SIGINT: -signal.SIGINT}


@contextlib.contextmanager
def peer() -> Iterator[tuple[Running, list[Any]]]:
    """A process that holds cache 1, with keys, and its address."""
    options = {"listen": True, **REMOTE}
    with running("node", json.dumps({"role": "PROMPT", "cluster": duo.PROMPT, "options": options})) as there:
        address = there.hear("ready")["address"]
        there.tell(json.dumps({"do": "publish", "nbytes": 1024, "first": 0}))
        there.hear("published")
        yield there, address


@contextlib.contextmanager
def program(face: str, doing: str, address: list[Any], **given: Any) -> Iterator[Running]:
    """Linked, and not yet doing anything."""
    options = {"close_timeout": CLOSE_MS, "settle_timeout": SETTLE_MS, "reconnect_grace": 60_000}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = {"address": address, "silent": silent.getsockname(), "options": options, **given}
        with running("shutting", face, doing, json.dumps(given), PYTHONWARNINGS="error") as here:
            here.hear("linked")
            yield here


def ends(here: Running, number: signal.Signals) -> None:
    """A signal ends it in time, with its status and nothing on standard error but what Python says of Ctrl-C."""
    began = time.monotonic()
    here.signal(number)
    status, errors = here.end()
    assert status == STATUS[number], errors
    assert time.monotonic() - began < IN_TIME
    if number is signal.SIGINT:
        assert errors.strip().endswith("KeyboardInterrupt"), errors
        assert "LLMException" not in errors
    else:
        assert errors == ""


@contextlib.contextmanager
def stopped(there: Running) -> Iterator[None]:
    there.signal(signal.SIGSTOP)
    os.waitpid(there.process.pid, os.WUNTRACED)
    yield
    there.signal(signal.SIGCONT)


def begun(here: Running) -> None:
    here.tell()
    here.hear("begun")


# --- signals ---


@pytest.mark.parametrize(
    ("face", "doing", "number"),
    [(face, doing, list(STATUS)[(i + j) % 2]) for i, doing in enumerate(CALLS) for j, face in enumerate(FACES)],
)
def test_p8_a_signal_during_a_call_to_a_stopped_peer_ends_the_program_in_time(
    face: str, doing: str, number: signal.Signals
) -> None:
    with peer() as (there, address), program(face, doing, address) as here, stopped(there):
        begun(here)
        ends(here, number)


@pytest.mark.parametrize(("face", "doing"), [("awaited", "many"), ("blocking", "push")])
def test_p8_a_signal_during_a_call_to_a_dead_peer_ends_the_program_in_time(face: str, doing: str) -> None:
    """The call waits for its return."""
    with peer() as (there, address), program(face, doing, address) as here:
        there.signal(signal.SIGKILL)
        there.end()
        begun(here)
        ends(here, signal.SIGTERM)


@pytest.mark.parametrize(("face", "doing"), [("awaited", "link"), ("blocking", "pull")])
def test_p8_a_program_that_forgets_finalize_and_is_signalled_ends_in_time_too(face: str, doing: str) -> None:
    with peer() as (there, address), program(face, doing, address, forgets=True) as here, stopped(there):
        begun(here)
        ends(here, signal.SIGTERM)


@pytest.mark.parametrize("face", FACES)
def test_p8_sigterm_after_a_quiet_life_ends_it_at_once(face: str) -> None:
    with peer() as (_, address), program(face, "pull", address) as here:
        begun(here)
        status, errors = here.end()
        assert (status, errors) == (0, "")


# --- finalize ---


HARM = {
    "silent": [Fault(FaultKind.STALL, way) for way in Way],
    "deaf": [Fault(FaultKind.SWALLOW, way) for way in Way],
    "half closed": [Fault(FaultKind.HALF_CLOSE, Way.BACK)],
    "slow": [Fault(FaultKind.THROTTLE, way, value=20) for way in Way],
    "cut": [Fault(FaultKind.CUT)],
}


@pytest.mark.parametrize(
    ("api", "harm", "who"),
    [
        (api, harm, ("decoder", "prompt")[(i + j) % 2])
        for i, harm in enumerate(HARM)
        for j, api in enumerate((AWAITED, BLOCKING))
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_p3_p8_finalize_in_the_middle_of_a_pull_is_bounded_whatever_the_line_does(
    api: Api, harm: str, who: str
) -> None:
    async def body() -> None:
        async with nodes(api, through=True, close_timeout=CLOSE_MS, settle_timeout=SETTLE_MS) as two:
            await two.publish(duo.BIG)
            cache = await two.destination(duo.BIG)
            two.proxy.inflict(*HARM[harm])
            pulling = api.start(lambda: two.pull(cache))
            await api.until(lambda: two.decoder.counters.get("pulls_started", 0) == 1)
            began = time.monotonic()
            await api.do(getattr(two, who).finalize)
            assert time.monotonic() - began < IN_TIME
            if who == "prompt":
                await api.do(two.decoder.finalize)
            error = await pulling.outcome()
            assert error is None or isinstance(error, LLMException), error
            if error is not None and who == "decoder":
                assert error.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED or harm in ("cut", "half closed"), error
            assert time.monotonic() - began < 2 * IN_TIME

    api.run(body())


# --- processes ---


@pytest.mark.parametrize(
    ("way", "method", "big"),
    [
        ("processes", "spawn", False), ("processes", "fork", True), ("processes", "forkserver", False),
        ("executor", "spawn", False), ("fork", "fork", True),
    ],
)  # fmt: skip
def test_p8_processes_started_beside_a_node_work_for_themselves_and_end_without_harm(
    way: str, method: str, big: bool
) -> None:
    with source(big=big) as made:
        given = json.dumps({"address": made.node.listen_address, "big": big})
        with running("multiplying", way, method, given) as here:
            told = here.hear("done")
            assert [right for right, _ in told["told"]] == [True] * 3
            for _, refusals in told["told"]:
                assert len(refusals) == (2 if method == "fork" else 0)
                assert all("belongs to the parent process" in text for text in refusals)
                assert all("init a new one in the child" in text for text in refusals)
            assert told["statuses"] == {"processes": [0, 0, 0], "executor": [], "fork": [0, 1, 2]}[way]
            assert told["right"]
            assert told["counters"]["links_up"] == 1
            assert "links_lost" not in told["counters"]
            assert here.end() == (0, "")
        check_the_peer_goes_on(made)
