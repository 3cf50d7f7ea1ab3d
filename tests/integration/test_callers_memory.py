"""What existing programs take for granted of memory and of caches, between real processes: what is touched and what is
not, where memory may lie, and which of it others may reach.
"""

from __future__ import annotations

import pytest

from tests.integration.callers import (
    DECODE,
    HELD,
    PREFILL,
    PULL,
    both,
    by_link_style,
    connect,
    link,
    pair,
    program,
    pulled,
)
from tests.torch_cpu import torch_cpu

# -- where memory lies -------------------------------------------------------------------------------------------------

# Memory that nobody may touch: a look at it ends the program.
UNTOUCHABLE = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
mapped = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
bytes_of = np.frombuffer(mapped, np.uint8)
bytes_of[:] = {fill}
where = bytes_of.ctypes.data
assert libc.mprotect(where, 1 << 20, 0) == 0
mapped_cache = cache_manager.register_blocks_cache(
    CacheDesc(2, [8, 1 << 16], DataType.DT_UINT8), [where, where + (1 << 19)], BlocksCacheKey({cluster}, 7)
)
"""
ALLOW = "assert libc.mprotect(where, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE) == 0"


@by_link_style
def test_registering_does_not_touch_memory(style: str) -> None:
    """Here the memory is a private mapping, which nobody may even read while it is registered."""
    with pair("remote-access", style) as (source, puller, port, _):
        for each, cluster, fill in ((source, PREFILL, 5), (puller, DECODE, 9)):
            each.run(UNTOUCHABLE, fill=fill, cluster=cluster)
        connect(style, source, puller, port)
        for each in (source, puller):
            each.run(ALLOW)
        puller.run(f"cache_manager.pull_blocks(BlocksCacheKey({PREFILL}, 7), mapped_cache, [1, 2], [6, 0])")
        held = puller.run("answer = bytes_of.reshape(2, 8, 1 << 16)[:, :, ::4096].max(axis=2).tolist()")
        assert held == [[5, 9, 9, 9, 9, 9, 5, 9]] * 2


ALLOCATE = {
    "ctypes": """
import ctypes
made = cache_manager.allocate_cache(CacheDesc(2, [2, 100], DataType.DT_UINT8), {keys})
views = [(ctypes.c_uint8 * 200).from_address(address) for address in made.tensor_addrs]
""",
    "torch": """
import ctypes, torch
made = cache_manager.allocate_cache(CacheDesc(2, torch.Size([2, 100]), DataType.DT_UINT8), {keys})
views = [
    torch.frombuffer((ctypes.c_uint8 * 200).from_address(address), dtype=torch.uint8) for address in made.tensor_addrs
]
""",
}


@pytest.mark.parametrize("through", ALLOCATE)
def test_addresses_of_an_allocated_cache_are_plain_memory(through: str) -> None:
    if through == "torch":
        torch_cpu()
    with both("cache-manager") as (source, puller, *_):
        source.run(ALLOCATE[through], keys=f"[CacheKey({PREFILL}, req_id=1), CacheKey({PREFILL}, req_id=2)]")
        source.run("for t in range(2):\n    for i in range(200):\n        views[t][i] = (100 * t + i) % 256")
        puller.run(ALLOCATE[through], keys="()")
        puller.run("for view in views:\n    for i in range(200):\n        view[i] = 77")
        puller.run(f"cache_manager.pull_cache(CacheKey({PREFILL}, req_id=2), made, 0)")
        held = puller.run("answer = [[int(byte) for byte in view] for view in views]")
        assert held == [[(100 * t + 100 + i) % 256 for i in range(100)] + [77] * 100 for t in range(2)]


@by_link_style
def test_bytes_outside_the_blocks_asked_for_stay_as_they_are(style: str) -> None:
    """In the tensor, and right before and behind it."""
    with both("remote-access", style) as (_, puller, *_):
        puller.run(PULL, peer=PREFILL, src=[15, 0], dst=[0, 15])
        held = puller.run("answer = [whole[t].tolist() for t in range(4)]")
        for t in range(4):
            expected = [255] * (16 * 256 + 64)
            expected[7 + t : 7 + t + 256] = [64 * t + 16] * 256
            expected[7 + t + 15 * 256 : 7 + t + 16 * 256] = [64 * t + 1] * 256
            assert held[t] == expected


# -- who may reach it --------------------------------------------------------------------------------------------------

LATER = """
later_bytes = np.full((4, 64), {fill}, np.uint8)
later = cache_manager.register_blocks_cache(
    CacheDesc(1, [4, 64], DataType.DT_UINT8), [later_bytes.ctypes.data], BlocksCacheKey({cluster}, 4){more}
)
"""
PULL_LATER = """
cache_manager.pull_blocks(BlocksCacheKey({peer}, 4), later, [1], [2])
answer = later_bytes.max(1).tolist()
"""


def test_after_link_clusters_registering_is_as_before() -> None:
    with both("remote-access") as (source, puller, *_):
        source.run(LATER, fill=3, cluster=PREFILL, more=", remote_accessible=True")
        puller.run(LATER, fill=9, cluster=DECODE, more="")
        assert puller.run(PULL_LATER, peer=PREFILL) == [9, 9, 3, 9]
        source.run(f"cache_manager.push_blocks(BlocksCacheKey({DECODE}, 4), later, [0], [0], tensor_num_per_layer=1)")
        assert puller.run("answer = later_bytes.max(1).tolist()") == [3, 9, 3, 9]


def test_after_link_new_memory_is_out_of_reach() -> None:
    with both("remote-access", "link") as (source, puller, *_):
        for each, cluster in ((source, PREFILL), (puller, DECODE)):
            refused = each.ask(LATER, fill=3, cluster=cluster, more=", remote_accessible=True")
            assert refused["raised"] == "LLMException", refused
            each.run(LATER, fill=3, cluster=cluster, more="")
        assert puller.ask(PULL_LATER, peer=PREFILL)["status"] == "LLM_PARAM_INVALID"
        puller.run(PULL, peer=PREFILL, src=[1], dst=[1])
        assert puller.run(HELD) == pulled({1: 1})


def test_a_destination_that_others_may_not_reach_is_refused() -> None:
    """With remote access on, both ends of a pull must be accessible."""
    with both("remote-access") as (source, puller, *_):
        source.run(LATER, fill=3, cluster=PREFILL, more="")
        puller.run(LATER, fill=9, cluster=DECODE, more=", remote_accessible=False")
        assert puller.ask(PULL_LATER, peer=PREFILL)["status"] == "LLM_PARAM_INVALID"
        puller.run(LATER, fill=9, cluster=DECODE, more="")
        assert puller.run(PULL_LATER, peer=PREFILL) == [9, 9, 3, 9]
        source.run(LATER, fill=5, cluster=PREFILL, more=", remote_accessible=False")
        assert puller.ask(PULL_LATER, peer=PREFILL)["status"] == "LLM_PARAM_INVALID"
        assert puller.run("answer = later_bytes.max(1).tolist()") == [9, 9, 3, 9]


# -- what moves --------------------------------------------------------------------------------------------------------

ENTRIES = """
entry_bytes = [np.full((2, 64), {fill} + 10 * t, np.uint8) for t in range(4)]
for tensor in entry_bytes:
    tensor[1] += 1
