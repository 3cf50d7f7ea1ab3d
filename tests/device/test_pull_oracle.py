"""On an NPU: see the module of the same name."""

from tests.integration.test_pull_oracle import *  # noqa: F403
