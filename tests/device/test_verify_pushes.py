"""On an NPU: see the module of the same name."""

from tests.integration.test_verify_pushes import *  # noqa: F403
