"""What nearly all existing programs do, between real processes: register plain heap memory by address, link, pull
blocks with positional arguments, finalize or not even that. The pieces of source below are such programs.
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
from typing import Any

import pytest

PATIENCE_S = 60.0
PREFILL = 0x7F000001_4E20_0001  # address, port and rank in one number, as callers make them
DECODE = 0xFEDCBA98_76543210

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

# Two layers of keys and values, 16 blocks each. The memory begins at no page, nor at any other boundary.
REGISTER = """
shape = (16, 4, 32)
block_nbytes = 4 * 32 * 2
tensors = [np.full(16 * block_nbytes + 64, {fill}, np.uint8)[7 + t : 7 + t + 16 * block_nbytes] for t in range(4)]
cache_desc = CacheDesc(num_tensors=4, shape=shape, data_type=DataType.DT_FLOAT16, seq_len_dim_index=-1)
cache = cache_manager.register_blocks_cache(
    cache_desc, [tensor.ctypes.data for tensor in tensors], BlocksCacheKey({cluster}, 0)
)
blocks = [tensor.reshape(16, block_nbytes) for tensor in tensors]
answer = cache.cache_id
"""
FILL = """
for t in range(4):
    for b in range(16):
        blocks[t][b] = (64 * t + b + {add}) % 256
