"""Packages that add a method and metrics: every command, table and page knows them.

Two are the examples of the documentation, the third is a metric whose score an edit always lowers.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shell import process, shell

from ffedit.editor.methods import METHODS
from ffedit.evaluator import METRICS

ROOT = Path(__file__).parents[2]
Command = Callable[..., str]
FACT = ROOT / "edits" / "eiffel-tower.json"
UNTOUCHED = """
from ffedit import Questions, Responses, metric


@metric("share", "keep", "1 until something is edited", "this test")
def untouched(q: Questions, now: Responses, before: Responses) -> float | None:
    return float(now is before)
"""


def install(folder: Path, module: str, code: str, group: str, name: str, what: str) -> None:
    """Put a package of one file and one entry point into `folder`."""
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    (about := folder / f"{module}-0.1.dist-info").mkdir()
    (about / "METADATA").write_text(f"Name: {module}\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{what}\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages: those of docs/add-a-method.md and docs/add-a-metric.md, and `UNTOUCHED`."""
    folder = tmp_path_factory.mktemp("site")
    for kind in ("method", "metric"):
        page = (ROOT / "docs" / f"add-a-{kind}.md").read_text(encoding="utf-8")
        (code,) = re.findall(rf"<!-- example: {kind} -->\n```python\n(.*?)```", page, re.DOTALL)
        points = re.search(r'\[project\.entry-points\."(ffedit\.\w+)"\]\n(\w+) = "(\w+):(\w+)"', page)
        assert points is not None
        group, name, module, what = points.groups()
        install(folder, module, code, group, name, what)
    install(folder, "ffedit_untouched", UNTOUCHED, "ffedit.metrics", "untouched", "untouched")
    return folder


@pytest.fixture
def run(site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Run a command of ffedit beside the packages in `site`, and return its output."""

    def command(*words: object) -> str:
        done = shell(capsys, *map(str, words))
        assert done.code == 0, done.err
        return done.out

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.syspath_prepend(site)
    for registry in (METHODS, METRICS):
        registry.reload()
    yield command
    monkeypatch.undo()
    for registry in (METHODS, METRICS):
        registry.reload()


def test_a_package_is_found_by_a_new_process(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    listed = process("-m", "ffedit", "methods")
    assert listed.code == 0 and "ridge" in listed.out and "ffedit_ridge" in listed.out, listed.err


@pytest.mark.usefixtures("warm_cache")
def test_the_method_and_the_metric_are_known_to_every_command(run: Command, tmp_path: Path) -> None:
    asked = ("--require", "worst_paraphrase>=-1", "--json", tmp_path / "a.json", "--out", tmp_path / "edit")
    run("apply", FACT, "--method", "ridge", "--layer", 0, *asked)
    applied = json.loads((tmp_path / "a.json").read_text())
    assert applied["method"] == "ridge"
    before, after = (applied[when]["worst_paraphrase"] for when in ("before", "after"))
    assert -1 <= before < after <= 1
    assert "worst_paraphrase" in run("evaluate", FACT, "--edit", tmp_path / "edit")
    run("bench", FACT, "--methods", "ridge", "--layers", 0, "--no-full", "--out", tmp_path / "bench")
    report = (tmp_path / "bench" / "report.md").read_text()
    assert "ridge" in report and "worst_paraphrase" in report


def test_a_package_imports_from_ffedit_alone(site: Path) -> None:
    for path in site.glob("*.py"):
        code = path.read_text(encoding="utf-8")
        modules = {node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
        assert "ffedit" in modules and not any((module or "").startswith("ffedit.") for module in modules)
        assert "import ffedit." not in code


@pytest.mark.usefixtures("warm_cache", "verified_here")
def test_a_metric_of_a_package_is_in_the_verdict_in_tables_and_on_pages(run: Command, tmp_path: Path) -> None:
    out = {name: tmp_path / name for name in ("a.json", "page.html", "model", "edit", "bench")}
    files = ("--json", out["a.json"], "--html", out["page.html"], "--export", out["model"], "--out", out["edit"])
    shown = run("apply", FACT, *files)
    result = json.loads(out["a.json"].read_text())
    assert (result["before"]["untouched"], result["after"]["untouched"]) == (1, 0)
    assert result["verdict"]["outcome"] == "took with damage" and result["verdict"]["damage"] == ["untouched"]
    for text in (
        shown,
        out["page.html"].read_text(),
        (out["model"] / "README.md").read_text(),
        run("show", out["edit"]),
        run("evaluate", FACT, "--edit", out["edit"]),
    ):
        assert "untouched" in text and "worst_paraphrase" in text
    assert "untouched fell from 1.00 to 0.00" in result["verdict"]["text"]
