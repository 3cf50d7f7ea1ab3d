"""On an NPU: see the module of the same name."""

from tests.integration.test_transfers_ending import *  # noqa: F403
