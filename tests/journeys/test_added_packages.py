"""Packages that add a method and metrics: every command, table and page knows them.

Two are the examples of the documentation, the third is a metric whose score an edit always lowers.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ffedit.inference.text import neutral_text

ROOT = Path(__file__).parents[2]
FACT = ROOT / "edits" / "eiffel-tower.json"
UNTOUCHED = """
from ffedit import Questions, Responses, metric


@metric("share", "keep", "1 until something is edited", "this test")
def untouched(q: Questions, now: Responses, before: Responses) -> float | None:
    return float(now is before)
"""
# The commands of a new process, with a fortieth of the names in C, as `few_names` counts here.
COMMANDS = """
import ast, sys
from ffedit.cli import invoke
from ffedit.editor import name_keys
from ffedit.inference.names import names

name_keys.names = lambda: names()[::40]
for words in ast.literal_eval(sys.argv[1]):
    if code := invoke(words):
        sys.exit(code)
    print("\\0", flush=True)
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


def corpus(folder: Path) -> Path:
    """Write a short text for the key statistics: what the commands are started in knows no shorter default."""
    (path := folder / "corpus.txt").write_text(neutral_text()[:20_000], encoding="utf-8")
    return path


def run(site: Path, *commands: tuple[object, ...]) -> list[str]:
    """Run commands beside the packages in `site`, in one process, and return what each shows."""
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    words = repr([list(map(str, command)) for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, words],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0\n")[:-1]


def test_a_package_imports_from_ffedit_alone(site: Path) -> None:
    for path in site.glob("*.py"):
        code = path.read_text(encoding="utf-8")
        modules = {node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
        assert "ffedit" in modules and not any((module or "").startswith("ffedit.") for module in modules)
        assert "import ffedit." not in code


@pytest.mark.usefixtures("warm_cache")
def test_method_and_metrics_are_known_to_every_command_in_the_verdict_in_tables_and_on_pages(
    site: Path, tmp_path: Path
) -> None:
    out = {name: tmp_path / name for name in ("a.json", "page.html", "model", "edit", "bench")}
    files = ("--json", out["a.json"], "--html", out["page.html"], "--export", out["model"], "--out", out["edit"])
    asked = ("--method", "ridge", "--layer", 0, "--require", "worst_paraphrase>=-1", *files)
    text = ("--corpus", corpus(tmp_path))
    listed, applied, shown, evaluated, _ = run(
        site,
        ("methods",),
        ("apply", FACT, *asked, *text),
        ("show", out["edit"]),
        ("evaluate", FACT, "--edit", out["edit"]),
        ("bench", FACT, "--methods", "ridge", "--layers", 0, *text, "--no-full", "--out", out["bench"]),
    )
    assert "ridge" in listed and "ffedit_ridge" in listed
    result = json.loads(out["a.json"].read_text())
    before, after = (result[when]["worst_paraphrase"] for when in ("before", "after"))
    assert result["method"] == "ridge" and -1 <= before < after <= 1
    assert (result["before"]["untouched"], result["after"]["untouched"]) == (1, 0)
    assert result["verdict"]["outcome"] == "took with damage" and result["verdict"]["damage"] == ["untouched"]
    assert "untouched fell from 1.00 to 0.00" in result["verdict"]["text"]
    report, page, card = (out["bench"] / "report.md", out["page.html"], out["model"] / "README.md")
    for told in (applied, shown, evaluated, *(file.read_text() for file in (report, page, card))):
        assert "untouched" in told and "worst_paraphrase" in told
    assert "ridge" in report.read_text()
