"""On an NPU: see the module of the same name."""

from tests.integration.test_cancellation import *  # noqa: F403
