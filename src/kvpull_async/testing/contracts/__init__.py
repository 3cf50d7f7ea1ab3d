"""What every transport, data path and memory must do, as pytest classes to inherit.

`ControlContract` and `DataPathContract` ask for a transport (`make_transport`), `MemoryContract` for a memory
(`make_memory`), `WaitingMemoryContract` for one that has to wait for a device. Their coroutines need pytest-asyncio in
its auto mode.
"""

from kvpull_async.testing.contracts.control import ControlContract
from kvpull_async.testing.contracts.memory import MemoryContract
from kvpull_async.testing.contracts.path import DataPathContract, Ends
from kvpull_async.testing.contracts.waiting_memory import WaitingMemoryContract

__all__ = ["ControlContract", "DataPathContract", "Ends", "MemoryContract", "WaitingMemoryContract"]
