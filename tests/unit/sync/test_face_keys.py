"""Keys of caches that are there, blocking: the documented calls, in both managers."""

from __future__ import annotations

import threading

import pytest

from kvpull_sync import CacheKey, LLMException, LLMStatusCode
from tests.duo import PROMPT, SMALL, fill, holds
from tests.unit.sync.test_face_managers import Pair

MANAGERS = pytest.mark.parametrize("name", ["kv_cache_manager", "cache_manager"])


@pytest.mark.smoke
@MANAGERS
def test_published_kept_pulled_and_given_up(name: str) -> None:
    pair = Pair()
    try:
        source, manager = getattr(pair.prompt, name), getattr(pair.decoder, name)
        cache, into = source.allocate_cache(SMALL), manager.allocate_cache(SMALL)
        fill(cache)
        source.publish_cache(cache, [CacheKey(PROMPT, number) for number in (1, 2, 3)], lease=60_000)
        manager.renew_key(CacheKey(PROMPT, 1), 60_000, timeout=20_000)
        manager.pull_cache(CacheKey(PROMPT, 1), into)
        assert holds(into, entry=0, source=0)
        manager.release_key(CacheKey(PROMPT, 2), timeout=20_000)
        source.remove_cache_key(CacheKey(PROMPT, 3))
        for number in (1, 2, 3):
            with pytest.raises(LLMException) as caught:
                manager.renew_key(CacheKey(PROMPT, number), 5)
            assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    finally:
        pair.close()


def test_threads_renew_at_the_same_time() -> None:
    pair = Pair()
    try:
        pair.publish()
        manager, failed = pair.decoder.kv_cache_manager, []

        def renew(number: int) -> None:
            try:
                for _ in range(20):
                    manager.renew_key(CacheKey(PROMPT, number % 4), 60_000)
            except LLMException as error:
                failed.append(error)

        threads = [threading.Thread(target=renew, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert pair.prompt.counters["keys_renewed"] == 160
    finally:
        pair.close()
