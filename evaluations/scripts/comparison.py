"""Methods against each other over several runs of `ffedit bench`: one table, one row for each method and moment.

python evaluations/scripts/comparison.py evaluations/reports/bench-*.json --out evaluations/reports/comparison.md
"""

import json
from pathlib import Path

import click
from common import SHOWN, number, table

from ffedit.evaluator import Scores

FIGURES = (*SHOWN, "teacher_forced", "token_accuracy")


@click.command()
@click.argument("reports", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The table, Markdown.")
def main(reports: tuple[Path, ...], out: Path) -> None:
    """Put the scores of all REPORTS side by side."""
    lines = []
    for report in [json.loads(path.read_text(encoding="utf-8")) for path in reports]:
        rows = [("before", report["before"], None)]
        for name, method in report["methods"].items():
            if method["end"] is None:
                rows.append((name, method["after"], method["norm_ratio"]))
            else:
                rows.append((f"{name}, at edit", method["after"], None))
                rows.append((f"{name}, at the end", method["end"], method["norm_ratio"]))
        run = report["run"]
        for name, row, ratio in rows:
            words = run["model"]["name"], run["mode"], str(row["facts"]), name, number(ratio)
            lines.append((words, Scores(**row["scores"])))
    out.write_text(table(lines, ("model", "mode", "facts", "method", "‖ΔW‖/‖W‖"), FIGURES), encoding="utf-8")


if __name__ == "__main__":
    main()
