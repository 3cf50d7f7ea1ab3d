"""The flows of the original's public samples, written anew, between real processes with torch's tensors: the same calls
in the same order with the same arguments, and every byte of every tensor checked on both sides.

The programs are in `peers/samples_*.py`. What differs from the samples: contents that tell every row apart, barriers in
place of sleeps, and addresses of the loopback.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.torch_cpu import torch_cpu

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
NUMBERS = itertools.count()


def host() -> str:
    """A loopback address that no other test uses, so that the samples' ports are free there."""
    process, number = os.getpid(), next(NUMBERS)
    return f"127.{1 + process // 250 % 250}.{1 + process % 250}.{1 + number % 250}"


@dataclass(frozen=True)
class Process:
    """One program of a flow; what it writes to standard error is kept for the day it fails."""

    name: str
    running: subprocess.Popen[bytes]
    errors: Path

    def says(self, give_up: float) -> Any:
        """Its next line, which must come by then."""
        line = b""
        assert self.running.stdout is not None
        while not line.endswith(b"\n"):
            left = max(0.0, give_up - time.monotonic())
            ready = select.select([self.running.stdout], [], [], left)[0]
            assert ready, f"{self.name} says nothing: {self.errors.read_text()}"
            piece = os.read(self.running.stdout.fileno(), 65536)
            if not piece:
                raise AssertionError(f"{self.name} ended with {self.running.wait(10)}: {self.errors.read_text()}")
            line += piece
        return json.loads(line)

    def go(self, values: list[Any]) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(json.dumps(values).encode() + b"\n")
        self.running.stdin.flush()

    def ended(self) -> tuple[int, str]:
        return self.running.wait(PATIENCE_S), self.errors.read_text()

    def close(self) -> None:
        self.running.kill()
        self.running.wait(10)
        for pipe in (self.running.stdin, self.running.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def started(program: str, arguments: list[dict[str, Any]], where: Path) -> Iterator[list[Process]]:
    """Processes that are gone afterwards, however the test ends."""
    made: list[Process] = []
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        for given in arguments:
            name = f"{given['flow']}, {given['role']}{given['index']}"
            errors = where / name.replace(", ", "-")
            command = [sys.executable, "-W", "error", "-m", f"tests.integration.peers.{program}", json.dumps(given)]
            with errors.open("wb") as file:
                pipe = subprocess.PIPE
                running = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file, cwd=ROOT, env=environment)
            made.append(Process(name, running, errors))
        yield made
    finally:
        for process in made:
            process.close()


def follow(processes: list[Process]) -> None:
    """Let them all through their barriers, each time with what each has given, until all are at their end."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        said = [process.says(give_up) for process in processes]
        kinds = {kind for kind, _ in said}
        assert len(kinds) == 1, f"not all are at the same place: {said}"
        if kinds == {"end"}:
            break
        for process in processes:
            process.go([value for _, value in said])
    for process in processes:
        assert process.ended() == (0, ""), process.name


def run(program: str, flow: str, where: Path, *, prompts: int = 1, decoders: int = 1, **given: Any) -> None:
    ips = {role: host() for role in "pd"}
    here = {
        "p": [f"{ips['p']}:{26000 + number}" for number in range(prompts)],
        "d": [f"{ips['d']}:{26000 + prompts + number}" for number in range(decoders)],
    }
    shared = {"flow": flow, "memory": "torch", "backend": "", "rank_table": "", "late_s": 0.0, **given}
    if shared["memory"] == "torch":
        torch_cpu()
    arguments = [
        {**shared, "role": role, "index": index, "here": address, "there": here["d" if role == "p" else "p"]}
        for role in "pd"
        for index, address in enumerate(here[role])
    ]
    with started(program, arguments, where) as processes:
        follow(processes)


def one_server() -> str:
    """Two devices of one server, as the samples write it for one machine."""
    ip = host()
    devices = [{"device_id": str(rank), "device_ip": ip, "rank_id": str(rank)} for rank in range(2)]
    return rank_table({"device": devices, "host_ip": "127.0.0.1", "server_id": "1"})


def two_servers(*, version: str = "1.2", **named: str) -> str:
    """A device on each of two servers, as the samples write it for two machines; the older ones name no host."""
    devices = [{"device_id": "0", "device_ip": host(), "rank_id": str(rank)} for rank in range(2)]
    servers = [{"device": [devices[rank]], "server_id": str(rank + 1), **named} for rank in range(2)]
    return rank_table(*servers, version=version)


def rank_table(*servers: dict[str, Any], version: str = "1.2") -> str:
    table = {"server_count": str(len(servers)), "status": "completed", "version": version, "server_list": servers}
    return json.dumps(table)


TABLES: dict[str, Callable[[], str]] = {
    "one server": one_server,
    "two servers": partial(two_servers, host_ip="127.0.0.1"),
    "version 1.0": partial(two_servers, version="1.0"),
}


# What the samples' own memory is; the others have numpy's, since torch takes seconds to import in every process.
TORCH = ("", "torch")
BACKENDS = [TORCH, ("hixl", "numpy"), ("shm", "numpy"), ("tcp", "numpy")]


# -- linked by rank table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "memory"), [("one server", "torch"), ("two servers", "numpy"), ("version 1.0", "numpy")]
)
@pytest.mark.parametrize("flow", ["pull_cache", "pull_blocks", "cache_to_blocks"])
def test_a_decoder_pulls_from_its_prompt(flow: str, table: str, memory: str, tmp_path: Path) -> None:
    run("samples_pull", flow, tmp_path, rank_table=TABLES[table](), memory=memory)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("flow", ["pull_cache", "pull_blocks", "cache_to_blocks"])
def test_a_decoder_pulls_over_every_transport(flow: str, backend: str, tmp_path: Path) -> None:
    run("samples_pull", flow, tmp_path, rank_table=one_server(), backend=backend, memory="numpy")


# -- linked by one side ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "decoders"), [(1, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("backend", ["", "tcp"])
def test_every_decoder_pulls_blocks_of_every_prompt(prompts: int, decoders: int, backend: str, tmp_path: Path) -> None:
    memory = "torch" if prompts == 2 and not backend else "numpy"
    run("samples_pull", "xpyd", tmp_path, prompts=prompts, decoders=decoders, backend=backend, memory=memory)


@pytest.mark.parametrize(("backend", "memory"), BACKENDS)
@pytest.mark.parametrize("flow", ["push_cache", "push_blocks", "transfer"])
def test_what_is_pushed_arrives(flow: str, backend: str, memory: str, tmp_path: Path) -> None:
    run("samples_push", flow, tmp_path, backend=backend, memory=memory)


@pytest.mark.parametrize(("backend", "memory"), [TORCH, ("tcp", "numpy")])
def test_the_roles_are_switched(backend: str, memory: str, tmp_path: Path) -> None:
    run("samples_push", "switch_role", tmp_path, backend=backend, memory=memory)


@pytest.mark.parametrize(("late_s", "memory"), [(0.0, "torch"), (0.001, "numpy"), (0.5, "numpy")])
def test_both_link_and_one_pulls_while_the_other_pushes(late_s: float, memory: str, tmp_path: Path) -> None:
    run("samples_push", "both_ways", tmp_path, backend="hixl", memory=memory, late_s=late_s)


# -- the older manager -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "memory"), [TORCH, ("tcp", "numpy")])
@pytest.mark.parametrize("flow", ["pull_cache", "pull_blocks", "transfer", "switch_role"])
def test_the_older_manager(flow: str, backend: str, memory: str, tmp_path: Path) -> None:
    run("samples_older", flow, tmp_path, backend=backend, memory=memory)
