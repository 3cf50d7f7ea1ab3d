"""On an NPU: see the module of the same name."""

from tests.integration.test_key_releases import *  # noqa: F403
