"""The house: few files at the root, a core that neither prints nor names a device, and no error swallowed whole.

Who may import whom is a contract of import-linter (`pyproject.toml`), which the gate runs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ffedit"
FILES = sorted(PACKAGE.rglob("*.py"))
# The surface: what a person sees, and the embedded models.
SURFACE = {"display", "cli", "atlas", "__main__.py"}
MOST_AT_THE_ROOT = 9


def test_the_root_holds_nothing_but_the_way_in() -> None:
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= MOST_AT_THE_ROOT


def test_the_citation_is_of_the_last_release() -> None:
    citation, changelog = (
        (PACKAGE.parent / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "CHANGELOG.md")
    )
    last, *_ = re.findall(r"^## ([\d.]+)(?: \(20.*\))?$", changelog, re.MULTILINE)
    assert f"\nversion: {last}\n" in citation and "\nlicense: Apache-2.0\n" in citation


def test_the_core_prints_nothing_and_names_no_device() -> None:
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in SURFACE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Name) and node.id == "print"), f"{path}: print"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("cuda"), f"{path}: {node.value!r}"


def test_float64_is_asked_for_in_one_place() -> None:
    """`algebra.linalg.double` goes to the CPU where a device has no float64; else only from there."""
    for path in set(FILES) - {PACKAGE / "algebra" / "linalg.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "double" and ast.unparse(node) != "torch.double":
                assert ast.unparse(node.value).endswith(".cpu()"), f"{path}:{node.lineno} {ast.unparse(node)}"


def test_errors_are_never_swallowed_whole() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                reraised = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                told = any(isinstance(inner, ast.Name) and inner.id == node.name for inner in ast.walk(node))
                assert caught not in ("everything", "Exception", "BaseException") or reraised or told, path
            assert not (isinstance(node, ast.Name) and node.id == "suppress"), path


def test_an_assert_narrows_a_type_and_checks_no_input() -> None:
    """`python -O` leaves asserts out: what a file or a user gives is refused by an error."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assert):
                said = ast.unparse(node.test)
                assert said.endswith(" is not None") or said.startswith("isinstance("), f"{path}:{node.lineno} {said}"


def test_docstrings_of_functions_begin_with_what_these_do() -> None:
    no_verbs = {"The", "What", "Whether", "Which", "Where", "How", "Who", "When", "A", "An", "As", "Is", "Are", "Does"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if said and not any("property" in ast.unparse(one) for one in node.decorator_list):
                first = said.split()[0]
                assert first not in no_verbs and first[0].isupper(), f"{path}:{node.lineno} {said.splitlines()[0]}"
