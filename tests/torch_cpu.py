"""torch for tests, where it is installed: on the default interpreter of CI it is, elsewhere those tests are skipped."""

from __future__ import annotations

from typing import Any

import pytest


def torch_cpu() -> Any:
    """The module; skips the test, or the test module that calls it while it is imported."""
    return pytest.importorskip("torch", reason="torch is not installed: pip install 'kvpull[compat]', or its CPU build")
