"""The report has what a reader of an issue needs, nothing secret, and a verdict that follows from the checks."""

from __future__ import annotations

from pathlib import Path

from kvpull_async.self_test.lines import State, Step
from kvpull_async.self_test.report import SECTIONS, Report, facts


def made(*steps: Step) -> tuple[Report, list[str]]:
    lines: list[str] = []
    report = Report(lines.append, known={"kvpull": "1.2"})
    for step in steps:
        report.add(step)
    return report, lines


def test_the_variables_of_ascend_are_named_and_no_others(tmp_path: Path) -> None:
    environ = {
        "ASCEND_HOME_PATH": "/opt/cann",
        "ASCEND_SOME_TOKEN": "hush",
        "KVPULL_DEVICE_BACKEND": "acl",
        "KVPULL_LINK_SECRET": "hush",
        "PATH": "hush",
    }
    known = facts(environ, driver=tmp_path / "version.info")
    assert known["ASCEND_HOME_PATH"] == "/opt/cann"
    assert known["KVPULL_DEVICE_BACKEND"] == "acl"
    assert "hush" not in known.values()


def test_the_versions_are_there_and_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    driver = tmp_path / "version.info"
    known = facts({}, driver=driver)
    assert {"kvpull", "torch_npu", "Python", "kernel", "machine"} <= known.keys()
    assert "No such file" in known["driver"]
    driver.write_text("Version=24.1\n\nascendhal_version=7.35\n")
    assert facts({}, driver=driver)["driver"] == "Version=24.1; ascendhal_version=7.35"


def test_each_section_has_a_heading_and_each_check_a_line() -> None:
    _, lines = made(
        Step(1, "library", State.OK, "/opt/libascendcl.so"),
        Step(1, "functions", State.SKIPPED, "why not"),
        Step(4, "copies", State.FAILED, "byte 3", lines=("more",), seconds=2),
    )
    text = "\n".join(lines)
    assert "\n1 binding\n  ok       library: /opt/libascendcl.so\n  skipped  functions: why not\n" in text
    assert "\n4 copies\n  FAILED   copies: byte 3  [2.00 s]\n           more" in text


def test_sections_that_were_not_tried_are_skipped_with_the_reason() -> None:
    report, lines = made(Step(1, "library", State.FAILED))
    report.skip(SECTIONS, "no library")
    assert [step.section for step in report.steps] == list(SECTIONS)
    assert lines[-1] == "  skipped  all of it: no library"


def test_one_failure_makes_the_verdict() -> None:
    report, lines = made(Step(1, "a", State.OK), Step(5, "b", State.FAILED), Step(5, "c", State.SKIPPED))
    assert not report.summary(1.5)
    assert lines[-3:] == [
        "\n1 ok, 1 FAILED, 1 skipped; 1.5 s",
        "  FAILED  time limits and aborts: b",
        "FAILED: do not rely on device memory here",
    ]
    report, lines = made(Step(1, "a", State.OK), Step(5, "c", State.SKIPPED))
    assert report.summary(1)
    assert lines[-1] == "OK: device memory can be used here"


def test_a_report_of_nothing_is_no_success() -> None:
    report, _ = made()
    assert not report.summary(0)


def test_the_same_is_there_for_programs() -> None:
    report, _ = made(Step(6, "pinned", State.OK, "21.5 GB/s"))
    assert report.data()["facts"] == {"kvpull": "1.2"}
    assert report.data()["steps"][0]["state"] == "ok"
    assert report.data()["steps"][0]["text"] == "21.5 GB/s"
