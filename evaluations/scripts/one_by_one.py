"""Helpers of the comparisons: facts of a file, an edit that is in the weights for a block, scores, paired differences.

An edit is a mapping of addresses to changes, so that ffedit's and a rival's are written and scored alike. The scores
before are computed once for each fact. Intervals are over subjects, like the evaluator's
(`ffedit.evaluator.intervals`); paired differences use the same facts and the same draws.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import facts_of

import ffedit
from ffedit import Editable, Fact
from ffedit.algebra import bootstrap
from ffedit.editor.edit import restored
from ffedit.evaluator import Evaluation, Scores
from ffedit.evaluator.intervals import changes, intervals
from ffedit.files.resuming import Journal

# Rates of a fact. Those of FOUR are by greedy generation; the harmonic mean is that of their means. The published ones
# are by which of two objects is likelier.
FOUR = ("generation", "paraphrase_generation", "neighbor_generation", "same_subject")
RATES = (*FOUR, "efficacy", "paraphrase", "specificity", "portability", "degenerate")
SEED, DRAWS = 0, 2000
Columns = Mapping[str, Sequence[Any]]


def facts_in(data: Path, split: str | None = None, limit: int | None = None, probed: bool = False) -> list[Fact]:
    """Return the first facts of a file in any form that ffedit reads; with `split`, the first ones of that split.

    `probed` takes only facts whose subject has other facts to ask.
    """
    facts = facts_of(split, None, data) if split is not None else ffedit.read_facts(data)
    return [fact for fact in facts if fact.same_subject or not probed][:limit]


@contextmanager
def written(editable: Editable, updates: Mapping[ffedit.Address, Any]) -> Iterator[None]:
    """In the block, `updates` are in the weights, which afterwards are as before, bit for bit."""
    memories = [editable.memories[at] for at in updates]
    with restored(memories):
        for memory, delta in zip(memories, updates.values(), strict=True):
            memory.write_(delta)
        yield


class Examiner:
    """Scores facts before and after edits; the scores before are computed once for each group of facts."""

    def __init__(self, editable: Editable) -> None:
        self.editable = editable
        self._evaluations: dict[tuple[Fact, ...], Evaluation] = {}

    def of(self, facts: Sequence[Fact]) -> Evaluation:
        """Return the evaluation of facts that are edited together, with their scores before."""
        if tuple(facts) not in self._evaluations:
            self._evaluations[tuple(facts)] = Evaluation(self.editable, facts)
        return self._evaluations[tuple(facts)]

    def forget(self) -> None:
        """Drop all answers, because those of hundreds of facts would fill the memory."""
        self._evaluations.clear()

    def scores(
        self, facts: Sequence[Fact], updates: Mapping[ffedit.Address, Any] | None = None
    ) -> list[tuple[dict[str, float | None], dict[str, float | None], str]]:
        """Return for each fact its rates before and after `updates`, if any, and the model's answer to its prompt."""
        evaluation = self.of(facts)
        with written(self.editable, updates or {}):
            after = evaluation.scores()
        pairs = zip(evaluation.before, after, strict=True)
        return [(rates(before.scores), rates(now.scores), now.says) for before, now in pairs]


def rates(scores: Scores) -> dict[str, float | None]:
    """Return the scores that are compared, by name."""
    return {name: getattr(scores, name) for name in RATES}


@contextmanager
def timed(into: dict[str, float]) -> Iterator[None]:
    """Add seconds of the block to `into`: by the clock, and processor seconds, which a busy machine changes less."""
    clock, processor = time.perf_counter(), time.process_time()
    yield
    into |= {"seconds": time.perf_counter() - clock, "processor_seconds": time.process_time() - processor}


def facts_done(journal: Journal) -> set[str]:
    """Return the facts that are in a journal."""
    return {line["fact"] for line in journal.lines}


def name_of(fact: Fact) -> str:
    """Return the name of a fact in a journal."""
    return f"{fact.text} {fact.target}"


def named(fact: Fact) -> dict[str, str]:
    """Return the entries of a journal's line that identify its fact."""
    return {"fact": name_of(fact), "subject": fact.subject}


def columns_of(lines: Sequence[Mapping[str, Any]], facts: Sequence[str], when: str = "after") -> Columns:
    """Return by name the measures of `facts`, all of which have a line, their subjects, and the edits' seconds."""
    by_fact = {line["fact"]: line for line in lines}
    chosen = [by_fact[fact] for fact in facts]
    columns = {name: [line[when][name] for line in chosen] for name in RATES}
    return columns | {name: [line[name] for line in chosen] for name in ("subject", "seconds", "processor_seconds")}


def interval(columns: Columns, name: str, against: Columns | None = None) -> bootstrap.Interval | None:
    """Return a mean over facts with its 95 % interval over subjects, or its paired difference from `against`.

    `against` has the same facts. None if nothing was measured.
    """
    subjects = columns["subject"]
    sides = [columns] if against is None else [columns, against]
    if any(name != "harmonic" and np.isnan(_array(side[name])).all() for side in sides):
        return None
    if name in RATES:
        if against is None:
            return intervals({name: columns[name]}, subjects=subjects).get(name)
        return changes({name: against[name]}, {name: columns[name]}, subjects).get(name)
    drawn = [_means(side, FOUR if name == "harmonic" else (name,), bootstrap.clusters_of(subjects)) for side in sides]
    values = drawn[0] - drawn[1] if len(drawn) > 1 else drawn[0]
    return bootstrap.percentile_interval(float(values[0]), values[1:])


def shown(figure: bootstrap.Interval | None, signed: bool = False, places: int = 3) -> str:
    """Return a figure with its interval, or a dash."""
    if figure is None:
        return "-"
    form = f"{'+' if signed else ''}.{places}f"
    return f"{figure.mean:{form}} [{figure.low:{form}}, {figure.high:{form}}]"


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _means(columns: Columns, names: Sequence[str], clusters: np.ndarray) -> np.ndarray:
    """Return the mean of a measure, or the harmonic mean of those measured: over all facts, then in each draw."""
    values = np.stack([array for name in names if not np.isnan(array := _array(columns[name])).all()], 1)
    means = np.vstack([np.nanmean(values, 0), bootstrap.mean_draws(values, SEED, DRAWS, clusters)])
    with np.errstate(divide="ignore"):
        return means[:, 0] if len(names) == 1 else np.asarray(values.shape[1] / (1 / means).sum(1))
