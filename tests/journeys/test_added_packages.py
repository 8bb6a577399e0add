"""The examples of the documentation, as packages: a method and a metric that every command knows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FACT = ROOT / "edits" / "eiffel-tower.json"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages: those of docs/add-a-method.md and docs/add-a-metric.md, word for word."""
    folder = tmp_path_factory.mktemp("site")
    for kind in ("method", "metric"):
        page = (ROOT / "docs" / f"add-a-{kind}.md").read_text(encoding="utf-8")
        (code,) = re.findall(rf"<!-- example: {kind} -->\n```python\n(.*?)```", page, re.DOTALL)
        points = re.search(r'\[project\.entry-points\."(ffedit\.\w+)"\]\n(\w+) = "(\w+):(\w+)"', page)
        assert points is not None
        group, name, module, what = points.groups()
        (folder / f"{module}.py").write_text(code, encoding="utf-8")
        (about := folder / f"{module}-0.1.dist-info").mkdir()
        (about / "METADATA").write_text(f"Name: {module}\nVersion: 0.1\n")
        (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{what}\n")
    return folder


def run(site: Path, *words: object) -> str:
    """Run a command beside the packages in `site`, and return what it shows."""
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "ffedit", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("warm_cache")
def test_the_method_and_the_metric_are_known_to_every_command(site: Path, tmp_path: Path) -> None:
    listed = run(site, "methods")
    assert "ridge" in listed and "ffedit_ridge" in listed
    asked = ("--require", "worst_paraphrase>=-1", "--json", tmp_path / "a.json", "--out", tmp_path / "edit")
    run(site, "apply", FACT, "--method", "ridge", "--layer", 0, *asked)
    applied = json.loads((tmp_path / "a.json").read_text())
    assert applied["method"] == "ridge"
    before, after = (applied[when]["worst_paraphrase"] for when in ("before", "after"))
    assert -1 <= before < after <= 1
    assert "worst_paraphrase" in run(site, "evaluate", FACT, "--edit", tmp_path / "edit")
    run(site, "bench", FACT, "--methods", "ridge", "--layers", 0, "--no-full", "--out", tmp_path / "bench")
    report = (tmp_path / "bench" / "report.md").read_text()
    assert "ridge" in report and "worst_paraphrase" in report
