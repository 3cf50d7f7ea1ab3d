"""What a face needs of the core, in one place: `kvpull_sync` imports this and the public names, nothing else."""

from kvpull_async._threads import Ended
from kvpull_async.crossing import awaited, blocked
from kvpull_async.datadist import DataDist, LinkResult
from kvpull_async.engine import (
    Engine,
    close_awaited,
    close_bounded,
    live_engines,
)
from kvpull_async.layers import LayerPull
from kvpull_async.managers.manager import Manager, Operation, remap_registered_memory
from kvpull_async.tasks import TransferTask, wait_seconds
from kvpull_async.transport.base import Address

__all__ = [
    "Address",
    "DataDist",
    "Ended",
    "Engine",
    "LayerPull",
    "LinkResult",
    "Manager",
    "Operation",
    "TransferTask",
    "awaited",
    "blocked",
    "close_awaited",
    "close_bounded",
    "live_engines",
    "remap_registered_memory",
    "wait_seconds",
]
