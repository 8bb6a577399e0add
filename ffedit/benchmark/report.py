"""Compute the figures of a run from its journal: means over facts, intervals, differences, failures.

Everything is computed from the journal alone, in an order that does not depend on when a line was written: a run that
was interrupted, or shared by several processes, gives the same report as one that was not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from ffedit.algebra.bootstrap import Interval
from ffedit.benchmark.folder import UNEDITED, WHOLE, Journal, Line
from ffedit.benchmark.task import unpack
from ffedit.errors import EditError
from ffedit.evaluator import METRICS, FactScores, LeftOut, Scores, headline_scores, left_out, mean_scores
from ffedit.evaluator.intervals import changes, intervals
from ffedit.evaluator.scores import columns, mean_kinds, subjects
from ffedit.facts.fact import Fact, show
from ffedit.facts.text import counted
from ffedit.notebook import Displayed


@dataclass(frozen=True)
class Row:
    """Means over a set of facts at one moment of a run: a row of a table."""

    name: str
    facts: int  # number of facts measured
    scores: Scores  # means; None where nothing was measured
    intervals: Mapping[str, Interval]  # 95 % intervals by score and by kind, for two facts or more
    kinds: Mapping[str, float]  # means by the data set's kinds of probes, as in `FactScores`

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        bounds = {name: [bound.low, bound.high] for name, bound in self.intervals.items() if not bound.is_point}
        row = {"name": self.name, "facts": self.facts, "scores": self.scores.to_dict(), "intervals": bounds}
        return {**row, "kinds": dict(self.kinds)} if self.kinds else row


@dataclass(frozen=True)
class Change:
    """Paired differences between two measurements of the same facts, second − first."""

    names: tuple[str, str]  # labels of the two measurements
    facts: int  # number of facts measured in both
    differences: Mapping[str, Interval]  # mean and interval by score and by kind

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON; the ends of an interval are null where draws show no spread."""
        differences = {
            name: [d.mean, None, None] if d.is_point else [d.mean, d.low, d.high]
            for name, d in self.differences.items()
        }
        return {"names": list(self.names), "facts": self.facts, "differences": differences}


@dataclass(frozen=True)
class MethodReport:
    """Figures of one method."""

    after: Row  # each fact right after its own edit
    end: Row | None  # each fact after the last edit; None unless sequential
    # The facts whose old object the model knew, before and at the end; None where there are none.
    known: tuple[Row, Row] | None
    change: Change  # the end against before
    curve: tuple[Row, ...]  # sequential only: all facts edited so far, one row per checkpoint, named by their number
    failed: int  # number of facts that could not be written
    not_finite: int  # number of facts not measured because the edit or the edited model's output is NaN or infinite
    norm_ratio: float | None  # ‖W − W₀‖ / ‖W₀‖, mean over edits; of a sequence, at its end
    # without measurements: seconds of `choosing` values that methods share, counted to each of them; and of `solving`,
    # which is everything else, and all of an edit whose values are its own (in a sequence, or in several layers)
    seconds_per_fact: Mapping[str, float]

    @property
    def last(self) -> Row:
        """Return the row that methods are compared by: the end of a sequence, else each fact after its own edit."""
        return self.end or self.after


@dataclass(frozen=True)
class BenchReport(Displayed):
    """Figures of a benchmark.

    Attributes:
        run: model, facts, mode and all hyperparameters, as in the manifest.
        before: all facts on the unedited model.
        methods: figures by the name of the method.
        comparisons: differences of each method from each earlier one in the list, at the end.
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

    def __repr__(self) -> str:
        lines = [f"BenchReport on {counted(self.before.facts, 'fact')}, {self.run['mode']}"]
        for name, method in self.methods.items():
            scores = {score: getattr(method.last.scores, score) for score in headline_scores()}
            lines.append(f"{name}: " + ", ".join(f"{n} {v:.2f}" for n, v in scores.items() if v is not None))
        return "\n  ".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    """Return plain JSON: fields by name, sequences as lists."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _index(name: str) -> int:
    """Return the index of a fact from its name in JSON; EditError for another name."""
    if not re.fullmatch(r"\d{1,9}", name, re.ASCII):
        raise EditError(f"the results are of fact {show(name)}; a number was expected")
    return int(name)


