"""The original's public interface as its callers use it: names, parameters and defaults. Both faces are held to it.

Ours may add keyword-only parameters and members of its own; `OPTIONAL_HERE` lists what must be given there, not here.
Left out are the constructors of managers and tasks, and members that only the original's own modules call.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, Final

EXPORTS: Final = {
    "LLMClusterInfo", "LLMStatusCode", "LLMException", "LLMRole", "LlmConfig", "LLMConfig", "DataType", "Status",
    "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "KvCache", "Cache", "BlocksCacheKey", "LLMDataDist", "Placement",
    "RegisterMemStatus", "LayerSynchronizer", "TransferConfig", "CacheTask", "TransferWithCacheKeyConfig", "Memtype",
    "MemInfo", "TensorDesc", "Tensor", "KvCacheManager",
}  # fmt: skip

SIGNATURES: Final[dict[str, dict[str, str]]] = {
    "LLMDataDist": {
        "__init__": "role, cluster_id",
        "init": "options",
        "finalize": "",
        "link": "comm_name, cluster_rank_info, rank_table",
        "unlink": "comm_id",
        "query_register_mem_status": "comm_id",
        "link_clusters": "clusters, timeout=3000",
        "unlink_clusters": "clusters, timeout=3000, force=False",
        "check_link_status": "remote_cluster_id",
        "switch_role": "role, switch_options=None",
    },
    "KvCacheManager": {
        "is_initialized": "",
        "allocate_cache": "cache_desc, cache_keys=()",
        "allocate_blocks_cache": "cache_desc, blocks_cache_key=None",
        "deallocate_cache": "cache",
        "remove_cache_key": "cache_key",
        "pull_cache": "cache_key, kv_cache, batch_index=0, size=-1, **kwargs",
        "pull_blocks": "prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, **kwargs",
        "copy_cache": "dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None",
        "copy_blocks": "cache, copy_block_info",
        "swap_blocks": "src, dst, src_to_dst",
        "get_cache_tensors": "kv_cache, tensor_index=0",
        "transfer_cache_async": (
            "src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, dst_block_indices=None, "
            "dst_block_memory_size=None"
        ),
    },
    "CacheManager": {
        "allocate_cache": "cache_desc, cache_keys=()",
        "allocate_blocks_cache": "cache_desc, blocks_cache_key=None",
        "deallocate_cache": "cache",
        "deallocate_blocks_cache": "cache",
        "register_cache": "cache_desc, addrs, cache_keys=(), remote_accessible=None",
        "register_blocks_cache": "cache_desc, addrs, blocks_cache_key=None, remote_accessible=None",
        "unregister_cache": "cache_id",
        "remove_cache_key": "cache_key",
        "pull_cache": "cache_key, cache, batch_index=0, size=-1, **kwargs",
        "pull_blocks": "src_cache_key, dst_cache, src_blocks=(), dst_blocks=(), **kwargs",
        "copy_cache": "dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None",
        "copy_blocks": "cache, copy_block_info",
        "swap_blocks": "src_cache, dst_cache, src_to_dst",
        "push_cache": (
            "dst_cache_key, src_cache, src_batch_index=0, src_layer_range=None, dst_layer_range=None, size=-1, "
            "tensor_num_per_layer=2"
        ),
        "push_blocks": (
            "dst_cache_key, src_cache, src_blocks=(), dst_blocks=(), src_layer_range=None, dst_layer_range=None, "
            "tensor_num_per_layer=2"
        ),
        "transfer_cache_async": (
            "src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, dst_block_indices=None, "
            "dst_block_memory_size=None"
        ),
        "remap_registered_memory": "mem_infos",
    },
    "LLMClusterInfo": {
        "__init__": "",
        "append_local_ip_info": "ip, port",
        "append_remote_ip_info": "ip, port",
    },
    "LLMConfig": {"__init__": "", "generate_options": "", "gen_options": ""},
    "Status": {"__init__": "status", "is_ok": ""},
    "CacheDesc": {
        "__init__": (
            "num_tensors, shape, data_type, placement=<Placement.DEVICE: 1>, batch_dim_index=0, seq_len_dim_index=-1, "
            "kv_tensor_format=None"
        ),
        "update_dim": "dim_index, dim_value",
    },
    "LLMException": {"__init__": "*args"},
    "CacheKey": {"__init__": "*args, **kwargs"},
    "BlocksCacheKey": {"__init__": "*args, **kwargs"},
    "CacheKeyByIdAndIndex": {"__init__": "cluster_id, cache_id, batch_index=0"},
    "Cache": {
        "__init__": "cache_id, cache_desc, tensor_addrs, cache_manager, is_registered, is_blocks_cache",
        "create_cpu_cache": "cache_desc, addrs",
    },
    "KvCache": {
        "__init__": "cache_id, cache_desc, per_device_tensor_addrs, kv_cache_manager",
        "create_cpu_cache": "cache_desc, addrs",
    },
    "MemInfo": {"__init__": "mem_type, addr, size"},
    "LayerSynchronizer": {"synchronize_layer": "layer_index, timeout_in_millis"},
    "TransferConfig": {"__init__": "dst_cluster_id, dst_addrs, src_layer_range=None, src_batch_index=0"},
    "TransferWithCacheKeyConfig": {
        "__init__": "cache_key, src_layer_range=None, dst_layer_range=None, src_batch_index=0"
    },
    "CacheTask": {"synchronize": "timeout_in_millis=None", "get_results": "timeout_in_millis=None"},
    "TensorDesc": {"__init__": "dtype, shape"},
    "Tensor": {"__init__": "data, tensor_desc=None", "numpy": "copy=False"},
}

OPTIONAL_HERE: Final[dict[tuple[str, str], set[str]]] = {
    ("CacheManager", "register_cache"): {"addrs"},
    ("CacheManager", "register_blocks_cache"): {"addrs"},
}
"""Parameters that the original must be given, and that ours has a default for: with `tensors=` there are no `addrs`."""

KEYWORDS: Final[dict[tuple[str, str], set[str]]] = {
    ("KvCacheManager", "pull_cache"): {
        "src_layer_range", "dst_layer_range", "tensor_num_per_layer", "src_cache_offset", "dst_cache_offset",
    },
    ("CacheManager", "pull_cache"): {
        "src_layer_range", "dst_layer_range", "tensor_num_per_layer", "src_cache_offset", "dst_cache_offset",
    },
}  # fmt: skip
"""What is given as `**kwargs`. Those of `pull_blocks` are the same but for offsets."""

MEMBERS: Final[dict[str, set[str]]] = {
    "LLMDataDist": {"cache_manager", "kv_cache_manager", "cluster_id", "llm_engine_instance"},
    "LLMClusterInfo": {"remote_cluster_id", "remote_role_type", "local_ip_info_list", "remote_ip_info_list"},
    "LLMException": {"status_code"},
    "Status": {"status_code"},
    "CacheDesc": {
        "num_tensors", "shape", "data_type", "batch_dim", "batch_size", "seq_len_dim_index", "size", "kv_tensor_format",
        "placement",
    },
    "CacheKey": {"prompt_cluster_id", "cluster_id", "req_id", "prefix_id", "model_id"},
    "BlocksCacheKey": {"prompt_cluster_id", "cluster_id", "model_id"},
    "CacheKeyByIdAndIndex": {"cluster_id", "cache_id", "batch_index"},
    "Cache": {"cache_id", "cache_desc", "tensor_addrs", "is_blocks_cache"},
    "KvCache": {"cache_id", "cache_desc", "per_device_tensor_addrs"},
    "MemInfo": {"mem_type", "addr", "size"},
    "TransferConfig": {"dst_cluster_id", "dst_addrs", "src_layer_range", "src_batch_index", "dst_layer_range"},
    "TransferWithCacheKeyConfig": {
        "cache_key", "dst_cluster_id", "src_layer_range", "dst_layer_range", "src_batch_index",
    },
    "Tensor": {"dtype", "shape"},
    "TensorDesc": {"dtype", "shape"},
}  # fmt: skip

CONFIG: Final = {
    "ge_options", "device_id", "sync_kv_timeout", "deploy_res_path", "buf_pool_cfg", "mem_pool_cfg",
    "host_mem_pool_cfg", "enable_cache_manager", "enable_remote_cache_accessible", "listen_ip_info", "link_total_time",
    "link_retry_count", "rdma_traffic_class", "rdma_service_level", "local_comm_res", "transfer_backend",
    "global_resource_config", "cluster_info", "output_max_size", "enable_switch_role", "mem_utilization",
    "options",
}  # fmt: skip

OPTION_KEYS: Final = {
    "ge.exec.deviceId", "ge.session_device_id", "ge.flowGraphMemMaxSize", "llm.SyncKvCacheWaitTime",
    "llm.deployResPath", "llm.BufPoolCfg", "llm.MemPoolConfig", "llm.HostMemPoolConfig", "llm.EnableCacheManager",
    "llm.EnableRemoteCacheAccessible", "llm.listenIpInfo", "llm.LinkTotalTime", "llm.LinkRetryCount",
    "llm.RdmaTrafficClass", "llm.RdmaServiceLevel", "llm.LocalCommRes", "llm.TransferBackend",
    "llm.GlobalResourceConfig", "llm.ClusterInfo", "llm.OutputMaxSize", "llm.EnableSwitchRole",
    "llm.MemoryUtilization", "llm.Role", "llm.ListenIp", "llm.ListenPort",
}  # fmt: skip

ENUMS: Final = {
    "Placement": {"HOST": 0, "DEVICE": 1},
    "LLMRole": {"PROMPT": 1, "DECODER": 2, "MIX": 3},
    "RegisterMemStatus": {"OK": 0, "PREPARING": 1, "FAILED": 2},
    "Memtype": {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1},
    "DataType": {
        "DT_FLOAT": 0, "DT_FLOAT16": 1, "DT_INT8": 2, "DT_INT32": 3, "DT_UINT8": 4, "DT_INT16": 6, "DT_UINT16": 7,
        "DT_UINT32": 8, "DT_INT64": 9, "DT_UINT64": 10, "DT_DOUBLE": 11, "DT_BOOL": 12, "DT_STRING": 13, "DT_BF16": 27,
    },
    "LLMStatusCode": {
        "LLM_SUCCESS": 0, "LLM_FAILED": 2**32 - 1, "LLM_WAIT_PROCESS_TIMEOUT": 0x5010B001,
        "LLM_KV_CACHE_NOT_EXIST": 0x5010B002, "LLM_REPEAT_REQUEST": 0x5010B003,
        "LLM_REQUEST_ALREADY_COMPLETED": 0x5010B004, "LLM_PARAM_INVALID": 0x5010B005,
        "LLM_ENGINE_FINALIZED": 0x5010B006, "LLM_NOT_YET_LINK": 0x5010B007, "LLM_ALREADY_LINK": 0x5010B008,
        "LLM_LINK_FAILED": 0x5010B009, "LLM_UNLINK_FAILED": 0x5010B00A,
        "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 0x5010B00B, "LLM_CLUSTER_NUM_EXCEED_LIMIT": 0x5010B00C,
        "LLM_PROCESSING_LINK": 0x5010B00D, "LLM_DEVICE_OUT_OF_MEMORY": 0x5010B00E,
        "LLM_PREFIX_ALREADY_EXIST": 0x5010B00F, "LLM_PREFIX_NOT_EXIST": 0x5010B010,
        "LLM_SEQ_LENOVERLIMIT": 0x5010B011, "LLM_NO_FREE_BLOCK": 0x5010B012, "LLM_BLOCKS_OUT_OF_MEMORY": 0x5010B013,
        "LLM_EXIST_LINK": 0x5010B018, "LLM_FEATURE_NOT_ENABLED": 0x5010B019, "LLM_TIMEOUT": 0x5010B01A,
        "LLM_LINK_BUSY": 0x5010B01B, "LLM_OUT_OF_MEMORY": 0x5010B01C, "LLM_DEVICE_MEM_ERROR": 507053,
        "LLM_SUSPECT_REMOTE_ERROR": 507057, "LLM_UNKNOWN_ERROR": -1,
    },
}  # fmt: skip

INTERNAL: Final = {
    "CacheManager.check_cache_key", "CacheManager.set_is_call_linked", "v2_list", "AUTO_USE_UC_MEMORY",
}  # fmt: skip
"""For the original's own modules: named in the page for those who look for them, and not here."""


