"""The READMEs of the evaluations name every file of data and every report, and commands that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from reliability import table

EVALUATIONS = Path(__file__).parents[2] / "evaluations"
READMES = [EVALUATIONS / "README.md", EVALUATIONS / "reliability" / "README.md"]
SHARED = ("benchmarks/measuring.py", "scripts/common.py")  # they declare options of several scripts


def rows(readme: Path) -> list[list[str]]:
    """Return the cells of the rows of a table."""
    lines = readme.read_text(encoding="utf-8").splitlines()
    return [line.strip("|").split("|") for line in lines if re.match(r"\| `[\w./*-]+`", line)]


def test_every_file_of_data_and_every_report_has_a_row() -> None:
    patterns = [
        (readme.parent, p) for readme in READMES for row in rows(readme) for p in re.findall(r"`(.*?)`", row[0])
    ]
    files = [set((folder / pattern).parent.glob(Path(pattern).name)) for folder, pattern in patterns if "/" in pattern]
    assert all(files), "a row names no file"
    listed = {file.resolve() for found in files for file in found}
    kept = {path for folder in ("data", "reports") for path in (EVALUATIONS / folder).rglob("*") if path.is_file()}
    assert not sorted(kept - listed)


def test_commands_name_scripts_and_options_that_exist() -> None:
    commands = [command for readme in READMES for row in rows(readme) for command in re.findall(r"`(.*?)`", row[2])]
    ours = [found.groups() for command in commands if (found := re.match(r"python evaluations/(\S+\.py)(.*)", command))]
    assert len(ours) > 40
    for script, words in ours:
        declared = "".join((EVALUATIONS / name).read_text(encoding="utf-8") for name in (script, *SHARED))
        assert not [option for option in re.findall(r"--[\w-]+", words) if f'"{option}"' not in declared], script


def test_the_table_of_reliability_is_that_of_its_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py", "--check"])
    table.main()
