"""What README.md and docs/ show is true: the Python blocks run, links lead somewhere, named tests and modules exist.

docs/events.md has tests of its own: tests/unit/test_events_page.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpull_async.config import LLMConfig, settings
from tests.house import CORE, LEVELS, part_of

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PROMISES = ROOT / "docs" / "promises.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]
WIDTH = 120
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
TEST_NAME = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)


def blocks(page: Path) -> list[str]:
    """The page's Python blocks; each keeps its line numbers, so that a traceback points into the page."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in BLOCK.finditer(text)]


def test_the_python_blocks_of_the_readme_run_one_after_another(tmp_path: Path) -> None:
    """In one session, as the page says, with warnings as errors."""
    found = blocks(README)
    assert len(found) >= 6
    session = ["namespace = {'__name__': '__main__'}"]
    session += [f"exec(compile({block!r}, {str(README)!r}, 'exec'), namespace)" for block in found]
    script = tmp_path / "readme.py"
    script.write_text("\n".join([*session, "print('ended')"]), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "ended"
    assert "[3.5 3.5 3.5 ... 3.5 3.5 3.5]" in ended.stdout
    assert "KVPULL_ALLOW_INSECURE_NETWORK" in ended.stdout
    assert '"event": "pull.finished"' in ended.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_the_pages_are_wrapped(page: Path) -> None:
    """Rows of tables cannot be."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    assert not [f"line {number}" for number, line in lines if len(line) > WIDTH and not line.startswith("|")]


def test_every_transfer_backend_is_named_where_callers_look() -> None:
    """In the docstring of the option, and on the page for those who come from the original."""
    text = str(LLMConfig.transfer_backend.__doc__)
    page = (ROOT / "docs" / "coming-from-llm_datadist.md").read_text(encoding="utf-8").partition("## Added here")[2]
    (option,) = [line for line in page.splitlines() if line.startswith("- `transfer_backend`")]
    for name in settings._BACKENDS:
        assert f'"{name}"' in text, name
        assert f'"{name}"' in option, name


def test_the_page_of_benchmarks_names_every_file_of_them() -> None:
    folder = ROOT / "benchmarks"
    text = (folder / "README.md").read_text(encoding="utf-8")
    files = [path for path in folder.rglob("*.[cp]*") if path.is_file() and path.suffix in (".c", ".py")]
    assert len(files) > 30
    assert not [path.name for path in files if not path.name.startswith("__") and f"`{path.name}`" not in text]


def test_the_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z]+)\b", README.read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named
    assert not [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def test_every_promise_is_held_by_tests_and_those_it_names_exist() -> None:
    text = PROMISES.read_text(encoding="utf-8")
    present = {name for path in (ROOT / "tests").rglob("test_*.py") for name in TEST_NAME.findall(path.read_text())}
    named = re.findall(r"`(test_p\d+_\w+)`", text)
    assert not [name for name in named if name not in present]
    for number in range(1, 11):
        assert re.search(rf"^## P{number} ", text, re.MULTILINE)
        assert [name for name in named if re.match(rf"test_(p\d+_)*p{number}_", name)], f"P{number} names no test"


def test_the_architecture_page_has_every_module_at_its_level() -> None:
    sources = ROOT / "src" / CORE
    if not sources.is_dir():
        pytest.skip("an installed package is tested; there are no sources beside it")
    rows = re.findall(r"^\| (\d+) \| `([^`]+)` \|", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    modules = [path.relative_to(sources) for path in sources.rglob("*.py") if path.name != "__init__.py"]
    parts = {str(path): part_of(".".join(path.with_suffix("").parts)) for path in modules}
    levels = {path: LEVELS[part] for path, part in parts.items() if part is not None}
    assert {path: int(level) for level, path in rows} == levels
