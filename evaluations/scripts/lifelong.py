"""Tabulate scores after each step of a long sequence of edits by several methods, and after PRUNE.

    python evaluations/scripts/lifelong.py RUN... [--prune RUN/edits/alphaedit] [--alpha 1.2] --out FILE

RUN is a folder of `ffedit bench FACTS --mode sequential:N`, finished or not, the report of one
(`evaluations/reports/smollm2-thousand-sequence.json`), or an earlier FILE.json; all of them have the same facts. rect
and revive are methods of `evaluations/lifelong` (`pip install evaluations/lifelong`). FILE.json and FILE.md get one row
for each method and each step after which all facts so far were scored.

PRUNE is not applied in each step, but once, to the sum of all changes. `--prune` names the edits that a run has saved;
their sum is restrained, once for each `--alpha`, and then all their facts are evaluated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from common import HERE, keep

import ffedit
from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import Dense
from ffedit.benchmark.folder import MANIFEST, REPORT, UNEDITED, Journal
from ffedit.benchmark.report import Results
from ffedit.benchmark.tables import Table, number

sys.path.append(str(HERE / "lifelong"))
from ffedit_lifelong.prune import ALPHA, restrained

SHOWN = ("efficacy", "paraphrase", "specificity", "generation", "perplexity", "drift")
# A row of results: method, facts edited so far, facts measured, means, and their intervals.
StepRow = dict[str, Any]
# Stands for every fact: only means of scores are read, which do not depend on the words of the facts.
NAMELESS = ffedit.Fact("subject", "{}", target="object")


def about_run(path: Path) -> dict[str, Any]:
    """Return the settings of a run, from its folder or its report."""
    report = json.loads((path if path.is_file() else path / MANIFEST).read_text(encoding="utf-8"))
    return dict(report.get("run", report))


def rows_of_run(path: Path) -> list[StepRow]:
    """Return the rows of a run: the unedited model, then each method after each step that is complete.

    A run that has no report yet has no intervals: its folder does not say which facts are of one subject.
    """
    path = path / REPORT if (path / REPORT).exists() else path
    if path.is_file():
        report = json.loads(path.read_text(encoding="utf-8"))
        if "rows" in report:
            return list(report["rows"])
        curves = {method: figures["curve"] for method, figures in report["methods"].items()}
        before = report["before"]
    else:
        results = Results(Journal(path, writes=False), [NAMELESS] * about_run(path)["facts"]["count"])
        curves = {
            method: [results.row(str(count), method, when).to_dict() for count, when in results.curve(method).items()]
            for method in about_run(path)["config"]
        }
        before = results.row("before", UNEDITED, "before").to_dict()
    steps = [step_row(method, int(row["name"]), row) for method, curve in curves.items() for row in curve]
    rows = [step_row("before", 0, before), *steps]
    return rows if path.is_file() else [{**row, "intervals": {}} for row in rows]


def step_row(method: str, edited: int, row: dict[str, Any]) -> StepRow:
    """Return the columns of one row of a report that are shown."""
    means = {name: row["scores"][name] for name in SHOWN}
    bounds = {name: row["intervals"][name] for name in SHOWN if name in row["intervals"]}
    return {"method": method, "edited": edited, "facts": row["facts"], **means, "intervals": bounds}


def written_edits(folder: Path) -> list[ffedit.Edit]:
    """Return the saved edits of a method in order, without those that the run has not written, or could not."""
    journal, method = Journal(folder.parents[1], writes=False), folder.name
    chunks = [int(path.name) for path in sorted(folder.iterdir()) if path.is_dir()]
    written = [i for i in chunks if journal.done(method, "after", i) and not journal.failed(method, i)]
    if not written:
        raise click.ClickException(f"{folder}: no edit that the run has written")
    return [ffedit.Edit.load(folder / f"{i:05d}") for i in written]


def pruned(editable: ffedit.Editable, edits: Sequence[ffedit.Edit], alpha: float) -> tuple[ffedit.Edit, dict[str, Any]]:
    """Return the sum of edits of the unedited model, its singular values restrained, as one edit; and figures of it.

    By address: how many singular values were restrained, and the norm of the sum before and after, relative to ‖W‖.
    """
    updates, about = {}, {}
    for at in sorted({at for edit in edits for at in edit.updates}):
        W = double(editable.memories[at].value)
        change = sum((edit.updates[at].dense.to(W) for edit in edits if at in edit.updates), start=0 * W)
        small = restrained(W, change, alpha)
        above = int((torch.linalg.svdvals(change) > torch.linalg.matrix_norm(W, 2)).sum())
        norms = [float(matrix.norm() / W.norm()) for matrix in (change, small)]
        updates[at] = Dense(small)
        about[str(at)] = {"restrained": above, "norm_ratio": norms[0], "norm_ratio_pruned": norms[1]}
    facts = tuple(fact for edit in edits for fact in edit.facts)
    return replace(edits[0], updates=updates, keys={}, values={}, facts=facts), about


def prune_rows(
    editable: ffedit.Editable, edits: Sequence[ffedit.Edit], method: str, alphas: Sequence[float]
) -> list[StepRow]:
    """Evaluate all facts of edits after PRUNE, once for each α."""
    rows = []
    for alpha in alphas:
        edit, about = pruned(editable, edits, alpha)
        report = ffedit.evaluate(editable, edit.facts, edit)
        assert report.after is not None and report.facts_after is not None
        bounds = {name: [b.low, b.high] for name, b in report.intervals_after.items() if not b.is_point}
        measured = {"facts": len(edit.facts), "scores": report.after.to_dict(), "intervals": bounds}
        row = step_row(f"{method}, PRUNE α = {alpha:g}", len(edit.facts), measured)
        rows.append({**row, "alpha": alpha, "matrices": about})
        print("  ".join([row["method"], *(f"{name} {number(row[name])}" for name in SHOWN)]), flush=True)
    return rows


def table(rows: Sequence[StepRow]) -> Table:
    """Return the rows as a table, the methods of one step below each other."""

    def cell(row: StepRow, name: str) -> str:
        bounds = row["intervals"].get(name)
        ends = f" [{number(bounds[0])}, {number(bounds[1])}]" if bounds else ""
        return f"{row[name]:,.1f}" if name == "perplexity" else number(row[name]) + ends

    lines = [
        [f"{row['edited']:,}" if row["edited"] else "before", row["method"], *(cell(row, name) for name in SHOWN)]
        for row in sorted(rows, key=lambda row: row["edited"])
    ]
    lines[0][1] = ""
    return Table("All facts edited so far", ["edited", "method", *SHOWN], lines)


@click.command(help=__doc__)
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--prune", type=click.Path(exists=True, file_okay=False, path_type=Path), help="RUN/edits/METHOD")
@click.option("--alpha", "alphas", type=float, multiple=True, default=(ALPHA,), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="FILE, without .json and .md.")
def main(runs: Sequence[Path], prune: Path | None, alphas: Sequence[float], out: Path) -> None:
    """Read, restrain, measure, show."""
    abouts = [about_run(run) for run in (*runs, *([prune.parents[1]] if prune else []))]
    same = {json.dumps([about[name] for name in ("model", "facts", "mode", "layers")]) for about in abouts}
    if len(same) > 1:
        raise click.ClickException("runs of other models, facts, modes or layers cannot stand in one table")
    rows: list[StepRow] = []
    for run in runs:  # the first run with a method supplies its rows
        seen = {row["method"] for row in rows}
        rows += [row for row in rows_of_run(run) if row["method"] not in seen]
    if prune is not None:
        rows += prune_rows(ffedit.load(abouts[0]["model"]["name"]), written_edits(prune), prune.name, alphas)
    about = {name: abouts[0][name] for name in ("model", "facts", "mode", "layers")}
    keep(
        out.with_suffix(".json"),
        {**about, "config": {k: v for a in abouts for k, v in a["config"].items()}, "rows": rows},
    )
    title = f"# {about['mode']}, {about['facts']['count']} facts, {about['model']['name']}, by several methods"
    words = (
        "Means over facts with 95 % intervals; perplexity and drift (nats per token) of text, as `bench` measures them."
    )
    out.with_suffix(".md").write_text(f"{title}\n\n{words}\n\n{table(rows).markdown}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
