"""On an NPU: see the module of the same name."""

from tests.integration.test_lost_connections import *  # noqa: F403
