"""What the comparisons share: facts of a file, one edit in the weights for a while, its scores, and paired differences.

An edit is a mapping of addresses to changes, whoever computed it, so that ffedit's and a rival's are written and scored
alike. The scores before are asked once for a fact. Intervals are over subjects, as the evaluator's
(`ffedit.evaluator.intervals`); what is compared is compared on the same facts and the same draws.
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

# Shares per fact: by what greedy generation says, of which the harmonic mean is (of their means), and, as published, by
# which of two objects is likelier.
FOUR = ("generation", "paraphrase_generation", "neighbor_generation", "same_subject")
RATES = (*FOUR, "efficacy", "paraphrase", "specificity", "portability", "degenerate")
SEED, DRAWS = 0, 2000
Columns = Mapping[str, Sequence[Any]]


def facts_in(data: Path, split: str | None = None, limit: int | None = None, probed: bool = False) -> list[Fact]:
    """Return the first facts of a file in any form that ffedit reads; of a file with splits, those of one.

    `probed` takes only those of whose subject other facts are asked.
    """
    facts = facts_of(split, None, data) if split is not None else ffedit.read_facts(data)
    return [fact for fact in facts if fact.same_subject or not probed][:limit]


@contextmanager
def written(editable: Editable, updates: Mapping[ffedit.Address, Any]) -> Iterator[None]:
    """In the block, `updates` are in the weights; afterwards these are what they were, bit for bit."""
    memories = [editable.memories[at] for at in updates]
    with restored(memories):
        for memory, delta in zip(memories, updates.values(), strict=True):
            memory.write_(delta)
        yield


class Examiner:
    """Scores facts before and after edits; what is asked before is asked once for each group of facts."""

    def __init__(self, editable: Editable) -> None:
        self.editable = editable
        self._evaluations: dict[tuple[Fact, ...], Evaluation] = {}

    def of(self, facts: Sequence[Fact]) -> Evaluation:
        """Return the questions of facts that are edited together, and their scores before."""
        if tuple(facts) not in self._evaluations:
            self._evaluations[tuple(facts)] = Evaluation(self.editable, facts)
        return self._evaluations[tuple(facts)]

    def forget(self) -> None:
        """Hold no answers any more: of hundreds of facts they would fill the memory."""
        self._evaluations.clear()

    def scores(
        self, facts: Sequence[Fact], updates: Mapping[ffedit.Address, Any] | None = None
    ) -> list[tuple[dict[str, float | None], dict[str, float | None], str]]:
        """For each fact its rates before and after, and what is said to its prompt; None: as the model is now."""
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
    """Seconds of the block: on the clock, and of this process's processors (which a busy machine changes less)."""
    clock, processor = time.perf_counter(), time.process_time()
    yield
    into |= {"seconds": time.perf_counter() - clock, "processor_seconds": time.process_time() - processor}


def facts_done(journal: Journal) -> set[str]:
    """Return the facts that are in a journal."""
    return {line["fact"] for line in journal.lines}


def name_of(fact: Fact) -> str:
    """By which a fact is known in a journal."""
    return f"{fact.text} {fact.target}"


def named(fact: Fact) -> dict[str, str]:
    """Return what a line of a journal says of its fact."""
    return {"fact": name_of(fact), "subject": fact.subject}


def columns_of(lines: Sequence[Mapping[str, Any]], facts: Sequence[str], when: str = "after") -> Columns:
    """By measure, its value for each of `facts`, which are all there, and their subjects; seconds are the edit's."""
    by_fact = {line["fact"]: line for line in lines}
    some = [by_fact[fact] for fact in facts]
    found = {name: [line[when][name] for line in some] for name in RATES}
    return {**found, **{name: [line[name] for line in some] for name in ("subject", "seconds", "processor_seconds")}}


def interval(columns: Columns, name: str, against: Columns | None = None) -> bootstrap.Interval | None:
    """A mean over facts with its 95 % interval over subjects; with `against`, the paired difference to it.

    `against` is of the same facts. None where nothing was measured.
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


def shown(found: bootstrap.Interval | None, signed: bool = False, places: int = 3) -> str:
    """A figure with its interval, or a dash."""
    if found is None:
        return "-"
    form = f"{'+' if signed else ''}.{places}f"
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _means(columns: Columns, names: Sequence[str], clusters: np.ndarray) -> np.ndarray:
    """Return the mean of a measure, or the harmonic mean of those measured: over all facts, then in each draw."""
    values = np.stack([array for name in names if not np.isnan(array := _array(columns[name])).all()], 1)
    means = np.vstack([np.nanmean(values, 0), bootstrap.mean_draws(values, SEED, DRAWS, clusters)])
    with np.errstate(divide="ignore"):
        return means[:, 0] if len(names) == 1 else np.asarray(values.shape[1] / (1 / means).sum(1))
