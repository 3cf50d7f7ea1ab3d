"""On an NPU: see the module of the same name."""

from tests.integration.test_leases import *  # noqa: F403
