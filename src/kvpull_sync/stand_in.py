"""`import llm_datadist` for programs that are not to be edited: the package under that name, and the original's modules
by which some programs name its classes. It must not define any of them.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

__all__ = ["install"]

_NAME: Final = "llm_datadist"

# The original's modules, packages first, and which public names each holds.
_MODULES: Final[dict[str, tuple[str, ...]]] = {
    "configs": ("LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig"),
    "data_type": ("DataType",),
    "status": ("LLMException", "LLMStatusCode", "Status"),
    "v2": (),
    "v2.cache_manager": ("CacheManager",),
    "v2.llm_datadist": ("LLMDataDist",),
    "v2.llm_types": (
        "BlocksCacheKey", "Cache", "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "CacheTask", "DataType", "KvCache",
        "LayerSynchronizer", "MemInfo", "Memtype", "Placement", "RegisterMemStatus", "TransferConfig",
        "TransferWithCacheKeyConfig",
    ),
}  # fmt: skip


def install(package: ModuleType) -> None:
    """Enter *package* as `llm_datadist`. RuntimeError when another one has been imported already."""
    present = sys.modules.get(_NAME)
    if present is not None and present is not package:
        raise RuntimeError(f"{_NAME} is imported already, from {getattr(present, '__file__', 'elsewhere')}")
    sys.modules[_NAME] = package
    for path, names in _MODULES.items():
        full = f"{_NAME}.{path}"
        if full in sys.modules:
            continue
        sys.modules[full] = module = _module(full, package, names)
        parent, _, name = full.rpartition(".")
        setattr(sys.modules[parent], name, module)


def _module(full: str, package: ModuleType, names: tuple[str, ...]) -> ModuleType:
    is_package = any(path.startswith(full.removeprefix(f"{_NAME}.") + ".") for path in _MODULES)
    module = ModuleType(full, f"Stands in for the original's module; what it holds is {package.__name__}'s.")
    module.__spec__ = ModuleSpec(full, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    vars(module).update({name: getattr(package, name) for name in names})
    vars(module)["__all__"] = list(names)
    return module
