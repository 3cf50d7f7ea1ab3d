"""The house rules, read from the AST: levels, forbidden imports, cycles, sizes, one unit test module per source module.

The tables below are the rules. Where the code teaches a better cut, change the code and the table together. The rules
only look; tests/unit/test_layering.py holds the tree to them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE, SYNC = "kvpull_async", "kvpull_sync"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SIZED = ("src", "tests", "examples", "benchmarks")

# The parts of kvpull_async, lowest level first. A part imports from lower levels only, and from itself; the longest
# matching prefix counts, so `memory.base` is a part of its own beside `memory`.
LAYERS = (
    ("status", "observe"),
    (
        "values", "_deadline", "_workers", "_prompt", "_threads", "transport.arrivals", "transport.tls", "memory._acl",
        "protocol.messages", "protocol.identity", "sums",
    ),
    ("config", "plan", "call", "fifo", "protocol.frames", "protocol.events", "memory.base"),
    ("core", "protocol.proof", "memory", "transport.base", "held"),
    ("addresses", "answers", "fates", "gathering", "leases", "protocol.session", "summing"),
    ("registry",),
    ("transport", "greeting", "offers", "aims"),
    ("lane",),
    ("linkage", "standing"),
    ("dialling", "halves", "pauses", "receipts", "routes", "turn"),
    ("link", "granting", "leasing", "receiving", "testing", "watching"),
    ("linked", "pull", "push", "serve"),
    ("links", "listening"),
    ("comm", "managers"),
    ("comms",),
    ("engine",),
    ("crossing",),
    ("datadist", "layers", "tasks"),
    ("entry",),
    ("face_keys", "face_layers", "face_tasks"),
    ("face_managers",),
    ("face",),
    ("",),  # kvpull_async itself: the public names
    ("self_test",),  # a program beside the library, which looks at its inside
)  # fmt: skip
LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# A lower part that names a higher one in annotations only, below `if TYPE_CHECKING:`.
UPWARD_FOR_TYPES = {
    ("memory.base", "plan"),  # a span says how its plan is made, and makes none
    ("turn", "link"),  # a turn is spent on a link, which runs turns one after another and never makes one
}

# Packages that only group their modules, one level or several: their own __init__ may import none of them.
EMPTY_PACKAGES = ("protocol", "memory", "memory.npu", "transport", "transport.shm")

# The blocking API sees the public names and the core's entry.
SYNC_MAY_IMPORT = {CORE, f"{CORE}.entry"}

# Parts that stay free of input, output and threads, and so of everything of ours that is not.
PURE = ("values", "status", "plan", "protocol")
IMPURE_LIBRARIES = {"asyncio", "socket", "ctypes", "threading"}

# Libraries that only these modules may import; an empty tuple means none.
RESERVED_LIBRARIES = {
    "ctypes": ("memory", "transport.shm", "self_test.raw"),
    "async_timeout": ("_deadline",),
    "torch": (),  # its tensors are known by what they can be asked
    "pickle": (),
    "marshal": (),
    "shelve": (),
}

# Heavy optional engines: imported inside the functions that need them.
LAZY_LIBRARIES = {"nixl", "mooncake", "xxhash"}

# These work with any transport and any memory, and know only the contracts.
CONTRACT_USERS = (
    "aims", "answers", "dialling", "granting", "greeting", "halves", "lane", "leasing", "link", "linkage", "linked",
    "links", "offers", "pull", "push", "receiving", "serve", "standing", "summing", "turn", "watching",
)  # fmt: skip
CONTRACTS = {"transport": "transport.base", "memory": "memory.base"}

# Source modules that need no unit test module of their own name, and the file that tests them instead.
TESTED_ELSEWHERE: dict[str, str] = {
    f"{CORE}.entry": "tests/unit/test_layering.py",  # names of other modules, nothing else
    f"{CORE}.testing.contracts.control": "tests/contract",
    f"{CORE}.testing.contracts.ends": "tests/contract",
    f"{CORE}.testing.contracts.memory": "tests/contract",
    f"{CORE}.testing.contracts.path": "tests/contract",
    f"{CORE}.testing.contracts.waiting_memory": "tests/contract",
    f"{CORE}.testing.contracts._waiting": "tests/contract",
    f"{CORE}.self_test.__main__": "tests/integration/test_self_test.py",
    f"{CORE}.self_test.copies": "tests/integration/test_self_test.py",  # on the emulator, right and wrong
    f"{CORE}.self_test.device": "tests/integration/test_self_test.py",
    f"{CORE}.self_test.pulls": "tests/integration/test_self_test.py",
    f"{CORE}.self_test.speed": "tests/integration/test_self_test.py",
    f"{CORE}.self_test.tensors": "tests/integration/test_self_test.py",
}


@dataclass(frozen=True)
class Import:
    """One imported module, as seen in one file."""

    target: str
    line: int
    top_level: bool
    typing_only: bool


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name and its tree."""

    name: str
    path: Path
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def part(self) -> str | None:
        """The part of LAYERS that this module belongs to; None outside kvpull_async, or if the table lacks it."""
        package, _, inner = self.name.partition(".")
        return part_of(inner) if package == CORE else None

    def within(self, *parts: str) -> bool:
        """Whether the module is one of these parts of kvpull_async, or lies inside one."""
        inner = self.name.removeprefix(f"{CORE}.")
        return self.name.startswith(f"{CORE}.") and any(inner == part or inner.startswith(f"{part}.") for part in parts)


