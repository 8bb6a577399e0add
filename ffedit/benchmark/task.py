"""The steps that every mode of a benchmark shares: score facts before and after an edit, and write the scores down.

Where an edit cannot be computed or applied, or the edited model's output is not finite, the reason is recorded instead
of scores; it is counted and listed in the report, and the run continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffedit.algebra.key_moments import KeyMoments
from ffedit.benchmark.journal import UNEDITED, WHOLE, Journal, Line, needed
from ffedit.benchmark.plan import Mode
from ffedit.benchmark.running import Running
from ffedit.editor import METHODS, Edit, EditConfig
from ffedit.errors import EditError, FactError, FFEditError, ModelError
from ffedit.evaluator import Evaluation, FactScores, GenericText
from ffedit.facts.fact import Fact
from ffedit.loading.distributed import ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.memory import Address
from ffedit.progress import Progress


@dataclass(frozen=True, eq=False)
class Task:
    """The state of a running benchmark.

    Attributes:
        editable: the unedited model.
        facts: the facts to write.
        methods: names of the methods, measured one after another.
        mode: how many facts are written at once, and whether edits accumulate.
        layers: layers to edit, in rising order; single-layer methods write to the last.
        configs: hyperparameters by method.
        stats: second moments of the unedited model's keys.
        text: generic text for drift and perplexity.
        full: also measure the slowest scores (`Evaluation`).
        weights: weights of the terms of all facts' reference texts.
        folder: results folder.
        journal: the results so far.
        process_group: the processes that measure each group together.
        running: reports the mean scores so far.
        progress: callback for the progress of a single edit.
    """

    editable: Editable
    facts: Sequence[Fact]
    methods: Sequence[str]
    mode: Mode
    layers: Sequence[int]
    configs: Mapping[str, EditConfig]
    stats: Mapping[Address, KeyMoments]
    text: GenericText
    full: bool
    weights: Mapping[str, float]
    folder: Path
    journal: Journal
    process_group: ProcessGroup
    running: Running
    progress: Progress

    def layers_of(self, method: str) -> Sequence[int]:
        """Return the layers that a method writes to."""
        return self.layers if METHODS[method].layers else self.layers[-1:]

    def measure(
        self, asked: Asked, some: Sequence[int], method: str, when: str, chunk: int, about: Mapping[str, Any]
    ) -> None:
        """Score facts on the model in its current state and record them as one group, or that it is not finite.

        Args:
            asked: the prompts, prepared on the unedited model.
            some: indices of facts.
            method: the method that edited the model.
            when: see `Line`.
            chunk: index of the last edit.
            about: further entries for the line about the model.
        """
        mine = [place for place in (asked.places[i] for i in some) if place in asked.mine]
        found: Sequence[FactScores] = ()
        problem, drift, perplexity = None, None, None
        try:
            if asked.evaluation and mine:
                found = asked.evaluation.scores(only=mine)
            if not (self.mode.sequential and when == "after"):  # a sequence measures these at checkpoints only
                drift, perplexity = self.text.measure()
        except ModelError as error:
            problem = str(error)
        told = self.process_group.gather([problem, [packed(one) for one in found]])
        problem = next((problem for problem, _ in told if problem), None)
        if problem is not None:
            bad = {"finite": False}
            self.note(
                method, when, chunk, {i: {"error": problem, **bad} for i in some}, {**about, "reason": problem, **bad}
            )
            return
        by_place = asked.gathered([scores for _, scores in told], some)
        self.note(method, when, chunk, by_place, {**about, "drift": drift, "perplexity": perplexity})

    def failed(self, some: Sequence[int], method: str, chunk: int, error: FFEditError) -> None:
        """Record for each fact of an edit that could not be made the reason why."""
        why = {"error": str(error), **({"finite": False} if isinstance(error, ModelError) else {})}
        self.note(method, "after", chunk, dict.fromkeys(some, why), why)

    def note(
        self, method: str, when: str, chunk: int, facts: Mapping[int, Mapping[str, Any]], model: Mapping[str, Any]
    ) -> None:
        """Write a group of lines to the journal and report the scores so far."""
        lines = [Line(method, when, chunk, i, found) for i, found in facts.items()]
        self.journal.add([*lines, Line(method, when, chunk, WHOLE, model)])
        if when == "after":
            self.running.add(method, [self.journal.lines[line.key].found for line in lines])


class Asked:
    """The prompts of facts that are edited together, prepared on the unedited model by a group of processes.

    A fact that does not fit the model goes to `problems`; each process evaluates its share of the others.

    Args:
        task: the benchmark.
        some: indices of facts.

    Attributes:
        problems: by the fact's index, why it cannot be asked.
        places: by the fact's index, its position among the facts that can be asked.
        mine: the positions that this process evaluates, in order.
        evaluation: scores this process's share; None where the share is empty.
    """

    def __init__(self, task: Task, some: Sequence[int]) -> None:
        self.problems: dict[int, str] = {}
        self.places: dict[int, int] = {}
        self.mine: Mapping[int, None] = {}
        self.evaluation: Evaluation | None = None
        self._task = task
        try:
            self._prepare(some)
        except FactError:
            self.problems = {i: reason for i in task.process_group.share(some) if (reason := self._problem(i))}
        self.problems = {
            i: reason for part in task.process_group.gather(list(self.problems.items())) for i, reason in part
        }
        if self.problems:
            self._prepare([i for i in some if i not in self.problems])

    def _prepare(self, some: Sequence[int]) -> None:
        task, self.places = self._task, {i: place for place, i in enumerate(some)}
        self.mine = dict.fromkeys(task.process_group.share(range(len(some))))
        if self.mine:
            facts = [task.facts[i] for i in some]
            self.evaluation = Evaluation(
                task.editable, facts, task.progress, task.full, list(self.mine), weights=task.weights
            )

    def _problem(self, i: int) -> str | None:
        try:
            Evaluation(self._task.editable, [self._task.facts[i]])
        except FactError as error:
            return str(error)
        return None

    def note_before(self, chunk: int) -> None:
        """Record the scores of the unedited model unless the journal has them already."""
        task = self._task
        if not task.journal.done(UNEDITED, "before", chunk):
            told = task.process_group.gather([packed(one) for one in self.evaluation.before] if self.evaluation else [])
            about = {
                "perplexity": task.text.perplexity,
                "drift_rows": list(task.text.drift_rows),
                "problems": {str(i): why for i, why in self.problems.items()},
            }
            task.note(UNEDITED, "before", chunk, self.gathered(told, list(self.places)), about)

    def gathered(self, told: Sequence[Sequence[Any]], some: Sequence[int]) -> dict[int, Any]:
        """Combine what each process returned for its share of the facts `some` into one dict by index, in order."""
        shares = [
            [i for i in some if self.places[i] % self._task.process_group.size == rank] for rank in range(len(told))
        ]
        found = {i: one for share, part in zip(shares, told, strict=True) for i, one in zip(share, part, strict=True)}
        return {i: found[i] for i in some}


def packed(scored: FactScores) -> dict[str, Any]:
    """Return one fact's scores as plain JSON, with only the fact's case_id, subject and target; see `unpacked`."""
    found = scored.to_dict()
    fact = found.pop("fact")
    return {**{name: fact[name] for name in ("case_id", "subject", "target") if name in fact}, **found}


def unpacked(found: Mapping[str, Any], fact: Fact) -> FactScores:
    """Restore the scores that `packed` made plain JSON."""
    own = {name: value for name, value in found.items() if name not in ("case_id", "subject", "target", "finite")}
    return FactScores.from_dict({**own, "fact": fact.to_dict()})


def by_first(process_group: ProcessGroup, work: Callable[[], Any]) -> Any:
    """Call `work` in the first process only, and return its result (plain JSON) in all of them.

    Raises:
        EditError: in every process, if `work` raises an `FFEditError`.
        ModelError: in every process, if `work` raises a `ModelError`.
    """
    found, problem, numbers = None, None, False
    if process_group.first:
        try:
            found = work()
        except FFEditError as error:
            problem, numbers = str(error), isinstance(error, ModelError)
    found, problem, numbers = process_group.gather([found, problem, numbers])[0]
    if problem is not None:
        raise ModelError(problem) if numbers else EditError(problem)
    return found


def check_finite(edit: Edit) -> Edit:
    """Check that an edit is finite and return it.

    Raises:
        ModelError: it holds NaN or infinity.
    """
    if not all(update.is_finite() for update in edit.updates.values()):
        raise ModelError("the edit holds NaN or infinity; nothing was written")
    return edit


def kept(path: Path, make: Callable[[], Edit]) -> Edit:
    """Load the edit saved in a folder; where there is none or it is damaged, make and save it."""
    if path.exists():
        try:
            return Edit.load(path)
        except EditError:
            pass
    edit = make()
    with needed():
        edit.save(path, force=True)
    return edit