"""
LINK = """
cluster = LLMClusterInfo()
cluster.remote_cluster_id = {peer}
cluster.append_local_ip_info("127.0.0.1", 0)
cluster.append_remote_ip_info("127.0.0.1", {port})
ret, rets = datadist.link_clusters([cluster], 20000)
answer = (ret == LLMStatusCode.LLM_SUCCESS, [code.name for code in rets])
"""
PULL = """
cache_manager.pull_blocks(BlocksCacheKey({peer}, 0), cache, {src}, {dst})
"""
HELD = "answer = [[int(b[0]) if (b == b[0]).all() else None for b in tensor] for tensor in blocks]"


class Program:
    """One process; `run` gives it a piece of source and returns its `answer`."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.integration.peers.program"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, source: str, **values: Any) -> Any:
        said = self.ask(source, **values)
        assert "raised" not in said, said
        return said["answer"]

    def ask(self, source: str, **values: Any) -> dict[str, Any]:
        """As `run`; also what the source raised, by name."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(source.format(**values) if values else source), file=stdin, flush=True)
        assert select.select([stdout], [], [], PATIENCE_S)[0], "the program does not answer"
        line = stdout.readline()
        assert line, f"the program ended: {self.end()}"
        said: dict[str, Any] = json.loads(line)
        return said

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


def prefill(made: Program, mode: str, *, port: int = 0, add: int = 1) -> int:
    """Make it a prefill process with filled blocks; returns the port it listens on."""
    _, listening = made.run(START, mode=MODES[mode], listen=f"127.0.0.1:{port}", role="PROMPT", cluster=PREFILL)
    assert made.run(REGISTER, fill=0, cluster=PREFILL) == 1
    made.run(FILL, add=add)
    return int(listening)


def decode(made: Program, mode: str, port: int) -> None:
    """Make it a decode process that is linked to the prefill process at that port."""
    made.run(START, mode=MODES[mode], listen="", role="DECODER", cluster=DECODE)
    made.run(REGISTER, fill=255, cluster=DECODE)
    assert made.run(LINK, peer=PREFILL, port=port) == [True, ["LLM_SUCCESS"]]


def pulled(moves: dict[int, int], *, add: int = 1, before: int = 255) -> list[list[int]]:
    """What a decode process holds after pulling {its block: the source's}."""
    return [[64 * t + moves[b] + add if b in moves else before for b in range(16)] for t in range(4)]


@contextmanager
def both(mode: str) -> Iterator[tuple[Program, Program, int]]:
    """A prefill and a linked decode process; ended however the test went."""
    with program() as source, program() as puller:
        port = prefill(source, mode)
        decode(puller, mode, port)
        yield source, puller, port


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
def test_the_main_path(mode: str) -> None:
    with both(mode) as (source, puller, _):
        puller.run(PULL, peer=PREFILL, src=[3, 4, 5, 0], dst=[7, 8, 9, 1])
        assert puller.run(HELD) == pulled({7: 3, 8: 4, 9: 5, 1: 0})
        source.run(FILL, add=2)
        puller.run(PULL, peer=PREFILL, src=[15], dst=[15])
        assert puller.run(HELD) == [
            [64 * t + 17 if b == 15 else was for b, was in enumerate(held)]
            for t, held in enumerate(pulled({7: 3, 8: 4, 9: 5, 1: 0}))
        ]
        for each in (puller, source):
            each.run("cache_manager.unregister_cache(cache.cache_id)\ndatadist.finalize()")
            assert each.end() == (0, "")


def test_after_one_side_has_linked_both_pull() -> None:
    with both("cache-manager") as (source, puller, _):
        puller.run(FILL, add=100)
        source.run(PULL, peer=DECODE, src=[2, 3], dst=[0, 1])
        held = source.run(HELD)
        assert [tensor[:2] for tensor in held] == [[(64 * t + b + 100) % 256 for b in (2, 3)] for t in range(4)]
        assert [tensor[2:] for tensor in held] == [[64 * t + b + 1 for b in range(2, 16)] for t in range(4)]


def test_layers_one_tensor_at_a_time() -> None:
    with both("remote-access") as (_, puller, _):
        puller.run(f"""
cache_manager.pull_blocks(BlocksCacheKey({PREFILL}, 0), cache, [1], [2], src_layer_range=range(3, 4),
                          dst_layer_range=range(0, 1), tensor_num_per_layer=1)
""")
        held = puller.run(HELD)
        assert held[0] == [255, 255, 194, *[255] * 13]
        assert held[1:] == [[255] * 16] * 3


def test_blocks_from_a_contiguous_entry() -> None:
    with both("cache-manager") as (source, puller, _):
        source.run(f"""
entries = [np.arange(2 * 2 * 256, dtype=np.uint8).reshape(2, 2 * 256) + np.uint8(t) for t in range(4)]
contiguous = cache_manager.register_cache(
    CacheDesc(4, [2, 8, 32], DataType.DT_FLOAT16), [entry.ctypes.data for entry in entries], [CacheKey({PREFILL}, 5)]
)
""")
        puller.run(f"cache_manager.pull_blocks(CacheKey({PREFILL}, 5), cache, src_blocks=[], dst_blocks=[9, 4])")
        held = puller.run("answer = [[tensor[9].tolist(), tensor[4].tolist()] for tensor in blocks]")
        assert held == [[[(i + t) % 256 for i in range(256)]] * 2 for t in range(4)]


def test_a_program_that_never_finalizes_ends_and_leaves_the_other_side_working() -> None:
    with both("remote-access") as (source, puller, port):
        puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
        assert puller.end() == (0, "")
        with program() as other:
            decode(other, "remote-access", port)
            other.run(PULL, peer=PREFILL, src=[2], dst=[2])
            assert other.run(HELD) == pulled({2: 2})
        assert source.end() == (0, "")


def test_two_processes_of_one_cluster_id_pull_from_one_source() -> None:
    with both("cache-manager") as (_, first, port), program() as second:
        decode(second, "cache-manager", port)
        for block in range(3):
            first.run(PULL, peer=PREFILL, src=[block], dst=[block])
            second.run(PULL, peer=PREFILL, src=[block], dst=[15 - block])
        assert first.run(HELD) == pulled({0: 0, 1: 1, 2: 2})
        assert second.run(HELD) == pulled({15: 0, 14: 1, 13: 2})


UNLINK = """
cluster = LLMClusterInfo()
cluster.remote_cluster_id = {peer}
ret, rets = datadist.unlink_clusters([cluster], 5000, force=True)
answer = [ret.name, [code.name for code in rets]]
"""
FORCED = ["LLM_SUCCESS", ["LLM_SUCCESS"]]


def test_a_dead_peer_is_unlinked_by_force_and_linked_again_when_it_is_back() -> None:
    with both("remote-access") as (source, puller, port):
        puller.run(PULL, peer=PREFILL, src=[0], dst=[0])
        source.kill()
        failed = puller.ask(PULL, peer=PREFILL, src=[1], dst=[1])
        assert failed["raised"] == "LLMException", failed
        assert puller.run(HELD) == pulled({0: 0})
        assert puller.run(UNLINK, peer=PREFILL) == FORCED
        assert puller.run(UNLINK, peer=PREFILL) == FORCED
        assert puller.run(UNLINK, peer=12345) == FORCED
        with program() as reborn:
            prefill(reborn, "remote-access", port=port, add=50)
            assert puller.run(LINK, peer=PREFILL, port=port) == [True, ["LLM_SUCCESS"]]
            puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
            assert [tensor[1] for tensor in puller.run(HELD)] == [64 * t + 51 for t in range(4)]
        puller.run("datadist.finalize()")
        assert puller.end() == (0, "")


def test_finalize_and_init_again_with_the_same_options_and_port() -> None:
    with both("cache-manager") as (source, puller, port):
        source.run(f'options["llm.listenIpInfo"] = "127.0.0.1:{port}"\ndatadist.finalize()')
        assert source.ask("datadist.cache_manager")["raised"] == "RuntimeError"
        source.run("datadist.init(options)\ncache_manager = datadist.cache_manager")
        assert source.run(REGISTER, fill=0, cluster=PREFILL) == 1
        source.run(FILL, add=9)
        assert puller.run(UNLINK, peer=PREFILL) == FORCED
        assert puller.run(LINK, peer=PREFILL, port=port) == [True, ["LLM_SUCCESS"]]
        puller.run(PULL, peer=PREFILL, src=[6], dst=[0])
        assert puller.run(HELD) == pulled({0: 6}, add=9)


def test_finalize_while_the_peer_is_gone() -> None:
    with both("cache-manager") as (source, puller, _):
        source.kill()
        puller.run("datadist.finalize()")
        assert puller.end() == (0, "")


def test_errors_by_class_and_status() -> None:
    with both("cache-manager") as (_, puller, _):
        for src, dst, status in (([16], [0], "LLM_PARAM_INVALID"), ([0], [16], "LLM_PARAM_INVALID")):
            assert puller.ask(PULL, peer=PREFILL, src=src, dst=dst)["status"] == status
        assert puller.ask(PULL, peer=77, src=[0], dst=[0])["status"] == "LLM_NOT_YET_LINK"
        assert puller.ask(PULL, peer=PREFILL, src="3", dst=[0])["raised"] == "TypeError"
        missing = f"cache_manager.pull_blocks(BlocksCacheKey({PREFILL}, 3), cache, [0], [0])"
        assert puller.ask(missing)["status"] == "LLM_KV_CACHE_NOT_EXIST"
        assert puller.run(HELD) == pulled({})
        puller.run(PULL, peer=PREFILL, src=[0], dst=[0])
