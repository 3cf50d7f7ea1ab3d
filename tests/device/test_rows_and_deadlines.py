"""On an NPU: see the module of the same name."""

from tests.integration.test_rows_and_deadlines import *  # noqa: F403