def differences(package: Any) -> list[str]:
    """Where a face's package is not what the original is, one line each."""
    lines = [f"{name}: missing" for name in sorted(EXPORTS - set(package.__all__))]
    lines += [line for owner, name in methods() for line in _of_method(package, owner, name)]
    lines += [f"{owner}.{name}: missing" for owner, name in members() if not _has(getattr(package, owner), name)]
    lines += [f"LLMConfig.{name}: missing" for name in sorted(CONFIG) if not hasattr(package.LLMConfig, name)]
    for owner, wanted in ENUMS.items():
        ours = {member.name: member.value for member in getattr(package, owner)}
        lines += [f"{owner}: {ours} instead of {wanted}"] if ours != wanted else []
    return lines


def _of_method(package: Any, owner: str, name: str) -> list[str]:
    wanted = SIGNATURES[owner][name]
    if not hasattr(getattr(package, owner), name):
        return [f"{owner}.{name}({wanted}): missing"]
    ours = our_signature(package, owner, name)
    return [] if ours == wanted else [f"{owner}.{name}({ours}) instead of ({wanted})"]


def differences_of_the_faces(awaitable: Any, blocking: Any) -> list[str]:
    """Where a class of the one package is not shaped as that of the other, one line each."""
    lines = []
    for owner in sorted(set(awaitable.__all__) & set(blocking.__all__)):
        theirs, ours = getattr(awaitable, owner), getattr(blocking, owner)
        if theirs is ours or not inspect.isclass(theirs):
            continue
        lines += [f"{owner}.{name}: in one only" for name in sorted(public_names(theirs) ^ public_names(ours))]
        for name in sorted(public_names(theirs) & public_names(ours) | {"__init__"}):
            if callable(getattr(theirs, name)) and _parameters(theirs, name) != _parameters(ours, name):
                lines.append(f"{owner}.{name}: {_parameters(theirs, name)}, blocking {_parameters(ours, name)}")
    return lines


