"""Keeps keys for longer, or gives them up, for this node itself or on a peer's word. It must not know links or wait.

A peer may do that to what it may pull, as pulling would, too.
"""

from __future__ import annotations

from kvpull_async.held import KeyId
from kvpull_async.lane import Lane
from kvpull_async.observe import Counters, Log, key_text
from kvpull_async.protocol import frames
from kvpull_async.registry import Binding, Registry
from kvpull_async.status import LLMException, LLMStatusCode

__all__ = ["Leasing", "give_up", "renew"]


def renew(registry: Registry, name: KeyId, seconds: float, *, peer: int | None = None) -> None:
    """The key ends so many seconds from now. A peer only puts the end off; a key without an end keeps none then.

    LLM_KV_CACHE_NOT_EXIST with what became of it.
    """
    registry.lease(_found(registry, name, peer), seconds, at_least=peer is not None)


def give_up(registry: Registry, name: KeyId, *, peer: int | None = None) -> None:
    """The key goes as by `remove_cache_key`, and one of a registered cache only if it has a lease.

    LLM_KV_CACHE_NOT_EXIST with what became of it, LLM_PARAM_INVALID for a key that stays.
    """
    binding = _found(registry, name, peer)
    if binding.entry.registered and binding.ends is None:
        raise LLMException(
            "the key is of a registered cache and has no lease: it stays until its owner takes the cache back",
            status_code=LLMStatusCode.LLM_PARAM_INVALID,
        )
    registry.give_up(binding)


def _found(registry: Registry, name: KeyId, peer: int | None) -> Binding:
    registry.drain_drops()
    binding = registry.find_key(name, peer=peer)
    if binding is None:
        missing = registry.missing(name, peer=peer, near=peer is None)  # a peer may ask for very many at once
        raise LLMException(missing, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    return binding


class Leasing:
    """What one peer asks for on a lane. Each is answered at once, with a RESULT."""

    def __init__(self, lane: Lane, registry: Registry, peer: int, *, log: Log, counters: Counters) -> None:
        self._lane = lane
        self._registry = registry
        self._peer = peer
        self._log = log
        self._counters = counters

    def receive(self, lease: frames.Lease) -> None:
        log = self._log.bind(
            pull_id=lease.pull_id, request_id=lease.request_id, key=key_text(lease.key, lease.identity, lease.model_id)
        )
        try:
            self._do(lease, log)
        except LLMException as error:
            status, reason = LLMStatusCode(error.status_code), str(error)
            log.info("serve.key_refused", status=status.name, reason=reason)
        else:
            status, reason = LLMStatusCode.LLM_SUCCESS, ""
        self._lane.session.end_request(lease.request_id)
        self._lane.post(frames.Result(lease.request_id, int(status), reason[: frames.REASON_LIMIT], unsafe=False))

    def _do(self, lease: frames.Lease, log: Log) -> None:
        if lease.key not in ("request", "prefix"):
            raise LLMException(f"keys of kind {lease.key!r} have no lease", status_code=LLMStatusCode.LLM_PARAM_INVALID)
        name = (lease.key, lease.identity, lease.model_id)
        if lease.lease_ms:
            renew(self._registry, name, lease.lease_ms / 1000, peer=self._peer)
            self._counters.add("keys_renewed")
            log.debug("serve.key_renewed", lease_ms=lease.lease_ms)
        else:
            give_up(self._registry, name, peer=self._peer)
            self._counters.add("keys_released")
            log.debug("serve.key_released")

    def __repr__(self) -> str:
        return f"<Leasing for cluster {self._peer}>"
