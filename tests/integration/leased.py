"""What tests of keys with a lease share: such keys on the prompt node of two, and how calls are refused."""

from __future__ import annotations

from typing import Any, Final

import pytest

from kvpull_async import CacheKey, LLMException, LLMStatusCode
from tests import duo

MISSING, INVALID = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_PARAM_INVALID
LONG: Final = 60_000
"""ms; a lease that no test sees the end of."""


def key(number: int) -> CacheKey:
    return CacheKey(duo.PROMPT, number)


async def leased(n: Any, *numbers: int, lease: int | None, desc: Any = duo.SMALL) -> Any:
    """A filled cache whose entries have these keys, for so many ms."""
    manager = n.prompt.kv_cache_manager
    cache = await n.api.do(manager.allocate_cache, desc)
    n.kept.append(cache)
    duo.fill(cache)
    await n.api.do(manager.publish_cache, cache, [key(number) for number in numbers], lease=lease)
    return cache


async def refused(n: Any, call: Any, *args: Any, code: LLMStatusCode = MISSING, **kwargs: Any) -> LLMException:
    with pytest.raises(LLMException) as caught:
        await n.api.do(call, *args, **kwargs)
    assert caught.value.status_code == code, caught.value
    assert caught.value.operation
    return caught.value


async def expired(n: Any, keys: int = 1) -> None:
    await n.api.until(lambda: n.prompt.counters.get("keys_expired", 0) >= keys)
