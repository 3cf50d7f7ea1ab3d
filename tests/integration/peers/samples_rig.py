"""What the programs of the samples' flows stand on: their arguments, barriers with the other processes, tensors of
known bytes, and links. The programs themselves are `samples_pull`, `samples_push` and `samples_older`.

    python -m tests.integration.peers.samples_pull '{"flow": "pull_cache", "role": "p", ...}'

It must not decide what a flow does, and not end before every process of the flow has come to its end.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_sync import (
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
)

LINK_MS = 30_000  # the samples give 5000, which a busy machine may need for less
PATIENCE_S = 60.0
OK = LLMStatusCode.LLM_SUCCESS
TORCH = {DataType.DT_FLOAT: "float32", DataType.DT_FLOAT16: "float16", DataType.DT_BF16: "bfloat16"}

Bytes = NDArray[np.uint8]
Moves = Mapping[int, int]
Flow = Callable[["Rig"], None]


@dataclass(frozen=True)
class Rig:
    """The arguments of one program."""

    flow: str
    role: str
    index: int
    """Which of the processes of its role this is."""
    here: str
    """The address that it listens on, when it does, as "ip:port"."""
    there: tuple[str, ...]
    """The addresses of the processes of the other role."""
    memory: str
    """What the tensors are made of: "torch" or "numpy"."""
    backend: str
    """The transfer backend, "" for none."""
    rank_table: str
    late_s: float
    """How much later than the prompt node the decoder node links, where both do."""

    @property
    def device_id(self) -> int:
        return self.index if self.role == "p" else 4 + self.index


# -- the other processes -----------------------------------------------------------------------------------------------


def barrier(value: Any = None) -> list[Any]:
    """Wait for all processes of the flow; what each of them gave, in the order of the test's list."""
    _say("barrier", value)
    return list(json.loads(sys.stdin.readline()))


def main(flows: Mapping[tuple[str, str], Flow]) -> None:
    arguments = json.loads(sys.argv[1])
    rig = Rig(**{**arguments, "there": tuple(arguments["there"])})
    flows[rig.flow, rig.role](rig)
    _say("end", None)


def _say(what: str, value: Any) -> None:
    sys.stdout.write(json.dumps([what, value]) + "\n")
    sys.stdout.flush()


# -- nodes and links ---------------------------------------------------------------------------------------------------


def init(rig: Rig, role: LLMRole, cluster_id: int, **properties: Any) -> LLMDataDist:
    """As the samples do it; `properties` are those of LLMConfig that they set."""
    datadist = LLMDataDist(role, cluster_id)
    llm_config = LLMConfig()
    llm_config.device_id = rig.device_id
    for name, value in properties.items():
        setattr(llm_config, name, value)
    llm_config.sync_kv_timeout = 30_000  # the samples have the default of a second
    if rig.backend:
        llm_config.transfer_backend = rig.backend
    datadist.init(llm_config.generate_options())
    return datadist


def cluster_info(cluster_id: int, *, local: str = "", remote: str = "") -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = cluster_id
    for address, append in ((local, cluster.append_local_ip_info), (remote, cluster.append_remote_ip_info)):
        if address:
            ip, port = address.split(":")
            append(ip, int(port))
    return cluster


def link_clusters(datadist: LLMDataDist, *clusters: LLMClusterInfo) -> None:
    ret, rets = datadist.link_clusters(list(clusters), LINK_MS)
    assert (ret, rets) == (OK, [OK] * len(clusters)), (ret, rets)


def unlink_clusters(datadist: LLMDataDist, *clusters: LLMClusterInfo, force: bool = False) -> None:
    ret, rets = datadist.unlink_clusters(list(clusters), LINK_MS, force=force)
    assert (ret, rets) == (OK, [OK] * len(clusters)), (ret, rets)


