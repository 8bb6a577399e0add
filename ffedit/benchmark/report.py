"""Compute the figures of a run from its journal: means over facts, intervals, differences, retention, failures.

Everything is computed from the journal alone, in an order that does not depend on when a line was written: a run that
was interrupted, or shared by several processes, gives the same report as one that was not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from statistics import fmean
from typing import Any

from ffedit.algebra.bootstrap import Interval
from ffedit.benchmark.journal import UNEDITED, WHOLE, Journal, Line
from ffedit.benchmark.task import unpacked
from ffedit.evaluator import METRICS, FactScores, LeftOut, Scores, left_out, mean_scores
from ffedit.evaluator.intervals import changes, interval, intervals
from ffedit.evaluator.scores import columns, mean_kinds
from ffedit.facts.fact import Fact

BINS = 10


@dataclass(frozen=True)
class Row:
    """Means over a set of facts at one moment of a run: a row of a table.

    Attributes:
        name: label of the row.
        facts: number of facts measured.
        scores: means; None where nothing was measured.
        intervals: 95 % intervals by score and by kind, for two facts or more.
        kinds: means by the data set's kinds of probes, as in `FactScores`.
    """

    name: str
    facts: int
    scores: Scores
    intervals: Mapping[str, Interval]
    kinds: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        bounds = {name: [found.low, found.high] for name, found in self.intervals.items()}
        found = {"name": self.name, "facts": self.facts, "scores": self.scores.to_dict(), "intervals": bounds}
        return {**found, "kinds": dict(self.kinds)} if self.kinds else found


@dataclass(frozen=True)
class Change:
    """Paired differences between two measurements of the same facts, second − first.

    Attributes:
        names: labels of the two measurements.
        facts: number of facts measured in both.
        differences: mean and interval by score and by kind.
    """

    names: tuple[str, str]
    facts: int
    differences: Mapping[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        found = {name: [d.mean, d.low, d.high] for name, d in self.differences.items()}
        return {"names": list(self.names), "facts": self.facts, "differences": found}


@dataclass(frozen=True)
class MethodReport:
    """The figures of one method.

    Attributes:
        after: each fact right after its own edit.
        end: each fact after the last edit; None unless sequential.
        known: the facts whose old object the model knew, before and at the end; None where there are none.
        change: the end against before.
        curve: sequential only: all facts edited so far, one row per checkpoint, named by their number.
        retention: sequential only: facts by how many were edited after them.
        failed: number of facts that could not be written.
        not_finite: number of facts not measured because the edit or the edited model's output is NaN or infinite.
        norm_ratio: ‖W − W₀‖ / ‖W₀‖, mean over edits; of a sequence, at its end.
        seconds: per fact, without measuring: `choosing` values (once for all methods that share them), `solving`.
    """

    after: Row
    end: Row | None
    known: tuple[Row, Row] | None
    change: Change
    curve: tuple[Row, ...]
    retention: tuple[Row, ...]
    failed: int
    not_finite: int
    norm_ratio: float | None
    seconds: Mapping[str, float]

    @property
    def last(self) -> Row:
        """The row that methods are compared by: the end of a sequence, else each fact right after its own edit."""
        return self.end or self.after

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return {
            "after": self.after.to_dict(),
            "end": self.end.to_dict() if self.end else None,
            "known": [row.to_dict() for row in self.known] if self.known else None,
            "change": self.change.to_dict(),
            "curve": [row.to_dict() for row in self.curve],
            "retention": [row.to_dict() for row in self.retention],
            "failed": self.failed,
            "not_finite": self.not_finite,
            "norm_ratio": self.norm_ratio,
            "seconds_per_fact": dict(self.seconds),
        }


@dataclass(frozen=True)
class BenchReport:
    """The figures of a benchmark.

    Attributes:
        run: model, facts, mode and all hyperparameters, as in the manifest.
        before: all facts on the unedited model.
        methods: figures by the name of the method.
        comparisons: each method against each earlier one in the list, at the end.
        failures: facts that could not be asked or written, with the reason.
        unusable: records of the data set that could not be made into facts, with the reason.
        left_out: prompts and texts that a score was not measured on.
        references: number of reference texts over which the document frequencies of consistency were counted.
    """

    run: Mapping[str, Any]
    before: Row
    methods: Mapping[str, MethodReport]
    comparisons: tuple[Change, ...]
    failures: tuple[Mapping[str, Any], ...]
    unusable: tuple[Mapping[str, Any], ...]
    left_out: tuple[LeftOut, ...]
    references: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return {
            "run": dict(self.run),
            "before": self.before.to_dict(),
            "methods": {name: found.to_dict() for name, found in self.methods.items()},
            "comparisons": [found.to_dict() for found in self.comparisons],
            "failures": [dict(failure) for failure in self.failures],
            "unusable": [dict(record) for record in self.unusable],
            "left_out": [one.to_dict() for one in self.left_out],
            "references": self.references,
        }


class Results:
    """The lines of a journal, indexed by method and moment.

    Args:
        journal: all lines.
        facts: the facts that the lines refer to by index.
    """

    def __init__(self, journal: Journal, facts: Sequence[Fact]) -> None:
        self._facts: dict[tuple[str, str], list[Line]] = {}
        self._models: dict[tuple[str, str], list[Line]] = {}
        self._scores: dict[tuple[str, str], dict[int, FactScores]] = {}
        for _, line in sorted(journal.lines.items()):
            moment = line.method, line.when
            if line.fact == WHOLE:
                self._models.setdefault(moment, []).append(line)
                continue
            self._facts.setdefault(moment, []).append(line)
            if "error" not in line.found:
                self._scores.setdefault(moment, {})[line.fact] = unpacked(line.found, facts[line.fact])
        self.before = self.scores(UNEDITED, "before")

    def lines(self, method: str, when: str) -> list[Line]:
        """Return the lines of facts, ordered by chunk and fact."""
        return self._facts.get((method, when), [])

    def models(self, method: str, when: str) -> list[Line]:
        """Return the lines about the whole model, ordered by chunk."""
        return self._models.get((method, when), [])

    def scores(self, method: str, when: str) -> dict[int, FactScores]:
        """Return the scores by the index of the fact."""
        return self._scores.get((method, when), {})

    def row(self, name: str, method: str, when: str, only: Iterable[int] | None = None) -> Row:
        """Average over all facts, or over the indices in `only`."""
        found = self.scores(method, when)
        some = [found[i] for i in sorted(found if only is None else set(found) & set(only))]
        models = [line.found for line in self.models(method, when)]
        figures = {
            figure: [m[figure] for m in models if m.get(figure) is not None]
            for figure, metric in METRICS.items()
            if metric.function is None
        }
        return _row(name, some, figures)

    def curve(self, method: str) -> dict[int, str]:
        """Map the number of facts edited at each checkpoint to the checkpoint's name in the lines (`Line.when`)."""
        moments = [when for own, when in self._models if own == method and when != "after"]
        return dict(sorted((len({line.fact for line in self.lines(method, when)}), when) for when in moments))

    def retention(self, method: str) -> tuple[Row, ...]:
        """Group facts by how many were edited after them, in ten ranges; range 0 is right after their own edit.

        A fact measured at several checkpoints in one range counts once, with its mean over them.
        """
        after = self.scores(method, "after")
        made = {line.chunk for line in self.models(method, "after") if "error" not in line.found}
        written = [line for line in self.lines(method, "after") if line.chunk in made]
        sizes = Counter(line.chunk for line in written)
        ends = dict(zip(sizes, accumulate(sizes.values()), strict=True))
        edited, count = {line.fact: ends[line.chunk] for line in written}, len(written)
        width = max(1, math.ceil(count / BINS))
        found: dict[int, dict[int, list[FactScores]]] = {0: {fact: [one] for fact, one in after.items()}}
        for so_far, when in self.curve(method).items():
            for fact, one in self.scores(method, when).items():
                if so_far > edited[fact]:
                    age = math.ceil((so_far - edited[fact]) / width)
                    found.setdefault(age, {}).setdefault(fact, []).append(one)
        names = {i: str(i) if width == 1 or not i else f"{(i - 1) * width + 1} to {i * width}" for i in found}
        return tuple(_row(names[i], [_one(found[i][fact]) for fact in sorted(found[i])], {}) for i in sorted(found))


