"""The table of `evaluations/README.md` has a row for every file, and stands as its script writes it."""

from __future__ import annotations

import sys

import pytest
from reliability import table
from scripts import make_readme


def test_the_table_is_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_readme.py", "--check"])
    make_readme.main()


def test_the_table_of_reliability_is_that_of_its_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py", "--check"])
    table.main()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("reports/none.json", "nothing", "ffedit bench FACTS"), "reports/none.json: no such file, but a row"),
        (("README.md", "this", "python evaluations/scripts/compare.py --no-such"), "compare.py knows no --no-such"),
    ],
)
def test_a_row_that_is_not_true_is_refused(
    monkeypatch: pytest.MonkeyPatch, row: tuple[str, str, str], reason: str
) -> None:
    monkeypatch.setattr(make_readme, "ROWS", (*make_readme.ROWS, row))
    with pytest.raises(ValueError, match=reason):
        make_readme.table()


def test_a_report_without_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_readme, "ROWS", make_readme.ROWS[1:])
    with pytest.raises(ValueError, match=r"evaluations/data/atlas-counterfact.json has no row in make_readme.py"):
        make_readme.table()
