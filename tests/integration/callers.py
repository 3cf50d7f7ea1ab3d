"""Programs as the original's users wrote them, each in a process of its own, and the pieces of source they are made of.

They move blocks of plain memory between a prefill and a decode process. `Program` runs pieces of source, the functions
below put the usual pieces together; what a program holds afterwards is judged by the test.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from tests import ranks
from tests.torch_cpu import torch_cpu

PATIENCE_S = 60.0
PREFILL = 0x7F000001_4E20_0001  # address, port and rank in one number, as callers make them
DECODE = 0xFEDCBA98_76543210
LINK_STYLES = ["link_clusters", "link"]

START = """
config = LLMConfig()
config.device_id = 0
config.{mode}
config.sync_kv_timeout = 20000
if {listen!r}:
    config.listen_ip_info = {listen!r}
options = config.generate_options()
datadist = LLMDataDist(LLMRole.{role}, {cluster})
datadist.init(options)
cache_manager = datadist.cache_manager
answer = datadist.listen_address
"""
MODES = {"remote-access": 'local_comm_res = ""', "cache-manager": "enable_cache_manager = True"}

MEMORY = {
    "numpy": """
def fresh(nbytes, fill):
    return np.full(nbytes, fill, np.uint8)
def address(tensor):
    return tensor.ctypes.data
""",
    "torch": """
import torch
def fresh(nbytes, fill):
    return torch.full((nbytes,), fill, dtype=torch.uint8)
def address(tensor):
    return tensor.data_ptr()
""",
}
# Two layers of keys and values, 16 blocks each. The memory begins at no page, nor at any other boundary.
REGISTER = """
shape = (16, 4, 32)
block_nbytes = 4 * 32 * 2
whole = [fresh(16 * block_nbytes + 64, {fill}) for t in range(4)]
tensors = [whole[t][7 + t : 7 + t + 16 * block_nbytes] for t in range(4)]
cache_desc = CacheDesc(num_tensors=4, shape=shape, data_type=DataType.DT_FLOAT16, seq_len_dim_index=-1)
cache = cache_manager.register_blocks_cache(
    cache_desc, [address(tensor) for tensor in tensors], BlocksCacheKey({cluster}, 0)
)
blocks = [tensor.reshape(16, block_nbytes) for tensor in tensors]
answer = cache.cache_id
"""
FILL = """
for t in range(4):
    for b in range(16):
        blocks[t][b] = (64 * t + b + {add}) % 256
"""
PULL = """
cache_manager.pull_blocks(BlocksCacheKey({peer}, 0), cache, {src}, {dst})
"""
HELD = "answer = [[int(b[0]) if (b == b[0]).all() else None for b in tensor] for tensor in blocks]"

LINK = """
cluster = LLMClusterInfo()
cluster.remote_cluster_id = {peer}
cluster.append_local_ip_info("127.0.0.1", 0)
cluster.append_remote_ip_info("127.0.0.1", {port})
ret, rets = datadist.link_clusters([cluster], 20000)
answer = (ret == LLMStatusCode.LLM_SUCCESS, [code.name for code in rets])
"""
LINKED = [True, ["LLM_SUCCESS"]]
UNLINK = """
cluster = LLMClusterInfo()
cluster.remote_cluster_id = {peer}
ret, rets = datadist.unlink_clusters([cluster], 5000, force=True)
answer = [ret.name, [code.name for code in rets]]
"""
FORCED = ["LLM_SUCCESS", ["LLM_SUCCESS"]]
JOIN = """
comm_id = datadist.link({name!r}, {{{prefill}: 0, {decode}: 1}}, {table!r})
answer = comm_id
"""
JOINED = """
import time
give_up = time.monotonic() + 30
while (status := datadist.query_register_mem_status(comm_id)) == RegisterMemStatus.PREPARING:
    assert time.monotonic() < give_up
    time.sleep(0.05)