def part_of(inner: str) -> str | None:
    """The longest part of LAYERS that is a prefix of a module's name within kvpull_async."""
    if not inner:
        return ""
    names = inner.split(".")
    prefixes = (".".join(names[:length]) for length in range(len(names), 0, -1))
    return next((prefix for prefix in prefixes if prefix in LEVELS), None)


class Tree:
    """All source modules below one `src` folder and what each imports."""

    def __init__(self, src: Path) -> None:
        self.src = src
        self.modules = {module.name: module for module in self._find()}

    def _find(self) -> Iterator[Module]:
        for path in sorted(self.src.rglob("*.py")):
            names = path.relative_to(self.src).with_suffix("").parts
            is_package = names[-1] == "__init__"
            yield Module(".".join(names[:-1] if is_package else names), path, is_package)

    def imports(self, module: Module) -> list[Import]:
        """What the module imports; `from package import submodule` counts as the submodule."""
        return list(self._walk(module, module.tree, top_level=True, typing_only=False))

    def _walk(self, module: Module, node: ast.AST, *, top_level: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target in self._targets(module, child):
                    yield Import(target, child.lineno, top_level, typing_only)
            inner = top_level and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typed = typing_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            yield from self._walk(module, child, top_level=inner, typing_only=typed)

    def _targets(self, module: Module, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = self._absolute(module, node)
        submodules = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in self.modules]
        # `from package import name, submodule` also needs the package itself, for `name`.
        return submodules if len(submodules) == len(node.names) else [base, *submodules]

    @staticmethod
    def _absolute(module: Module, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
        package = package[: len(package) - (node.level - 1)]
        return ".".join([*package, *filter(None, [node.module])])

    def ours(self, module: Module) -> list[Import]:
        return [found for found in self.imports(module) if found.target.partition(".")[0] in {CORE, SYNC}]

    def libraries(self, module: Module) -> list[Import]:
        return [found for found in self.imports(module) if found.target.partition(".")[0] not in {CORE, SYNC}]

    def where(self, module: Module, line: int) -> str:
        return f"{module.path.relative_to(self.src.parent)}:{line}"


# --- the rules: each yields one sentence per violation ---


def unknown_parts(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        if module.name.startswith(CORE) and module.part is None and not module.within(*EMPTY_PACKAGES):
            yield f"{module.name} stands in no row of LAYERS: add it there, and to the architecture page"


def upward_imports(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        part = module.part
        if part is None or (module.is_package and module.name.removeprefix(f"{CORE}.") in EMPTY_PACKAGES):
            continue
        for found in tree.ours(module):
            package, _, inner = found.target.partition(".")
            target = part_of(inner)
            if found.typing_only and (part, target) in UPWARD_FOR_TYPES:
                continue
            if package == SYNC or target is None or (target != part and LEVELS[target] >= LEVELS[part]):
                yield f"{tree.where(module, found.line)} {module.name} must not import {found.target}: no lower level"


def imports_in_empty_packages(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        if module.is_package and module.name.removeprefix(f"{CORE}.") in EMPTY_PACKAGES:
            for found in tree.ours(module):
                yield f"{tree.where(module, found.line)} {module.name} only groups modules and imports none of them"


def sync_imports(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        if module.name.partition(".")[0] != SYNC:
            continue
        for found in tree.ours(module):
            if found.target.partition(".")[0] == CORE and found.target not in SYNC_MAY_IMPORT:
                yield f"{tree.where(module, found.line)} {module.name} must not import {found.target}"


def impure_imports(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        if not module.within(*PURE):
            continue
        for found in tree.libraries(module):
            if found.target.partition(".")[0] in IMPURE_LIBRARIES:
                yield f"{tree.where(module, found.line)} {module.name} is pure and must not import {found.target}"
        for found in tree.ours(module):
            target = tree.modules.get(found.target)
            if target is not None and not found.typing_only and not target.within(*PURE):
                yield f"{tree.where(module, found.line)} {module.name} is pure, {found.target} is not"


def reserved_imports(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        for found in tree.libraries(module):
            library = found.target.partition(".")[0]
            if library in RESERVED_LIBRARIES and not module.within(*RESERVED_LIBRARIES[library]):
                yield f"{tree.where(module, found.line)} {module.name} must not import {library}"
            if library in LAZY_LIBRARIES and found.top_level:
                yield f"{tree.where(module, found.line)} {library} must be imported inside a function"


def concrete_imports(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        if not module.within(*CONTRACT_USERS):
            continue
        for found in tree.ours(module):
            family, _, rest = found.target.removeprefix(f"{CORE}.").partition(".")
            if family in CONTRACTS and f"{family}.{rest}" != CONTRACTS[family]:
                yield f"{tree.where(module, found.line)} {module.name} must not know {found.target}"


def cycles(tree: Tree) -> Iterator[str]:
    """Import cycles, imports inside functions included; those for type checkers only do not run and do not count."""
    edges = {
        name: {found.target for found in tree.ours(module) if not found.typing_only and found.target in tree.modules}
        for name, module in tree.modules.items()
    }
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield " -> ".join([*path[path.index(name) :], name])
        elif name not in finished:
            for target in sorted(edges[name]):
                yield from visit(target, (*path, name))
            finished.add(name)

    for name in sorted(edges):
        yield from visit(name, ())


def oversize(root: Path) -> Iterator[str]:
    for path in sorted(path for folder in SIZED for path in (root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        where = path.relative_to(root)
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            yield f"{where}: {lines} lines, more than {MAX_FILE_LINES}"
        for node in ast.walk(ast.parse(text, str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    yield f"{where}:{node.lineno} {node.name}: {length} lines, more than {MAX_FUNCTION_LINES}"


def unit_test_names(name: str, *, ambiguous: bool) -> list[str]:
    """The files of tests/unit that count as the unit test module of a source module, in the order of preference.

    `values/test_desc.py` or `test_values_desc.py` always does, `test_desc.py` only where no other module has that name.
    The blocking API stands below `sync`.
    """
    package, *inner = [part.strip("_") for part in name.split(".")]
    parts = ["sync", *inner] if package == SYNC else inner
    file = f"test_{parts[-1]}.py"
    names = ["/".join([*parts[:-1], file]), f"test_{'_'.join(parts)}.py"]
    if not ambiguous and package == CORE:
        names.append(file)
    return list(dict.fromkeys(names))


def untested_modules(tree: Tree, tests: Path) -> Iterator[str]:
    modules = [module for module in tree.modules.values() if not module.is_package]
    last_names = [module.name.rpartition(".")[2] for module in modules if module.name.startswith(CORE)]
    unit = tests / "unit"
    present = {path.relative_to(unit).as_posix() for path in unit.rglob("test_*.py")}
    for module in modules:
        if module.name in TESTED_ELSEWHERE:
            continue
        ambiguous = last_names.count(module.name.rpartition(".")[2]) > 1
        wanted = unit_test_names(module.name, ambiguous=ambiguous)
        if not present.intersection(wanted):
            yield f"{module.name} has no unit test module: write tests/unit/{' or '.join(wanted)}"