def _row(name: str, some: Sequence[FactScores], figures: Mapping[str, Sequence[float]]) -> Row:
    """Average the scores over facts, each of which occurs once, and the whole-model `figures` over edits."""
    means = {figure: fmean(values) if values else None for figure, values in figures.items()}
    bounds = {figure: bound for figure, values in figures.items() if (bound := interval(values, share=False))}
    scores = mean_scores((one.scores for one in some), **means)
    return Row(name, len(some), scores, {**intervals(columns(some)), **bounds}, mean_kinds(some))


def _one(some: Sequence[FactScores]) -> FactScores:
    """Average one fact's scores over several checkpoints."""
    return replace(some[-1], scores=mean_scores(one.scores for one in some), kinds=mean_kinds(some))


def change(names: tuple[str, str], first: Mapping[int, FactScores], second: Mapping[int, FactScores]) -> Change:
    """Compute the paired differences second − first over the facts that were measured in both."""
    both = sorted(set(first) & set(second))
    old, new = (columns([side[i] for i in both]) for side in (first, second))
    return Change(names, len(both), changes(old, new))


def report(
    journal: Journal,
    facts: Sequence[Fact],
    methods: Sequence[str],
    sequential: bool,
    run: Mapping[str, Any],
    unusable: Sequence[Mapping[str, Any]],
) -> BenchReport:
    """Compute all figures from the lines of a run.

    Args:
        journal: the lines.
        facts: the facts to be written.
        methods: names in the order of the tables.
        sequential: whether the edits stayed in the model.
        run: the manifest's description of the run.
        unusable: records of the data set that could not be made into facts.
    """
    results, last = Results(journal, facts), "end" if sequential else "after"
    before = results.row("before", UNEDITED, "before")
    found = {method: _method(results, method, last, sequential) for method in methods}
    ends = {method: results.scores(method, last) for method in methods}
    pairs = tuple(change(pair, ends[pair[0]], ends[pair[1]]) for pair in combinations(methods, 2))
    rows = [line.found["drift_rows"] for line in results.models(UNEDITED, "before") if "drift_rows" in line.found]
    measured, there = rows[0] if rows else (0, 0)
    return BenchReport(
        run=run,
        before=before,
        methods=found,
        comparisons=pairs,
        failures=tuple(_failures(results, facts, methods)),
        unusable=tuple(unusable),
        left_out=left_out(results.before.values(), (measured, there)),
        references=sum(len(fact.references) for fact in facts),
    )


