"""Figures as tables, in the order in which papers print them, and `report.md`, which has them as Markdown.

A figure is followed by its 95 % interval over subjects. Columns without any measurement are left out; "-" marks a
figure that was not measured in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ffedit.algebra.bootstrap import Interval
from ffedit.benchmark.report import BenchReport, Change, Row
from ffedit.evaluator import METRICS, headline_scores
from ffedit.facts.text import counted, plain

# Scores of the first table; all others go into the second.
LEADING = (
    *("efficacy", "paraphrase", "specificity", "score", "generation", "teacher_forced", "teacher_forced_gap"),
    *("token_accuracy_gap", "same_subject", "degenerate", "greedy_entropy", "entropy", "consistency"),
)
GAPS = (
    "teacher_forced_gap is teacher_forced − generation; token_accuracy_gap is token_accuracy − generation, as "
    "arXiv 2502.11177 publishes the gap."
)
SHORT = ("efficacy", "paraphrase", "specificity", "score", "generation", "same_subject")


@dataclass(frozen=True)
class Table:
    """A table of figures as text: its headings, and a row of cells for each line."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def markdown(self) -> str:
        """Return the table under its title."""
        lines = [f"| {' | '.join(map(plain, self.headings))} |", f"|{'---|' * len(self.headings)}"]
        rows = (f"| {' | '.join(map(plain, row))} |" for row in self.rows)
        return "\n".join([f"## {self.title}", "", *lines, *rows])


def markdown(report: BenchReport) -> str:
    """Render a report as Markdown."""
    run = report.run
    title = f"{run['mode']}, {counted(run['facts']['count'], 'fact')}, {run['model']['name']}"
    sections = [f"# {plain(title)}", *notes(report), *(table.markdown for table in tables(report))]
    if lines := not_measured(report):
        sections.append("\n".join([f"## Not measured ({len(lines)})", "", *(f"- {plain(line)}" for line in lines)]))
    return "\n\n".join(sections) + "\n"


def notes(report: BenchReport) -> list[str]:
    """Say where the facts were written and what the figures are."""
    layers, sequential = report.run["layers"], any(method.end for method in report.methods.values())
    weights = (
        f" The document frequencies of consistency come from the {report.references} reference texts of these facts, "
        "so compare it only with runs on the same facts."
    )
    return [
        f"Layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}. Figures are means over facts "
        "with 95 % intervals over subjects: Wilson's for proportions, otherwise bootstrap intervals."
        + (" A method's own row measures all facts after the last edit." if sequential else ""),
        GAPS + ("" if report.before.scores.consistency is None else weights),
    ]


def tables(report: BenchReport) -> list[Table]:
    """Return all tables that have a figure in them."""
    rows = [report.before]
    for name, method in report.methods.items():
        rows += [method.after] if method.end is None else [replace(method.after, name=f"{name}, at edit"), method.end]
    others = [name for name in METRICS if name not in LEADING]
    known = [row for method in report.methods.values() for row in method.known or ()]
    known = known[:1] + [row for row in known if row.name != "before"]
    all_tables = [
        _scores("Scores", rows, LEADING),
        _scores("What else was measured", rows, [name for name in others if not name.endswith("_magnitude")]),
        _scores("Magnitudes", rows, [name for name in others if name.endswith("_magnitude")]),
        _kinds(rows),
        _scores("Facts that the model knew", known, LEADING),
        *_changes("Change against before, paired", [method.change for method in report.methods.values()]),
        *_changes("Method against method, paired (second − first)", report.comparisons),
    ]
    for name, method in report.methods.items():
        all_tables.append(_scores(f"{name}: all facts edited so far", method.curve, SHORT, "edited"))
    return [table for table in (*all_tables, _costs(report)) if table is not None]


def headline(report: BenchReport) -> list[list[str]]:
    """Return the cells of a small table for a terminal: a row of titles, then one for each headline score."""
    rows = [report.before, *(method.last for method in report.methods.values())]
    titles = ["score", *(row.name for row in rows)]
    return [
        titles,
        *([n, *(number(getattr(row.scores, n)) for row in rows)] for n in _measured(rows, headline_scores())),
    ]


def number(value: float | None) -> str:
    """Format a figure with three decimals, or in scientific notation below 0.001; "-" where it is None."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def _measured(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the `names` of scores that at least one row has."""
    return [name for name in names if any(getattr(row.scores, name) is not None for row in rows)]


def _scores(title: str, rows: Sequence[Row], names: Sequence[str], first: str = "") -> Table | None:
    """Make a table of scores; None where none was measured."""
    shown = _measured(rows, names)
    cells = [[_cell(getattr(row.scores, n), row.intervals.get(n)) for n in shown] for row in rows]
    lines = [[row.name, str(row.facts), *line] for row, line in zip(rows, cells, strict=True)]
    return Table(title, [first, "facts", *shown], lines) if shown else None


def _cell(value: float | None, bound: Interval | None) -> str:
    return number(value) if bound is None else f"{number(value)} {bound.ends(number)}".rstrip()


def _kinds(rows: Sequence[Row]) -> Table | None:
    names = list(dict.fromkeys(name for row in rows for name in row.kinds))
    cells = [[row.name, *(_cell(row.kinds.get(name), row.intervals.get(name)) for name in names)] for row in rows]
    return Table("Locality and portability by kind", ["", *names], cells) if names else None


def _changes(title: str, changes: Sequence[Change]) -> list[Table]:
    """Make one table of the leading scores and one by kind; a table without columns is left out."""
    names = dict.fromkeys(name for change in changes for name in change.differences)
    leading, kinds = [name for name in LEADING if name in names], [name for name in names if "/" in name]

    def row(change: Change, shown: Sequence[str]) -> list[str]:
        bounds = [change.differences.get(name) for name in shown]
        cells = [_cell(bound.mean if bound else None, bound) for bound in bounds]
        return [" → ".join(change.names), str(change.facts), *cells]

    return [
        Table(heading, ["", "facts", *shown], [row(change, shown) for change in changes])
        for heading, shown in ((title, leading), (f"{title}, by kind", kinds))
        if shown
    ]


def _costs(report: BenchReport) -> Table:
    titles = ["", "facts", "failed", "not finite", "‖ΔW‖/‖W‖", "s/fact, shared values", "s/fact, own"]
    cells = [
        [
            name,
            *map(str, (method.after.facts, method.failed, method.not_finite)),
            number(method.norm_ratio),
            *(f"{method.seconds_per_fact[step]:.2f}" for step in ("choosing", "solving")),
        ]
        for name, method in report.methods.items()
    ]
    return Table("Edits", titles, cells)


def not_measured(report: BenchReport) -> list[str]:
    """List what was not measured, with the reasons."""
    return [
        *(f"record {record['record']}: {record['reason']}" for record in report.unusable),
        *(
            f"{failure['method'] or 'every method'}, fact {failure['fact']} ({failure['subject']}): {failure['reason']}"
            for failure in report.failures
        ),
        *map(str, report.left_out),
    ]
