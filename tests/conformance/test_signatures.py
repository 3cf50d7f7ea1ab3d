"""The original's names, parameters, their order and defaults, in both packages; and both packages beside each other."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import kvpull_async
import kvpull_sync
from tests import original_api

PACKAGES = [kvpull_async, kvpull_sync]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_nothing_differs_from_the_original(package: ModuleType) -> None:
    found = original_api.differences(package)
    assert not found, "\n".join(["", *found])


def test_nothing_differs_between_the_packages() -> None:
    found = original_api.differences_of_the_faces(kvpull_async, kvpull_sync)
    assert not found, "\n".join(["", *found])


def test_every_class_that_is_exported_is_compared() -> None:
    compared = {*original_api.SIGNATURES, *original_api.MEMBERS, *original_api.ENUMS}
    classes = {name for name in original_api.EXPORTS if inspect.isclass(getattr(kvpull_async, name))}
    assert classes - compared == {"LlmConfig"}  # LLMConfig by its older name


def test_a_difference_is_found() -> None:
    """Each kind of difference, in a package that lacks and changes something."""

    class Cache:
        def __init__(self, cache_id: int, tensor_addrs: list[int]) -> None: ...

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            return getattr(kvpull_sync, name)

    package = Broken("broken")
    package.__all__ = sorted(original_api.EXPORTS - {"Status"})  # type: ignore[attr-defined]
    package.Cache = Cache  # type: ignore[attr-defined]
    found = set(original_api.differences(package)) - set(original_api.differences(kvpull_sync))
    wanted = original_api.SIGNATURES["Cache"]["__init__"]
    assert {line.split(":")[0] for line in found} == {
        "Status",
        f"Cache.__init__(cache_id, tensor_addrs) instead of ({wanted})",
        "Cache.create_cpu_cache(cache_desc, addrs)",
        *(f"Cache.{name}" for name in original_api.MEMBERS["Cache"]),
    }
    assert original_api.differences_of_the_faces(kvpull_async, package)
