"""Write the chunks of facts of each mode, by one method after another.

**Single edits and batches** are written into the unedited model. Most of a method's cost is the optimisation of the
values v*, which for one subject depend on its facts, the layer and the unedited model only. So they are computed once
per chunk, saved in `edits/values-…`, and the update is solved anew for each closed-form method (`ffedit.combine`).
Four cases compute their own values: several layers that share the update, several subjects that are written one after
another (ROME), or whose values are chosen again with the method's own update written (`value.rounds`), and fine-tuning.

**In a sequence**, each chunk is written on top of all before it. Every fact is scored right after its own edit, again
at about ten evenly spaced checkpoints, and after the last edit: the difference shows what later edits destroy. The key
statistics are those of the unedited model. Values are chosen anew by every method, since they depend on the model's
current output. A method that `preserves` earlier edits gets its own. The edited matrices are saved after each edit
(`edits/METHOD/weights.safetensors`), bit for bit: a run that was interrupted continues from them, and every process but
the first loads them from there. All processes choose the values of an edit, and the first writes it.

An edit that cannot be made is recorded as failed. If memory fails or another process ends during an edit, nothing is
recorded and the run ends; it can be continued.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from torch import Tensor

import ffedit
from ffedit.algebra.linalg import double
from ffedit.benchmark.folder import EDITS, UNEDITED, needed
from ffedit.benchmark.settings import checkpoints
from ffedit.benchmark.task import Scorer, Task
from ffedit.editor.combine import combine
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit, applied_edits
from ffedit.editor.methods import METHODS
from ffedit.errors import EditError, FFEditError, ModelError
from ffedit.facts.fact import Fact, by_subject
from ffedit.files.resuming import load_state, save_state
from ffedit.inference.distributed import ProcessGroup
from ffedit.model.editable import History


def check_finite(edit: Edit) -> Edit:
    """Return the edit. Raises ModelError where it holds NaN or infinity."""
    if not all(update.is_finite() for update in edit.updates.values()):
        raise ModelError("the edit holds NaN or infinity; nothing was written")
    return edit


def saved(path: Path, make: Callable[[], Edit], group: ProcessGroup) -> Edit:
    """Load the edit saved in a folder; where there is none or it is damaged, make it in all processes, and save it."""

    def is_there() -> bool:
        try:
            return path.exists() and bool(Edit.load(path))
        except EditError:
            return False

    if not group.by_first(is_there):
        edit = make()

        def save() -> None:
            shutil.rmtree(path, ignore_errors=True)  # `save` refuses a folder that exists
            with needed():
                edit.save(path)

        group.by_first(save)
        if group.size == 1:
            return edit
    return group.in_all(lambda: Edit.load(path))


# Single edits and batches -------------------------------------------------------------------------


def edit_single_or_batch(task: Task) -> None:
    """Measure every chunk by every method; in single mode, each process takes its own share of the facts."""
    chunks = list(enumerate(task.mode.chunks(task.facts)))
    if task.mode.name == "single":
        chunks, task = task.process_group.share(chunks), replace(task, process_group=ProcessGroup())
    for chunk, facts in chunks:
        methods = [method for method in task.methods if not task.journal.done(method, "after", chunk)]
        if not methods and task.journal.done(UNEDITED, "before", chunk):
            continue
        scorer = Scorer(task, facts)
        scorer.record_before(chunk)
        failures: dict[Path, FFEditError] = {}
        for method in methods:
            try:
                edit = check_finite(edit_chunk(task, chunk, [task.facts[i] for i in scorer.facts], method, failures))
                figures = {name: edit.provenance[name] for name in ("seconds", "norm_ratio")}
                with edit.applied(task.editable):
                    scorer.record_edited(scorer.facts, method, "after", chunk, figures)
            except FFEditError as error:
                task.record_failure(scorer.facts, method, chunk, error)


def edit_chunk(task: Task, chunk: int, facts: Sequence[Fact], method: str, failures: dict[Path, FFEditError]) -> Edit:
    """Return the edit of a chunk by a method; its provenance has the `seconds` of choosing values and of solving.

    `failures` holds the error of shared values that could not be chosen, by their path, for the methods that follow.
    """
    name, config, group = f"{chunk:05d}", task.configs[method], task.process_group

    def edited(method: str) -> Edit:
        started = time.perf_counter()
        return timed(make_edit(task, facts, method, config), 0.0, started)

    def solved() -> Edit:
        """Solve for values that the methods share, chosen once by MEMIT; or edit, where they share none."""
        subjects = len(by_subject(facts))
        own_values = (subjects > 1 and METHODS[method].one_by_one) or config.value.rounds_of(subjects) > 1
        if len(task.layers) > 1 or own_values or METHODS[method].solve is None:
            return edited(method)
        numbers = sha256(json.dumps(config.to_dict()).encode()).hexdigest()[:8]
        path = task.folder / EDITS / f"values-{numbers}" / name
        if path in failures:
            raise failures[path]
        try:
            values = saved(path, partial(edited, "memit"), group)
        except FFEditError as error:
            failures[path] = error
            raise
        started, edit = time.perf_counter(), values
        if method != "memit":
            edit = group.in_all(lambda: combine(task.editable, [values], method, stats=task.stats, config=config))
        return timed(edit, sum(values.provenance["seconds"].values()), started)

    return solved() if task.mode.name == "single" else saved(task.folder / EDITS / method / name, solved, group)


def make_edit(
    task: Task, facts: Sequence[Fact], method: str, config: EditConfig, preserve: Sequence[Edit] = ()
) -> Edit:
    """Choose values for `facts` and solve for them in all processes, on the model in its current state."""
    return ffedit.edit(
        task.editable,
        facts,
        method,
        layers=task.layers_of(method),
        config=config,
        stats=task.stats,
        preserve=preserve,
        progress=task.progress,
        process_group=task.process_group,
    )


def timed(edit: Edit, choosing: float, started: float) -> Edit:
    """Return the edit with its seconds in the provenance: `choosing` values, and solving since `started`."""
    return edit.noted(seconds={"choosing": choosing, "solving": time.perf_counter() - started})


# Sequences ----------------------------------------------------------------------------------------


def edit_in_sequence(task: Task) -> None:
    """Write the sequence of all chunks by every method and measure it."""
    scorer = Scorer(task, range(len(task.facts)))
    scorer.record_before(0)
    chunks = [tuple(i for i in chunk if i not in scorer.problems) for chunk in task.mode.chunks(task.facts)]
    chunks = [chunk for chunk in chunks if chunk]
    for method in task.methods if chunks else ():
        if not task.journal.done(method, "end", len(chunks) - 1):
            MethodSequence(task, scorer, chunks, method).write_temporarily()


class MethodSequence:
    """Edits of one method, in order: `chunks` are indices of the facts that are written together."""

    def __init__(self, task: Task, scorer: Scorer, chunks: Sequence[tuple[int, ...]], method: str) -> None:
        self._task, self._scorer, self._chunks, self._method = task, scorer, chunks, method
        self._folder = task.folder / EDITS / method
        self._file = self._folder / "weights.safetensors"
        self._memories = [memory for at in task.layers_of(method) for memory in task.editable.feed_forward[at].memories]
        self._originals = {memory.address: memory.value.clone() for memory in self._memories}

    def write_temporarily(self) -> None:
        """Write and measure the chunks that are missing in the journal, and restore the unedited weights at the end.

        Meanwhile, the model's history holds the unedited weights, which the statistics belong to, and only those edits
        that the method must preserve.
        """
        editable, history = self._task.editable, self._task.editable.history
        editable.history = History(originals=self._originals)
        try:
            self._write_all()
        finally:
            editable.history = history
            for memory in self._memories:
                memory.set_(self._originals[memory.address])

    def _write_all(self) -> None:
        task, method, stops = self._task, self._method, checkpoints(self._chunks)

        def measure(facts: Sequence[int], when: str, chunk: int, **figures: object) -> None:
            model = {**figures, "norm_ratio": self._norm_ratio()}
            self._scorer.record_edited(facts, method, when, chunk, model)

        group = task.process_group
        last, seconds = group.by_first(self._resumed)
        group.in_all(lambda: None if last < 0 or group.first else self._resume(last, self._saved()))
        written: list[int] = []
        for chunk, facts in enumerate(self._chunks):
            if chunk > last and not task.journal.failed(method, chunk):
                try:
                    seconds = self._write(chunk)
                except FFEditError as error:
                    task.record_failure(facts, method, chunk, error)
                else:
                    group.in_all(lambda: None if group.first else self._set(self._saved()))
            if not task.journal.done(method, "after", chunk):
                measure(facts, "after", chunk, seconds={"choosing": 0.0, "solving": seconds})
            if not task.journal.failed(method, chunk):
                written += facts
            when = "end" if chunk + 1 == len(self._chunks) else f"at {len(written)}"
            if chunk in stops and not task.journal.done(method, when, chunk):
                measure(written, when, chunk)

    def _write(self, chunk: int) -> float:
        """Write a chunk into the current model, save the weights, and return the seconds the edit took to compute.

        Raises FFEditError where there is no edit, or the weights would not be finite; they are unchanged then.
        """
        task, method, group = self._task, self._method, self._task.process_group
        facts, preserve = [task.facts[i] for i in self._chunks[chunk]], applied_edits(task.editable)
        make = partial(make_edit, task, facts, method, task.configs[method], preserve)
        preserves, started = METHODS[method].preserves, time.perf_counter()
        edit = saved(self._folder / f"{chunk:05d}", make, group) if preserves else make()
        seconds = time.perf_counter() - started

        def write() -> None:
            check_finite(edit).check(task.editable)
            for at, delta in edit.updates.items():
                task.editable.memories[at].write_(delta)
            tensors = {str(memory.address): memory.value.contiguous().cpu() for memory in self._memories}
            with needed():
                save_state(self._file, tensors, {"chunk": chunk, "seconds": seconds})

        group.by_first(write)
        if preserves:
            task.editable.history.edits[edit.fingerprint()] = edit
        return seconds

    def _norm_ratio(self) -> float:
        """Return the largest ‖W − W₀‖ / ‖W₀‖."""
        pairs = [(double(memory.value), double(self._originals[memory.address])) for memory in self._memories]
        return max(float((current - original).norm() / original.norm()) for current, original in pairs)

    def _saved(self) -> Mapping[str, Tensor]:
        """Load the matrices that the first process saved last."""
        return load_state(self._file, "cannot be read")[0]

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for memory in self._memories:
            memory.set_(tensors[str(memory.address)])

    def _resume(self, last: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state after the chunk `last`: its `tensors`, and the edits, if the method preserves them."""
        written = [chunk for chunk in range(last + 1) if not self._task.journal.failed(self._method, chunk)]
        edits = [Edit.load(self._folder / f"{chunk:05d}") for chunk in written if METHODS[self._method].preserves]
        self._set(tensors)
        self._task.editable.history.edits = {edit.fingerprint(): edit for edit in edits}

    def _resumed(self) -> tuple[int, float]:
        """Load the state after the last saved edit; return its chunk (−1 for none) and its seconds.

        If the journal lacks a measurement due before that edit, the sequence starts over.
        """
        journal, method, stops, edited = self._task.journal, self._method, checkpoints(self._chunks), 0
        try:
            tensors, state = load_state(self._file, "nothing to resume from")
            last = state["chunk"]
            for chunk in range(last):
                edited += 0 if journal.failed(method, chunk) else len(self._chunks[chunk])
                complete = chunk not in stops or journal.done(method, f"at {edited}", chunk)
                if not (complete and journal.done(method, "after", chunk)):
                    raise EditError("measurements are missing")
            self._resume(last, tensors)
            return last, state["seconds"]
        except EditError:  # nothing to resume from
            shutil.rmtree(self._folder, ignore_errors=True)
            return -1, 0.0
