"""What the managers of one engine share: a change of it is seen by both at once."""

from __future__ import annotations

import pytest

from kvpull_async import CacheKey, LLMException, LLMRole
from kvpull_async.crossing import blocked
from kvpull_async.managers.dialect import CACHE, KV
from kvpull_async.managers.manager import Manager
from tests.unit.side import DESC, Side


def test_both_managers_of_an_engine_see_each_others_caches_and_the_role_it_has_now() -> None:
    side = Side("kv", LLMRole.DECODER, enable_cache_manager=True)
    try:
        node = side.engine.node
        older, newer = (Manager(node, dialect, lambda entry: entry) for dialect in (KV, CACHE))
        with pytest.raises(LLMException, match="role PROMPT"):
            older.allocate_cache(DESC, [CacheKey(1, 1)])
        blocked(side.engine, side.datadist.switch_role(LLMRole.PROMPT, None))
        assert node.role is LLMRole.PROMPT
        blocked(side.engine, older.allocate_cache(DESC, [CacheKey(1, 1)]))
        with pytest.raises(LLMException, match="is bound already"):
            blocked(side.engine, newer.allocate_cache(DESC, [CacheKey(1, 1)]))
        blocked(side.engine, newer.remove_cache_key(CacheKey(1, 1)))
        blocked(side.engine, newer.allocate_cache(DESC, [CacheKey(1, 1)]))
    finally:
        side.close()