entries = cache_manager.register_cache(
    CacheDesc(4, [2, 64], DataType.DT_UINT8), [tensor.ctypes.data for tensor in entry_bytes]
)
"""
ENTRIES_HELD = "answer = [[int(entry.max()) for entry in tensor] for tensor in entry_bytes]"


@by_link_style
def test_a_push_without_a_batch_index_moves_entry_0(style: str) -> None:
    with pair("remote-access", style) as (source, puller, port, _):
        source.run(ENTRIES, fill=100, cluster=PREFILL)
        puller.run(ENTRIES, fill=0, cluster=DECODE)
        connect(style, source, puller, port)
        source.run(f"cache_manager.push_cache(CacheKeyByIdAndIndex({DECODE}, 2), entries)")
        assert puller.run(ENTRIES_HELD) == [[100, 1], [110, 11], [120, 21], [130, 31]]
        source.run(f"cache_manager.push_cache(CacheKeyByIdAndIndex({DECODE}, 2, 1), entries, 1, size=-1)")
        assert puller.run(ENTRIES_HELD) == [[100, 101], [110, 111], [120, 121], [130, 131]]


TRANSFER = """
class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        seen.append(layer_index)
        return True

seen = []
task = cache_manager.transfer_cache_async(entries, Ready(), [{config}])
answer = [task.synchronize(20000).name, seen]
"""
BY_KEY = "TransferWithCacheKeyConfig(CacheKeyByIdAndIndex({peer}, 2), range(0, 2), range(0, 2))"


def test_a_transfer_without_block_indices_moves_entry_0() -> None:
    with both("remote-access") as (source, puller, *_):
        source.run(ENTRIES, fill=100, cluster=PREFILL)
        puller.run(ENTRIES, fill=0, cluster=DECODE)
        assert source.run(TRANSFER, config=BY_KEY.format(peer=DECODE)) == ["LLM_SUCCESS", [0, 1]]
        assert puller.run(ENTRIES_HELD) == [[100, 1], [110, 11], [120, 21], [130, 31]]


def test_a_transfer_to_addresses_moves_entry_0() -> None:
    with both("cache-manager") as (source, puller, *_):
        source.run(ENTRIES, fill=100, cluster=PREFILL)
        puller.run(ENTRIES, fill=0, cluster=DECODE)
        addresses = puller.run("answer = entries.tensor_addrs")
        config = f"TransferConfig({DECODE}, {addresses}, range(0, 2))"
        assert source.run(TRANSFER, config=config) == ["LLM_SUCCESS", [0, 1]]
        assert puller.run(ENTRIES_HELD) == [[100, 1], [110, 11], [120, 21], [130, 31]]


@by_link_style
def test_layers_one_tensor_at_a_time(style: str) -> None:
    with both("remote-access", style) as (_, puller, *_):
        puller.run(f"""