answer = status.name
"""


class Program:
    """One process; `run` gives it a piece of source and returns its `answer`."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.integration.peers.program"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, source: str, **values: Any) -> Any:
        self.begin(source, **values)
        return self.finish()

    def ask(self, source: str, **values: Any) -> dict[str, Any]:
        """As `run`; also what the source raised, by name."""
        self.begin(source, **values)
        return self._said()

    def begin(self, source: str, **values: Any) -> None:
        """Let it run meanwhile; `finish` has its answer."""
        assert self._process.stdin is not None
        print(json.dumps(source.format(**values) if values else source), file=self._process.stdin, flush=True)

    def finish(self) -> Any:
        said = self._said()
        assert "raised" not in said, said
        return said["answer"]

    def _said(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        assert select.select([stdout], [], [], PATIENCE_S)[0], "the program does not answer"
        line = stdout.readline()
        assert line, f"the program ended: {self.end()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def end(self) -> tuple[int, str]:
        """Let it run out of source: its exit status, and what it wrote to standard error."""
        try:
            _, stderr = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, stderr = self._process.communicate()
        return self._process.returncode, stderr


@contextmanager
def program() -> Iterator[Program]:
    started = Program()
    try:
        yield started
    finally:
        started.end()


class Pair(NamedTuple):
    """A prefill process that is filled, and a decode process; `comm` is the name that `link` was called with."""

    source: Program
    puller: Program
    port: int
    comm: str


def prefill(made: Program, mode: str, *, port: int | None = 0, add: int = 1, memory: str = "numpy") -> int:
    """Make it a prefill process with filled blocks; returns the port it listens on. It does not listen on None."""
    listen = "" if port is None else f"127.0.0.1:{port}"
    made.run(MEMORY[memory])
    address = made.run(START, mode=MODES.get(mode, mode), listen=listen, role="PROMPT", cluster=PREFILL)
    assert made.run(REGISTER, fill=0, cluster=PREFILL) == 1
    made.run(FILL, add=add)
    return int(address[1]) if address else 0


def decode(made: Program, mode: str, *, memory: str = "numpy") -> None:
    """Make it a decode process, not linked yet."""
    made.run(MEMORY[memory])
    made.run(START, mode=MODES.get(mode, mode), listen="", role="DECODER", cluster=DECODE)
    assert made.run(REGISTER, fill=255, cluster=DECODE) == 1


def link(made: Program, port: int) -> None:
    """With the prefill process at that port."""
    assert made.run(LINK, peer=PREFILL, port=port) == LINKED


def join(one: Program, other: Program, name: str, table: str = "") -> None:
    """Both call `link`, one after the other, and poll."""
    for each in (one, other):
        each.run(JOIN, name=name, prefill=PREFILL, decode=DECODE, table=table or ranks.together())
    assert [each.run(JOINED) for each in (one, other)] == ["OK", "OK"]


def connect(style: str, source: Program, puller: Program, port: int) -> str:
    """Link the two; the name of the comm that `link` makes."""
    name = ranks.comm_name()
    if style == "link_clusters":
        link(puller, port)
    else:
        join(source, puller, name)
    return name


@contextmanager
def pair(mode: str = "remote-access", style: str = "link_clusters", memory: str = "numpy") -> Iterator[Pair]:
    """A prefill and a decode process, not linked yet; ended however the test went."""
    if memory == "torch":
        torch_cpu()
    with program() as source, program() as puller:
        port = prefill(source, mode, port=0 if style == "link_clusters" else None, memory=memory)
        decode(puller, mode, memory=memory)
        yield Pair(source, puller, port, "")


@contextmanager
def both(mode: str = "remote-access", style: str = "link_clusters", memory: str = "numpy") -> Iterator[Pair]:
    """A prefill and a decode process that are linked."""
    with pair(mode, style, memory) as (source, puller, port, _):
        yield Pair(source, puller, port, connect(style, source, puller, port))


def pulled(moves: dict[int, int], *, add: int = 1, before: int = 255) -> list[list[int]]:
    """What a decode process holds after pulling {its block: the source's}."""
    return [[64 * t + moves[b] + add if b in moves else before for b in range(16)] for t in range(4)]


by_link_style = pytest.mark.parametrize("style", LINK_STYLES)
