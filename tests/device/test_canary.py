"""On an NPU: see the module of the same name."""

from tests.integration.test_canary import *  # noqa: F403