cache_manager.pull_blocks(BlocksCacheKey({PREFILL}, 0), cache, [1], [2], src_layer_range=range(3, 4),
                          dst_layer_range=range(0, 1), tensor_num_per_layer=1)
""")
        held = puller.run(HELD)
        assert held[0] == [255, 255, 194, *[255] * 13]
        assert held[1:] == [[255] * 16] * 3


@by_link_style
def test_blocks_from_a_contiguous_entry(style: str) -> None:
    with both("cache-manager", style) as (source, puller, *_):
        source.run(f"""
entries = [np.arange(2 * 2 * 256, dtype=np.uint8).reshape(2, 2 * 256) + np.uint8(t) for t in range(4)]
contiguous = cache_manager.register_cache(
    CacheDesc(4, [2, 8, 32], DataType.DT_FLOAT16), [entry.ctypes.data for entry in entries], [CacheKey({PREFILL}, 5)]
)
""")
        puller.run(f"cache_manager.pull_blocks(CacheKey({PREFILL}, 5), cache, src_blocks=[], dst_blocks=[9, 4])")
        held = puller.run("answer = [[tensor[9].tolist(), tensor[4].tolist()] for tensor in blocks]")
        assert held == [[[(i + t) % 256 for i in range(256)]] * 2 for t in range(4)]


TYPES = """
import torch
kinds = {{torch.float32: DataType.DT_FLOAT, torch.float16: DataType.DT_FLOAT16, torch.bfloat16: DataType.DT_BF16,
          torch.int8: DataType.DT_INT8, torch.int32: DataType.DT_INT32, torch.uint8: DataType.DT_UINT8}}
typed = []
for model_id, (dtype, kind) in enumerate(kinds.items()):
    tensor = (torch.arange(6 * 2 * 8) % 100 + model_id).reshape(6, 2, 8).to(dtype) if {filled} \\
        else torch.full((6, 2, 8), 7).to(dtype)
    for shape in (list(tensor.shape), tuple(tensor.shape), tensor.shape):
        held = cache_manager.register_blocks_cache(
            CacheDesc(1, shape, kind), [tensor.data_ptr()], BlocksCacheKey({cluster}, 10 + model_id)
        )
    typed.append((tensor, held))
"""


def test_tensors_of_every_type_and_form_of_shape_are_moved() -> None:
    with pair("remote-access", "link", memory="torch") as (source, puller, port, _):
        source.run(TYPES, filled=True, cluster=PREFILL)
        puller.run(TYPES, filled=False, cluster=DECODE)
        connect("link", source, puller, port)
        assert puller.run(f"""
wrong = []
for model_id, (tensor, held) in enumerate(typed):
    cache_manager.pull_blocks(BlocksCacheKey({PREFILL}, 10 + model_id), held, [1, 5], [4, 0])
    expected = torch.full((6, 2, 8), 7).to(tensor.dtype)
    expected[[4, 0]] = (torch.arange(96) % 100 + model_id).reshape(6, 2, 8).to(tensor.dtype)[[1, 5]]
    if not torch.equal(tensor, expected):
        wrong.append(str(tensor.dtype))
answer = [len(typed), wrong]
""") == [6, []]


# -- the older manager -------------------------------------------------------------------------------------------------

OLDER = """
options = {{"llm.SyncKvCacheWaitTime": "20000", "ge.flowGraphMemMaxSize": str(9 * 2**30), "ge.exec.deviceId": "0"}}
if {listen!r}:
    options["llm.listenIpInfo"] = {listen!r}
datadist = LLMDataDist(LLMRole.{role}, {cluster})
datadist.init(options)
manager = datadist.kv_cache_manager
desc = CacheDesc(2, [1, 64], DataType.DT_FLOAT16)
answer = datadist.listen_address
"""


def test_the_data_of_a_deallocated_prompt_cache_lives_until_it_is_pulled() -> None:
    with program() as source, program() as puller:
        port = source.run(OLDER, role="PROMPT", cluster=PREFILL, listen="127.0.0.1:0")[1]
        puller.run(OLDER, role="DECODER", cluster=DECODE, listen="")
        source.run(f"""
import ctypes
keys = [CacheKey({PREFILL}, 77, 1)]
kept = manager.allocate_cache(desc, keys)
for address in kept.per_device_tensor_addrs[0]:
    ctypes.memset(address, 42, 128)
manager.deallocate_cache(kept)
del kept
""")
        link(puller, port)
        pull = f"manager.pull_cache(CacheKey({PREFILL}, 77, 1), held, 0)"
        puller.run("import ctypes\nheld = manager.allocate_cache(desc)")
        puller.run(pull)
        assert (
            puller.run("answer = [[*set(ctypes.string_at(a, 128))] for a in held.per_device_tensor_addrs[0]]")
            == [[42]] * 2
        )
        assert puller.ask(pull)["status"] == "LLM_KV_CACHE_NOT_EXIST"
        source.run("manager.remove_cache_key(keys[0])\nmanager.remove_cache_key(keys[0])")
        puller.run("manager.deallocate_cache(held)")
        for each in (puller, source):
            each.run("datadist.finalize()")
            assert each.end() == (0, "")