class Results:
    """Lines of a journal, indexed by method and moment; `facts` are those that they refer to by index."""

    def __init__(self, journal: Journal, facts: Sequence[Fact]) -> None:
        self.lines: dict[tuple[str, str], list[Line]] = defaultdict(list)  # of facts, ordered by chunk and fact
        self.models: dict[tuple[str, str], list[Line]] = defaultdict(list)  # about the whole model, ordered by chunk
        self.scores: dict[tuple[str, str], dict[int, FactScores]] = defaultdict(dict)  # by the index of the fact
        for _, line in sorted(journal.lines.items()):
            indices = [line.fact, *(_index(name) for name in line.measured.get("problems", ()))]
            if not all(WHOLE <= index < len(facts) for index in indices):
                raise EditError(f"the results are of fact {max(indices)}; the run has {counted(len(facts), 'fact')}")
            moment = line.method, line.when
            (self.models if line.fact == WHOLE else self.lines)[moment].append(line)
            if line.fact != WHOLE and "error" not in line.measured:
                self.scores[moment][line.fact] = unpack(line.measured, facts[line.fact])
        self.before = self.scores.get((UNEDITED, "before"), {})

    def row(self, name: str, method: str, when: str, only: Iterable[int] | None = None) -> Row:
        """Average over all facts, and over the model's lines; or over the indices in `only`, without the model's."""
        scores = self.scores.get((method, when), {})
        indices = sorted(scores if only is None else set(scores) & set(only))
        # A model's line is measured on an edit, which may have written other facts, too.
        models = [line.measured for line in self.models.get((method, when), ()) if only is None]
        of_model = [score for score, metric in METRICS.items() if metric.function is None]
        values = {score: [model[score] for model in models if model.get(score) is not None] for score in of_model}
        return _row(name, [scores[i] for i in indices], values)

    def curve(self, method: str) -> dict[int, str]:
        """Map the number of facts edited at each checkpoint to the checkpoint's name in the lines (`Line.when`)."""
        moments = [when for name, when in self.models if name == method and when != "after"]
        return dict(sorted((len({line.fact for line in self.lines.get((method, when), ())}), when) for when in moments))


def _row(name: str, facts: Sequence[FactScores], of_model: Mapping[str, Sequence[float]]) -> Row:
    """Average the scores over facts, each of which occurs once, and the scores `of_model` over edits."""
    means = {score: fmean(values) for score, values in of_model.items() if values}
    bounds = intervals(columns(facts), subjects=subjects(facts))
    for score, values in of_model.items():
        bounds |= intervals({score: values})
    return Row(name, len(facts), mean_scores((fact.scores for fact in facts), **means), bounds, mean_kinds(facts))


def change(names: tuple[str, str], first: Mapping[int, FactScores], second: Mapping[int, FactScores]) -> Change:
    """Compute the paired differences second − first over the facts that were measured in both."""
    both = sorted(set(first) & set(second))
    old, new = (columns([side[i] for i in both]) for side in (first, second))
    return Change(names, len(both), changes(old, new, subjects([first[i] for i in both])))


def report(
    journal: Journal,
    facts: Sequence[Fact],
    methods: Sequence[str],
    sequential: bool,
    run: Mapping[str, Any],
    unusable: Sequence[Mapping[str, Any]],
) -> BenchReport:
    """Compute all figures from the lines of a run; `methods` are in the order of the tables."""
    results, last = Results(journal, facts), "end" if sequential else "after"
    ends = {method: results.scores.get((method, last), {}) for method in methods}
    return BenchReport(
        run=run,
        before=results.row("before", UNEDITED, "before"),
        methods={method: _method(results, method, last, sequential) for method in methods},
        comparisons=tuple(change(pair, ends[pair[0]], ends[pair[1]]) for pair in combinations(methods, 2)),
        failures=tuple(_failures(results, facts, methods)),
        unusable=tuple(unusable),
        left_out=left_out(results.before.values()),
        references=sum(len(fact.references) for fact in facts),
    )


def _method(results: Results, method: str, last: str, sequential: bool) -> MethodReport:
    knew = [i for i, fact in results.before.items() if fact.scores.knew]
    known = results.row("before", UNEDITED, "before", knew), results.row(method, method, last, knew)
    lines, models = results.lines.get((method, "after"), []), results.models.get((method, "after"), [])
    edits = {line.chunk: line.measured for line in models if "error" not in line.measured}
    written = sum(line.chunk in edits for line in lines)
    ratios = [model["norm_ratio"] for model in edits.values() if model["norm_ratio"] is not None]
    return MethodReport(
        after=results.row(method, method, "after"),
        end=results.row(method, method, "end") if sequential else None,
        known=known if knew else None,
        change=change(("before", method), results.before, results.scores.get((method, last), {})),
        curve=tuple(results.row(str(n), method, when) for n, when in results.curve(method).items()),
        failed=sum("error" in line.measured and line.measured.get("finite") is not False for line in lines),
        not_finite=sum(line.measured.get("finite") is False for line in lines),
        norm_ratio=(ratios[-1] if sequential else fmean(ratios)) if ratios else None,
        seconds_per_fact={
            name: sum(model["seconds"][name] for model in edits.values()) / max(written, 1)
            for name in ("choosing", "solving")
        },
    )


def _failures(results: Results, facts: Sequence[Fact], methods: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Yield the facts that could not be asked, then those that a method could not write."""

    def failure(i: int, method: str | None, reason: str) -> dict[str, Any]:
        fact = facts[i]
        return {"fact": i, "case_id": fact.case_id, "subject": fact.subject, "method": method, "reason": reason}

    for line in results.models.get((UNEDITED, "before"), ()):
        yield from (failure(_index(i), None, reason) for i, reason in line.measured["problems"].items())
    for method in methods:
        lines = [line for line in results.lines.get((method, "after"), ()) if "error" in line.measured]
        yield from (failure(line.fact, method, line.measured["error"]) for line in lines)
