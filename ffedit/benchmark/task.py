"""Steps that every mode of a benchmark shares: score facts before and after an edit, and write the scores down.

Where an edit cannot be computed or applied, or the edited model's output is not finite, the reason is recorded instead
of scores; it is counted and listed in the report, and the run continues. Where memory fails, which tells nothing about
the edit, the run ends; it can be continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ffedit.algebra.key_moments import KeyMoments
from ffedit.benchmark.folder import UNEDITED, WHOLE, Journal, Line
from ffedit.benchmark.settings import Mode
from ffedit.editor.config import EditConfig
from ffedit.editor.methods import METHODS
from ffedit.errors import FactError, FFEditError, ModelError, ProcessError
from ffedit.evaluator import Evaluation, FactScores, GenericText
from ffedit.evaluator.prompts import questions
from ffedit.facts.fact import Fact
from ffedit.inference.batching import out_of_memory
from ffedit.inference.distributed import ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.memory import Address
from ffedit.progress import Progress


@dataclass(frozen=True, eq=False)
class Task:
    """A running benchmark of `facts` by each of `methods`, on the unedited model `editable`."""

    editable: Editable
    facts: Sequence[Fact]
    methods: Sequence[str]
    mode: Mode
    layers: Sequence[int]  # layers to edit, in rising order; single-layer methods write to the last
    configs: Mapping[str, EditConfig]
    stats: Mapping[Address, KeyMoments]  # second moments of the unedited model's keys
    text: GenericText
    full: bool
    weights: Mapping[str, float]  # weights of the terms of all facts' reference texts
    folder: Path
    journal: Journal
    process_group: ProcessGroup  # the processes that measure each group together
    own: Sequence[int]  # indices of the facts that this process measures by each method
    progress: Progress  # callback for the progress of the run, and of a single edit

    def layers_of(self, method: str) -> Sequence[int]:
        """Return the layers that a method writes to."""
        return self.layers if METHODS[method].layers else self.layers[-1:]

    def record(
        self, method: str, when: str, chunk: int, facts: Mapping[int, Mapping[str, Any]], model: Mapping[str, Any]
    ) -> None:
        """Write a group of lines to the results and report how many facts are done; for the arguments see `Line`."""
        lines = [Line(method, when, chunk, i, measured) for i, measured in facts.items()]
        self.journal.add([*lines, Line(method, when, chunk, WHOLE, model)])
        if when == "after":
            indices = set(self.own)
            keys = [key for key in self.journal.lines if key[:2] == (method, when) and key[3] in indices]
            self.progress(method, sum(self.journal.done(*key[:3]) for key in keys), len(indices))

    def record_failure(self, facts: Sequence[int], method: str, chunk: int, error: FFEditError) -> None:
        """Record why an edit could not be made, for each of its facts; raise failures of memory or of a process."""
        if isinstance(error, ProcessError) or out_of_memory(error):
            raise error
        reason = {"error": str(error), **({"finite": False} if isinstance(error, ModelError) else {})}
        self.record(method, "after", chunk, dict.fromkeys(facts, reason), reason)


class Scorer:
    """Scores of facts that are edited together, with their prompts prepared on the unedited model.

    A fact that does not fit the model goes to `problems`, by its index, with the reason; `facts` are the indices of the
    others. Each process evaluates its share of them; an error in one process is raised in all.
    """

    def __init__(self, task: Task, facts: Sequence[int]) -> None:
        self._task, self.facts, group = task, facts, task.process_group
        self.problems: dict[int, str] = {}
        while True:
            try:
                self._evaluation = group.in_all(self._prepared)
                return
            except FactError:
                shares = group.gather(group.in_all(self._own_problems))
                if not any(shares):
                    raise
            # What is asked of a fact depends on the others, so that without these another one may not fit.
            self.problems |= {i: reason for share in shares for i, reason in share}
            self.facts = [i for i in facts if i not in self.problems]

    def _prepared(self) -> Evaluation | None:
        task, positions = self._task, self._task.process_group.share(range(len(self.facts)))
        self._own = {self.facts[position]: position for position in positions}
        if not positions:
            return None
        edited = [task.facts[i] for i in self.facts]
        return Evaluation(task.editable, edited, task.progress, task.full, positions, weights=task.weights)

    def _own_problems(self) -> list[tuple[int, str]]:
        edited, problems = [self._task.facts[i] for i in self.facts], []
        for i in self._own:
            try:
                questions(self._task.editable, [self._task.facts[i]], edited, self._task.full)
            except FactError as error:
                problems.append((i, str(error)))
        return problems

    def record_before(self, chunk: int) -> None:
        """Record the scores of the unedited model unless the results have them already."""
        task = self._task
        if task.journal.done(UNEDITED, "before", chunk):
            return
        scores = self._evaluation.before if self._evaluation else ()
        shares = task.process_group.gather([[i, pack(fact)] for i, fact in zip(self._own, scores, strict=True)])
        problems = {str(i): reason for i, reason in self.problems.items()}
        model = {"perplexity": task.text.perplexity, "problems": problems}
        task.record(UNEDITED, "before", chunk, _in_order(shares, self.facts), model)

    def record_edited(self, facts: Sequence[int], method: str, when: str, chunk: int, model: Mapping[str, Any]) -> None:
        """Score facts on the model in its current state and record them, or that it is not finite, as one group.

        For the arguments see `Line`; `model` has further entries for the line about the model.
        """
        task, group, share = self._task, self._task.process_group, [i for i in facts if i in self._own]

        def measured() -> tuple[Sequence[FactScores], float | None, float | None]:
            scores: Sequence[FactScores] = ()
            if self._evaluation and share:
                scores = self._evaluation.scores(only=[self._own[i] for i in share])
            if task.mode.sequential and when == "after":  # a sequence measures the text at checkpoints only
                return scores, None, None
            return scores, *task.text.measure()

        try:
            scores, drift, perplexity = group.in_all(measured)
        except ModelError as error:
            if out_of_memory(error):
                raise
            reason = {"error": str(error), "finite": False}
            unmeasured = dict.fromkeys(facts, reason)
            task.record(method, when, chunk, unmeasured, {**model, "reason": str(error), "finite": False})
        else:
            shares = group.gather([[i, pack(fact)] for i, fact in zip(share, scores, strict=True)])
            by_fact = _in_order(shares, facts)
            task.record(method, when, chunk, by_fact, {**model, "drift": drift, "perplexity": perplexity})


def _in_order(shares: Sequence[Sequence[Any]], facts: Sequence[int]) -> dict[int, Any]:
    """Combine [fact, value] pairs of all processes into one mapping, in the order of `facts`."""
    values = {i: value for share in shares for i, value in share}
    return {i: values[i] for i in facts}


def pack(scores: FactScores) -> dict[str, Any]:
    """Return one fact's scores as plain JSON, with only the fact's case_id, subject and target; see `unpack`."""
    packed = replace(scores, asked=()).to_dict()
    fact = packed.pop("fact")
    return {**{name: fact[name] for name in ("case_id", "subject", "target") if name in fact}, **packed}


def unpack(packed: Mapping[str, Any], fact: Fact) -> FactScores:
    """Return the scores that `pack` returned as plain JSON."""
    return FactScores.from_dict({**packed, "fact": fact.to_dict()})
