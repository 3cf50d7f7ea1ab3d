"""On an NPU: see the module of the same name."""

from tests.integration.test_interruptions import *  # noqa: F403