def _parameters(owner: type, name: str) -> list[tuple[str, Any, Any]]:
    return [
        (each.name, each.kind, each.default) for each in inspect.signature(getattr(owner, name)).parameters.values()
    ]


def _has(owner: type, name: str) -> bool:
    return hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ())


def methods() -> list[tuple[str, str]]:
    return [(owner, name) for owner, signatures in SIGNATURES.items() for name in signatures]


def names() -> set[str]:
    """Every public name: classes as `Cache`, what they have as `Cache.cache_id`, keywords as `C.method.keyword`,
    option keys, and what is internal.
    """
    listed = EXPORTS | {"CacheManager"} | OPTION_KEYS | INTERNAL | {f"LLMConfig.{name}" for name in CONFIG}
    listed |= {f"{owner}.{name}" for owner, name in methods() if name != "__init__"}
    listed |= {f"{owner}.{name}" for owner, name in members()}
    listed |= {f"{owner}.{name}" for owner, values in ENUMS.items() for name in values}
    return listed | {f"{owner}.{name}.{given}" for (owner, name), found in KEYWORDS.items() for given in found}


def members() -> list[tuple[str, str]]:
    return [(owner, name) for owner, names in MEMBERS.items() for name in sorted(names)]


def our_signature(package: Any, owner: str, name: str) -> str:
    """A method of ours as `SIGNATURES` has it: what the original must be given is shown without its default."""
    method, optional = getattr(getattr(package, owner), name), OPTIONAL_HERE.get((owner, name), set())
    return signature(method, optional=optional)


def signature(function: Any, *, optional: Collection[str] = ()) -> str:
    """Parameters of a function or method as text, without `self`, annotations and keyword-only ones. Those that are
    `optional` must have a default, which is left out.
    """
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls") or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            continue
        assert parameter.kind is not inspect.Parameter.POSITIONAL_ONLY, f"{function}: {parameter} has no name"
        bare = parameter.replace(annotation=inspect.Parameter.empty)
        if parameter.name in optional:
            assert bare.default is not inspect.Parameter.empty, f"{function} must be given {parameter.name}"
            bare = bare.replace(default=inspect.Parameter.empty)
        shown.append(str(bare))
    return ", ".join(shown)


def public_names(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}
