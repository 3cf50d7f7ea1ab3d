"""The original's public interface as its callers use it: names, parameters and defaults. Both faces are held to it.

Ours may add keyword-only parameters and members of its own. Left out are members that only the original's own modules
call, and the parameters of what this version answers with LLM_FEATURE_NOT_ENABLED.
"""

from __future__ import annotations

import inspect
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
        "get_cache_tensors": "kv_cache, tensor_index=0",
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
        "swap_blocks": "src_cache, dst_cache, src_to_dst",
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

MEMBERS: Final[dict[str, set[str]]] = {
    "LLMDataDist": {"cache_manager", "kv_cache_manager", "cluster_id", "llm_engine_instance"},
    "KvCacheManager": {"copy_blocks", "swap_blocks", "transfer_cache_async"},
    "CacheManager": {"copy_blocks", "push_cache", "push_blocks", "transfer_cache_async", "remap_registered_memory"},
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
    "TransferConfig": {"dst_cluster_id", "dst_addrs", "src_layer_range", "src_batch_index", "dst_layer_range"},
    "TransferWithCacheKeyConfig": {"cache_key", "src_layer_range", "dst_layer_range", "src_batch_index"},
    "Tensor": {"dtype", "shape"},
    "TensorDesc": {"dtype", "shape"},
}  # fmt: skip

CONFIG: Final = {
    "ge_options", "device_id", "sync_kv_timeout", "deploy_res_path", "buf_pool_cfg", "mem_pool_cfg",
    "host_mem_pool_cfg", "enable_cache_manager", "enable_remote_cache_accessible", "listen_ip_info", "link_total_time",
    "link_retry_count", "rdma_traffic_class", "rdma_service_level", "local_comm_res", "transfer_backend",
    "global_resource_config", "cluster_info", "output_max_size", "enable_switch_role", "mem_utilization",
}  # fmt: skip


def methods() -> list[tuple[str, str]]:
    return [(owner, name) for owner, signatures in SIGNATURES.items() for name in signatures]


def members() -> list[tuple[str, str]]:
    return [(owner, name) for owner, names in MEMBERS.items() for name in sorted(names)]


def signature(function: Any) -> str:
    """Parameters of a function or method as text, without `self`, annotations and keyword-only ones."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls") or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            continue
        shown.append(str(parameter.replace(annotation=inspect.Parameter.empty)))
    return ", ".join(shown)


def public_names(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}
