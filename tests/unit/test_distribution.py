"""What the installed distribution declares: dependencies, type information, licence."""

from __future__ import annotations

from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PINS = Path(__file__).parents[1] / "lowest-requirements.txt"


def run_time_requirements() -> list[Requirement]:
    requirements = map(Requirement, metadata.requires("kvpull") or [])
    return [requirement for requirement in requirements if "extra" not in str(requirement.marker)]


@pytest.mark.smoke
def test_the_pins_that_ci_tests_are_the_lower_bounds_that_the_package_declares() -> None:
    lines = [line for line in PINS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    bounds = {
        f"{requirement.name}{requirement.specifier}".replace(">=", "==") for requirement in run_time_requirements()
    }
    assert set(lines) == bounds


@pytest.mark.smoke
@pytest.mark.parametrize("package", ["kvpull_async", "kvpull_sync"])
def test_both_packages_ship_their_type_information(package: str) -> None:
    assert resources.files(package).joinpath("py.typed").is_file()


@pytest.mark.smoke
def test_the_distribution_names_its_licence() -> None:
    declared = metadata.metadata("kvpull")
    assert declared["Name"] == "kvpull"
    assert declared["License-Expression"] == "Apache-2.0"
    assert declared["Requires-Python"] == ">=3.10"