def _method(results: Results, method: str, last: str, sequential: bool) -> MethodReport:
    knew = [i for i, one in results.before.items() if one.scores.knew]
    known = results.row("before", UNEDITED, "before", knew), results.row(method, method, last, knew)
    written = results.lines(method, "after")
    made = [line.found for line in results.models(method, "after") if "error" not in line.found]
    count = len(results.scores(method, "after"))
    not_finite = sum(line.found.get("finite") is False for line in written)
    ratios = [found["norm_ratio"] for found in made if found["norm_ratio"] is not None]
    spent = {name: sum(found["seconds"][name] for found in made) for name in ("choosing", "solving")}
    return MethodReport(
        after=results.row(method, method, "after"),
        end=results.row(method, method, "end") if sequential else None,
        known=known if knew else None,
        change=change(("before", method), results.before, results.scores(method, last)),
        curve=tuple(results.row(str(n), method, when) for n, when in results.curve(method).items()),
        retention=results.retention(method) if sequential else (),
        failed=sum("error" in line.found and line.found.get("finite") is not False for line in written),
        not_finite=not_finite,
        norm_ratio=(ratios[-1] if sequential else fmean(ratios)) if ratios else None,
        seconds={name: seconds / max(count, 1) for name, seconds in spent.items()},
    )


def _failures(results: Results, facts: Sequence[Fact], methods: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Yield the facts that could not be asked, then those that a method could not write."""

    def named(i: int, method: str | None, reason: str) -> dict[str, Any]:
        return {
            "fact": i,
            "case_id": facts[i].case_id,
            "subject": facts[i].subject,
            "method": method,
            "reason": reason,
        }

    for line in results.models(UNEDITED, "before"):
        for i, reason in line.found["problems"].items():
            yield named(int(i), None, reason)
    for method in methods:
        for line in results.lines(method, "after"):
            if "error" in line.found:
                yield named(line.fact, method, line.found["error"])
