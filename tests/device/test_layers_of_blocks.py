"""On an NPU: see the module of the same name."""

from tests.integration.test_layers_of_blocks import *  # noqa: F403
