"""On an NPU: see the module of the same name."""

from tests.integration.test_layers_failing import *  # noqa: F403
