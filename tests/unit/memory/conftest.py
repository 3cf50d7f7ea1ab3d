"""What the test modules of memory share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.acl_libraries import Library, compiler
from tests.copies import loaded


@pytest.fixture(scope="module", params=[True, False], ids=["extension", "fallback"])
def impl(request: pytest.FixtureRequest) -> Any:
    """The module of copies, once with the C extension and once without."""
    module = loaded(extension=request.param)
    if request.param and not module.ACCELERATED:
        pytest.skip("the extension was not built for this Python")
    return module


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """Compiles small libraries that look like AscendCL's."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no compiler")
    return compiler(gcc, tmp_path)