def link(rig: Rig, datadist: LLMDataDist) -> int:
    """By rank table, as clusters 1 and 2 of ranks 0 and 1, until the memory of both is known."""
    comm_id = datadist.link("link", {1: 0, 2: 1}, rig.rank_table)
    give_up = time.monotonic() + PATIENCE_S
    while (status := datadist.query_register_mem_status(comm_id)) is not RegisterMemStatus.OK:
        assert status is RegisterMemStatus.PREPARING, status
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return comm_id


# -- tensors -----------------------------------------------------------------------------------------------------------


class Tensors:
    """The memory of a cache, as the caller sees it: `rows` are its tensors' bytes, (batch entries or blocks, bytes)."""

    def __init__(self, desc: CacheDesc, made: Sequence[Any], rows: Sequence[Bytes]) -> None:
        self.made = made  # keeps them
        self.rows = [row.reshape(desc.shape[0], -1) for row in rows]
        self.desc = desc

    @property
    def addresses(self) -> list[int]:
        return [row.ctypes.data for row in self.rows]

    def fill(self, seed: int) -> Tensors:
        for row, content in zip(self.rows, known(seed, self.desc), strict=True):
            row[...] = content
        return self

    def check(self, expected: Sequence[Bytes]) -> None:
        """Every byte of every tensor."""
        for index, (row, wanted) in enumerate(zip(self.rows, expected, strict=True)):
            wrong = np.flatnonzero(row != wanted)
            assert not wrong.size, f"tensor {index}: {wrong.size} bytes of {row.size} are wrong, from {wrong[:8]} on"


def known(seed: int, desc: CacheDesc) -> list[Bytes]:
    """Bytes that tell every tensor and row of every `seed` apart."""
    nbytes = int(np.prod(desc.shape[1:])) * desc.data_type.nbytes
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (desc.shape[0], nbytes), np.uint8) for _ in range(desc.num_tensors)]


def moved(into: Sequence[Bytes], out_of: Sequence[Bytes], rows: Moves) -> list[Bytes]:
    """What `into` becomes when rows {of the source: of the destination} of every tensor are copied."""
    expected = [row.copy() for row in into]
    for row, source in zip(expected, out_of, strict=True):
        for source_row, row_number in rows.items():
            row[row_number] = source[source_row]
    return expected


def tensors(rig: Rig, desc: CacheDesc) -> Tensors:
    """New ones, of the caller's own memory."""
    if rig.memory == "numpy":
        sized = [np.zeros(int(np.prod(desc.shape)) * desc.data_type.nbytes, np.uint8) for _ in range(desc.num_tensors)]
        return Tensors(desc, sized, sized)
    import torch  # only where the flow is about it: it takes long

    dtype = getattr(torch, TORCH[desc.data_type])
    made = [torch.zeros(*desc.shape, dtype=dtype) for _ in range(desc.num_tensors)]
    found = Tensors(desc, made, [tensor.view(torch.uint8).numpy() for tensor in made])
    assert found.addresses == [int(tensor.data_ptr()) for tensor in made]
    return found


def at(rig: Rig, desc: CacheDesc, addresses: Sequence[int]) -> Tensors:
    """Over the memory of an allocated cache."""
    nbytes = int(np.prod(desc.shape)) * desc.data_type.nbytes
    lent = [(ctypes.c_uint8 * nbytes).from_address(address) for address in addresses]
    assert len(lent) == desc.num_tensors
    if rig.memory == "numpy":
        return Tensors(desc, lent, [np.ctypeslib.as_array(memory) for memory in lent])
    import torch

    dtype = getattr(torch, TORCH[desc.data_type])
    made = [torch.frombuffer(memory, dtype=dtype).reshape(*desc.shape) for memory in lent]
    return Tensors(desc, made, [tensor.view(torch.uint8).numpy() for tensor in made])


def refused(status: LLMStatusCode, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """The call must be refused, with that status."""
    try:
        call(*arguments, **named)
    except LLMException as error:
        got = error.status_code
    else:
        raise AssertionError("it was not refused")
    assert got == status, got
