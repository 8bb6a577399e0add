"""The house: imports point down only, and the core neither prints nor names a device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ffedit"
L0 = {
    "errors",
    "progress",
    "version",
    "lowrank",
    "linalg",
    "algebra",
    "blocks",
    "moments",
    "facts",
    "mentions",
    "formats",
    "readers",
    "reading",
    "tables",
    "conflicts",
    "bootstrap",
}
L1 = {
    "hooks",
    "memory",
    "key_rows",
    "stacks",
    "halves",
    "joints",
    "experts",
    "expert_rows",
    "feed_forward",
    "recognise",
    "saved_names",
    "routing",
    "anatomy",
    "tokens",
    "offsets",
    "chat",
    "replay",
    "readout",
    "corpus",
    "neutral",
    "fingerprint",
    "room",
    "history",
    "placement",
    "quantised",
}
# Small helpers that touch no model: the cache, folders that appear whole or belong to one process, interrupts.
PLAIN = {"cache", "finite", "folders", "interrupts", "lock", "visible"}
L2 = {"locator", "editor", "evaluator", "inspector"}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The module or sub-package of ffedit that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(part: str) -> int:
    floors = ((L0 | PLAIN, 0), (L1, 1), (L2, 2))
    return next((number for names, number in floors if part in names), 3)


def type_checking_only(tree: ast.Module) -> set[ast.AST]:
    """Nodes below `if TYPE_CHECKING:`: they import nothing when the program runs."""
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    return {inner for guard in guards for child in guard.body for inner in ast.walk(child)}


def imported(path: Path, source: str | None = None) -> set[str]:
    """Absolute names of all that a file imports when it runs."""
    tree = ast.parse(source or path.read_text(encoding="utf-8"))
    skipped = type_checking_only(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = ("ffedit", *path.relative_to(PACKAGE).parent.parts)
            above = ".".join(parents[: len(parents) + 1 - node.level]) if node.level else ""
            base = ".".join(name for name in (above, node.module) if name)
            found |= {f"{base}.{alias.name}" for alias in node.names} | {base}
    return found


def parts_imported(path: Path, source: str | None = None) -> set[str]:
    own = {name.split(".")[1] for name in imported(path, source) if name.startswith("ffedit.")}
    return {name for name in own if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()}


def test_the_check_sees_every_way_to_import() -> None:
    lines = "import ffedit.api\nfrom ffedit import cache\nfrom . import tokens\nfrom .errors import EditError\n"
    lines += "def f():\n    from ffedit.editor.methods.rome import rome\n"
    assert parts_imported(PACKAGE / "algebra.py", lines) == {"api", "cache", "tokens", "errors", "editor"}
    inner = "from ..replay import record\nfrom .scores import Scores\n"
    assert parts_imported(PACKAGE / "evaluator" / "x.py", inner) == {"replay", "evaluator"}


def test_all_modules_named_here_exist() -> None:
    assert {p for p in L0 | L1 | PLAIN if not (PACKAGE / f"{p}.py").is_file()} == set()
    assert {"locator", "editor", "evaluator"} <= {p.name for p in PACKAGE.iterdir()}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    own = part_of(path)
    above = {name for name in parts_imported(path) if floor(name) > floor(own)}
    assert not above, f"{own} is of floor {floor(own)} and imports {above}"


def test_the_sciences_import_no_sibling() -> None:
    for own in L2:
        for path in (PACKAGE / own).rglob("*.py"):
            assert not parts_imported(path) & (L2 - {own}), path


def test_pure_maths_knows_no_transformers() -> None:
    for name in L0 | PLAIN:
        assert not {n for n in imported(PACKAGE / f"{name}.py") if n.split(".")[0] == "transformers"}, name


def test_the_core_prints_nothing_and_names_no_device() -> None:
    for path in FILES:
        if floor(part_of(path)) == 3:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Name) and node.id == "print"), f"{path}: print"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("cuda"), f"{path}: {node.value!r}"


def test_errors_are_never_swallowed_whole() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                reraised = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                assert caught not in ("everything", "Exception", "BaseException") or reraised, path
            assert not (isinstance(node, ast.Name) and node.id == "suppress"), path
