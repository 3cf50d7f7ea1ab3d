"""What the test modules of memory share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.copies import loaded


@pytest.fixture(scope="module", params=[True, False], ids=["extension", "fallback"])
def impl(request: pytest.FixtureRequest) -> Any:
    """The module of copies, once with the C extension and once without."""
    module = loaded(extension=request.param)
    if request.param and not module.ACCELERATED:
        pytest.skip("the extension was not built for this Python")
    return module
