"""A benchmark as a page: each headline score of all methods as bars, then every table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ffedit.benchmark import BenchReport
from ffedit.benchmark.report import Row
from ffedit.benchmark.tables import not_measured, notes, number, tables
from ffedit.display.html import render
from ffedit.evaluator import METRICS, headline_scores
from ffedit.evaluator.verdict import fell, kept
from ffedit.facts.text import counted
from ffedit.files.atomic import finite


def bench_page(report: BenchReport, command: str) -> str:
    """Render a report; `command` is the command line that made it."""
    run, rows = report.run, [method.last for method in report.methods.values()]
    measured = [name for name in headline_scores() if any(getattr(row.scores, name) is not None for row in rows)]
    longest = {name: _longest(rows, name) for name in measured}
    groups = {"What should stay": ("keep", "zero"), "What should change": ("up",)}
    return render(
        "bench.html",
        title=f"{', '.join(report.methods)}: {counted(run['facts']['count'], 'fact')} in {run['model']['name']}",
        mode=run["mode"],
        notes=notes(report),
        groups={
            title: {
                name: list(_bars([report.before, *rows], name, longest[name]))
                for name in measured
                if METRICS[name].direction in directions
            }
            for title, directions in groups.items()
        },
        meanings={name: METRICS[name].meaning for name in measured},
        longest=longest,
        tables=tables(report),
        not_measured=not_measured(report),
        command=command,
        settings=json.dumps(finite(run.get("config", {})), indent=1, ensure_ascii=False),
        machines=run.get("hardware", []),
    )


def _longest(rows: Sequence[Row], name: str) -> float:
    """Return the value of a full bar: 1 for shares, else the largest value or end of an interval."""
    if METRICS[name].unit == "share":
        return 1.0
    highs = [row.intervals[name].high for row in rows if name in row.intervals]
    return max(*highs, *(getattr(row.scores, name) or 0.0 for row in rows), 0.0) or 1.0


def _bars(rows: Sequence[Row], name: str, longest: float) -> Iterator[dict[str, Any]]:
    """Yield one score as bars: before the edit, then by method, each with the ends of its interval."""
    before = getattr(rows[0].scores, name)
    for row in rows:
        value, interval = getattr(row.scores, name), row.intervals.get(name)
        if value is not None:
            yield {
                "name": row.name,
                "figure": (number(value), "" if interval is None else interval.ends(number)),
                "share": value / longest,
                "low": interval and interval.low / longest,
                "high": interval and interval.high / longest,
                # a score that should stay is clearly lower than before
                "harm": name in kept() and before is not None and fell(before, value),
            }
