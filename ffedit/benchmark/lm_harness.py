"""General capabilities before and after an edit, measured with EleutherAI's lm-evaluation-harness.

The harness (`lm-eval`, an extra) has the field's general tasks: reading, arithmetic, knowledge. The same tasks,
examples and seeds are used both times, so that a difference is due to the edit. Its standard errors are those of each
run alone: they hold for a figure, not for a difference.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ffedit.editor.edit import Edit
from ffedit.errors import EditError, brief
from ffedit.loading.distributed import launched
from ffedit.model.editable import Editable


@dataclass(frozen=True)
class Figure:
    """One metric of one task, before and after."""

    task: str
    metric: str  # the harness's name of the metric, with its filter if there is one ("exact_match, strict")
    before: float  # on the base model
    after: float  # on the edited model
    error_before: float | None  # standard error of `before`; None where the harness has none
    error_after: float | None  # standard error of `after`; None where the harness has none
    examples: int | None  # number of examples asked
    higher_is_better: bool | None  # None where the harness does not say

    @property
    def change(self) -> float:
        """Difference of the figure, after − before."""
        return self.after - self.before

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return {**asdict(self), "change": self.change}


class Harness:
    """A selection of tasks of the harness, loaded before any model is run.

    Args:
        tasks: names of tasks, groups or tags, or paths of YAML files.
        include_path: a folder with the user's own tasks.
        limit: maximum number of examples per task; None: all.
        batch_size: examples per forward pass.
        quiet: hide the harness's own progress bars.

    Raises:
        EditError: lm-eval is not installed, there is no such task, or its data cannot be read.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        include_path: Path | None = None,
        limit: int | None = None,
        batch_size: int = 8,
        quiet: bool = False,
    ) -> None:
        if launched():
            raise EditError("the harness runs in one process here; start the command without a launcher")
        if not tasks:
            raise EditError("no task was named; `lm-eval ls tasks` lists those of the harness")
        if include_path is not None and not include_path.is_dir():
            raise EditError(f"{include_path}: no such folder; one with task files (YAML) was expected")
        self.limit, self.batch_size, self.quiet = limit, batch_size, quiet
        with self._muffled():
            try:
                from lm_eval.tasks import TaskManager
            except ImportError as error:
                raise EditError("lm-eval is not installed; pip install 'ffedit[harness]'") from error
            self.tasks = list(dict.fromkeys(tasks))
            own = TaskManager(include_path=include_path, include_defaults=False)
            # The harness's own tasks are many thousands of files: index them only if one of them is named.
            known = all(_is_known(own, task) for task in self.tasks)
            self._manager = own if known else TaskManager(include_path=include_path)
            for task in self.tasks:
                if not _is_known(self._manager, task):
                    lists = "`lm-eval ls tasks` lists its own, --include-path adds a folder of yours"
                    none = f"{task}: no such file; a task file of the harness (YAML) was expected"
                    raise EditError(none if _is_file_name(task) else f"the harness has no task {task!r}; {lists}")
                try:
                    self._manager.load([task])
                except Exception as error:  # a task file, its code or its data may fail in any way
                    raise EditError(f"the task {task} cannot be read: {brief(error)}") from error

    def measure(self, editable: Editable) -> dict[str, Any]:
        """Run the tasks on a model in its current state, with its chat template where `editable.chat` is set.

        Returns what the harness reports, by its own names (`results`, `higher_is_better`, `n-samples`, `n-shot`,
        `versions`), its version (`lm_eval`), and `chat`. Raises EditError where a task cannot be run on this model.
        """
        with self._muffled():
            import lm_eval
            from lm_eval.models.huggingface import HFLM

            wrapped = HFLM(
                pretrained=editable.model,
                tokenizer=copy.deepcopy(editable.tokenizer),  # the harness sets its padding token
                max_length=editable.max_tokens,
                batch_size=self.batch_size,
            )
            # The model's first weight may be offloaded, and then has no real device.
            wrapped._device = editable.device
            try:
                results = lm_eval.simple_evaluate(
                    wrapped,
                    tasks=self.tasks,
                    task_manager=self._manager,
                    limit=self.limit,
                    log_samples=False,
                    apply_chat_template=editable.chat,
                )
            except Exception as error:  # a task's code may fail in any way
                raise EditError(f"the harness failed on {editable.name}: {brief(error)}") from error
        assert results is not None
        names = ("results", "higher_is_better", "n-samples", "n-shot", "versions")
        figures = {name: results.get(name, {}) for name in names}
        return {**figures, "lm_eval": results["lm_eval_version"], "chat": editable.chat}

    def compare(self, editable: Editable, edit: Edit) -> Measured:
        """Run the tasks on a model and again with `edit`, which must belong to it, applied; errors are of `measure`."""
        edit.check(editable)
        before = self.measure(editable)
        with edit.applied(editable):
            return Measured(editable.name, f"edit {edit.fingerprint()}", before, self.measure(editable), self.limit)

    @contextlib.contextmanager
    def _muffled(self) -> Iterator[None]:
        """Hide the harness's log and standard output, and with `quiet` its progress bars."""
        level = (logger := logging.getLogger("lm_eval")).level
        logger.setLevel(logging.ERROR)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
                if self.quiet:
                    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
                yield
        finally:
            logger.setLevel(level)


@dataclass(frozen=True)
class Measured:
    """The results of the same tasks on a base model and an edited one."""

    base: str
    edited: str  # name of the edited model, or of the edit
    before: Mapping[str, Any]  # what the harness reports of the base, by its own names
    after: Mapping[str, Any]  # what the harness reports of the edited model
    limit: int | None = None  # maximum number of examples per task; None: all

    @property
    def figures(self) -> list[Figure]:
        """All metrics of all tasks, in the harness's order."""
        figures = []
        for task, scores in self.before["results"].items():
            again, higher = self.after["results"][task], self.before["higher_is_better"].get(task, {})
            examples = self.before["n-samples"].get(task, {}).get("effective")
            for key, value in scores.items():
                metric, comma, how = key.partition(",")
                if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                    name = metric if how == "none" else f"{metric}, {how}"
                    # The harness writes "N/A" where it has no standard error.
                    errors = [run.get(f"{metric}_stderr,{how}") for run in (scores, again)]
                    first, second = (float(error) if isinstance(error, int | float) else None for error in errors)
                    numbers = float(value), float(again[key])
                    figures.append(Figure(task, name, *numbers, first, second, examples, higher.get(metric)))
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return {**asdict(self), "figures": [figure.to_dict() for figure in self.figures]}


def _is_known(manager: Any, task: str) -> bool:
    return task in manager.task_index or (_is_file_name(task) and Path(task).is_file())


def _is_file_name(task: str) -> bool:
    return Path(task).suffix in (".yaml", ".yml")
