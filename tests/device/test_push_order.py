"""On an NPU: see the module of the same name."""

from tests.integration.test_push_order import *  # noqa: F403
