"""What else can the model still do? EleutherAI's lm-evaluation-harness, run before an edit and after it.

The harness (`lm-eval`, an extra) has the field's general tasks: reading, arithmetic, knowledge. The same tasks,
examples and seeds are used both times, so that a difference is the edit's. Its standard errors are those of each run
alone; they say how sure a figure is, and not how sure a difference is.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from ffedit.editor import Edit
from ffedit.errors import EditError
from ffedit.loading.distributed import launched
from ffedit.model.editable import Editable


@dataclass(frozen=True)
class Figure:
    """One metric of one task, before and after.

    Attributes:
        task: its name.
        metric: as the harness calls it, with its filter if there is one ("exact_match, strict").
        before: on the base.
        after: on the edited model.
        error_before: standard error, None where the harness has none.
        error_after: the same of `after`.
        examples: how many were asked.
        higher_is_better: None where the harness does not say.
    """

    task: str
    metric: str
    before: float
    after: float
    error_before: float | None
    error_after: float | None
    examples: int | None
    higher_is_better: bool | None

    @property
    def change(self) -> float:
        """After less before."""
        return self.after - self.before

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "change": self.change}


class Harness:
    """Some tasks of the harness, found and read before any model is asked.

    Args:
        tasks: names of tasks, groups or tags, or paths of YAML files.
        include_path: a folder with tasks of one's own.
        limit: only so many examples of each task; None: all.
        batch_size: how many go through the model together.
        quiet: show no progress of the harness's own.

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
            # The harness's own tasks are many thousands of files: read only where one of them is asked for.
            known = all(_is_known(own, task) for task in self.tasks)
            self._manager = own if known else TaskManager(include_path=include_path)
            for task in self.tasks:
                if not _is_known(self._manager, task):
                    raise EditError(_unknown(task))
                try:
                    self._manager.load([task])
                except Exception as error:  # a task file, its code or its data may fail in any way
                    raise EditError(f"the task {task} cannot be read: {_brief(error)}") from error

    def measure(self, editable: Editable) -> dict[str, Any]:
        """Run the tasks on a model as it is, each prompt as the user's turn where it is asked in its chat template.

        Returns:
            What the harness reports, by its own names: `results`, `higher_is_better`, `n-samples`, `n-shot`,
            `versions`; `lm_eval`, the version of the harness; and `chat`, whether prompts were turns of a chat.

        Raises:
            EditError: a task cannot be run on this model.
        """
        with self._muffled():
            import lm_eval
            from lm_eval.models.huggingface import HFLM

            wrapped = HFLM(
                pretrained=editable.model,
                tokenizer=copy.deepcopy(editable.tokenizer),  # it is given a padding token
                max_length=editable.max_tokens,
                batch_size=self.batch_size,
            )
            # The model's first weight may be offloaded, and tells no device then.
            wrapped._device = editable.device
            try:
                found = lm_eval.simple_evaluate(
                    wrapped,
                    tasks=self.tasks,
                    task_manager=self._manager,
                    limit=self.limit,
                    log_samples=False,
                    apply_chat_template=editable.chat,
                )
            except Exception as error:  # a task's code may fail in any way
                raise EditError(f"the harness failed on {editable.name}: {_brief(error)}") from error
        assert found is not None
        parts = ("results", "higher_is_better", "n-samples", "n-shot", "versions")
        about = {"lm_eval": found["lm_eval_version"], "chat": editable.chat}
        return {**{part: found.get(part, {}) for part in parts}, **about}

    def compare(self, editable: Editable, edit: Edit) -> Measured:
        """Run the tasks on a model, and again with `edit` applied; the model is left as it was.

        Raises:
            EditError: a task cannot be run on this model, or the edit does not belong to it.
        """
        edit.check(editable)
        before = self.measure(editable)
        with edit.applied(editable):
            return Measured(editable.name, f"edit {edit.fingerprint()}", before, self.measure(editable), self.limit)

    @contextlib.contextmanager
    def _muffled(self) -> Iterator[None]:
        """Keep the harness's notes to itself, and its bars where they are not wanted."""
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
    """The same tasks on two models.

    Attributes:
        base: name of the one.
        edited: name of the other, or the edit that makes it.
        before: what the harness reports of the base, by its own names.
        after: the same of the edited model.
        limit: how many examples of each task were asked at most; None: all.
    """

    base: str
    edited: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    limit: int | None = None

    @property
    def figures(self) -> list[Figure]:
        """Every metric of every task, in the harness's order."""
        found = []
        for task, scores in self.before["results"].items():
            again, higher = self.after["results"][task], self.before["higher_is_better"].get(task, {})
            examples = self.before["n-samples"].get(task, {}).get("effective")
            for key, value in scores.items():
                metric, comma, how = key.partition(",")
                if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                    name = metric if how == "none" else f"{metric}, {how}"
                    first, second = (_number(run.get(f"{metric}_stderr,{how}")) for run in (scores, again))
                    numbers = float(value), float(again[key])
                    found.append(Figure(task, name, *numbers, first, second, examples, higher.get(metric)))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "figures": [figure.to_dict() for figure in self.figures]}


def _number(value: Any) -> float | None:
    """A standard error; the harness writes "N/A" where it has none."""
    return float(value) if isinstance(value, int | float) else None


def _is_known(manager: Any, task: str) -> bool:
    return task in manager.task_index or (Path(task).suffix in (".yaml", ".yml") and Path(task).is_file())


def _unknown(task: str) -> str:
    if Path(task).suffix in (".yaml", ".yml"):
        return f"{task}: no such file; a task file of the harness (YAML) was expected"
    return f"the harness has no task {task!r}; `lm-eval ls tasks` lists its own, --include-path adds a folder of yours"


def _brief(error: BaseException) -> str:
    """What an error says, on one line that can be read."""
    return shorten(str(error), 200, placeholder=" …") or type(error).__name__
