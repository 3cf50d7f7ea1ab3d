"""On an NPU: see the module of the same name."""

from tests.integration.test_verify import *  # noqa: F403
