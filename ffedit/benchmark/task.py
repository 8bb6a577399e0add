"""What every mode of a benchmark does: ask the unedited model, score facts on the edited one, and note it all.

An edit that cannot be computed or applied leaves its facts without scores and its reason in their place: it is counted
and listed, and the run goes on. So does a model whose numbers are not finite any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffedit.algebra.key_moments import KeyMoments
from ffedit.benchmark.journal import UNEDITED, WHOLE, Journal, Line
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
    """A benchmark as it runs.

    Attributes:
        editable: the unedited model.
        facts: what is written.
        methods: by which, one after another.
        mode: how many at once, and on top of what.
        layers: where, in rising order; methods of one layer write to the last.
        configs: by method, all numbers of its edits.
        stats: second moments of the unedited model's keys.
        text: generic text, to see what else moves.
        full: also measure what takes longest (`Evaluation`).
        weights: of the terms of all facts' reference texts.
        folder: where results go.
        journal: the results so far.
        crew: the processes that measure each group together.
        running: tells the scores so far.
        progress: told how far a single edit is.
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
        """Where a method writes."""
        return self.layers if METHODS[method].layers else self.layers[-1:]

    def measure(
        self, asked: Asked, some: Sequence[int], method: str, when: str, chunk: int, about: Mapping[str, Any]
    ) -> None:
        """Score facts on the model as it is, and note them as one group; if its numbers are not finite, note that.

        Args:
            asked: the questions, prepared on the unedited model.
            some: indices of facts.
            method: what edited the model.
            when: see `Line`.
            chunk: the last edit.
            about: what else is to be noted of the model.
        """
        mine = [place for place in (asked.places[i] for i in some) if place in asked.mine]
        found: Sequence[FactScores] = ()
        problem, drift, perplexity = None, None, None
        try:
            if asked.evaluation and mine:
                found = asked.evaluation.scores(only=mine)
            if not (self.mode.sequential and when == "after"):  # there, at the checkpoints only
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
        """Note that there is no edit, and why, for each of its facts."""
        why = {"error": str(error), **({"finite": False} if isinstance(error, ModelError) else {})}
        self.note(method, "after", chunk, dict.fromkeys(some, why), why)

    def note(
        self, method: str, when: str, chunk: int, facts: Mapping[int, Mapping[str, Any]], model: Mapping[str, Any]
    ) -> None:
        """Keep a group of lines, and tell the scores so far."""
        lines = [Line(method, when, chunk, i, found) for i, found in facts.items()]
        self.journal.add([*lines, Line(method, when, chunk, WHOLE, model)])
        if when == "after":
            self.running.add(method, [self.journal.lines[line.key].found for line in lines])


class Asked:
    """The questions of facts that are edited together, prepared on the unedited model by the processes of a crew.

    A fact that does not fit the model is set apart; each process asks about its share of the others.

    Args:
        task: the benchmark.
        some: indices of facts.

    Attributes:
        problems: by index, why a fact cannot be asked.
        places: by index, the place of a fact among the others.
        mine: the places that this process asks about, in order.
        evaluation: asks; None where there is nothing to ask.
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
        """Note the scores of the unedited model, where that was not done before."""
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
        """What each process told of its share of the facts `some`, by their index, in order."""
        shares = [
            [i for i in some if self.places[i] % self._task.process_group.size == rank] for rank in range(len(told))
        ]
        found = {i: one for share, part in zip(shares, told, strict=True) for i, one in zip(share, part, strict=True)}
        return {i: found[i] for i in some}


def packed(scored: FactScores) -> dict[str, Any]:
    """One fact's scores as plain JSON; the fact itself is told by its index, its subject and its number in the data."""
    found = scored.to_dict()
    fact = found.pop("fact")
    return {**{name: fact[name] for name in ("case_id", "subject", "target") if name in fact}, **found}


def unpacked(found: Mapping[str, Any], fact: Fact) -> FactScores:
    """What `packed` packed."""
    own = {name: value for name, value in found.items() if name not in ("case_id", "subject", "target", "finite")}
    return FactScores.from_dict({**own, "fact": fact.to_dict()})


def by_first(process_group: ProcessGroup, work: Callable[[], Any]) -> Any:
    """Let the first process work; all of them get its result, plain JSON.

    Raises:
        EditError: in every process, if the first one meets a mistake.
        ModelError: the same, if the model's numbers are to blame.
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
    """The edit.

    Raises:
        ModelError: it holds NaN or infinity.
    """
    if not all(update.is_finite() for update in edit.updates.values()):
        raise ModelError("the edit holds NaN or infinity; nothing was written")
    return edit


def kept(path: Path, make: Callable[[], Edit]) -> Edit:
    """The edit that is in a folder; made and saved now where there is none, or it is damaged."""
    if path.exists():
        try:
            return Edit.load(path)
        except EditError:
            pass
    edit = make()
    with needed():
        edit.save(path, force=True)
    return edit


@contextmanager
def needed() -> Iterator[None]:
    """What is written here must be written: a full disk is no edit that failed, and ends the run.

    Raises:
        OSError: it cannot be written.
    """
    try:
        yield
    except EditError as error:
        raise OSError(str(error)) from error
