"""Report on an edit: the scores before and after it, their intervals, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import compress

from ffedit.algebra.bootstrap import Interval
from ffedit.evaluator import intervals
from ffedit.evaluator.scores import (
    FactScores,
    LeftOut,
    Scores,
    columns,
    headline_scores,
    mean_kinds,
    mean_scores,
    subjects,
)
from ffedit.evaluator.verdict import Verdict, judge
from ffedit.facts.text import counted, number
from ffedit.notebook import Displayed


@dataclass(frozen=True)
class Report(Displayed):
    """The same measurements twice; `after` is None where only the unedited model was measured."""

    before: Scores
    after: Scores | None
    facts_before: tuple[FactScores, ...]
    facts_after: tuple[FactScores, ...] | None
    left_out: tuple[LeftOut, ...] = ()

    def __repr__(self) -> str:
        sides = [side for side in (self.before, self.after) if side is not None]
        lines = [f"Report on {counted(len(self.facts_before), 'fact')}{', before → after' if self.after else ''}"]
        for name in headline_scores():
            values = [getattr(side, name) for side in sides]
            if any(value is not None for value in values):
                shown = " → ".join("not measured" if value is None else number(value) for value in values)
                lines.append(f"{name:<14}  {shown}")
        return "\n  ".join(lines)

    @cached_property
    def verdict(self) -> Verdict:
        """Return what became of the edit: whether it took, and what it damaged."""
        return judge(self.before, self.after, self.facts_before, self.facts_after, self.intervals_after)

    @cached_property
    def intervals_before(self) -> dict[str, Interval]:
        """Return, by score and by kind as in `kinds`, the 95 % interval of the mean over two measured facts or more."""
        return intervals.intervals(columns(self.facts_before), subjects=subjects(self.facts_before))

    @cached_property
    def intervals_after(self) -> dict[str, Interval]:
        """Return the intervals of the scores after the edit."""
        return intervals.intervals(columns(self.facts_after or ()), subjects=subjects(self.facts_after or ()))

    @cached_property
    def changes(self) -> dict[str, Interval]:
        """Return the interval of after − before by score and by kind, paired by fact."""
        if not self.after:
            return {}
        sides = columns(self.facts_before), columns(self.facts_after or ())
        return intervals.changes(*sides, subjects=subjects(self.facts_before))

    @cached_property
    def known(self) -> tuple[Scores, Scores | None]:
        """Scores before and after of the facts whose old object the unedited model said."""
        knew = [bool(fact.scores.knew) for fact in self.facts_before]
        before = mean_scores(fact.scores for fact in compress(self.facts_before, knew))
        after = None if self.facts_after is None else mean_scores(f.scores for f in compress(self.facts_after, knew))
        return before, after

    @property
    def kinds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Locality and portability by kind, before and after; means over the facts that have probes of the kind."""
        return mean_kinds(self.facts_before), mean_kinds(self.facts_after or ())

    @property
    def references(self) -> int:
        """Return the number of reference texts behind the document frequencies that `consistency` uses."""
        return sum(len(fact.fact.references) for fact in self.facts_before)
